"""One run: what a client is asked to do, what it measures of itself, and how it is started."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[1]

Figures = dict[str, float]
"""Of one run, by name: `rate` a second, `messages`, `cpu_per_10k` seconds, `rss_mb` at the highest; or others."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    url: str = ""
    queue: str = ""
    count: int = 0
    window: int = 1
    """Publishes that may be unconfirmed; 1 awaits each."""
    prefetch: int = 200
    waiting: int = 0
    """Messages that lie in the queue all the time."""
    limit: float = 8.0
    """Seconds after which it stops with what it has."""


class RunFailed(Exception):
    """A client that gave no figures, or figures that the broker does not confirm."""


def run_client(command: list[str], patience: float) -> Figures:
    """The figures that a fresh process prints as its last line; it is killed after `patience` seconds."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"no figures within {patience:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise RunFailed(f"ended with {done.returncode}: {done.stderr.strip()[-800:]}")
    return msgspec.json.decode(lines[-1], type=Figures)


def python_client(module: str, task: Task) -> list[str]:
    return [sys.executable, "-m", f"benches.clients.{module}", msgspec.json.encode(task).decode()]


# In the client


class Meter:
    """Counts messages from the first to the last, and sets `over` when there were enough or time is up."""

    def __init__(self, count: int, limit: float) -> None:
        self.over = asyncio.Event()
        self.messages = 0
        self._count, self._limit = count, limit
        self._began = self._cpu = 0.0
        self._took = self._cpu_took = 0.0

    def start(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def hit(self) -> None:
        """One more. The first starts the clock, unless it runs; after `over` nothing counts."""
        if self.over.is_set():
            return
        if not self._began:
            self.start()
        self.messages += 1
        if self.messages >= self._count or (self.messages % 64 == 0 and self.late):
            self.stop()

    @property
    def late(self) -> bool:
        return time.perf_counter() - self._began > self._limit

    def stop(self) -> None:
        self._took, self._cpu_took = time.perf_counter() - self._began, time.process_time() - self._cpu
        self.over.set()

    def figures(self) -> Figures:
        return {
            "rate": round(self.messages / self._took, 1),
            "messages": self.messages,
            "cpu_per_10k": round(self._cpu_took / self.messages * 10_000, 4),
            "rss_mb": round(peak_rss_mb(), 1),
        }


async def pump(send: Callable[[], Awaitable[object]], task: Task) -> Figures:
    """Send `task.count` messages from `task.window` coroutines, each of which awaits its own confirm."""
    meter = Meter(task.count, task.limit)
    left = task.count

    async def sender() -> None:
        nonlocal left
        while left > 0 and not meter.over.is_set():
            left -= 1
            await send()
            meter.messages += 1
            if meter.messages % 64 == 0 and meter.late:
                left = 0

    meter.start()
    async with asyncio.TaskGroup() as senders:
        for _ in range(task.window):
            senders.create_task(sender())
    meter.stop()
    return meter.figures()


def serve(jobs: Mapping[str, Callable[[Task], Awaitable[Figures]]]) -> None:
    """The `main` of a client: do the job of the task that its argument holds, on plain asyncio."""
    task = msgspec.json.decode(sys.argv[1], type=Task)

    async def main() -> Figures:
        return await jobs[task.job](task)

    print(msgspec.json.encode(asyncio.run(main())).decode())


def peak_rss_mb() -> float:
    """The most memory that this process has had."""
    # Not getrusage on Linux: there a child begins with the peak of the parent that forked it.
    return _status_mb("VmHWM:") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _PER_MB


def rss_mb() -> float:
    """The memory that it has now; the most it has had where the system does not tell."""
    return _status_mb("VmRSS:") or peak_rss_mb()


_PER_MB = 2**20 if sys.platform == "darwin" else 2**10


def _status_mb(field: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith(field)), None)


def cpu_count() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
