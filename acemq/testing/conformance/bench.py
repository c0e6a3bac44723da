"""What a scenario holds in its hands: transports, short verbs, a sink that remembers, and the clock."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, Unpack

from acemq.connect_options import ConnectOptions
from acemq.connection import Connection
from acemq.headers import DELIVERY_COUNT, Headers, HeaderValue
from acemq.testing.conformance.hooks import NOW, Faults, Hooks
from acemq.testing.conformance.scenario import Scenario
from acemq.testing.conformance.timing import LEAST_QUIET, Pace
from acemq.topology import QueueOptions, Topology
from acemq.transport import (
    ApplyMode,
    Capabilities,
    Delivery,
    Finding,
    LostBy,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    Settled,
    Settlement,
    Subscription,
    SubscriptionPhase,
    SubscriptionState,
    Transport,
    Verb,
)

SOON = timedelta(seconds=10)
"""For calls that nothing disturbs."""

_numbers = itertools.count(1)


def out(to: str, body: bytes = b"x", *, exchange: str = "", **fields: Any) -> Outgoing:
    """A message to a queue, or under the routing key `to` to an exchange."""
    given: dict[str, Any] = {"headers": {}, "content_type": "application/octet-stream", **fields}
    given.setdefault("message_id", f"m-{next(_numbers)}")
    return Outgoing(exchange=exchange, routing_key=to, body=body, **given)


def carried(got: Delivery) -> dict[str, HeaderValue]:
    """The headers that were sent: all, but for what the broker itself has written."""
    return {name: value for name, value in got.headers.items() if name != DELIVERY_COUNT}


class Remembering:
    """A sink. It fails its scenario when it is called re-entrantly or after the end."""

    def __init__(self, pace: Pace) -> None:
        self.got: list[Delivery] = []
        self.at: list[float] = []
        """When, by the clock of the scenario."""
        self.really_at: list[float] = []
        """When, by the machine's: what is measured may not be moved."""
        self.losses: list[tuple[list[Delivery], LostBy]] = []
        self.states: list[SubscriptionState] = []
        self.slips: list[str] = []
        self.over = False
        self.each: Callable[[Delivery], object] | None = None
        self._pace, self._inside = pace, False

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self._enter("deliver")
        try:
            for delivery in batch:
                self.got.append(delivery)
                self.at.append(self._pace.clock.monotonic())
                self.really_at.append(time.perf_counter())
            if self.each is not None:
                for delivery in batch:
                    self.each(delivery)
        finally:
            self._inside = False

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        self._enter("lost")
        self.losses.append((list(batch), by))
        self._inside = False

    def changed(self, state: SubscriptionState, /) -> None:
        self._enter("changed")
        self.states.append(state)
        self._inside = False

    @property
    def bodies(self) -> list[bytes]:
        return [delivery.body for delivery in self.got]

    def _enter(self, call: str) -> None:
        if self._inside:
            self.slips.append(f"{call} was called re-entrantly")
        if self.over:
            self.slips.append(f"{call} was called after the end")
        self._inside = True


class _OnTransport(Connection):
    """A connection on the transport under test."""

    def __init__(self, make: Callable[..., Transport], **options: Unpack[ConnectOptions]) -> None:
        self._make = make
        super().__init__("memory://", **options)

    def make_transport(self, url: str, **options: object) -> Transport:
        return self._make(**options)


class Bench:
    """One scenario on one transport. `t` is open when the scenario begins; everything is closed when it ends."""

    def __init__(self, suite: Hooks, which: Scenario) -> None:
        self.suite, self.which = suite, which
        self._movable = suite.clock()
        self.pace = Pace(self._movable)
        self.timing = suite.timing.grown()
        self.step, self.late, self.settling = self.timing.step, self.timing.late, self.timing.settle
        self.measured: dict[str, float | int | str] = {}
        """Goes into the report."""
        self.logs = Logs()
        self.sinks: list[Remembering] = []
        self.made: list[Transport] = []
        self._connections: list[Connection] = []
        self._queues: set[str] = set()
        self._exchanges: set[str] = set()
        self._faults: Faults | None = None
        self._work: set[asyncio.Future[object]] = set()
        self.t: Transport

    # Transports

    def make(self, **options: object) -> Transport:
        made = self.suite.make(**options)
        self.made.append(made)
        return made

    async def open(self, **options: object) -> Transport:
        made = self.make(**options)
        await made.open(within=SOON)
        return made

    @property
    def can(self) -> Capabilities:
        return self.t.capabilities

    def can_of(self, queue: str) -> Capabilities:
        return self.t.capabilities_of("queue", queue)

    @asynccontextmanager
    async def connection(self, **options: Unpack[ConnectOptions]) -> AsyncGenerator[Connection]:
        """The engine, on a transport of its own."""
        if self._movable is not None:
            options.setdefault("clock", self._movable)
        options.setdefault("close_timeout", timedelta(seconds=2))
        opened = await _OnTransport(self.make, **options).opening()
        try:
            yield opened
        finally:
            await opened.close()

    async def close(self) -> None:
        """Delete what the scenario has declared, and close every transport."""
        with suppress(Exception):
            await self._tidy()
        for made in self.made:
            if made.state.phase not in (Phase.NEW, Phase.CLOSED):
                await made.close(timedelta(seconds=1))
        for sink in self.sinks:
            sink.over = True

    async def _tidy(self) -> None:
        live = [made for made in self.made if made.state.phase is Phase.CONNECTED]
        if not live and (self._queues or self._exchanges):
            live = [await self.open()]
        async with asyncio.timeout(5):
            for queue in self._queues:
                await live[0].delete(queue)
            for exchange in self._exchanges:
                await live[0].delete(exchange, "exchange")

    # Faults

    @property
    def faults(self) -> Faults:
        if self._faults is None:
            self._faults = self.suite.faults()
        return self._faults

    @asynccontextmanager
    async def refused(self) -> AsyncGenerator[None]:
        await self.faults.refuse(True)
        try:
            yield
        finally:
            await self.faults.refuse(False)

    @asynccontextmanager
    async def swallowed(self) -> AsyncGenerator[None]:
        await self.faults.swallow(True)
        try:
            yield
        finally:
            await self.faults.swallow(False)

    @asynccontextmanager
    async def blocked(self) -> AsyncGenerator[None]:
        await self.faults.block(True)
        try:
            yield
        finally:
            await self.faults.block(False)

    # Topology

    def name(self, word: str) -> str:
        return self.suite.name(f"{self.which.id.replace('-', '').lower()}-{word}")

    async def queue(self, word: str = "q", *, t: Transport | None = None, **options: Unpack[QueueOptions]) -> str:
        """Declare one, and say what it is called."""
        name = self.name(word)
        await self.apply(self.described(name, **options), t=t)
        return name

    def described(self, name: str, **options: Unpack[QueueOptions]) -> Topology:
        wanted: QueueOptions = {**self.suite.queues, **options}
        if wanted.get("priorities", 0) not in (0, "lanes"):
            wanted["type"] = "classic"
        return Topology().queue(name, **wanted)

    async def fan_out(self, *words: str) -> tuple[str, list[str]]:
        """A fanout exchange with a queue for each word."""
        exchange, queues = self.name("x"), [self.name(word) for word in words]
        topology = Topology().exchange(exchange, "fanout")
        for queue in queues:
            topology |= self.described(queue)
            topology = topology.bind(queue, exchange)
        await self.apply(topology)
        return exchange, queues

    async def apply(
        self, topology: Topology, mode: ApplyMode = ApplyMode.CREATE, *, t: Transport | None = None
    ) -> list[Finding]:
        whole = topology.spelled_out()
        self._queues |= {queue.name for queue in whole.queues}
        self._exchanges |= {exchange.name for exchange in whole.exchanges if not exchange.name.startswith("acemq.")}
        return list(await (t or self.t).apply(topology.in_lanes(), mode))

    # Publishing

    async def publish(
        self, *batch: Outgoing, t: Transport | None = None, within: timedelta = SOON
    ) -> list[PublishResult]:
        return list(await (t or self.t).publish(batch, within=within))

    async def result(self, message: Outgoing, *, t: Transport | None = None, within: timedelta = SOON) -> PublishResult:
        (result,) = await self.publish(message, t=t, within=within)
        return result

    async def send(self, queue: str, *bodies: bytes, t: Transport | None = None, **fields: Any) -> None:
        """In one batch, all routed."""
        results = await self.publish(*(out(queue, body, **fields) for body in bodies), t=t)
        assert [result.outcome for result in results] == [Published.ROUTED] * len(bodies), results

    # Receiving and settling

    async def consume(
        self, queue: str, *, prefetch: int = 10, t: Transport | None = None, accept: bool = False, **options: Any
    ) -> tuple[Remembering, Subscription]:
        """`accept`: everything that comes is accepted, in a turn of its own."""
        sink, transport = self.sink(), t or self.t
        if accept:
            sink.each = lambda delivery: self.soon(transport.settle([Settlement(delivery, Verb.ACCEPT)]))
        return sink, await transport.subscribe(queue, sink, prefetch=prefetch, **options)

    def sink(self) -> Remembering:
        sink = Remembering(self.pace)
        self.sinks.append(sink)
        return sink

    def soon(self, work: Awaitable[object]) -> None:
        """Done in a task of the scenario's own; what it raises fails the scenario."""
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._worked)

    def _worked(self, task: asyncio.Future[object]) -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.result()

    async def take(
        self, queue: str, count: int, *, t: Transport | None = None, within: timedelta | None = None
    ) -> list[Delivery]:
        """So many, held; fails when they do not come."""
        taken: list[Delivery] = []
        end = self.pace.clock.monotonic() + (within or self.settling).total_seconds()
        while len(taken) < count and self.pace.clock.monotonic() < end:
            left = timedelta(seconds=max(end - self.pace.clock.monotonic(), 0))
            taken += await (t or self.t).pull(queue, most=count - len(taken), wait=left)
        assert len(taken) == count, f"{len(taken)} of {count} messages came from {queue}"
        return taken

    async def take_one(self, queue: str, *, t: Transport | None = None, within: timedelta | None = None) -> Delivery:
        (taken,) = await self.take(queue, 1, t=t, within=within)
        return taken

    async def drain(
        self, queue: str, expected: int | None = None, *, t: Transport | None = None, within: timedelta | None = None
    ) -> list[Delivery]:
        """Everything that is ready, accepted. With `expected`: waits for so many, and sees that no more are there."""
        transport, drained = t or self.t, list[Delivery]()
        if expected:
            drained = await self.take(queue, expected, t=t, within=within)
            await self.accept(drained, t=t)
        while batch := await transport.pull(queue, most=500, wait=NOW):
            drained += batch
            await self.accept(batch, t=t)
        assert expected is None or len(drained) == expected, f"{len(drained)} messages in {queue}, not {expected}"
        return drained

    async def accept(self, deliveries: Iterable[Delivery], *, t: Transport | None = None) -> list[Settled]:
        return await self.settle(deliveries, Verb.ACCEPT, t=t)

    async def settle(
        self,
        deliveries: Iterable[Delivery],
        verb: Verb,
        *,
        delay: timedelta = NOW,
        headers: Headers | None = None,
        t: Transport | None = None,
    ) -> list[Settled]:
        batch = [Settlement(delivery, verb, delay, headers) for delivery in deliveries]
        return list(await (t or self.t).settle(batch))

    async def requeue(self, *deliveries: Delivery, t: Transport | None = None, **options: Any) -> list[Settled]:
        return await self.settle(deliveries, Verb.REQUEUE, t=t, **options)

    # Waiting

    async def sleep(self, length: timedelta) -> None:
        await self.pace.sleep(length)

    def now(self) -> float:
        return self.pace.clock.monotonic()

    async def quiet(self) -> None:
        """So long that what should not happen would have."""
        await self.pace.sleep(max(3 * self.step, LEAST_QUIET))

    async def eventually(
        self,
        condition: Callable[[], object | Awaitable[object]],
        what: str,
        *,
        within: timedelta | None = None,
        seen: Callable[[], object] = lambda: "",
    ) -> None:
        await self.pace.eventually(condition, within=within or self.settling, what=what, seen=seen)

    async def has(self, sink: Remembering, count: int, *, within: timedelta | None = None) -> None:
        await self.eventually(
            lambda: len(sink.got) >= count, f"{count} deliveries", within=within, seen=lambda: len(sink.got)
        )

    async def ready(self, queue: str, count: int, *, t: Transport | None = None) -> None:
        """Wait until the broker says that so many are ready; nothing where it does not say."""
        if self.can.depth == "none":
            return
        seen = -1

        async def right() -> bool:
            nonlocal seen
            seen = (await (t or self.t).depth(queue)).ready
            return seen == count

        await self.eventually(right, f"{count} ready in {queue}", seen=lambda: seen)

    async def turns(self, most: int = 20) -> None:
        """A random moment: so many turns of the loop at most, and sometimes a while."""
        for _ in range(random.randrange(most)):
            await asyncio.sleep(0)
        if random.random() < 0.2:
            await self.pace.sleep(timedelta(milliseconds=1))

    async def phase(self, phase: Phase, *, t: Transport | None = None, within: timedelta | None = None) -> None:
        transport = t or self.t
        await self.eventually(
            lambda: transport.state.phase is phase, f"phase {phase}", within=within, seen=lambda: transport.state
        )

    async def active(self, subscription: Subscription, *, generation: int = 1, within: timedelta | None = None) -> None:
        await self.eventually(
            lambda: (
                subscription.state.phase is SubscriptionPhase.ACTIVE and subscription.state.generation >= generation
            ),
            "the subscription is active",
            within=within or self.timing.recovery,
            seen=lambda: subscription.state,
        )


class Logs(logging.Handler):
    """Everything that is logged while a scenario runs."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, level: int, *words: str) -> list[str]:
        """What was said of the library at this level or above, with all of these words in it."""
        return [
            text
            for record in self.records
            if record.levelno >= level and not record.name.startswith("asyncio")
            for text in [self.whole(record)]
            if all(word in text for word in words)
        ]

    @staticmethod
    def whole(record: logging.LogRecord) -> str:
        told = record.getMessage()
        return f"{told}\n{record.exc_info[1]!r}" if record.exc_info else told
