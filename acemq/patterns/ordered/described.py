"""What is said about an ordered queue before it is declared, and whether it may be declared so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from acemq.clock import check_duration
from acemq.codec import Payload
from acemq.connection import Connection
from acemq.errors import ConfigurationError, PartitionCountError
from acemq.opening import Opening
from acemq.patterns.ordered.consumer import Sharing
from acemq.patterns.ordered.keys import check_count, queue_of, queues_of
from acemq.patterns.ordered.partition import PartitionFailure
from acemq.patterns.ordered.queue import OrderedQueue, waiting_in
from acemq.retry import RetryPolicy
from acemq.topology import Topology

T = TypeVar("T")

log = logging.getLogger("acemq")


class Ordered(msgspec.Struct, Generic[T], frozen=True):
    """An ordered queue that is being described; each verb gives a new one, and nothing happens before `declare`."""

    connection: Connection
    name: str
    payload: Payload[T]
    count: int = 4
    key: Callable[[T], str] | None = None
    failure: PartitionFailure = PartitionFailure.STOP
    attempts: int = 3
    delay: timedelta = timedelta(seconds=1)
    share: Sharing | None = None
    moves_keys: bool = False

    def partitions(self, count: int) -> Ordered[T]:
        """So many, 4 unless said. A power of two: only then do all libraries agree where a key belongs."""
        return replace(self, count=check_count(count))

    def keyed_by(self, key: Callable[[T], str]) -> Ordered[T]:
        """How the key is read from a payload. Choosing it is choosing what order means."""
        if not callable(key):
            raise ConfigurationError(f"keyed_by({key!r}) must be a function from a payload to its key")
        return replace(self, key=key)

    def on_failure(
        self, mode: PartitionFailure, *, attempts: int = 3, delay: timedelta = timedelta(seconds=1)
    ) -> Ordered[T]:
        """What a message that fails does to its partition, after how many tries, and how long between them.

        `RETRY_IN_PLACE` has no last try.
        """
        if not isinstance(mode, PartitionFailure):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"on_failure({mode!r}) must be a PartitionFailure, for example STOP")
        described = replace(self, failure=mode, attempts=attempts, delay=check_duration("delay", delay, zero=True))
        described.policy()  # refuses the rest
        return described

    def sharing(self, at_most: int, *, take_over_after: timedelta = timedelta(seconds=15)) -> Ordered[T]:
        """A process serves `at_most` partitions, and more only where they stayed free for `take_over_after`.

        What it has above that it offers to others again. Without it, the first process serves all of them.
        """
        if at_most < 1:
            raise ConfigurationError(f"at_most={at_most} must be 1 or more")
        return replace(self, share=Sharing(at_most, check_duration("take_over_after", take_over_after)))

    def repartitioning(self) -> Ordered[T]:
        """Declare it whatever is there, and give up the order of what waits."""
        return replace(self, moves_keys=True)

    def policy(self) -> RetryPolicy:
        """Of the tries in place: none of its waits is spent in the broker."""
        attempts = None if self.failure is PartitionFailure.RETRY_IN_PLACE else self.attempts
        return RetryPolicy(max_attempts=attempts, first=self.delay, factor=1.0, broker_from=timedelta())

    def topology(self) -> Topology:
        """Its partitions (CONTRACT.md section 5)."""
        ordered = self.connection.capabilities.ordered_queues
        whole = Topology()
        for queue in queues_of(self.name, self.count):
            whole = whole.queue(queue, ordered=ordered)
        return whole

    def declare(self) -> Opening[OrderedQueue[T]]:
        """Make its partitions where they are missing, as the connection's `topology=` says, and hand it over.

        `PartitionCountError`, and nothing is made, when it is there with another count and keys would move between
        messages that wait.
        """

        async def open_queue() -> OrderedQueue[T]:
            if not self.moves_keys:
                await self._check_count()
            for sentence in await self.connection.provide(self.topology()):
                log.info("%s", sentence)
            if self.count & (self.count - 1):
                log.warning(
                    "ordered queue %r has %d partitions, which is no power of two: "
                    "libraries in other languages may put a key elsewhere",
                    self.name, self.count,
                )  # fmt: skip
            return OrderedQueue(self)

        return Opening(f"ordered queue {self.name!r}", open_queue, _nothing_to_close)

    async def _check_count(self) -> None:
        more = queue_of(self.name, self.count)
        if await self.connection.exists(more):
            raise PartitionCountError(
                f"ordered queue {self.name!r} has more than {self.count} partitions: {more!r} is there. Stop its "
                f"senders, wait until depths() are 0, delete {more!r} and those after it, then change the count",
                name=self.name, wanted=self.count, found=await self._count_from(self.count + 1),
            )  # fmt: skip
        there = [queue for queue in queues_of(self.name, self.count) if await self.connection.exists(queue)]
        if len(there) == self.count:
            return
        for queue in there:
            waiting = await waiting_in(self.connection, queue)
            if waiting:
                raise PartitionCountError(
                    f"ordered queue {self.name!r} has {len(there)} of {self.count} partitions, and messages wait in "
                    f"{queue!r}, {waiting} of them: their keys would move. Stop its senders, wait until depths() "
                    "are 0, then change the count everywhere; repartitioning() gives up their order",
                    name=self.name, wanted=self.count, found=len(there),
                )  # fmt: skip

    async def _count_from(self, known: int) -> int:
        while await self.connection.exists(queue_of(self.name, known)):
            known += 1
        return known


async def _nothing_to_close(queue: OrderedQueue[T]) -> None:
    """Its consumer closes by itself, or with the connection."""
