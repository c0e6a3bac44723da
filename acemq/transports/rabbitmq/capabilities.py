"""What RabbitMQ can do, as a whole and per queue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache

from msgspec.structs import replace

from acemq.headers import HeaderValue
from acemq.topology import Declaration
from acemq.transport import Capabilities

from . import frames

DELIVERY_LIMIT = 20
"""Of a quorum queue on RabbitMQ 4 that names none. A policy may set another, and AMQP does not show policies."""

OWN = Capabilities(
    transport="rabbitmq",
    durable=True,
    ordering="fifo",
    ordered_queues=True,
    requeue_place="any",
    unroutable="told",
    dead_letter_routes=True,
    expiry=True,
    priorities=256,
    hold_limit=timedelta(minutes=30),
    fenced=True,
    delivery_limit=DELIVERY_LIMIT,
    exclusive=True,
    consumer_priority=True,
    consumer_arguments=True,
    max_length=True,
    max_message=frames.MAX_MESSAGE,
    depth="ready",
    notes=(
        "Durable are persistent messages in durable queues.",
        "Priorities are those of classic queues declared with priorities=.",
        "Deliveries are counted by quorum queues, from which RabbitMQ 4 drops or dead-letters a message after 20, "
        "or after what a policy says; AMQP does not show it.",
        "hold_limit is the broker's consumer_timeout, by default.",
        "Exclusive consumers take turns by a queue acemq.owner.{queue}; it keeps out those that know of it.",
        "Streams are not built yet.",
    ),
)
"""Of a transport with a connection of its own for publishing."""

SHARED = replace(
    OWN,
    notes=(
        *OWN.notes,
        "One connection for everything: while the broker is short of memory or disk, acknowledgements wait, too.",
    ),
)

_REQUEUED = "What is requeued goes to the tail of a quorum queue, or near its head where a delivery limit is set."


def levels(declared: Declaration) -> int:
    """Of priority that a queue has; 0 where it has none."""
    highest = declared.arguments.get("x-max-priority")
    return highest + 1 if isinstance(highest, int) else 0


def delivery_limit(arguments: Mapping[str, HeaderValue]) -> int | None:
    """Of a quorum queue with these arguments."""
    limit = arguments.get("x-delivery-limit", DELIVERY_LIMIT)
    return limit if isinstance(limit, int) and limit >= 0 else None


def of(declared: Declaration, whole: Capabilities) -> Capabilities:
    """Of one queue or exchange that this transport has declared."""
    if declared.kind != "queue":
        return whole if declared.durable else _transient(whole)
    if declared.type == "quorum":
        return _quorum(whole, delivery_limit(declared.arguments))
    return _classic(whole, levels(declared), declared.durable)


# Asked for with every publish that has a priority or an expiry, hence the caches.


@lru_cache(8)
def _transient(whole: Capabilities) -> Capabilities:
    return replace(whole, durable=False)


@lru_cache(64)
def _quorum(whole: Capabilities, limit: int | None) -> Capabilities:
    notes = (*whole.notes, _REQUEUED)
    return replace(whole, counts_deliveries=True, delivery_limit=limit, priorities=0, notes=notes)


@lru_cache(64)
def _classic(whole: Capabilities, priorities: int, durable: bool) -> Capabilities:
    return replace(whole, requeue_place="head", delivery_limit=None, priorities=priorities, durable=durable)
