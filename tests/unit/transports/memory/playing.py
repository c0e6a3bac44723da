"""What the tests of this folder hold in their hands: a client with short verbs, and a sink that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from acemq.clock import MovableClock
from acemq.headers import Headers
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Delivery,
    LostBy,
    Outgoing,
    Published,
    PublishResult,
    Settled,
    Settlement,
    Subscription,
    SubscriptionPhase,
    SubscriptionState,
    Transport,
    TransportState,
    Verb,
)
from acemq.transports.memory import MemoryBroker, transport

NOW = timedelta()
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def outgoing(body: bytes = b"x", *, to: str = "orders", exchange: str = "", **options: Any) -> Outgoing:
    options = {"headers": {}, "message_id": body.decode(), "content_type": "text/plain", **options}
    return Outgoing(exchange=exchange, routing_key=to, body=body, **options)


class Remembering:
    """A sink. `held` is what it was handed and has not settled."""

    def __init__(self) -> None:
        self.batches: list[list[Delivery]] = []
        self.losses: list[tuple[list[bytes], LostBy]] = []
        self.phases: list[SubscriptionPhase] = []
        self.states: list[SubscriptionState] = []

    @property
    def deliveries(self) -> list[Delivery]:
        return [delivery for batch in self.batches for delivery in batch]

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.deliveries]

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.batches.append(list(batch))

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        self.losses.append(([delivery.body for delivery in batch], by))

    def changed(self, state: SubscriptionState, /) -> None:
        self.phases.append(state.phase)
        self.states.append(state)


class Calling(Remembering):
    """A sink that hands every delivery to a function."""

    def __init__(self, handle: Callable[[Delivery], object]) -> None:
        super().__init__()
        self.handle = handle

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        super().deliver(batch)
        for delivery in batch:
            self.handle(delivery)


class Client:
    """A transport of the broker under test."""

    def __init__(self, broker: MemoryBroker, clock: MovableClock, **options: Any) -> None:
        self.broker, self.clock = broker, clock
        self.states: list[TransportState] = []
        self.port: Transport = transport("memory://", broker=broker, on_change=self.states.append, **options)

    async def declare(self, *queues: str, **options: Any) -> None:
        topology = Topology()
        for queue in queues:
            topology |= Topology().queue(queue, **options)
        await self.port.apply(topology, ApplyMode.CREATE)

    async def apply(self, topology: Topology) -> None:
        await self.port.apply(topology, ApplyMode.CREATE)

    async def publish(self, *batch: Outgoing) -> list[PublishResult]:
        return list(await self.port.publish(batch, within=SECOND))

    async def send(self, *bodies: bytes, to: str = "orders", **options: Any) -> None:
        results = await self.publish(*(outgoing(body, to=to, **options) for body in bodies))
        assert [result.error for result in results] == [None] * len(bodies)

    async def outcome(self, message: Outgoing) -> tuple[Published, BaseException | None]:
        (result,) = await self.publish(message)
        return result.outcome, result.error

    async def consume(
        self, queue: str = "orders", prefetch: int = 10, **options: Any
    ) -> tuple[Remembering, Subscription]:
        sink = Remembering()
        subscription = await self.port.subscribe(queue, sink, prefetch=prefetch, **options)
        await self.turn()
        return sink, subscription

    async def take(self, queue: str = "orders", most: int = 10, **options: Any) -> list[Delivery]:
        return list(await self.port.pull(queue, most=most, wait=NOW, **options))

    async def bodies(self, queue: str = "orders") -> list[bytes]:
        """What is ready, taken and accepted."""
        taken = await self.take(queue, 1000)
        await self.accept(*taken)
        return [delivery.body for delivery in taken]

    async def accept(self, *deliveries: Delivery) -> list[Settled]:
        return list(await self.port.settle([Settlement(delivery, Verb.ACCEPT) for delivery in deliveries]))

    async def requeue(
        self, *deliveries: Delivery, delay: timedelta = NOW, headers: Headers | None = None
    ) -> list[Settled]:
        items = [Settlement(delivery, Verb.REQUEUE, delay=delay, headers=headers) for delivery in deliveries]
        return list(await self.port.settle(items))

    async def depth(self, queue: str = "orders") -> tuple[int, int | None, int | None]:
        depth = await self.port.depth(queue)
        return depth.ready, depth.held, depth.delayed

    async def depth_ready(self, queue: str) -> int:
        return (await self.port.depth(queue)).ready

    async def turn(self, times: int = 3) -> None:
        """Let the loop deliver what is on its way."""
        for _ in range(times):
            await asyncio.sleep(0)

    async def advance(self, by: timedelta) -> None:
        await self.clock.advance(by)
