"""What a transport can do, in words: the same in the documentation and on the command line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from acemq.transport import FOREVER, Capabilities

ABILITIES: dict[str, Callable[[Capabilities], object]] = {
    "messages survive a restart of the broker": lambda can: can.durable,
    "delivery": lambda can: can.delivery.replace("_", " "),
    "order of one publisher into one queue": lambda can: can.ordering,
    "an unroutable message is": lambda can: can.unroutable,
    "delayed publish (`delay=`)": lambda can: (
        "over the ladder" if can.publish_delay is None and can.dead_letter_routes else can.publish_delay
    ),
    "delayed retry without a copy": lambda can: can.requeue_delay if can.requeue_rewrites else None,
    "rung queues for long retry waits": lambda can: can.dead_letter_routes,
    "expiry of one message (`expires_in=`)": lambda can: can.expiry,
    "priority levels a queue may have": lambda can: can.priorities or None,
    "exclusive consumers": lambda can: can.exclusive,
    "consumer priority": lambda can: can.consumer_priority,
    "arguments of a consumer (`arguments=`)": lambda can: can.consumer_arguments,
    "deliveries after which the broker gives a message up": lambda can: can.delivery_limit or "no limit",
    "`max_length` of a queue": lambda can: can.max_length,
    "sending inside your transaction (`transaction=`)": lambda can: can.transactions,
    "longest time a delivery may be held": lambda can: can.hold_limit or FOREVER,
    "largest message": lambda can: can.max_message,
    "`depth()` is": lambda can: can.depth,
}


def shown(value: object) -> str:
    match value:
        case None | False:
            return "no"
        case True:
            return "yes"
        case timedelta():
            return "no limit" if value == FOREVER else _time(value)
        case int() if value >= 1 << 20:
            return f"{value >> 20} MiB"
        case _:
            return str(value)


def _time(length: timedelta) -> str:
    seconds = round(length.total_seconds())
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
