"""Servers from containers, where a Docker engine answers and testcontainers is installed."""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
import warnings
from abc import abstractmethod
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

from tests.services.heir import heir
from tests.services.server import LOOPBACK, CannotBeHad, Server, free_ports


class DockerServer(Server):
    """A container of its own. A subclass says which image, which port it listens on, and when it answers."""

    image: str
    listens_on: int
    environment: dict[str, str] = {}  # noqa: RUF012 never changed
    starts_within = timedelta(minutes=2)  # the first time the image is fetched

    def __init__(self) -> None:
        require_docker()
        from testcontainers.core.container import DockerContainer

        self.home = Path(tempfile.mkdtemp(prefix="acemq-"))
        heir().keep("folder", self.home)
        self.home.chmod(0o755)
        (self.port,) = free_ports(1)  # chosen here, as Docker would choose another at each start
        self._container = DockerContainer(self.image)
        self._container.with_bind_ports(self.listens_on, self.port)
        for name, value in self.environment.items():
            self._container.with_env(name, value)
        self._host = LOOPBACK
        self._created = False

    @abstractmethod
    def _answers(self) -> bool:
        """One look; errors of the connection count as no."""

    def start(self) -> None:
        if self._created:
            self._container.get_wrapped_container().start()
        else:
            self._container.start()
            self._created = True
            self._host = self._container.get_container_host_ip()  # the engine may run on another machine
        deadline = time.monotonic() + self.starts_within.total_seconds()
        while not self._answers():
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
        shutil.rmtree(self.home, ignore_errors=True)
        heir().forget("folder", self.home)

    def run(self, *command: str) -> tuple[int, str]:
        """Run a command in the container: how it ended and what it printed."""
        done = self._container.exec(list(command))
        return done.exit_code or 0, done.output.decode()

    def demand(self, *command: str) -> str:
        """What a command in the container prints; an error where it fails."""
        code, text = self.run(*command)
        if code != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {code}: {text}")
        return text


def require_docker() -> None:
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
