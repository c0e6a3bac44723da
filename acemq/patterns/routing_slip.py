"""A route that travels with the message, in either of two forms (CONTRACT.md sections 3 and 4).

`RoutingSlip` names steps and stands in reserved headers; `Itinerary` holds addresses and stands in one JSON header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from acemq import headers as h
from acemq.clock import whole_seconds
from acemq.connection import Connection
from acemq.envelope import Envelope
from acemq.errors import ConfigurationError, RouteError
from acemq.headers import HeaderValue
from acemq.ids import new_id
from acemq.message import Message
from acemq.publishing.options import PublishOptions, carrying
from acemq.publishing.outbound import Receipt


class RoutingSlip(msgspec.Struct, frozen=True):
    """The declared form: the names of all steps, and which of them the message is for now."""

    steps: tuple[str, ...]
    position: int = 0
    run_id: str = ""

    @property
    def current(self) -> str | None:
        """The step the message is for now; `None` when the slip is finished."""
        return self.steps[self.position] if not self.is_finished else None

    @property
    def next(self) -> str | None:
        return self.steps[self.position + 1] if self.position + 1 < len(self.steps) else None

    @property
    def is_finished(self) -> bool:
        return self.position >= len(self.steps)

    @staticmethod
    def start_of(*steps: str) -> RoutingSlip:
        """A new run over these steps. Refused: none at all, a blank name, a name with a comma."""
        if not steps:
            raise ConfigurationError("a routing slip needs at least one step")
        for step in steps:
            if not isinstance(step, str) or not step.strip() or "," in step:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"step {step!r} must be a name that is not blank and has no comma")
        return RoutingSlip(steps, 0, new_id())

    @staticmethod
    def of(message: Message[Any]) -> RoutingSlip | None:
        return RoutingSlip.from_headers(message.wire_headers)

    @staticmethod
    def from_headers(wire_headers: Mapping[str, HeaderValue]) -> RoutingSlip | None:
        """Read leniently: a position that cannot be read is the start, one past the end is finished."""
        names = tuple(name for part in (h.text(wire_headers.get(h.ROUTE)) or "").split(",") if (name := part.strip()))
        if not names:
            return None
        position = max(h.integer(wire_headers.get(h.ROUTE_POSITION)) or 0, 0)
        return RoutingSlip(names, position, h.text(wire_headers.get(h.ROUTE_ID)) or "")

    def advance(self) -> RoutingSlip:
        return replace(self, position=self.position + 1)

    def advance_to(self, position: int) -> RoutingSlip:
        """Ahead or back; steps that it reaches again must tolerate that."""
        if position < 0:
            raise ConfigurationError(f"position={position} must be 0 or more")
        return replace(self, position=position)

    def on(self, envelope: Envelope) -> Envelope:
        """The envelope with this slip, and without a stale one of the other form."""
        return envelope.replace(
            route=",".join(self.steps),
            route_position=self.position,
            route_id=self.run_id,
            headers=_without_itinerary(envelope),
        )


class Stop(msgspec.Struct, frozen=True):
    """One address of an itinerary."""

    exchange: str = ""
    """Empty: the default exchange, whose routing key is the queue."""
    routing_key: str = ""
    name: str = ""
    completed_at: str = ""
    """As it was stamped: UTC, whole seconds, `2026-02-03T04:05:06Z`."""

    @property
    def label(self) -> str:
        """What a message on its way to this stop is called: the default of its type."""
        return self.name or (f"{self.exchange}/{self.routing_key}" if self.exchange else self.routing_key)


class Itinerary(msgspec.Struct, frozen=True):
    """The itinerary form: addresses to come, and stops that are done."""

    steps: tuple[Stop, ...] = ()
    done: tuple[Stop, ...] = ()

    @property
    def current(self) -> Stop | None:
        return self.steps[0] if self.steps else None

    @property
    def is_finished(self) -> bool:
        return not self.steps

    def then(self, exchange: str, routing_key: str, name: str = "") -> Itinerary:
        return replace(self, steps=(*self.steps, Stop(exchange, routing_key, name)))

    @staticmethod
    def of(message: Message[Any]) -> Itinerary | None:
        return Itinerary.from_headers(message.wire_headers)

    @staticmethod
    def from_headers(wire_headers: Mapping[str, HeaderValue]) -> Itinerary | None:
        """`None` when there is none; `RouteError`, which is fatal, when it cannot be read."""
        value = wire_headers.get(h.ROUTING_SLIP)
        if value is None:
            return None
        if not isinstance(value, str | bytes):
            raise RouteError(f"{h.ROUTING_SLIP} is a {type(value).__name__}, not text")
        return Itinerary.parse(value)

    @staticmethod
    def parse(text: str | bytes) -> Itinerary:
        try:
            root: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RouteError(f"{h.ROUTING_SLIP} is not JSON: {error}") from None
        if not isinstance(root, dict):
            raise RouteError(f"{h.ROUTING_SLIP} is not a JSON object")
        return Itinerary(_stops(root, "steps"), _stops(root, "done"))  # pyright: ignore[reportUnknownArgumentType]

    def advance(self, *, now: datetime | None = None) -> Itinerary:
        """The first stop is done, stamped `now`. A finished itinerary stays as it is."""
        if not self.steps:
            return self
        stamped = replace(self.steps[0], completed_at=whole_seconds(now or datetime.now(UTC)))
        return Itinerary(self.steps[1:], (*self.done, stamped))

    def __str__(self) -> str:
        """As it stands in its header: no white space, `done` only when something is."""
        document: dict[str, object] = {"steps": [_document(stop) for stop in self.steps]}
        if self.done:
            document["done"] = [_document(stop) for stop in self.done]
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    def on(self, envelope: Envelope) -> Envelope:
        """The envelope with this slip, and without a stale one of the other form."""
        headers = {**envelope.headers, h.ROUTING_SLIP: str(self)}
        return envelope.replace(route=None, route_position=0, route_id=None, headers=headers)


def _stops(root: dict[str, Any], key: str) -> tuple[Stop, ...]:
    found = root.get(key)
    if found is None:
        return ()
    if not isinstance(found, list):
        raise RouteError(f"{h.ROUTING_SLIP}: {key!r} is not an array")
    return tuple(_stop(item) for item in found)  # pyright: ignore[reportUnknownVariableType]


def _stop(item: Any) -> Stop:
    if not isinstance(item, dict):
        raise RouteError(f"{h.ROUTING_SLIP}: a step is not an object")
    fields = cast("dict[str, Any]", item)
    read = {
        key: "" if value is None else value if isinstance(value, str) else json.dumps(value)
        for key, value in fields.items()
    }
    return Stop(read.get("exchange", ""), read.get("routingKey", ""), read.get("name", ""), read.get("completedAt", ""))


def _document(stop: Stop) -> dict[str, str]:
    document = {"exchange": stop.exchange, "routingKey": stop.routing_key}
    if stop.name:
        document["name"] = stop.name
    if stop.completed_at:
        document["completedAt"] = stop.completed_at
    return document


def _without_itinerary(envelope: Envelope) -> dict[str, HeaderValue]:
    return {name: value for name, value in envelope.headers.items() if name != h.ROUTING_SLIP}


class Route:
    """Reads whichever form is there. The itinerary wins, even a finished one; a malformed one is `RouteError`."""

    @staticmethod
    def of(message: Message[Any]) -> RoutingSlip | Itinerary | None:
        return Route.from_headers(message.wire_headers)

    @staticmethod
    def from_headers(wire_headers: Mapping[str, HeaderValue]) -> RoutingSlip | Itinerary | None:
        itinerary = Itinerary.from_headers(wire_headers)
        return RoutingSlip.from_headers(wire_headers) if itinerary is None else itinerary


def address_of(slip: RoutingSlip | Itinerary) -> Stop:
    """Where the message goes now. Outside a pipeline a step's name is its queue."""
    current = slip.current
    if current is None:
        raise RouteError("the routing slip is finished: there is no step left to send the message to")
    return Stop("", current, current) if isinstance(current, str) else current


async def send_along(
    connection: Connection, slip: RoutingSlip | Itinerary, payload: object, options: PublishOptions
) -> Receipt:
    """Start the route: to the slip's current stop, whose label is the type unless `options` name one."""
    stop = address_of(slip)
    envelope = connection.outbound.encoder.envelope(stop.label, options)
    return await connection.outbound.publish(
        stop.exchange, stop.routing_key, payload, carrying(slip.on(envelope), options)
    )


async def forward(
    connection: Connection, slip: RoutingSlip | Itinerary, payload: object, envelope: Envelope
) -> Receipt:
    """On to the slip's current stop, as given: it does not advance. Identity, correlation and headers travel on."""
    stop = address_of(slip)
    return await connection.outbound.publish(
        stop.exchange, stop.routing_key, payload, carrying(slip.on(envelope)), own=True
    )
