"""What tests may do to a server, and the ways one is had."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self, TypedDict, TypeVar

from tests.services.heir import heir

S = TypeVar("S", bound="Server")

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


class Identity(TypedDict, total=False):
    user: str
    group: str
    extra_groups: list[str]


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
    stop_signal = signal.SIGTERM

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="acemq-"))
        heir().keep("folder", self.home)
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

    def _identity(self) -> Identity:
        """As whom it runs, where that is not ourselves."""
        return {}

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
        self._end(self.stop_signal)

    def discard(self) -> None:
        if self.is_running():
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
        heir().forget("folder", self.home)

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
                **self._identity(),
            )
        heir().keep("group", child.pid)
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
        heir().forget("group", child.pid)

    def _last_words(self) -> str:
        return (self.home / "output").read_text(errors="replace")[-4000:]


def nearest(what: str, *routes: Callable[[], S]) -> S:
    """By the first route that leads there."""
    refusals: list[str] = []
    for route in routes:
        try:
            return route()
        except CannotBeHad as refusal:
            refusals.append(str(refusal))
    raise CannotBeHad(f"{what} cannot be had: {'; '.join(refusals)}")


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
