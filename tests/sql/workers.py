"""Consumers as processes, for tests that kill them, stop them, or look at what they have done."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Worker:
    """`acked` and `stale` are known once it has ended in order."""

    def __init__(
        self, url: str, record: Path, *, point: str = "", nth: int = 0, hold: float = 0, exclusive: bool = False
    ) -> None:
        self.errors = record.with_suffix(f".{id(self)}.err")
        self.acked = self.stale = 0
        with self.errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.sql.worker", url, str(record)),
                    *(point, str(nth), str(hold), "exclusive" * exclusive),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def await_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", self.errors.read_text()[-2000:]

    def state(self) -> str:
        """Of its subscription, by its own word."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("state\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> str:
        """Let it drain and end; what it has said on its way."""
        out, _ = self._process.communicate(timeout=60)
        said = self.errors.read_text()
        assert self._process.returncode == 0, said[-2000:]
        self.acked, self.stale = map(int, out.split()[-2:])
        return said

    def discard(self) -> None:
        if self.is_running():
            self._process.kill()
        self._process.communicate()


class Record:
    """What was handled, by whom."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def counts(self) -> Counter[int]:
        return Counter(int(line.split()[0]) for line in self.path.read_text().splitlines())

    def order(self) -> list[int]:
        return [int(line.split()[0]) for line in self.path.read_text().splitlines()]

    def by(self, pid: int) -> list[int]:
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [int(payload) for payload, who in lines if int(who) == pid]


@contextmanager
def discarded(workers: list[Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            worker.discard()
