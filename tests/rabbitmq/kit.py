"""What the tests of the RabbitMQ transport share: a sink that records, a message, and waiting for a named condition."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from acemq.transport import (
    Delivery,
    LostBy,
    Outgoing,
    Published,
    PublishResult,
    Settled,
    Settlement,
    SubscriptionPhase,
    SubscriptionState,
    Transport,
    Verb,
)

SOON = timedelta(seconds=5)
_numbers = itertools.count(1)


class Recorder:
    """A sink that keeps what it is told, in that order."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self.batches: list[int] = []
        self.lost_by: list[tuple[LostBy, int]] = []
        self.phases: list[SubscriptionPhase] = []
        self.state: SubscriptionState | None = None
        self.on_deliver: Callable[[Sequence[Delivery]], None] | None = None
        self._is_inside = False

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        assert not self._is_inside, "called re-entrantly"
        self._is_inside = True
        try:
            self.got += batch
            self.batches.append(len(batch))
            if self.on_deliver is not None:
                self.on_deliver(batch)
        finally:
            self._is_inside = False

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        assert not self._is_inside, "called re-entrantly"
        self.lost_by.append((by, len(batch)))

    def changed(self, state: SubscriptionState, /) -> None:
        assert not self._is_inside, "called re-entrantly"
        self.phases.append(state.phase)
        self.state = state

    async def has(self, count: int, within: float = 30.0) -> None:
        """Return once so many deliveries have come."""
        await until(lambda: len(self.got) >= count, f"{count} deliveries", within)

    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.got]


def out(routing_key: str, body: bytes = b"x", *, exchange: str = "", **options: Any) -> Outgoing:
    given = {"headers": {}, "content_type": "text/plain", "message_id": f"m-{next(_numbers)}"} | options
    return Outgoing(exchange=exchange, routing_key=routing_key, body=body, **given)


async def send(transport: Transport, *messages: Outgoing, within: timedelta = SOON) -> Sequence[PublishResult]:
    return await transport.publish(messages, within=within)


async def fill(transport: Transport, queue: str, count: int) -> None:
    results = await send(transport, *(out(queue, b"%d" % number) for number in range(count)))
    assert {result.outcome for result in results} == {Published.ROUTED}


async def settle(transport: Transport, deliveries: Iterable[Delivery], verb: Verb = Verb.ACCEPT) -> list[Settled]:
    return list(await transport.settle([Settlement(delivery, verb) for delivery in deliveries]))


async def drain(transport: Transport, queue: str) -> list[Delivery]:
    """Everything that is ready in a queue, accepted."""
    out: list[Delivery] = []
    while batch := await transport.pull(queue, most=500, wait=timedelta()):
        out += batch
        await settle(transport, batch)
    return out


async def until(condition: Callable[[], object], what: str, within: float = 30.0) -> None:
    try:
        async with asyncio.timeout(within):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within {within:g} s: {what}") from None


async def until_depth(transport: Transport, queue: str, ready: int, within: float = 30.0) -> None:
    found = -1
    try:
        async with asyncio.timeout(within):
            while found != ready:
                found = (await transport.depth(queue)).ready
    except TimeoutError:
        raise AssertionError(f"{queue} has {found} ready messages, not {ready}, after {within:g} s") from None
