"""Where the cases meet the library: a broker in memory that can do what RabbitMQ can, watched at its door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from pamqp import frame, header

import acemq
from acemq.clock import MovableClock
from acemq.headers import HeaderValue
from acemq.ids import new_id
from acemq.topology import Declaration, Topology
from acemq.transport import ApplyMode, Delivery, Outgoing, Settlement
from acemq.transports.memory import MemoryBroker, Profile
from acemq.transports.rabbitmq.frames import PublishFrames


@dataclass(frozen=True)
class Seen:
    """Something that a client asked of the broker."""

    what: Outgoing | Settlement
    at: datetime


Event: TypeAlias = Literal["publish", "settle"]


@dataclass
class Bench:
    """A connection to a broker of its own, and everything that was asked of that broker."""

    mq: acemq.AceMQ
    broker: MemoryBroker
    clock: MovableClock
    seen: list[Seen] = field(default_factory=list[Seen])
    told: list[acemq.Diagnostic] = field(default_factory=list[acemq.Diagnostic])

    @property
    def published(self) -> list[Outgoing]:
        return [seen.what for seen in self.seen if isinstance(seen.what, Outgoing)]

    @property
    def settled(self) -> list[Settlement]:
        return [seen.what for seen in self.seen if isinstance(seen.what, Settlement)]

    async def declare(self, *queues: str, **options: Any) -> None:
        """These queues, plain, past the library's own rules about names."""
        whole = Topology()
        for queue in queues:
            whole = whole.queue(queue, **options)
        await self.mq.transport.apply(whole, ApplyMode.CREATE)

    async def put(self, queue: str, body: bytes = b"{}", **fields: Any) -> None:
        """A message as another library may have left it there: these headers and no others. It is not `seen`."""
        fields = {"headers": {}, "message_id": None, "content_type": "application/json", **fields}
        await self.mq.transport.publish(
            [Outgoing(exchange="", routing_key=queue, body=body, **fields)], within=timedelta(seconds=1)
        )
        self.seen.clear()

    def waiting(self, queue: str) -> list[str | None]:
        """The ids of the messages there, first to last."""
        return [stored.message_id for stored in self.broker.snapshot() if stored.queue == queue]


@asynccontextmanager
async def bench(**options: Any) -> AsyncIterator[Bench]:
    clock = MovableClock(datetime.now(UTC))
    name = f"wire-{new_id()}"
    broker = MemoryBroker.named(name, clock=clock, profile=Profile.RABBITMQ)
    told: list[acemq.Diagnostic] = []
    async with acemq.connect(f"memory://{name}", clock=clock, on_diagnostic=told.append, **options) as mq:
        made = Bench(mq, broker, clock, told=told)

        def watch(subject: Any) -> bool:
            if isinstance(subject, Outgoing | Settlement):
                made.seen.append(Seen(subject, clock.now()))
            return False

        verbs: tuple[Event, Event] = ("publish", "settle")
        for verb in verbs:
            broker.faults.next(verb, "fail", match=watch)  # a fault that is asked and never takes effect
        yield made


def arrived(headers: Mapping[str, HeaderValue], **fields: Any) -> Delivery:
    """A delivery with these headers."""
    known: dict[str, Any] = {"queue": "q", "body": b"{}", "message_id": None, "content_type": "application/json"}
    known |= {"exchange": "", "routing_key": "q"}
    return Delivery(headers=headers, **{**known, **fields})


def on_the_wire(message: Outgoing) -> dict[str, Any]:
    """Headers and AMQP properties of a message, from the bytes that RabbitMQ would be sent, read by another library."""
    parts: list[bytes] = []
    PublishFrames(1, 131_072).append_to(parts, message)
    raw = b"".join(parts)
    used, _, _ = frame.unmarshal(raw)
    _, _, content = frame.unmarshal(raw[used:])
    assert isinstance(content, header.ContentHeader)
    names = ("message_id", "content_type", "delivery_mode", "correlation_id", "timestamp", "reply_to", "app_id")
    properties: dict[str, Any] = {
        name: getattr(content.properties, name) for name in (*names, "expiration", "priority")
    }
    properties["type"] = content.properties.message_type
    return {"headers": dict(content.properties.headers or {}), "properties": properties}


def declared(objects: tuple[Declaration, ...]) -> dict[str, list[dict[str, Any]]]:
    """Declarations as the fixtures write them: `type` beside the arguments, and as one only when it is not classic."""
    return {
        "exchanges": [{"name": o.name, "type": o.type, "durable": o.durable} for o in objects if o.kind == "exchange"],
        "queues": [_queue(o) for o in objects if o.kind == "queue"],
        "bindings": [
            {"queue": o.name, "exchange": o.exchange, "routing_key": o.routing_key}
            for o in objects
            if o.kind == "binding"
        ],
    }


def _queue(declared: Declaration) -> dict[str, Any]:
    arguments = dict(declared.arguments)
    return {
        "name": declared.name,
        "type": arguments.pop("x-queue-type", "classic"),
        "durable": declared.durable,
        "exclusive": declared.exclusive,
        "auto_delete": declared.auto_delete,
        "arguments": arguments,
    }
