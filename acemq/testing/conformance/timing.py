"""Never early, not late: how the scenarios measure, and how they wait for a named condition and for nothing else."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from datetime import timedelta

import msgspec

from acemq.clock import SYSTEM, Clock, MovableClock, sleep

LEAST_QUIET = timedelta(milliseconds=300)


def time_factor() -> float:
    """By which a slow machine multiplies every upper limit: `ACEMQ_TIME_FACTOR`, and 3 where `CI` is set."""
    return float(os.environ.get("ACEMQ_TIME_FACTOR") or (3 if os.environ.get("CI") else 1))


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How finely a broker counts, and how long it may take. The upper limits grow by the time factor."""

    step: timedelta = timedelta(milliseconds=1)
    """The unit of its delays, leases and expiries; also how much too early something may come."""
    late: timedelta = timedelta(seconds=1)
    """How much later than it is due something may come."""
    settle: timedelta = timedelta(seconds=5)
    """How long a count may be wrong after a change."""
    binding: timedelta = timedelta(seconds=1)
    """How long a new binding may need to reach a publisher."""
    recovery: timedelta = timedelta(seconds=10)
    """How long it may take until everything works again after a link was lost."""
    silence: timedelta = timedelta(seconds=45)
    """How long it may take until a link that went silent is noticed: the documented detection time."""
    takeover: timedelta = timedelta(seconds=45)
    """How long it may take until what a dead client held is free again: its lease, or its heartbeats."""

    def grown(self) -> Timing:
        factor = time_factor()
        limits = ("late", "settle", "binding", "recovery", "silence", "takeover")
        return msgspec.structs.replace(self, **{limit: getattr(self, limit) * factor for limit in limits})


class Pace:
    """Waiting, by a real clock or by one that is moved whenever nothing else is left to do."""

    def __init__(self, movable: MovableClock | None) -> None:
        self.clock: Clock = movable or SYSTEM
        self._movable = movable
        self._held = 0

    @property
    def is_moved(self) -> bool:
        return self._movable is not None

    async def drive(self) -> None:
        """Move the clock to its next timer whenever the event loop has come to rest; for as long as a scenario runs."""
        clock = self._movable
        while clock is not None:
            await asyncio.sleep(0.0002)  # by the real clock: while others work, it costs them nothing
            if not self._held:
                await clock.advance_to_next()

    async def elsewhere(self, call: Callable[[], object]) -> None:
        """A call in a thread of its own; time stands still meanwhile, since nobody here can see how far it is."""
        self._held += 1
        try:
            await asyncio.to_thread(call)
        finally:
            self._held -= 1

    async def sleep(self, length: timedelta) -> None:
        await sleep(self.clock, length.total_seconds())

    async def eventually(
        self,
        condition: Callable[[], object | Awaitable[object]],
        *,
        within: timedelta,
        what: str,
        seen: Callable[[], object] = lambda: "",
    ) -> None:
        """Return as soon as `condition` holds; else fail after `within`, naming it and what was seen."""
        end = self.clock.monotonic() + within.total_seconds()
        pause = 0.001
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return
            if self.clock.monotonic() >= end:
                raise AssertionError(f"not within {within}: {what}{f'; seen: {seen()}' if seen() != '' else ''}")
            await sleep(self.clock, min(pause, max(end - self.clock.monotonic(), 0.0005)))
            pause = min(pause * 1.5, 0.05)
