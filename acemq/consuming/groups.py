"""Several consumers of one queue, started, resized and stopped as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from acemq.consuming.consumer import Consumer
from acemq.consuming.options import check_prefetch
from acemq.consuming.settling import ConsumerCounters
from acemq.errors import ClosedError, ConfigurationError
from acemq.opening import Opening
from acemq.stopping import Drained

Member = Callable[[int, int | None], Opening[Consumer]]
"""The consumer of that number, about to be opened, with that prefetch where one was set."""


class ConsumerGroup:
    """Consumers of one queue with a channel and a prefetch each. Made by `Connection.consume_group`."""

    def __init__(self, queue: str, member: Member, *, drain_timeout: Callable[[], timedelta]) -> None:
        self.queue = queue
        self._member, self._drain_timeout = member, drain_timeout
        self._members: list[Consumer] = []
        self._leaving: list[Consumer] = []
        self._left = ConsumerCounters()
        self._prefetch: int | None = None
        self._paused = self._closed = False
        self._changing = asyncio.Lock()

    @property
    def size(self) -> int:
        return len(self._members)

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """In the order of their numbers."""
        return tuple(self._members)

    @property
    def counters(self) -> ConsumerCounters:
        """The sum, closed members included."""
        return sum((each.counters for each in (*self._members, *self._leaving)), self._left)

    async def scale(self, size: int) -> None:
        """Return when there are so many members.

        More: if one cannot start, those started by this call are closed, and its error is raised. Fewer: the highest
        numbers are drained, each within the connection's `close_timeout`.
        """
        check_size(size)
        async with self._changing:
            self._check_open()
            before = self.size
            try:
                while self.size < size:
                    self._members.append(await self._start(self.size + 1))
            except BaseException:
                await self._leave_behind(before)
                raise
            await self._leave_behind(size)

    async def set_prefetch(self, prefetch: int) -> None:
        """Return when every member fetches so many at once.

        A broker fixes that when a consumer starts, so each member is replaced by one of its name, and drained.
        """
        check_prefetch(prefetch)
        async with self._changing:
            self._check_open()
            before, self._prefetch = self._prefetch, prefetch
            for place, member in enumerate(self._members):
                try:
                    self._members[place] = await self._start(place + 1)
                except BaseException:
                    self._prefetch = before
                    raise
                await self._leave([member])

    def pause(self) -> None:
        """Of every member, and of those to come."""
        self._paused = True
        for member in self._members:
            member.pause()

    def resume(self) -> None:
        self._paused = False
        for member in self._members:
            member.resume()

    async def drain(self, timeout: timedelta | None = None) -> Drained:
        """Of all members at once, within one budget. Idempotent."""
        self._closed = True
        budget = self._drain_timeout() if timeout is None else timeout
        return await self._drained((*self._members, *self._leaving), budget)

    async def close(self) -> Drained:
        """The same as `drain()`."""
        return await self.drain()

    async def _start(self, number: int) -> Consumer:
        member = await self._member(number, self._prefetch)
        if self._paused:
            member.pause()  # in the same turn of the loop: nothing was delivered yet
        if self._closed:
            await self._leave([member])  # drained while this one started, and so without it
            self._check_open()
        return member

    async def _leave_behind(self, size: int) -> None:
        surplus = self._members[size:]
        del self._members[size:]
        await self._leave(surplus)

    async def _leave(self, members: list[Consumer]) -> None:
        self._leaving += members
        try:
            await self._drained(members, self._drain_timeout())
        finally:
            for member in members:
                self._leaving.remove(member)
                self._left += member.counters

    @staticmethod
    async def _drained(members: tuple[Consumer, ...] | list[Consumer], budget: timedelta) -> Drained:
        total = Drained()
        for drained in await asyncio.gather(*(member.drain(budget) for member in members)):
            total += drained
        return total

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the group of consumers of {self.queue!r} is closed; make a new one")


def check_size(size: int) -> int:
    if size < 1:
        raise ConfigurationError(f"size={size} must be 1 or more")
    return size
