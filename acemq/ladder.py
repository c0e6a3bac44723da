"""The ladder: queues of one fixed delay each, over which a message gets to its time (CONTRACT.md section 6).

It stands in for delayed publishes where a broker has none and a queue may send on what expires in it. Whoever consumes
the control queue, in whatever language, moves the messages on; `acemq.patterns.scheduler` does.
"""

from __future__ import annotations

from datetime import timedelta

import msgspec

from acemq import headers as h
from acemq.envelope import write
from acemq.headers import Headers, HeaderValue
from acemq.ids import new_id
from acemq.topology import SCHEDULE, SCHEDULE_EXCHANGE
from acemq.transport import Outgoing

TYPE = "ScheduledMessage"
"""The envelope type of every copy on the way, and of the delivery."""

_MILLISECOND = timedelta(milliseconds=1)
ON_ITS_WAY = "application/octet-stream"
"""The content type of what is not there yet."""
_IF_NOT_SAID = "application/json"


class Rung(msgspec.Struct, frozen=True):
    queue: str
    millis: int


RUNGS = tuple(Rung(queue.name, queue.ttl // _MILLISECOND) for queue in SCHEDULE.queues if queue.ttl is not None)
"""Longest first."""


class Waiting(msgspec.Struct, frozen=True):
    """What a message on the ladder says of itself."""

    exchange: str
    routing_key: str
    due_ms: int
    content_type: str = _IF_NOT_SAID

    def to_headers(self) -> dict[str, HeaderValue]:
        return {
            h.SCHEDULE_EXCHANGE: self.exchange,
            h.SCHEDULE_ROUTING_KEY: self.routing_key,
            h.SCHEDULE_DUE_AT: self.due_ms,
            h.SCHEDULE_CONTENT_TYPE: self.content_type,
        }

    @staticmethod
    def from_headers(headers: Headers) -> Waiting | None:
        """`None`: the message is of somebody who does not keep the contract, and has nowhere to go."""
        exchange, routing_key = (_text(headers.get(name)) for name in (h.SCHEDULE_EXCHANGE, h.SCHEDULE_ROUTING_KEY))
        due_ms = h.integer(headers.get(h.SCHEDULE_DUE_AT))
        if exchange is None or routing_key is None or due_ms is None:
            return None
        return Waiting(exchange, routing_key, due_ms, h.text(headers.get(h.SCHEDULE_CONTENT_TYPE)) or _IF_NOT_SAID)


def _text(value: object) -> str | None:
    """As `headers.text`, but what is empty is there: it is the default exchange."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def rung_for(remaining_ms: int) -> Rung | None:
    """The longest that is not too long; `None`: it is due, within a second."""
    for rung in RUNGS:
        if rung.millis <= remaining_ms:
            return rung
    return None


def hops(remaining_ms: int) -> int:
    """How many rungs a message passes, if each takes exactly its time."""
    count = 0
    for rung in RUNGS:
        if remaining_ms >= rung.millis:
            passed, remaining_ms = divmod(remaining_ms, rung.millis)
            count += passed
    return count


def onward(waiting: Waiting, body: bytes, *, now_ms: int, origin: str) -> Outgoing:
    """The next copy: onto a rung, or to where the message is due. Each has an envelope of its own."""
    identity = new_id()
    headers = write(id=identity, type=TYPE, correlation_id=identity, first_seen_ms=now_ms, origin=origin)
    rung = rung_for(waiting.due_ms - now_ms)
    if rung is not None:
        headers |= waiting.to_headers()
    return Outgoing(
        exchange=waiting.exchange if rung is None else SCHEDULE_EXCHANGE,
        routing_key=waiting.routing_key if rung is None else rung.queue,
        body=body,
        headers=headers,
        message_id=identity,
        content_type=waiting.content_type if rung is None else ON_ITS_WAY,
    )
