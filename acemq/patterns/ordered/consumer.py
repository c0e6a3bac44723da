"""Who serves which partition: everybody all that he can get, or each process its share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import cast

import msgspec

from acemq.clock import sleep
from acemq.connection import Connection
from acemq.errors import AcemqError, ClosedError
from acemq.opening import Opening
from acemq.patterns.ordered.partition import PartitionConsumer
from acemq.public_errors import made_public
from acemq.stopping import Drained, StopOnce
from acemq.telemetry import CONSUMER_LOST, Diagnostic
from acemq.transport import Claims, Phase, SubscriptionPhase, SubscriptionState

LOOK = (1.6, 2.4)
"""Seconds between two looks at the partitions that others have, from and to."""
OFFERED = 3.0
"""Seconds for which a partition that is too many is left to others."""
OFFERS = (5.0, 60.0)
"""Seconds between two offers; doubled from the first to the second while nobody takes any."""
TAKEN = 10.0
"""Seconds after which a partition that went to another while our link was down counts as his."""


class Sharing(msgspec.Struct, frozen=True):
    at_most: int
    take_over_after: timedelta


class OrderedConsumer:
    """The part of this process in an ordered queue. Made by `OrderedQueue.consume`; drained when its block is left."""

    def __init__(
        self,
        name: str,
        *,
        connection: Connection,
        queues: tuple[str, ...],
        opening: Callable[[int], Opening[PartitionConsumer]],
        sharing: Sharing | None,
        closed: Callable[[], None],
    ) -> None:
        self.name = name
        self._connection, self._clock = connection, connection.clock
        self._queues, self._opening, self._sharing, self._closed = queues, opening, sharing, closed
        self._mine: dict[int, PartitionConsumer] = {}
        self._loop: asyncio.Task[None] | None = None
        self._stop = StopOnce()
        self._free_since: dict[int, float] = {}
        self._offered: dict[int, float] = {}
        """Until when a partition is left to others, by number."""
        self._said: dict[int, str] = {}
        """Why a partition could not be looked at or had, as last said."""
        self._offer_pause, self._next_offer = OFFERS[0], 0.0

    @property
    def partitions(self) -> Mapping[int, PartitionConsumer]:
        """The consumers of this process by partition: those that are served, and those that stand by."""
        return self._mine

    async def start(self) -> None:
        try:
            if self._sharing is None:
                for partition in range(len(self._queues)):
                    self._mine[partition] = await self._opening(partition)
            else:
                for partition in self._not_mine():
                    await self._look_at(partition, self._sharing)
                self._loop = self._connection.keep(self._share(self._sharing), f"shares {self.name}")
        except BaseException:
            await self.close(timedelta())
            raise

    async def close(self, timeout: timedelta | None = None) -> Drained:
        """The same as `drain()`."""
        return await self.drain(timeout)

    async def drain(self, timeout: timedelta | None = None) -> Drained:
        """Stop all partitions at once and leave them to other processes, as a consumer does. Idempotent.

        A halted or waiting message goes back to its place; whoever takes the partition next begins with it.
        """
        for consumer in self._mine.values():
            consumer.excuse_caller()
        return await self._stop.once(lambda: self._drain(timeout))

    async def _drain(self, timeout: timedelta | None) -> Drained:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.wait({self._loop})
        try:
            drained = await asyncio.gather(*(consumer.drain(timeout) for consumer in self._mine.values()))
        finally:
            self._closed()
        return sum(drained, Drained())

    # Sharing

    async def _share(self, sharing: Sharing) -> None:
        while True:
            await sleep(self._clock, random.uniform(*LOOK))
            try:
                await self._each(self._taken(), self._let_go)
                await self._each(self._not_mine(), lambda partition: self._look_at(partition, sharing))
                await self._each(self._surplus(sharing), self._offer)
            except ClosedError:
                return

    async def _each(self, partitions: list[int], do: Callable[[int], Awaitable[None]]) -> None:
        """One after the other; what one of them fails with keeps nothing from the others."""
        for partition in partitions:
            try:
                await do(partition)
            except ClosedError:
                raise
            except AcemqError as error:
                self._failed(partition, str(error))
            else:
                self._said.pop(partition, None)

    def _failed(self, partition: int, text: str) -> None:
        """Say so when it is news. Without a link nobody can look, and what is ours comes back by itself."""
        if self._connection.state.phase is Phase.CONNECTED and self._said.get(partition) != text:
            self._said[partition] = text
            failed = f"partition {partition} of {self.name!r} cannot be had or given: {text}; trying again"
            self._connection.report(Diagnostic(CONSUMER_LOST, "warning", failed, self._queues[partition]))

    def _taken(self) -> list[int]:
        """What others have taken while our link was down is theirs, as anything else that they have."""
        return [partition for partition, consumer in self._mine.items() if self._is_taken(consumer.subscription)]

    def _is_taken(self, state: SubscriptionState | None) -> bool:
        if state is None or state.phase is not SubscriptionPhase.WAITING or state.error is not None:
            return False
        return (self._clock.now() - state.since).total_seconds() >= TAKEN

    def _not_mine(self) -> list[int]:
        others = [partition for partition in range(len(self._queues)) if partition not in self._mine]
        random.shuffle(others)  # or processes that start together would all ask for the same
        return others

    async def _look_at(self, partition: int, sharing: Sharing) -> None:
        """Take one that others have or had, if it is free and ours to take."""
        if await self._is_claimed(partition):
            self._free_since.pop(partition, None)
            if self._offered.pop(partition, None) is not None:
                self._offer_pause = OFFERS[0]
            return
        now = self._clock.monotonic()
        since = self._free_since.setdefault(partition, now)
        if partition in self._offered:
            may_take = now >= self._offered[partition]
        else:
            has_room = len(self._mine) < sharing.at_most
            may_take = has_room or now - since >= sharing.take_over_after.total_seconds()
        if may_take:
            await self._take(partition)

    async def _is_claimed(self, partition: int) -> bool:
        with made_public():
            return await cast("Claims", self._connection.transport).is_claimed(self._queues[partition])

    async def _take(self, partition: int) -> None:
        self._free_since.pop(partition, None)
        if self._offered.pop(partition, None) is not None:
            self._offer_pause = min(2 * self._offer_pause, OFFERS[1])
        consumer = self._mine[partition] = await self._opening(partition)
        if not consumer.owns:
            await self._let_go(partition)  # another was quicker

    def _surplus(self, sharing: Sharing) -> list[int]:
        """The one to leave to others while this process has more than its share, if it is time for that."""
        now = self._clock.monotonic()
        if len(self._mine) <= sharing.at_most or now < self._next_offer or self._offered:
            return []
        # A halt is known to this process alone: another would begin again, and halt again.
        offerable = [(each.in_flight, partition) for partition, each in self._mine.items() if each.halt is None]
        return [min(offerable)[1]] if offerable else []

    async def _offer(self, partition: int) -> None:
        """Between two messages."""
        await self._let_go(partition)
        now = self._clock.monotonic()
        self._offered[partition], self._next_offer = now + OFFERED, now + self._offer_pause

    async def _let_go(self, partition: int) -> None:
        # Cancelled, this loop waits no longer; the handler in hand still ends in peace.
        await asyncio.shield(asyncio.ensure_future(self._mine[partition].drain()))
        del self._mine[partition]
