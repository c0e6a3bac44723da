"""Workers as child processes, and the ways in which they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.crash.recording import Recorder
from tests.crash.worker import Plan
from tests.secret import assert_unprinted
from tests.waiting import until

ROOT = Path(__file__).parents[2]
STARTS_WITHIN = 20.0


class Worker:
    """One process of `worker.py`."""

    def __init__(self, plan: Plan, output: Path) -> None:
        self._recorder, self._output = Recorder(plan.record), output
        with output.open("ab") as written:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "tests.crash.worker", msgspec.json.encode(plan).decode()],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
            )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        assert self._process.returncode is not None
        return self._process.returncode

    async def ready(self) -> None:
        """Its consumers are registered."""
        await until(
            lambda: bool(self._recorder.lines("ready", pid=self.pid)) or not self.is_running, within=STARTS_WITHIN
        )
        assert self._recorder.lines("ready", pid=self.pid), self.last_words()

    def kill(self) -> None:
        """SIGKILL, at once; nothing of it runs when this returns."""
        assert self.is_running, self.last_words()
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM: it is asked to end, and not waited for."""
        assert self.is_running, self.last_words()
        os.kill(self.pid, signal.SIGTERM)

    async def ended(self, *, within: float = 20) -> int:
        await until(lambda: not self.is_running, within=within)
        return self.exit_code

    def last_words(self) -> str:
        return self._output.read_text(errors="replace")[-4_000:]

    def bury(self) -> None:
        if self.is_running:
            self.kill()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Workers:
    """All workers of one test. None outlives it."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        self._all = ExitStack()
        self._record = folder / "record"
        self.recorder = Recorder(self._record)

    def start(self, url: str, **plan: Any) -> Worker:
        """A new one; `plan` as in `Plan`."""
        worker = Worker(Plan(url=url, record=str(self._record), **plan), self._output)
        self._all.callback(worker.bury)
        return worker

    async def supervise(self, done: Callable[[], bool], url: str, *, within: float, **plan: Any) -> list[int]:
        """Start a worker whenever there is none, until `done`; the exit codes of those that died."""
        deaths: list[int] = []
        current = self.start(url, **plan)

        def look() -> bool:
            nonlocal current
            if not current.is_running:
                deaths.append(current.exit_code)
                current = self.start(url, **plan)
            return done()

        look.__qualname__ = f"supervised until {done.__qualname__}"
        await until(look, within=within)
        return deaths

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._all.close()
        if self._output.exists():
            assert_unprinted(self._output.read_text(errors="replace"), "the output of a worker")
