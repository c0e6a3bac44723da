"""Time as the library asks for it: a clock that tests can move.

The only file of the lowest floor that knows the event loop, because a timer is a callback on it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Protocol

from acemq.errors import ConfigurationError


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """Where the library takes the time from."""

    def now(self) -> datetime:
        """The wall clock, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds that only ever grow; for waits and limits."""
        ...

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        """Call once, on the running event loop, after `delay` seconds of this clock."""
        ...


class SystemClock:
    """The machine's own clocks, and the event loop's timers."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay, call)


SYSTEM = SystemClock()


_MOST_TURNS = 500
"""Turns of the loop for which the clock rests at an instant at the most: something may be ready for ever."""
_TURNS = 60
"""On a loop that does not show what is ready: more than the longest chain from a timer to the next one."""


class MovableClock:
    """A clock that stands still until a test moves it.

    `await clock.advance(timedelta(hours=1))` stops at every timer on the way and lets the event loop come to rest
    there, so an hour of retries happens in its order, exactly, and in milliseconds.
    """

    def __init__(self, at: datetime = datetime(2027, 1, 1, tzinfo=UTC)) -> None:
        if at.utcoffset() is None:
            raise ConfigurationError(f"at={at.isoformat()} is naive; give it a time zone, for example UTC")
        self._began = at.astimezone(UTC)
        self._elapsed = 0.0
        self._timers: list[_MovableTimer] = []
        self._numbers = itertools.count()

    def now(self) -> datetime:
        return self._began + timedelta(seconds=self._elapsed)

    def monotonic(self) -> float:
        return self._elapsed

    def call_later(self, delay: float, call: Callable[[], None]) -> Timer:
        # Compared by instant, then by the order in which they were asked for.
        timer = _MovableTimer(self._elapsed + max(delay, 0.0), next(self._numbers), call, asyncio.get_running_loop())
        heapq.heappush(self._timers, timer)
        return timer

    async def advance(self, by: timedelta) -> None:
        """Move the clock on; on return everything due by then has happened on the event loop.

        Threads are not waited for: what a handler that is a plain `def` does may still be under way.
        """
        if by < timedelta():
            raise ConfigurationError(f"by={by} is negative; this clock only moves on")
        end = self._elapsed + by.total_seconds()
        await self.rest()
        while self._timers and self._timers[0].at <= end + 1e-9:
            timer = heapq.heappop(self._timers)
            if timer.cancelled:
                continue
            self._elapsed = max(self._elapsed, timer.at)
            timer.fire()
            await self.rest()
        self._elapsed = max(self._elapsed, end)

    def next(self) -> timedelta | None:
        """How far ahead the next timer is; `None` when none is set. To advance by it reaches that timer."""
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return timedelta(seconds=max(self._timers[0].at - self._elapsed, 0.0)) + timedelta.resolution

    async def advance_to_next(self) -> bool:
        """Move on to the next timer, however far ahead; False when none is set."""
        ahead = self.next()
        if ahead is None:
            return False
        await self.advance(ahead)
        return True

    async def rest(self) -> None:
        """Let the event loop run until what is ready has run; nothing is waited for in real time."""
        loop = asyncio.get_running_loop()
        # Of asyncio's own loops, which alone are known to keep there all that is ready.
        is_known = type(loop).call_soon is asyncio.BaseEventLoop.call_soon
        ready = getattr(loop, "_ready", None) if is_known else None
        for _ in range(_TURNS if ready is None else _MOST_TURNS):
            await asyncio.sleep(0)
            if ready is not None and not ready:
                return


class _MovableTimer:
    __slots__ = ("at", "call", "cancelled", "loop", "number")

    def __init__(self, at: float, number: int, call: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self.at, self.number, self.call, self.loop, self.cancelled = at, number, call, loop, False

    def __lt__(self, other: _MovableTimer) -> bool:
        return (self.at, self.number) < (other.at, other.number)

    def cancel(self) -> None:
        self.cancelled = True

    def fire(self) -> None:
        if not self.loop.is_closed():  # of another test, which shares this clock
            self.loop.call_soon_threadsafe(self.call)


class Pauses:
    """Waits by any clock that may be ended together before their time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: set[asyncio.Future[None]] = set()

    async def pause(self, seconds: float) -> None:
        """Return after so long, or as soon as `end` is called. Whoever waits looks for himself which it was."""
        if seconds <= 0:
            return
        pause: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(seconds, partial(_end, pause))
        self._under_way.add(pause)
        try:
            await pause
        finally:
            timer.cancel()
            self._under_way.discard(pause)

    def end(self) -> None:
        """All that are under way; one that begins later takes its time."""
        for pause in self._under_way:
            _end(pause)


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


async def sleep(clock: Clock, delay: float) -> None:
    """`asyncio.sleep` by any clock."""
    await Pauses(clock).pause(delay)


def check_duration(option: str, value: object, *, zero: bool = False) -> timedelta:
    """Refuse what is no usable length of time, naming the option."""
    if not isinstance(value, timedelta):
        raise ConfigurationError(f"{option}={value!r} must be a timedelta, for example timedelta(seconds=5)")
    if value < timedelta() or (not zero and not value):
        raise ConfigurationError(f"{option}={value} must be {'zero or more' if zero else 'more than zero'}")
    return value


def whole_seconds(moment: datetime) -> str:
    """As stamps stand on the wire: UTC, truncated to seconds, `2026-02-03T04:05:06Z` (CONTRACT.md sections 4 and 7)."""
    if moment.utcoffset() is None:
        raise ConfigurationError(f"{moment.isoformat()} is naive; give it a time zone, for example UTC")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
