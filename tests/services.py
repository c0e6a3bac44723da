"""Private, disposable servers for tests: on free ports of the loopback, with their data in a folder of their own.

    with RabbitMQ.obtain(consumer_timeout=timedelta(seconds=2)) as server:
        ...  # server.url, server.kill(), server.restart(), server.ctl("list_queues")

A server that somebody else started is never used and never touched: what is killed here is killed by the id under
which it was started here. All calls block; in a coroutine use `asyncio.to_thread(server.restart)`.
"""

from __future__ import annotations

import gc
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from tests.secret import PASSWORD

S = TypeVar("S", bound="Server")
Setting = bool | int | str | timedelta

LOOPBACK = "127.0.0.1"


class CannotBeHad(Exception):
    """A server, or one route to it, is not to be had on this machine; the text says why."""


def free_ports(count: int) -> list[int]:
    """As many ports of the loopback that nobody uses, all different."""
    with ExitStack() as held:  # all of one round stay open until the last is known, else one could come twice
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


class Server(ABC):
    """What tests may do to a server, however it runs."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Where it answers; the same for its whole life."""

    @abstractmethod
    def start(self) -> None:
        """Return once it answers."""

    @abstractmethod
    def kill(self) -> None:
        """SIGKILL: what is not on disk is lost. Returns once it is gone."""

    @abstractmethod
    def stop(self) -> None:
        """Stop it in order. Returns once nothing of it runs; its data stay for `restart`."""

    @abstractmethod
    def discard(self) -> None:
        """Leave nothing behind, neither process nor data."""

    @abstractmethod
    def is_running(self) -> bool: ...

    def restart(self) -> None:
        """Start it again on the same data, after a kill if it still runs."""
        if self.is_running():
            self.kill()
        self.start()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.discard()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.discard()


class LocalServer(Server):
    """A server as a child process. A subclass says how it is called and when it answers."""

    starts_within = timedelta(seconds=50)
    stops_within = timedelta(seconds=20)

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="acemq-"))
        _heir().keep("folder", self.home)
        self._child: subprocess.Popen[bytes] | None = None
        self.pid = 0
        """The id of the server itself, 0 while it does not run."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """One look; errors of the connection count as no."""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _server_id(self, child: int) -> int:
        """The process to kill, where that is not the child itself."""
        return child

    def start(self) -> None:
        if self.is_running():
            raise RuntimeError(f"{type(self).__name__} at {self.url} runs already")
        child = self._spawn(self._command())
        try:
            self._await_answer(child)
            self.pid = self._server_id(child.pid)
        except BaseException:
            self._bury(child)
            raise
        self._child = child

    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def discard(self) -> None:
        if self.is_running():
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
        _heir().forget("folder", self.home)

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.home / "output").open("ab") as output:
            child = subprocess.Popen(
                command,
                env=self._environment(),
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the tests; and its group holds nothing but it and its own
            )
        _heir().keep("group", child.pid)
        return child

    def _await_answer(self, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.starts_within.total_seconds()
        while not self._answers():
            if child.poll() is not None:
                raise RuntimeError(f"{child.args!r} ended with {child.returncode}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer from {self.url} within {self.starts_within}:\n{self._last_words()}")
            time.sleep(0.02)

    def _end(self, by: signal.Signals) -> None:
        if self._child is None or not self.is_running():
            raise RuntimeError(f"{type(self).__name__} at {self.url} does not run")
        os.kill(self.pid, by)
        # The child may be a shell round the server: it ends when the server has ended and been reaped.
        self._child.wait(self.stops_within.total_seconds())
        self._bury(self._child)
        self._child, self.pid = None, 0

    def _bury(self, child: subprocess.Popen[bytes]) -> None:
        """End whatever is left of a child and of its group."""
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        _heir().forget("group", child.pid)

    def _last_words(self) -> str:
        return (self.home / "output").read_text(errors="replace")[-4000:]


class RabbitMQ(Server):
    """A RabbitMQ node of one's own, user `guest`, with a password that no other text has in it."""

    @classmethod
    def obtain(cls, **settings: Setting) -> RabbitMQ:
        """A node, not yet started, by the nearest route; `CannotBeHad` says why there is none.

        `settings` go into the `rabbit` section of its `advanced.config`, a text verbatim as an Erlang term:
        `consumer_timeout=timedelta(seconds=2)`, `heartbeat=1`, `ssl_listeners='[{"127.0.0.1", 5671}]'`.
        """

        def installed() -> RabbitMQ:
            install("rabbitmq-server")
            return LocalRabbitMQ(settings)

        return nearest("RabbitMQ", lambda: LocalRabbitMQ(settings), lambda: DockerRabbitMQ(settings), installed)

    port: int
    """On the loopback; the same for its whole life."""

    def url_as(self, user: str, password: str) -> str:
        return self.url.replace(f"guest:{PASSWORD}@", f"{user}:{password}@")

    def url_through(self, *ports: int) -> str:
        """The same node by other doors of the loopback, such as a proxy's."""
        return f"amqp://guest:{PASSWORD}@{','.join(f'{LOOPBACK}:{port}' for port in ports)}"

    @abstractmethod
    def ctl(self, *arguments: str) -> str:
        """What `rabbitmqctl` prints; about half a second a call."""

    def close_all_connections(self, reason: str = "closed by a test") -> None:
        self.ctl("close_all_connections", reason)

    def list_queues(self, *columns: str) -> list[dict[str, Any]]:
        """A row per queue; by default name, messages and consumers. A quorum queue's counts are half a second old."""
        columns = columns or ("name", "messages", "consumers")
        return cast("list[dict[str, Any]]", json.loads(self.ctl("list_queues", "--formatter", "json", *columns)))

    def count_connections(self) -> int:
        return len(json.loads(self.ctl("list_connections", "--formatter", "json", "pid")))

    def set_memory_alarm(self, on: bool) -> None:
        """Make the broker block its publishers, or let them go on."""
        self.ctl("set_vm_memory_high_watermark", "0.00001" if on else "0.4")


class LocalRabbitMQ(LocalServer, RabbitMQ):
    """From the binaries of this machine, without their system wrappers: those switch to a user of their own."""

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        self._scripts = _rabbitmq_scripts()
        super().__init__()
        self.port, self._distribution_port, self._epmd_port = free_ports(3)
        self._epmd: subprocess.Popen[bytes] | None = None
        for folder in ("home", "mnesia", "log", "etc"):
            (self.home / folder).mkdir()
        cookie = self.home / "home" / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(24))
        cookie.chmod(0o400)
        (self.home / "etc" / "enabled_plugins").write_text("[].\n")
        (self.home / "etc" / "env.conf").touch()
        (self.home / "etc" / "advanced.config").write_text(_advanced_config(settings))
        self._plugins = _fewer_plugins(self._scripts, self.home / "plugins")

    @property
    def url(self) -> str:
        return self.url_through(self.port)

    def start(self) -> None:
        if self._epmd is None:
            # Without an epmd that runs already, the node starts one as a daemon, which outlives it.
            self._epmd = self._spawn(["epmd"])
            while not _connects(self._epmd_port):
                if self._epmd.poll() is not None:
                    raise RuntimeError(f"epmd ended with {self._epmd.returncode}:\n{self._last_words()}")
                time.sleep(0.005)
        (self.home / "pid").unlink(missing_ok=True)  # a killed node leaves its own
        super().start()

    def stop(self) -> None:
        super().stop()
        self._end_epmd()

    def discard(self) -> None:
        super().discard()
        self._end_epmd()

    def forget(self) -> None:
        """Lose all that it has on disk; only while it does not run."""
        assert not self.is_running()
        shutil.rmtree(self.home / "mnesia")
        (self.home / "mnesia").mkdir()

    def ctl(self, *arguments: str) -> str:
        command = [str(self._scripts / "rabbitmqctl"), "--quiet", *arguments]
        done = subprocess.run(
            command, env=self._environment(), cwd=self.home, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def _end_epmd(self) -> None:
        if self._epmd is not None:
            self._bury(self._epmd)
            self._epmd = None

    def _command(self) -> list[str]:
        return [str(self._scripts / "rabbitmq-server")]

    def _environment(self) -> dict[str, str]:
        foreign = ("RABBITMQ_", "ERL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        etc = self.home / "etc"
        return (
            kept
            | {
                "HOME": str(self.home / "home"),  # where the cookie is looked for
                "LANG": "C.UTF-8",
                "ERL_EPMD_PORT": str(self._epmd_port),
                "ERL_EPMD_ADDRESS": LOOPBACK,
                "RABBITMQ_NODENAME": f"test_{self.port}@localhost",
                "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
                "RABBITMQ_NODE_PORT": str(self.port),
                "RABBITMQ_DIST_PORT": str(self._distribution_port),
                # Else the distribution port listens on every interface.
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
                "RABBITMQ_MNESIA_BASE": str(self.home / "mnesia"),
                "RABBITMQ_LOG_BASE": str(self.home / "log"),
                "RABBITMQ_PID_FILE": str(self.home / "pid"),
                "RABBITMQ_CONF_ENV_FILE": str(etc / "env.conf"),  # else the machine's own is read
                "RABBITMQ_CONFIG_FILE": str(etc / "rabbitmq"),
                "RABBITMQ_ADVANCED_CONFIG_FILE": str(etc / "advanced.config"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(etc / "enabled_plugins"),
                "RABBITMQ_GENERATED_CONFIG_DIR": str(etc / "generated"),
            }
            | ({"RABBITMQ_PLUGINS_DIR": str(self._plugins)} if self._plugins else {})
        )

    def _answers(self) -> bool:
        return _speaks_amqp(LOOPBACK, self.port)

    def _server_id(self, child: int) -> int:
        # The child is a shell that waits for the node. The file is gone soon after SIGTERM, so it is read now.
        return int((self.home / "pid").read_text())


class DockerRabbitMQ(RabbitMQ):
    """From a container, where a Docker engine answers and testcontainers is installed."""

    image = "rabbitmq:3.13"
    starts_within = timedelta(minutes=2)  # the first time the image is fetched

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        _require_docker()
        from testcontainers.core.container import DockerContainer

        self._folder = Path(tempfile.mkdtemp(prefix="acemq-"))
        _heir().keep("folder", self._folder)
        config = self._folder / "advanced.config"
        config.write_text(_advanced_config(settings))
        self._folder.chmod(0o755)
        (self.port,) = free_ports(1)  # chosen here, as Docker would choose another at each start
        self._container = DockerContainer(self.image)
        self._container.with_bind_ports(5672, self.port)
        self._container.with_volume_mapping(str(config), "/etc/rabbitmq/advanced.config")
        self._host = LOOPBACK
        self._created = False

    @property
    def url(self) -> str:
        return f"amqp://guest:{PASSWORD}@{self._host}:{self.port}"

    def start(self) -> None:
        if self._created:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._created = True
            self._host = self._container.get_container_host_ip()  # the engine may run on another machine
        deadline = time.monotonic() + self.starts_within.total_seconds()
        while not _speaks_amqp(self._host, self.port):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer from {self.url} within {self.starts_within}")
            time.sleep(0.1)

    def is_running(self) -> bool:
        if not self._created:
            return False
        container = self._container.get_wrapped_container()
        container.reload()
        return bool(container.status == "running")

    def kill(self) -> None:
        self._container.get_wrapped_container().kill()
        self._container.get_wrapped_container().wait()

    def stop(self) -> None:
        self._container.get_wrapped_container().stop()

    def discard(self) -> None:
        if self._created:
            self._container.stop()
            self._created = False
        shutil.rmtree(self._folder, ignore_errors=True)
        _heir().forget("folder", self._folder)

    def ctl(self, *arguments: str) -> str:
        done = self._container.exec(["rabbitmqctl", "--quiet", *arguments])
        text = done.output.decode()
        if done.exit_code != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} ended with {done.exit_code}: {text}")
        return text


def _rabbitmq_scripts() -> Path:
    """The folder of the distribution's own scripts."""
    found = shutil.which("rabbitmq-server", path="/usr/lib/rabbitmq/bin") or shutil.which("rabbitmq-server")
    if found is None:
        raise CannotBeHad("no rabbitmq-server on this machine")
    if shutil.which("epmd") is None:
        raise CannotBeHad("no epmd beside rabbitmq-server")
    return Path(found).resolve().parent


def _fewer_plugins(scripts: Path, into: Path) -> Path | None:
    """A folder of links to what a bare node needs, which starts two seconds sooner; None where that was never tried."""
    plugins = scripts.parent / "plugins"
    if not any(plugins.glob("rabbit-3.10.*")):
        return None
    left_out = ("rabbitmq_", "cow", "gun", "eetcd", "jose", "prometheus", "amqp10", "quantile", "accept", "base64url")
    into.mkdir()
    for plugin in plugins.iterdir():
        if plugin.name.startswith("rabbitmq_prelaunch-") or not plugin.name.startswith(left_out):
            (into / plugin.name).symlink_to(plugin)
    return into


def _advanced_config(settings: Mapping[str, Setting]) -> str:
    every: dict[str, Setting] = {
        "disk_free_limit": 50_000_000,
        "default_pass": f'<<"{PASSWORD}">>',
        "quorum_tick_interval": timedelta(milliseconds=500),
        **settings,
    }
    terms = ", ".join(f"{{{name}, {_erlang(value)}}}" for name, value in every.items())
    return f"[{{rabbit, [{terms}]}}].\n"


def _erlang(value: Setting) -> str:
    match value:
        case bool():
            return str(value).lower()
        case timedelta():
            return str(round(value / timedelta(milliseconds=1)))
        case _:
            return str(value)


def _connects(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1):
            return True
    except OSError:
        return False


def _speaks_amqp(host: str, port: int) -> bool:
    """Whether a broker answers the protocol header with a method frame; an open port alone is too early."""
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(7)[:1] == b"\x01"
    except OSError:
        return False


def nearest(what: str, *routes: Callable[[], S]) -> S:
    """By the first route that leads there."""
    refusals: list[str] = []
    for route in routes:
        try:
            return route()
        except CannotBeHad as refusal:
            refusals.append(str(refusal))
    raise CannotBeHad(f"{what} cannot be had: {'; '.join(refusals)}")


def _require_docker() -> None:
    refusal = _no_docker()
    if refusal:
        raise CannotBeHad(refusal)


@cache
def _no_docker() -> str:
    try:
        from testcontainers.core.docker_client import DockerClient
    except ImportError:
        return "testcontainers is not installed"
    with warnings.catch_warnings():
        # Where none answers, the client drops an open socket: its warning must come here and not fail some test.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            cast(Any, DockerClient().client).ping()  # docker has no types
            refusal = ""
        except Exception as error:  # what the client raises differs from release to release
            refusal = f"no Docker engine answers ({type(error).__name__})"
        gc.collect()
    return refusal


def install(package: str) -> None:
    """A Debian package, where that may be done; else `CannotBeHad`."""
    refusal = _not_installable(package)
    if refusal:
        raise CannotBeHad(refusal)


@cache
def _not_installable(package: str) -> str:
    """Install a Debian package, once a session; why that failed, or nothing."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"not root on Debian, so {package} was not installed"
    # RUNLEVEL: Debian would start the service at once, on its usual port; tests want none but their own.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    options = ["-qq", "-o", "DPkg::Lock::Timeout=60"]
    for step in (["update"], ["install", "-y", "--no-install-recommends", package]):
        command = ["apt-get", *options, *step]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {step[0]} took longer than five minutes"
        if done.returncode != 0:
            return f"apt-get {step[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}"
    return ""


class _Heir:
    """A small process that outlives this one by a moment and ends and removes what it left.

    It learns of our end, SIGKILL included, because its pipe closes. PR_SET_PDEATHSIG would not do: it speaks of
    the thread that started the child, and a server may be started in a thread of a pool.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else whoever reads our output would wait for its end
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def keep(self, kind: str, what: object) -> None:
        self._tell(f"+ {kind} {what}")

    def forget(self, kind: str, what: object) -> None:
        self._tell(f"- {kind} {what}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


_heir = cache(_Heir)
"""The one of this process, made when the first server is."""


def _inherit(lines: Iterable[str]) -> None:
    """What the heir does: listen until the pipe closes, then end and remove what is on the list."""
    left: set[tuple[str, str]] = set()
    for line in lines:
        sign, kind, what = line.rstrip("\n").split(" ", 2)
        (left.add if sign == "+" else left.discard)((kind, what))
    for kind, what in left:
        if kind == "group":
            with suppress(ProcessLookupError):
                os.killpg(int(what), signal.SIGKILL)
    for kind, what in left:
        if kind == "folder":
            shutil.rmtree(what, ignore_errors=True)


if __name__ == "__main__":
    _inherit(sys.stdin)
