"""How poor a broker is: what it says it can do, and how it behaves where a real one differs.

An option that a profile lacks is refused as on the transport it stands for, so that the engine's other paths can be
tested without a server. What is only not promised (order, place, fences) keeps the behaviour of `FULL`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from acemq.headers import text
from acemq.topology import Queue, dead_letters_of
from acemq.transport import FOREVER, Capabilities, LeaseTerms

STEP = timedelta(milliseconds=1)
"""Of leases."""

MAX_MESSAGE = 64 * 1024 * 1024


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One of your own: `replace(Profile.FULL, capabilities=replace(Profile.FULL.capabilities, publish_delay=…))`."""

    FULL: ClassVar[Profile]
    RABBITMQ: ClassVar[Profile]
    BARE: ClassVar[Profile]

    name: str
    capabilities: Capabilities
    by_type: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """What a queue of this type has otherwise."""
    of_exchanges: Mapping[str, Any] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    """What exchanges have otherwise."""
    native: str = "memory"
    """Whose native arguments it reads."""
    fences: bool = True
    """Deliveries carry a number that grows with every take, and may be had on a lease."""
    nacks: bool = False
    """A queue that is full refuses alone: other queues of the fan-out have the message, and the publish has failed."""

    @property
    def title(self) -> str:
        """For the texts of refusals."""
        return "memory" if self is Profile.FULL else f"memory (profile {self.name})"

    def hold(self, capabilities: Capabilities, queue: Queue) -> float | None:
        """Seconds for which a delivery from this queue may be held; `None`: while its link lives."""
        terms = capabilities.lease
        length = capabilities.hold_limit if terms is None else queue.lease or terms.default
        return None if length is None else length.total_seconds()

    def with_terms(self, lease: timedelta | None, max_message: int) -> Capabilities:
        """The capabilities of a broker with this lease (`None`: what the profile has) and this limit."""
        terms = self.capabilities.lease
        if lease is not None:
            terms = LeaseTerms(default=lease, shortest=STEP, longest=FOREVER, step=STEP, renewable=True)
        return replace(self.capabilities, lease=terms, max_message=max_message)

    def of_queue(self, capabilities: Capabilities, queue: Queue) -> Capabilities:
        levels = queue.priorities if isinstance(queue.priorities, int) else 0
        return replace(capabilities, **{**self.by_type.get(queue.type, {}), "priorities": levels})

    def dead_letters(self, queue: Queue) -> tuple[str, str | None] | None:
        """Exchange and routing key (`None`: as it was published) for what expires in this queue."""
        if not self.capabilities.dead_letter_routes:
            return ("", dead_letters_of(queue.name)) if queue.dead_letter else None
        arguments = queue.arguments()
        exchange, key = (text(arguments.get(f"x-dead-letter-{name}")) for name in ("exchange", "routing-key"))
        return None if exchange is None else (exchange, key)


_MUST_HAVE = Capabilities(transport="memory", durable=False)

Profile.FULL = Profile(
    name="FULL",
    capabilities=replace(
        _MUST_HAVE,
        ordering="fifo",
        ordered_queues=True,
        requeue_place="head",
        unroutable="told",
        publish_delay=FOREVER,
        requeue_delay=FOREVER,
        requeue_rewrites=True,
        expiry=True,
        priorities=256,
        fenced=True,
        counts_deliveries=True,
        exclusive=True,
        max_length=True,
        depth="exact",
        notes=("everything is lost with the process",),
    ),
)

Profile.RABBITMQ = Profile(
    name="RABBITMQ",
    capabilities=replace(
        _MUST_HAVE,
        ordering="fifo",
        unroutable="told",
        dead_letter_routes=True,
        expiry=True,
        priorities=256,
        hold_limit=timedelta(minutes=30),
        fenced=True,
        exclusive=True,
        max_length=True,
        depth="ready",
    ),
    by_type=MappingProxyType(
        {
            "quorum": MappingProxyType({"requeue_place": "tail", "counts_deliveries": True}),
            "classic": MappingProxyType({"requeue_place": "head"}),
        }
    ),
    native="rabbitmq",
    fences=False,
    nacks=True,
)

Profile.BARE = Profile(
    name="BARE",
    capabilities=replace(_MUST_HAVE, topic_patterns="none"),
    fences=False,
)
