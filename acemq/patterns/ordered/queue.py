"""An ordered queue in hand: send by key, consume, and decide about halted partitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar, Unpack, cast

from msgspec.structs import replace

from acemq.clock import check_duration
from acemq.connection import Connection
from acemq.consuming.handling import check_handler
from acemq.consuming.options import ConsumeOptions, check_prefetch
from acemq.errors import (
    AcemqError,
    BatchPublishError,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    PublishingPausedError,
    PublishRefusedError,
)
from acemq.keywords import check_keywords
from acemq.message import Handler
from acemq.opening import Opening
from acemq.patterns.ordered.consumer import OrderedConsumer
from acemq.patterns.ordered.keys import partition_of, queues_of
from acemq.patterns.ordered.partition import Halt, OrderedCounters, Part, PartitionConsumer
from acemq.publishing.draft import Draft
from acemq.publishing.options import OPTIONS, PublishOptions
from acemq.publishing.outbound import Receipt, all_through
from acemq.stores import Idempotency, IdempotencyStore
from acemq.transport import Claims

if TYPE_CHECKING:
    from acemq.patterns.ordered.described import Ordered

T = TypeVar("T")

AHEAD = 1_000
"""Messages of `send_many` that are read before the first of them is confirmed."""


class OrderedQueue(Generic[T]):
    """Messages of one key are handled in the order in which the broker took them. Made by `Ordered.declare`."""

    def __init__(self, described: Ordered[T]) -> None:
        self.name = described.name
        self.queues = queues_of(described.name, described.count)
        """Of the partitions, by number."""
        self._described = described
        self._connection: Connection = described.connection
        self._counted = OrderedCounters()
        self._consumer: OrderedConsumer | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} of {len(self.queues)} partitions>"

    # Sending

    def partition_of(self, key: str) -> int:
        """The same in every process, and in every language that shares the queues."""
        return partition_of(key, len(self.queues))

    async def send(self, payload: T, *, key: str | None = None, **options: Unpack[PublishOptions]) -> Receipt:
        """Return once the broker has the message in the partition of its key, which `keyed_by` reads unless given.

        Raises as `Connection.send`, and `ConfigurationError` before any I/O for a message without a key. For two
        messages of one key to be in order, wait for the first.
        """
        queue = self.queues[self.partition_of(self._key_of(payload) if key is None else key)]
        receipt = await self._connection.outbound.publish("", queue, payload, checked(options) if options else None)
        self._counted.sent += 1
        return receipt

    async def send_many(self, payloads: Iterable[T], **options: Unpack[PublishOptions]) -> list[Receipt]:
        """The same for many, whose keys `keyed_by` reads; receipts in the order of the payloads.

        The next one of a key is written once the one before it is confirmed, while other keys go on beside it. When
        one does not get through, nothing more of its key is sent; `BatchPublishError` says which were. One without a
        key fails alone.
        """
        checked(options)
        if options.keys() & {"message_id", "envelope"}:
            raise ConfigurationError("message_id and envelope belong to one message; send_many gives each its own id")
        results: list[Receipt | Exception] = []
        failed: dict[str, Exception] = {}
        source = iter(payloads)
        while window := list(islice(source, AHEAD)):
            results.extend(await self._send_window(window, options, failed))
        return all_through(results)

    async def _send_window(
        self, payloads: list[T], options: PublishOptions, failed: dict[str, Exception]
    ) -> list[Receipt | Exception]:
        results: list[Receipt | Exception] = [_NOT_SENT] * len(payloads)
        waiting: dict[str, deque[int]] = {}
        for at, payload in enumerate(payloads):
            try:
                key = self._key_of(payload)
                self.partition_of(key)
            except ConfigurationError as error:
                results[at] = error
                continue
            waiting.setdefault(key, deque()).append(at)
        while waiting:
            for key in waiting.keys() & failed.keys():
                for at in waiting.pop(key):
                    results[at] = _held_back(key, failed[key])
            heads = {key: places.popleft() for key, places in waiting.items()}
            waiting = {key: places for key, places in waiting.items() if places}
            if not heads:
                break
            sent = await self._send_heads([(key, payloads[at]) for key, at in heads.items()], options)
            for (key, at), result in zip(heads.items(), sent, strict=True):
                results[at] = result
                if isinstance(result, Exception):
                    failed[key] = result
                else:
                    self._counted.sent += 1
        return results

    async def _send_heads(self, heads: list[tuple[str, T]], options: PublishOptions) -> list[Receipt | Exception]:
        """At most one message of each key, and so in any order."""
        each = cast("PublishOptions", {name: value for name, value in options.items() if name != "timeout"})
        drafts = [Draft("", self.queues[self.partition_of(key)], payload, **each) for key, payload in heads]
        try:
            return list(await self._connection.publish_batch(drafts, timeout=options.get("timeout")))
        except BatchPublishError as error:
            return list(error.results)
        except (PublishingPausedError, ClosedError) as error:
            return [error] * len(heads)  # what went before it is told beside it

    def _key_of(self, payload: T) -> str:
        read = self._described.key
        if read is None:
            raise ConfigurationError(f"{self.name!r} has no keyed_by(…), so a message needs key=")
        try:
            key = read(payload)
        except Exception as error:
            text = f"keyed_by of {self.name!r} raised {type(error).__name__}: {error}; so the message has no key"
            raise ConfigurationError(text) from error
        return key

    # Consuming

    def consume(
        self,
        handler: Handler[T],
        *,
        prefetch: int = 1,
        handler_timeout: timedelta | None = None,
        idempotency: IdempotencyStore | Idempotency | None = None,
        hold: timedelta = timedelta(minutes=10),
    ) -> Opening[OrderedConsumer]:
        """Put the messages of each partition through `handler`, one at a time, as long as no other process does.

        Partitions that others have are stood by for. With `idempotency`, a message whose claim another holds is waited
        for in its place. A halted message is held for `hold`, then given back to its
        place, where it waits with its partition. Once in a connection: a second is refused.
        """
        check_handler(handler, self._described.payload)
        check_prefetch(prefetch)
        check_duration("hold", hold)
        transport = self._connection.transport
        can = transport.capabilities
        option = f"ordered({self.name!r})"
        if not can.exclusive:
            raise CapabilityError(can.transport, "exclusive consumers", option)
        if self._described.share is not None and not isinstance(transport, Claims):
            raise CapabilityError(can.transport, "a look at who has a queue", "sharing()")
        if can.hold_limit is not None and self._described.delay > can.hold_limit * 0.9:
            longest = f"holding a delivery for longer than {can.hold_limit}"
            raise CapabilityError(
                can.transport, longest, f"delay={self._described.delay}", "Wait for less between tries"
            )
        options: ConsumeOptions = {
            "concurrency": 1,
            "prefetch": prefetch,
            "retry": self._described.policy(),
            "exclusive": True,
        }
        if handler_timeout is not None:
            options["handler_timeout"] = check_duration("handler_timeout", handler_timeout)
        if idempotency is not None:
            options["idempotency"] = idempotency

        def opening(number: int) -> Opening[PartitionConsumer]:
            part = Part(self.name, number, self._described.failure, hold, self._key_of, self._counted)
            make = partial(PartitionConsumer, part=part)
            return self._connection.consumer_of(
                make, self.queues[number], self._described.payload, handler, options, in_place=True
            )

        async def open_consumer() -> OrderedConsumer:
            alone = self._connection.consumers.alone
            if self.name in alone:
                raise ConfigurationError(
                    f"ordered queue {self.name!r} is consumed by this connection already; close that first"
                )
            alone.add(self.name)
            consumer = OrderedConsumer(
                self.name,
                connection=self._connection,
                queues=self.queues,
                opening=opening,
                sharing=self._described.share,
                closed=lambda: alone.discard(self.name),
            )
            self._consumer = consumer
            await consumer.start()
            return consumer

        opening(0)  # refuses here what is wrong with any of them
        return Opening(f"consumer of ordered queue {self.name!r}", open_consumer, lambda consumer: consumer.close())

    def _mine(self) -> Mapping[int, PartitionConsumer]:
        return self._consumer.partitions if self._consumer is not None else {}

    @property
    def owned_partitions(self) -> frozenset[int]:
        """Served by this process now."""
        return frozenset(number for number, consumer in self._mine().items() if consumer.owns)

    # What stands still, and what is decided about it

    @property
    def halted_partitions(self) -> Mapping[int, Halt]:
        """Of those that this process serves."""
        return {number: consumer.halt for number, consumer in self._mine().items() if consumer.halt is not None}

    def resume(self, partition: int | None = None) -> None:
        """Try the halted message again, from its first attempt; `None`: in all partitions that are halted here.

        `ConfigurationError` for a partition that is not.
        """
        if partition is None:
            for number in self.halted_partitions:
                self._mine()[number].try_again()
        elif not self._halted(partition).try_again():
            raise self._not_halted(partition)

    async def skip(self, partition: int) -> str:
        """Return the id of the halted message once it is in the dead letters; the next one is handled then.

        `ConfigurationError` for a partition that is not halted here, `ClosedError` when it was let go before.
        """
        skipped = await self._halted(partition).skip()
        if skipped is None:
            raise self._not_halted(partition)
        return skipped

    def _halted(self, partition: int) -> PartitionConsumer:
        if partition not in range(len(self.queues)):
            raise ConfigurationError(
                f"ordered queue {self.name!r} has partitions 0 to {len(self.queues) - 1}, no {partition!r}"
            )
        if partition not in self.halted_partitions:
            raise self._not_halted(partition)
        return self._mine()[partition]

    def _not_halted(self, partition: int) -> AcemqError:
        if self._consumer is None:
            return ClosedError(f"this process does not consume {self.name!r}; ask the one that does")
        halted = ", ".join(map(str, self.halted_partitions)) or "none"
        return ConfigurationError(
            f"partition {partition} of {self.name!r} is not halted in this process; halted: {halted}"
        )

    async def depths(self) -> dict[int, int]:
        """How many messages are in each partition by the broker's word, those in hand included where it says."""
        return {number: await waiting_in(self._connection, queue) for number, queue in enumerate(self.queues)}

    @property
    def counters(self) -> OrderedCounters:
        """Of this process, since it was declared."""
        counted = [self._connection.consumers.counted(queue) for queue in self.queues]
        return replace(
            self._counted,
            handled=sum(each.acked for each in counted),
            retried=sum(each.retried for each in counted),
            parked=sum(each.parked for each in counted),
        )


async def waiting_in(connection: Connection, queue: str) -> int:
    depth = await connection.depth(queue)
    return depth.ready + (depth.held or 0)


def checked(options: PublishOptions) -> PublishOptions:
    """Refuse what would let a later message pass an earlier one."""
    check_keywords("send", options, OPTIONS)
    for option in ("delay", "priority"):
        if option in options:
            raise ConfigurationError(f"{option}= lets messages pass each other, and an ordered queue keeps their order")
    return options


def _held_back(key: str, because: Exception) -> PublishRefusedError:
    return PublishRefusedError(f"not sent, since the message of key {key!r} before it did not get through: {because}")


_NOT_SENT: Exception = PublishRefusedError("not sent")
