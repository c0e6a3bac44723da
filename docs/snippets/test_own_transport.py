"""A transport of one's own: queues that are lists in this process. `SmallConformance` proves it."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from acemq.errors import CapabilityError, ClosedError, TopologyError
from acemq.testing.conformance import SmallConformance
from acemq.topology import Topology, aside_of
from acemq.transport import (
    ROUTED,
    ApplyMode,
    Capabilities,
    Delivery,
    Depth,
    ExchangeMissing,
    Finding,
    Kind,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    QueueMissing,
    Renewal,
    Settled,
    Settlement,
    Sink,
    SubscriptionPhase,
    SubscriptionState,
    TransportState,
    Unroutable,
    Verb,
)

log = logging.getLogger("lists")

CAN = Capabilities(
    transport="lists", durable=False, requeue_place="head", unroutable="told", topic_patterns="none", depth="exact"
)


class Stored:
    """A message. It keeps its place in its list while it is held, and leaves the list when it is settled."""

    def __init__(self, out: Outgoing) -> None:
        self.out, self.is_held, self.redelivered = out, False, False


class Broker:
    """What the transports of one broker share."""

    def __init__(self) -> None:
        self.queues: dict[str, list[Stored]] = {}
        self.exchanges: dict[str, str] = {}
        self.bindings: set[tuple[str, str, str]] = set()
        self.subscriptions: list[Subscribed] = []
        self.tokens = itertools.count(1)

    def ready(self, queue: str) -> Iterator[Stored]:
        if queue not in self.queues:
            raise QueueMissing(f"there is no queue {queue!r}; declare it first")
        return (stored for stored in list(self.queues[queue]) if not stored.is_held)

    def targets(self, out: Outgoing) -> list[str]:
        if not out.exchange:
            return [out.routing_key] if out.routing_key in self.queues else []
        if out.exchange not in self.exchanges:
            raise ExchangeMissing(f"there is no exchange {out.exchange!r}; declare it first")
        found = {q for x, q, key in self.bindings if x == out.exchange and key in self.keys(out)}
        return [queue for queue in self.queues if queue in found]

    def keys(self, out: Outgoing) -> set[str]:
        if self.exchanges[out.exchange] == "fanout":
            return {key for x, _, key in self.bindings if x == out.exchange}
        return {out.routing_key}

    def feed(self) -> None:
        for subscription in self.subscriptions:
            asyncio.get_running_loop().call_soon(subscription.deliver)


class Subscribed:
    """A subscription. What it has out is never more than its prefetch."""

    def __init__(self, transport: "Lists", queue: str, sink: Sink, prefetch: int) -> None:
        self.transport, self.queue, self.sink, self.prefetch = transport, queue, sink, prefetch
        self.phase = SubscriptionPhase.ACTIVE

    @property
    def out(self) -> list[int]:
        return [token for token, (_, holder) in self.transport.held.items() if holder is self]

    @property
    def state(self) -> SubscriptionState:
        return SubscriptionState(phase=self.phase, since=datetime.now(UTC), held=len(self.out))

    def deliver(self) -> None:
        room = self.prefetch - len(self.out)
        if self.phase is SubscriptionPhase.ACTIVE and room > 0 and self.queue in self.transport.broker.queues:
            batch = self.transport.take(self.queue, room, self)
            if batch:
                self.sink.deliver(batch)

    def pause(self) -> None:
        self.phase = SubscriptionPhase.PAUSED

    def resume(self) -> None:
        self.phase = SubscriptionPhase.ACTIVE
        self.transport.broker.feed()

    async def stop(self) -> None:
        self.phase = SubscriptionPhase.STOPPED

    async def close(self) -> None:
        self.phase = SubscriptionPhase.CLOSED
        for token in self.out:
            self.transport.give_back(token)


class Lists:
    """`acemq.transport.Transport`."""

    capabilities = CAN

    def __init__(self, broker: Broker) -> None:
        self.broker, self.phase, self.opened = broker, Phase.NEW, 0
        self.held: dict[int, tuple[Stored, object]] = {}
        self.warned: set[int] = set()

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        return CAN

    @property
    def state(self) -> TransportState:
        return TransportState(phase=self.phase, since=datetime.now(UTC), endpoint="lists", generation=self.opened)

    def check(self) -> Broker:
        if self.phase is not Phase.CONNECTED:
            raise ClosedError("this transport is closed; open it")
        return self.broker

    async def open(self, *, within: timedelta) -> None:
        self.phase, self.opened = Phase.CONNECTED, self.opened + 1

    async def close(self, grace: timedelta = timedelta(seconds=5)) -> None:
        for subscription in [each for each in self.broker.subscriptions if each.transport is self]:
            await subscription.close()
            self.broker.subscriptions.remove(subscription)
        for token in list(self.held):
            self.give_back(token)
        self.phase = Phase.CLOSED

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        broker, create = self.check(), mode is ApplyMode.CREATE
        for queue in topology.queues:
            if queue.dead_letter:
                topology |= aside_of(queue.name, exchanges=False)
            if queue.max_length:
                raise CapabilityError("lists", "max_length", f"max_length= of queue {queue.name!r}")
        findings: list[Finding] = []

        def found(kind: Any, name: str, there: bool) -> None:
            verdict: Any = "present" if there else "created" if create else "missing"
            findings.append(Finding(verdict=verdict, kind=kind, name=name))

        for exchange in topology.exchanges:
            found("exchange", exchange.name, exchange.name in broker.exchanges)
        for queue in topology.queues:
            found("queue", queue.name, queue.name in broker.queues)
        for b in topology.bindings:
            if {"*", "#"} & set(b.key.split(".")):
                raise CapabilityError("lists", "topic patterns", f"the binding on {b.key!r}")
            found("binding", b.queue, (b.exchange, b.queue, b.key) in broker.bindings)
        missing = [f"{each.kind} {each.name!r} is missing" for each in findings if each.verdict == "missing"]
        if mode is ApplyMode.VERIFY and missing:
            raise TopologyError(*missing)
        if create:
            broker.exchanges |= {exchange.name: exchange.kind for exchange in topology.exchanges}
            broker.queues |= {each.name: broker.queues.get(each.name, []) for each in topology.queues}
            broker.bindings |= {(b.exchange, b.queue, b.key) for b in topology.bindings}
        return findings

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        self.check()
        results = [self.accept(out, transaction) for out in batch]
        self.broker.feed()
        return results

    def accept(self, out: Outgoing, transaction: object) -> PublishResult:
        asked = {"delay": out.delay, "expires_in": out.expires_in, "transaction": transaction}
        for option in (option for option, value in asked.items() if value):
            return PublishResult(Published.REFUSED, CapabilityError("lists", option, f"{option}="))
        try:
            targets = self.broker.targets(out)
        except ExchangeMissing as error:
            return PublishResult(Published.REFUSED, error)
        for queue in targets:
            self.broker.queues[queue].append(Stored(out))
        if targets or not out.mandatory:
            return ROUTED
        return PublishResult(Published.UNROUTABLE, Unroutable(f"nothing takes {out.routing_key!r}"))

    def take(self, queue: str, most: int, holder: object) -> list[Delivery]:
        taken: list[Delivery] = []
        for stored in itertools.islice(self.broker.ready(queue), most):
            token, stored.is_held = next(self.broker.tokens), True
            self.held[token] = stored, holder
            out = stored.out
            told: dict[str, Any] = {"message_id": out.message_id, "content_type": out.content_type}
            told |= {"exchange": out.exchange, "routing_key": out.routing_key, "reply_to": out.reply_to}
            told |= {"redelivered": stored.redelivered, "headers": dict(out.headers), "receipt": (queue, token)}
            taken.append(Delivery(queue=queue, body=out.body, **told))
        return taken

    def give_back(self, token: int) -> None:
        stored, _ = self.held.pop(token)
        stored.is_held, stored.redelivered = False, True
        self.broker.feed()

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        self.check()
        clock = asyncio.get_running_loop().time
        end = clock() + wait.total_seconds()
        while not (taken := self.take(queue, most, None)) and clock() < end:
            await asyncio.sleep(min(end - clock(), 0.005))
        return taken

    async def subscribe(
        self, queue: str, sink: Sink, *, prefetch: int, options: Mapping[str, object] | None = None, **asked: Any
    ) -> Subscribed:
        self.check().ready(queue)
        asked |= {key: value for key, value in (options or {}).items() if key != "name"}
        for option in (option for option, value in asked.items() if value):
            raise CapabilityError("lists", option, f"{option}=")
        subscription = Subscribed(self, queue, sink, prefetch)
        self.broker.subscriptions.append(subscription)
        self.broker.feed()
        return subscription

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        results = [self.settle_one(each) for each in batch]
        self.broker.feed()
        return results

    def settle_one(self, each: Settlement) -> Settled:
        queue, token = cast("tuple[str, int]", each.delivery.receipt)
        if token not in self.held:
            if token not in self.warned:
                log.warning("settling %s came too late", each.delivery.message_id)
            self.warned.add(token)
            return Settled.STALE
        if each.delay or each.headers is not None:
            log.error("a requeue with a delay or other headers is not done; the delivery stays held")
            return Settled.FAILED
        if each.verb is Verb.REQUEUE:
            self.give_back(token)
        else:
            self.broker.queues[queue].remove(self.held.pop(token)[0])
        return Settled.DONE

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        self.check()
        return [Renewal("failed") for _ in batch]

    async def depth(self, queue: str) -> Depth:
        ready = len(list(self.check().ready(queue)))
        held = len(self.broker.queues[queue]) - ready
        return Depth(ready=ready, held=held, delayed=0, exact=True, at=datetime.now(UTC))

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        broker = self.check()
        return name in (broker.queues if kind == "queue" else broker.exchanges)

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        if not await self.exists(name, kind) or (only_if_empty and self.broker.queues.get(name)):
            return False
        if kind == "queue":
            del self.broker.queues[name]
        else:
            del self.broker.exchanges[name]
        self.broker.bindings = {each for each in self.broker.bindings if each[kind == "queue"] != name}
        return True

    async def purge(self, queue: str) -> int | None:
        gone = list(self.check().ready(queue))
        self.broker.queues[queue] = [stored for stored in self.broker.queues[queue] if stored.is_held]
        return len(gone)


class TestLists(SmallConformance):
    label = "lists"

    def make(self, **options: object) -> Lists:
        # Every test has an instance of its own, and so a broker of its own.
        self.broker = getattr(self, "broker", None) or Broker()
        return Lists(self.broker)
