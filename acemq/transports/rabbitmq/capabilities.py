"""What RabbitMQ can do, as a whole and per queue."""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache

from msgspec.structs import replace

from acemq.topology import Declaration
from acemq.transport import Capabilities

from . import frames

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
    exclusive=True,
    consumer_priority=True,
    max_length=True,
    max_message=frames.MAX_MESSAGE,
    depth="ready",
    notes=(
        "Durable are persistent messages in durable queues.",
        "Priorities are those of classic queues declared with priorities=.",
        "Deliveries are counted by quorum queues, from which RabbitMQ 4 drops or dead-letters a message after 20.",
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


def of(declared: Declaration, whole: Capabilities) -> Capabilities:
    """Of one queue or exchange that this transport has declared."""
    if declared.kind != "queue":
        return whole if declared.durable else _transient(whole)
    if declared.type == "quorum":
        return _quorum(whole)
    return _classic(whole, levels(declared), declared.durable)


# Asked for with every publish that has a priority or an expiry, hence the caches.


@lru_cache(8)
def _transient(whole: Capabilities) -> Capabilities:
    return replace(whole, durable=False)


@lru_cache(8)
def _quorum(whole: Capabilities) -> Capabilities:
    return replace(whole, counts_deliveries=True, priorities=0, notes=(*whole.notes, _REQUEUED))


@lru_cache(64)
def _classic(whole: Capabilities, priorities: int, durable: bool) -> Capabilities:
    return replace(whole, requeue_place="head", priorities=priorities, durable=durable)
