"""How a queue is consumed: the options, and what is refused about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict

from acemq.clock import check_duration
from acemq.codec import AnyCodec
from acemq.consuming.handling import is_async
from acemq.errors import CapabilityError, ConfigurationError
from acemq.headers import HeaderValue
from acemq.interceptors import ConsumeInterceptor
from acemq.keywords import check_keywords
from acemq.message import Message
from acemq.retry import RetryPolicy
from acemq.stores import Idempotency, IdempotencyStore
from acemq.transport import Capabilities

log = logging.getLogger("acemq")

MAX_DELIVERIES = 15
"""Below the limit of every broker that is known to have one (`Capabilities.delivery_limit`)."""


class ConsumeOptions(TypedDict, total=False):
    """How a queue is consumed; all of it optional."""

    concurrency: int
    """10; handlers at once."""
    prefetch: int
    """The connection's, raised to `concurrency`."""
    retry: RetryPolicy
    """The connection's."""
    retry_for: Callable[[Message[Any], BaseException], RetryPolicy | None]
    """None; asked after each failure for the policy that decides this time, `None` leaves it to the consumer's.

    Attempt and age are the message's, so the count goes on. An `Ack.retry()` without an exception is no question. Its
    rungs cannot be known beforehand: name long waits with `with_rungs`, or they are spent in the consumer.
    """
    handler_timeout: timedelta
    """None; then the handler is cancelled and the failure is `HandlerTimeoutError`."""
    max_deliveries: int | None
    """15; `None`: no limit. A message that kills its process more often than that goes to the dead letters.

    Counts what the broker counts: quorum queues do, classic ones do not.
    """
    expired: Literal["dead_letter", "drop"]
    """dead_letter; what becomes of a message that expired before it was handled."""
    set_aside: str
    """The queue whose `.dlq` and `.parked` take what is given up; the queue itself."""
    idempotency: IdempotencyStore | Idempotency
    """None; a message that was handled before is accepted, and the handler does not run."""
    interceptors: Sequence[ConsumeInterceptor]
    """After the connection's."""
    codec: AnyCodec
    """The connection's."""
    name: str
    """The consumer's name on the broker, stable over recovery; `{origin}/{queue}/{number}`."""
    exclusive: bool
    """False; one consumer in the world, the others stand by and take over. Needs the capability."""
    priority: int
    """Consumer priority; needs the capability."""
    declare: bool
    """True: `.dlq`, `.parked` and rungs are made before the consumer starts (CONTRACT.md section 2)."""
    arguments: Mapping[str, HeaderValue]
    """Passed to the broker's consume; needs the capability."""


_OPTIONS = frozenset(ConsumeOptions.__annotations__)


def check_policy(policy: RetryPolicy, can: Capabilities) -> None:
    """Refuse waits that would have to be spent in the consumer for longer than the broker lets a delivery be held."""
    if can.requeue_rewrites or can.publish_delay is not None or can.hold_limit is None:
        return
    rungs = policy.rungs() if can.dead_letter_routes else ()
    too_long = [wait for wait in policy.schedule() if wait not in rungs and wait > can.hold_limit * 0.9]
    if too_long:
        raise CapabilityError(
            can.transport,
            f"holding a delivery for longer than {can.hold_limit}",
            f"retry= with a wait of {too_long[0]} in the consumer",
            "Let whole seconds wait in the broker: wait_in_broker_from()",
        )


def check_prefetch(prefetch: int) -> int:
    if not 1 <= prefetch <= 65_535:
        raise ConfigurationError(f"prefetch={prefetch} must lie between 1 and 65,535; there is no unlimited prefetch")
    return prefetch


def warn_of_limit(queue: str, options: ConsumeOptions, can: Capabilities) -> None:
    """Say that the broker may give a message up before the consumer does, and without a copy."""
    most, limit = options.get("max_deliveries", MAX_DELIVERIES), can.delivery_limit
    if limit is not None and (most is None or most >= limit):
        log.warning(
            "a consumer of %r has max_deliveries=%s: the broker may give a message up after %d deliveries, before "
            "the consumer does, and keep no copy; set max_deliveries below that, or give the queue a higher "
            "delivery-limit, with a policy of the broker",
            queue, most, limit,
        )  # fmt: skip


def check_options(options: ConsumeOptions, can: Capabilities, prefetch: int) -> int:
    """Refuse bad options of `consume`; gives the prefetch that holds."""
    check_keywords("consume", options, _OPTIONS)
    concurrency = options.get("concurrency", 10)
    if concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency} must be 1 or more")
    if "prefetch" in options:
        prefetch = check_prefetch(options["prefetch"])
        if prefetch < concurrency:
            raise ConfigurationError(
                f"prefetch={prefetch} keeps {concurrency} handlers from being busy; raise it to {concurrency}"
            )
    limit = check_duration("handler_timeout", options["handler_timeout"]) if "handler_timeout" in options else None
    if limit is not None and can.hold_limit is not None and limit > can.hold_limit * 0.9:
        raise CapabilityError(
            can.transport, f"holding a delivery for longer than {can.hold_limit}", f"handler_timeout={limit}"
        )
    lease = can.lease
    if limit is not None and lease is not None and not lease.renewable and limit >= lease.default:
        raise CapabilityError(can.transport, f"a lease longer than {lease.default}", f"handler_timeout={limit}")
    most = options.get("max_deliveries", MAX_DELIVERIES)
    if most is not None and most < 1:
        raise ConfigurationError(f"max_deliveries={most} must be 1 or more, or None for no limit")
    if options.get("expired", "dead_letter") not in ("dead_letter", "drop"):
        raise ConfigurationError(f"expired={options.get('expired')!r} must be 'dead_letter' or 'drop'")
    ask = options.get("retry_for")
    if ask is not None and (not callable(ask) or is_async(ask)):
        raise ConfigurationError(f"retry_for={ask!r} must be a plain function of message and error; it decides at once")
    if options.get("exclusive") and not can.exclusive:
        raise CapabilityError(can.transport, "exclusive consumers", "exclusive=True")
    if "priority" in options and not can.consumer_priority:
        raise CapabilityError(can.transport, "consumer priorities", f"priority={options['priority']}")
    if "arguments" in options and not can.consumer_arguments:
        raise CapabilityError(can.transport, "consumer arguments", "arguments=")
    return max(prefetch, concurrency)
