"""How a message waits longer than the broker can delay it.

A queue that puts deliveries back for a while has it put back until it is due, before any handler sees it. Elsewhere it
waits in the scheduler's control queue, from hop to hop, with its own envelope. Where queues may send on what expires in
them, the ladder stands in, whose copies have envelopes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum

from acemq import headers as h
from acemq.errors import CapabilityError
from acemq.headers import Headers, HeaderValue
from acemq.ladder import ON_ITS_WAY, Waiting
from acemq.topology import SCHEDULE_EXCHANGE, SCHEDULE_QUEUE
from acemq.transport import FOREVER, Capabilities, Delivery, Outgoing

_MILLISECOND = timedelta(milliseconds=1)


class Way(StrEnum):
    NATIVE = "native"
    """The broker delays it, if it is delayed at all."""
    PUT_BACK = "put back"
    """It comes early, and is put back until it is due."""
    LADDER = "ladder"
    HOPS = "hops"
    """Through the control queue, as often as that takes."""


NOT_CARRIED: Mapping[Way, frozenset[str]] = {
    Way.NATIVE: frozenset(),
    Way.PUT_BACK: frozenset(),
    Way.LADDER: frozenset(
        {
            *("headers", "message_id", "type", "version", "correlation_id", "causation_id", "claim", "envelope"),
            *("priority", "expires_in", "reply_to", "ordering_key", "mandatory", "persistent"),
        }
    ),
    Way.HOPS: frozenset({"priority", "ordering_key", "mandatory", "persistent"}),
}
"""Options of a publish that the delivery would not show."""

_AS_ON_THE_WAY = ("mandatory", "persistent")
"""Lost only when they are false: every copy on the way is both."""


def way(exchange: str, delay: timedelta, can: Capabilities, control: Callable[[], Capabilities]) -> Way | None:
    """`can` is of the target, `control` of the control queue. `None`: nothing waits for so long."""
    if can.publish_delay is not None and delay <= can.publish_delay:
        return Way.NATIVE
    if can.dead_letter_routes:
        return Way.LADDER
    if not exchange and can.publish_delay and can.requeue_delay:
        return Way.PUT_BACK
    return Way.HOPS if control().publish_delay else None


def refuse_lost(way: Way, options: Mapping[str, object], transport: str) -> None:
    """Refuse what would not get to the end of this way."""
    lost = [name for name in NOT_CARRIED[way] & options.keys() if name not in _AS_ON_THE_WAY or not options[name]]
    if lost:
        raise CapabilityError(
            transport,
            "a delayed publish that keeps its envelope and options",
            f"{min(lost)}= together with delay=",
            "Put what the consumer has to know into the payload",
        )


# Put back until it is due


def first_leg(headers: Headers, delay: timedelta, longest: timedelta, now_ms: int) -> tuple[Headers, timedelta]:
    """What to ask of the broker now, and the headers that say how long the whole wait is."""
    if delay <= longest:
        return headers, delay
    return {**headers, h.DUE_AT: now_ms + delay // _MILLISECOND}, longest


def comes_early(can: Capabilities) -> bool:
    """Whether what comes from such a queue may have to be put back."""
    ends = [longest for longest in (can.publish_delay, can.requeue_delay) if longest and longest != FOREVER]
    return bool(can.requeue_delay and ends)


def left_of(headers: Headers, now_ms: int) -> timedelta:
    """How long before it is due; zero and less: it is."""
    due_ms = h.integer(headers.get(h.DUE_AT)) if h.DUE_AT in headers else None
    return timedelta() if due_ms is None else (due_ms - now_ms) * _MILLISECOND


def put_backs(headers: Headers, can: Capabilities) -> int:
    """Of the deliveries so far, at most so many were too early. A broker counts them with the others."""
    due_ms, sent_ms = (h.integer(headers.get(name)) for name in (h.DUE_AT, h.FIRST_SEEN))
    if due_ms is None or sent_ms is None or not can.requeue_delay:
        return 0
    return max(-((sent_ms - due_ms) * _MILLISECOND // can.requeue_delay), 0)


# Hops through the control queue


def first_hop(waiting: Waiting, out: Outgoing, *, now_ms: int, longest: timedelta) -> Outgoing:
    """What is to go out later, on its way to the control queue."""
    headers: dict[str, HeaderValue] = {**out.headers, **waiting.to_headers()}
    return _into_control(waiting, out.body, headers, out.message_id, out.reply_to, now_ms, longest)


def next_hop(waiting: Waiting, delivery: Delivery, *, now_ms: int, longest: timedelta) -> Outgoing:
    """The next copy of what came from the control queue: into it again, or to where the message is due."""
    identity = h.text(delivery.headers.get(h.ID)) or delivery.message_id or ""
    if waiting.due_ms > now_ms:
        headers = {name: value for name, value in delivery.headers.items() if name not in _OF_THE_QUEUE}
        return _into_control(waiting, delivery.body, headers, identity, delivery.reply_to, now_ms, longest)
    return Outgoing(
        exchange=waiting.exchange,
        routing_key=waiting.routing_key,
        body=delivery.body,
        headers={name: value for name, value in delivery.headers.items() if name not in _OF_THE_WAY},
        message_id=identity,
        content_type=waiting.content_type,
        reply_to=delivery.reply_to,
    )


_OF_THE_QUEUE = frozenset({h.DUE_AT, h.DELIVERY_COUNT})
_OF_THE_WAY = _OF_THE_QUEUE | {
    h.SCHEDULE_EXCHANGE,
    h.SCHEDULE_ROUTING_KEY,
    h.SCHEDULE_DUE_AT,
    h.SCHEDULE_CONTENT_TYPE,
}


def _into_control(
    waiting: Waiting,
    body: bytes,
    headers: Headers,
    identity: str,
    reply_to: str | None,
    now_ms: int,
    longest: timedelta,
) -> Outgoing:
    return Outgoing(
        exchange="",
        routing_key=SCHEDULE_QUEUE,
        body=body,
        headers=headers,
        message_id=identity,
        content_type=ON_ITS_WAY,
        reply_to=reply_to,
        delay=min((waiting.due_ms - now_ms) * _MILLISECOND, longest),
    )


def is_on_its_way(out: Outgoing) -> bool:
    """Whether it goes to the scheduler's queues, and not yet to where it is due."""
    if out.exchange != SCHEDULE_EXCHANGE and (out.exchange or out.routing_key != SCHEDULE_QUEUE):
        return False
    return h.SCHEDULE_DUE_AT in out.headers
