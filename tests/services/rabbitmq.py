"""A RabbitMQ node of one's own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from tests.secret import PASSWORD
from tests.services.docker import DockerServer
from tests.services.server import LOOPBACK, CannotBeHad, LocalServer, Server, free_ports, install, nearest

Setting = bool | int | str | timedelta

RIPE = 2.5
"""Seconds after which a new queue survives the death of its broker: a node writes the table of its queues late."""


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
            command, env=self._environment(), cwd=self.home, capture_output=True, text=True, timeout=90, check=False
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


class DockerRabbitMQ(DockerServer, RabbitMQ):
    image = "rabbitmq:3.13"
    listens_on = 5672

    def __init__(self, settings: Mapping[str, Setting]) -> None:
        super().__init__()
        config = self.home / "advanced.config"
        config.write_text(_advanced_config(settings))
        self._container.with_volume_mapping(str(config), "/etc/rabbitmq/advanced.config")

    @property
    def url(self) -> str:
        return f"amqp://guest:{PASSWORD}@{self._host}:{self.port}"

    def _answers(self) -> bool:
        return _speaks_amqp(self._host, self.port)

    def ctl(self, *arguments: str) -> str:
        return self.demand("rabbitmqctl", "--quiet", *arguments)


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
