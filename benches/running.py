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
from typing import Literal

import msgspec

from benches.order import SIZE, now

ROOT = Path(__file__).parents[1]

Figures = dict[str, float]
"""Of one run, by name: `rate` a second, `messages`, `cpu_per_10k` seconds, `rss_mb` at the highest; or others."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    url: str = ""
    queue: str = ""
    queue_type: Literal["classic", "quorum"] = "classic"
    count: int = 0
    size: int = SIZE
    """Bytes of a body."""
    window: int = 1
    """Publishes that may be unconfirmed; 1 awaits each."""
    batch: int = 1
    """Messages handed over in one call, where a client can do that."""
    rate: float = 0
    """Messages a second; 0 is as fast as it goes."""
    prefetch: int = 200
    ack_every: int = 1
    """Messages that one acknowledgement covers, where a client lets its user say that."""
    waiting: int = 0
    """Messages that lie in the queue all the time."""
    database: str = ""
    """The SQLAlchemy URL of one, for what needs it."""
    sent: int = 0
    """Rows of an outbox that were published."""
    promises: tuple[str, ...] = ()
    """For `clients/costs.py`: those that are switched on."""
    limit: float = 8.0
    """Seconds after which it stops with what it has."""
    loop: Literal["asyncio", "uvloop"] = "asyncio"


class RunFailed(Exception):
    """A client that gave no figures, or figures that the broker does not confirm."""


def run_client(command: list[str], patience: float) -> Figures:
    """The figures that a fresh process prints as its last line; it is killed after `patience` seconds."""
    with _start(command) as process:
        return _figures_of(process, patience)


def run_pair(receiver: list[str], sender: list[str], receives: Callable[[], None], patience: float) -> Figures:
    """The figures of the receiver, of two fresh processes at once; the sender is started once `receives` returns."""
    with _start(receiver) as receiving:
        try:
            receives()
            run_client(sender, patience)
            return _figures_of(receiving, patience)
        finally:
            receiving.kill()  # nothing is left to end where it gave its figures


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _figures_of(process: subprocess.Popen[str], patience: float) -> Figures:
    try:
        output, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        raise RunFailed(f"no figures within {patience:g} s") from None
    lines = output.splitlines()
    if process.returncode != 0 or not lines:
        raise RunFailed(f"ended with {process.returncode}: {errors.strip()[-800:]}")
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

    def hit(self, sent: int = 0) -> None:
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


class Arrivals(Meter):
    """Counts from the sending of the first message, and knows how old each was: its time from `Order.t` to the hit."""

    def __init__(self, count: int, limit: float) -> None:
        super().__init__(count, limit)
        self._ages: list[int] = []

    def hit(self, sent: int = 0) -> None:
        age = now() - sent
        if not self._ages:
            self.start()
            self._began -= age / 1_000_000
        self._ages.append(age)
        super().hit()

    def figures(self) -> Figures:
        ages = sorted(self._ages)
        middle, high = ages[len(ages) // 2], ages[len(ages) * 99 // 100]
        return {**super().figures(), "p50_ms": round(middle / 1_000, 3), "p99_ms": round(high / 1_000, 3)}


def meter_of(task: Task) -> Meter:
    """For the jobs `consume` and `receive`, which differ in nothing else."""
    return (Arrivals if task.job == "receive" else Meter)(task.count, task.limit)


async def pump(send: Callable[[], Awaitable[object]], task: Task) -> Figures:
    """Send `task.count` messages from `task.window` coroutines, each of which awaits its own confirm."""
    meter = Meter(task.count, task.limit)
    left = task.count
    step = task.batch

    async def sender() -> None:
        nonlocal left
        while left > 0 and not meter.over.is_set():
            left -= step
            await send()
            meter.messages += step
            if meter.messages % 64 < step and meter.late:
                left = 0

    meter.start()
    if task.rate:
        await _pace(send, meter, task)
    else:
        async with asyncio.TaskGroup() as senders:
            for _ in range(task.window):
                senders.create_task(sender())
    meter.stop()
    return meter.figures()


def pump_blocking(send: Callable[[], object], task: Task) -> Figures:
    """The same for a client that blocks."""
    meter = Meter(task.count, task.limit)
    meter.start()
    while meter.messages < task.count and not (meter.messages % 64 < task.batch and meter.late):
        send()
        meter.messages += task.batch
    meter.stop()
    return meter.figures()


async def _pace(send: Callable[[], Awaitable[object]], meter: Meter, task: Task) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number in range(task.count):
        await asyncio.sleep(max(0, began + number / task.rate - loop.time()))
        await send()
        meter.messages += 1


def serve(jobs: Mapping[str, Callable[[Task], Awaitable[Figures]]]) -> None:
    """The `main` of a client: do the job of the task that its argument holds, on the loop that it names."""
    task = msgspec.json.decode(sys.argv[1], type=Task)

    async def main() -> Figures:
        return await jobs[task.job](task)

    with asyncio.Runner(loop_factory=_loop_factory(task.loop)) as runner:
        figures = runner.run(main())
    print(msgspec.json.encode(figures).decode())


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop


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
