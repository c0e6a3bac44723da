"""What the clock will bring: lease ends, due messages, expiries. One timer for the earliest, however many there are."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from weakref import WeakMethod

from acemq.clock import Clock, Timer
from acemq.transports.memory.queues import DELAYED, GONE, HELD, Stored
from acemq.transports.memory.receiving import Link

GRAIN = 1e-6
"""Seconds: what `timedelta` can tell apart. A timer may come back that much early by the rounding of floats."""


class Rank(IntEnum):
    """Of two things due at one instant, the lower comes first; of two equal ones, the lower position."""

    LEASE = 0
    DUE = 1
    EXPIRY = 2


class Agenda:
    """Runs under the broker's lock, but for `_ring`."""

    def __init__(self, clock: Clock, links: Sequence[Link], wake: Callable[[], None]) -> None:
        self._clock, self._links = clock, links
        self._wake = WeakMethod(wake)  # the broker's; a broker must die with its last holder, not with a collection
        self._entries: list[tuple[float, Rank, int, int, Stored]] = []
        self._numbers = itertools.count()
        """So that no two entries are equal, and messages are never compared."""
        self._crowded = 1024
        self._armed_for = inf
        self._timer: Timer | None = None
        self._timer_thread = 0
        self._alarm = 0

    def add(self, at: float, rank: Rank, message: Stored) -> None:
        heappush(self._entries, (at, rank, message.position, next(self._numbers), message))
        if at < self._armed_for:
            self.arm()
        if len(self._entries) > self._crowded:
            # Entries of what was settled in time: thrown out before they are more than the live ones.
            self._entries = [entry for entry in self._entries if _is_live(entry[0], entry[1], entry[4])]
            heapify(self._entries)
            self._crowded = 2 * len(self._entries) + 1024

    def due(self) -> Iterator[tuple[Rank, Stored]]:
        """What is due by now, in its order; what comes due by handling it is included."""
        while self._entries and self._entries[0][0] <= self._clock.monotonic() + GRAIN:
            at, rank, _, _, message = heappop(self._entries)
            if _is_live(at, rank, message):
                yield rank, message

    @property
    def overdue(self) -> bool:
        return bool(self._entries) and self._entries[0][0] <= self._clock.monotonic() + GRAIN

    def arm(self) -> None:
        """Set the timer for the earliest entry, on the loop that is running or else on some link's."""
        self.disarm()
        if not self._entries or not self._links:
            return  # with nobody linked, whoever links next arms it
        at = self._armed_for = self._entries[0][0]
        here = _running_loop()
        if any(link.loop is here for link in self._links):
            self._timer_thread = threading.get_ident()
            self._timer = self._clock.call_later(
                max(at - self._clock.monotonic(), 0.0), partial(self._ring, self._alarm)
            )
        else:
            self._links[0].call(self._call)

    def disarm(self) -> None:
        self._alarm += 1
        self._armed_for = inf
        if self._timer is not None and self._timer_thread == threading.get_ident():
            self._timer.cancel()  # another thread's loop cannot be touched from here; its alarm rings for nothing
        self._timer = None

    def _ring(self, alarm: int) -> None:
        if alarm == self._alarm:
            self._call()

    def _call(self) -> None:
        wake = self._wake()
        if wake is not None:
            wake()


def _is_live(at: float, rank: Rank, message: Stored) -> bool:
    match rank:
        case Rank.LEASE:
            return message.where is HELD and message.until == at
        case Rank.DUE:
            return message.where is DELAYED and message.until == at
        case Rank.EXPIRY:
            return message.where is not GONE


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
