"""What a handler is given, and what it learns of how that ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from acemq import headers as h
from acemq.ack import Ack
from acemq.clock import SYSTEM, Clock
from acemq.envelope import Envelope, from_millis, identity_of
from acemq.headers import Headers
from acemq.transport import Delivery

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SetAside(msgspec.Struct, frozen=True):
    """Why a message lies in a dead-letter or parked queue. What another library wrote has only `text`."""

    text: str
    """Empty where only the other facts are known."""
    queue: str | None = None
    at: datetime | None = None
    how: str | None = None
    """exhausted, too_old, fatal, rejected, refused, parked, undecodable, delivery_limit or expired."""
    error_type: str | None = None
    by: str | None = None


class Handled(msgspec.Struct, frozen=True):
    """What really happened to a delivery: the engine's decision, not the handler's wish."""

    outcome: str
    """acked, retried, rejected, dead_lettered, parked or in_progress (CONTRACT.md section 14)."""
    target: str | None
    """The queue of the copy."""
    reason: str | None
    attempt: int
    delay: timedelta | None
    landed: bool
    """False: the copy failed and the original was given back."""


class Message(Generic[T_co]):
    """One delivery, decoded. What is not asked for is not read: envelope and headers are taken apart at first use."""

    __slots__ = ("__weakref__", "_clock", "_envelope", "_headers", "_payload", "_state", "delivery", "listeners")

    def __init__(self, payload: T_co, delivery: Delivery, clock: Clock = SYSTEM) -> None:
        self._payload, self._clock = payload, clock
        self.delivery = delivery
        """As the transport handed it over; for the engine and the patterns."""
        self._envelope: Envelope | None = None
        self._headers: Headers | None = None
        self._state: dict[str, Any] | None = None
        self.listeners: list[Callable[[Handled], None]] | None = None

    @property
    def payload(self) -> T_co:
        return self._payload

    def fill(self, payload: Any) -> None:
        """For the engine: the payload that had to be waited for."""
        self._payload = payload

    @property
    def envelope(self) -> Envelope:
        if self._envelope is None:
            self._envelope = envelope_of(self.delivery, self._clock)
        return self._envelope

    @property
    def headers(self) -> Headers:
        """The application's: no name begins with `x-acemq-`."""
        if self._headers is None:
            self._headers = h.application(self.delivery.headers)
        return self._headers

    @property
    def wire_headers(self) -> Headers:
        """All of them, as they arrived."""
        return self.delivery.headers

    @property
    def queue(self) -> str:
        return self.delivery.queue

    @property
    def exchange(self) -> str:
        return self.delivery.exchange

    @property
    def routing_key(self) -> str:
        return self.delivery.routing_key

    @property
    def content_type(self) -> str | None:
        return self.delivery.content_type

    @property
    def body(self) -> bytes:
        """As it travelled, before any codec."""
        return self.delivery.body

    @property
    def redelivered(self) -> bool:
        """The broker's flag. It says nothing about attempts."""
        return self.delivery.redelivered

    @property
    def deliveries(self) -> int | None:
        """The broker's count, this one included; `None` where it keeps none."""
        return self.delivery.deliveries

    @property
    def fence(self) -> int | None:
        """Grows with every take, so that the handler's own store can refuse a late write."""
        return self.delivery.fence

    @property
    def reply_to(self) -> str | None:
        return h.text(self.delivery.headers.get(h.REPLY_TO)) or self.delivery.reply_to or None

    @property
    def failure(self) -> SetAside | None:
        """On a dead letter or a parked message: why it is there."""
        return failure_of(self.delivery.headers)

    @property
    def state(self) -> dict[str, Any]:
        """Empty at first; for what surrounds a handler to hand something on to it."""
        if self._state is None:
            self._state = {}
        return self._state

    @property
    def id(self) -> str:
        # All that most handlers ask for, and far less to read than an envelope.
        delivery = self.delivery
        known = identity_of(delivery.headers, delivery.message_id) if self._envelope is None else None
        return known or self.envelope.id

    @property
    def type(self) -> str:
        return self.envelope.type

    @property
    def attempt(self) -> int:
        return self.envelope.attempt

    @property
    def correlation_id(self) -> str:
        return self.envelope.correlation_id

    @property
    def age(self) -> timedelta | None:
        return self.envelope.age(self._clock.now())

    def when_settled(self, listener: Callable[[Handled], None]) -> None:
        """Called once, on the loop, after the settlement was handed to the transport.

        Not called for what was stopped by us. What it raises is reported and changes nothing.
        """
        if self.listeners is None:
            self.listeners = []
        self.listeners.append(listener)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.envelope.id} of {self.queue}, attempt {self.attempt}>"


Handler: TypeAlias = Callable[[Message[T]], Awaitable[Ack | None] | Ack | None]

CURRENT: ContextVar[Message[Any] | None] = ContextVar("acemq_message", default=None)

IN_BATCH: ContextVar[object | None] = ContextVar("acemq_batch", default=None)
"""The batch in hand. It has no current message: what is published from it takes no correlation it was not given."""


def current_message() -> Message[Any] | None:
    """The delivery that the running handler was given; `None` outside one."""
    return CURRENT.get()


def envelope_of(delivery: Delivery, clock: Clock) -> Envelope:
    now = None if clock is SYSTEM else clock.now()
    return Envelope.from_headers(
        delivery.headers, routing_key=delivery.routing_key, message_id=delivery.message_id, now=now
    )


def failure_of(headers: Headers) -> SetAside | None:
    text = h.text(headers.get(h.ERROR))
    how = h.text(headers.get(h.FAILED_AS))
    if text is None and how is None:
        return None
    at = h.integer(headers.get(h.FAILED_AT))
    return SetAside(
        text=text or "",
        queue=h.text(headers.get(h.FAILED_QUEUE)),
        at=from_millis(at) if at is not None and 0 < at < 253_402_300_800_000 else None,
        how=how,
        error_type=h.text(headers.get(h.FAILED_WITH)),
        by=h.text(headers.get(h.FAILED_BY)),
    )
