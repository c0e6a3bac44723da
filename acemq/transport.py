"""The port to a broker: the one thing that a stranger implements, and the values it exchanges with the engine.

Batches are the normal case; a batch of one is one message. Values are frozen `msgspec.Struct`s, here and on the floors
below: made for every message, they cost a fifth of a frozen dataclass, and their classes load fifty times as fast.
`msgspec.structs.replace` changes a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from acemq.errors import AcemqError
from acemq.headers import Headers
from acemq.plan import Finding as Finding  # of what `apply` answers

if TYPE_CHECKING:
    from acemq.topology import Topology

FOREVER = timedelta.max
Ordering = Literal["none", "fifo"]
Kind = Literal["queue", "exchange"]


# Errors of the port. The engine turns each into one of the public tree (`acemq.errors`).


class TransportError(AcemqError):
    """What a transport hands up. `code` is the broker's own number, where it has one."""

    retryable = True

    def __init__(self, text: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(text)


class NotConnected(TransportError):
    """No link to the server within the time. `hosts`: those tried, `last`: why not the last of them; no secret."""

    def __init__(
        self, text: str, *, code: int | None = None, hosts: Sequence[str] = (), last: str | None = None
    ) -> None:
        self.hosts, self.last = tuple(hosts), last
        super().__init__(text, code=code)


class AccessDenied(TransportError):
    """Credentials refused, or not allowed to do this."""

    retryable = False


class Blocked(TransportError):
    """The broker takes no publishes now; the text is its reason."""


class TimedOut(TransportError):
    """No answer within the time."""


class WrongLoop(TransportError):
    """A verb called from an event loop other than the one that opened the transport."""

    retryable = False


class QueueMissing(TransportError):
    retryable = False


class ExchangeMissing(TransportError):
    retryable = False


class Unroutable(TransportError):
    """Accepted nowhere; the text is the broker's."""

    retryable = False


class Nacked(TransportError):
    """The broker has said no after it had the message; other queues of a fan-out may hold it."""


class QueueFull(TransportError):
    """A queue at its `max_length`."""


class BadHeader(TransportError):
    retryable = False

    def __init__(self, text: str, *, name: str) -> None:
        self.name = name
        super().__init__(text)


class MessageTooLarge(TransportError):
    retryable = False

    def __init__(self, text: str, *, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(text)


class ServerTooOld(TransportError):
    retryable = False

    def __init__(self, text: str, *, found: str, wanted: str) -> None:
        self.found, self.wanted = found, wanted
        super().__init__(text)


class SchemaMissing(TransportError):
    retryable = False


# Publishing


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    exchange: str
    """Empty: the default exchange, whose routing key is the queue."""
    routing_key: str
    body: bytes
    headers: Headers
    """Envelope and application headers, ready for the wire."""
    message_id: str
    content_type: str | None
    """`None` only on a copy of a message that came without one."""
    reply_to: str | None = None
    mandatory: bool = True
    persistent: bool = True
    delay: timedelta | None = None
    """From acceptance by the broker."""
    expires_in: timedelta | None = None
    priority: int | None = None
    ordering_key: str | None = None


class Published(StrEnum):
    ROUTED = "routed"
    """Durable in every matching queue."""
    UNROUTABLE = "unroutable"
    """Accepted nowhere; nothing is stored."""
    REFUSED = "refused"
    """Nothing was written: safe to send again."""
    FAILED = "failed"
    """Unknown: may be there, or there in part."""


class PublishResult(msgspec.Struct, frozen=True):
    outcome: Published
    error: AcemqError | None = None
    """A `TransportError` or `CapabilityError`; `None` only with `ROUTED`."""
    broker_id: str | None = None


ROUTED = PublishResult(Published.ROUTED)


# Receiving


class Delivery(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """One message handed to one consumer. Compared by identity."""

    queue: str
    body: bytes
    headers: Headers
    """All of them, as they arrived."""
    message_id: str | None
    content_type: str | None
    exchange: str
    """Published to; empty when unknown."""
    routing_key: str
    reply_to: str | None = None
    redelivered: bool = False
    deliveries: int | None = None
    """This one included; `None` when the broker does not count."""
    fence: int | None = None
    """Grows with every take in this queue; `None` when unfenced."""
    lease_until: float | None = None
    """`Clock.monotonic()`; `None`: held until settled or the link dies."""
    enqueued_at: datetime | None = None
    priority: int | None = None
    expires_in: timedelta | None = None
    """As published, where the broker tells."""
    ordering_key: str | None = None
    fault: str | None = None
    """The message could not be taken apart; `body` holds the raw bytes, and it can still be settled."""
    receipt: object = None
    """The transport's own; never pickled, never compared."""


class LostBy(StrEnum):
    LEASE = "lease"
    CONNECTION = "connection"
    CHANNEL = "channel"
    QUEUE = "queue"


# Settling


class Verb(StrEnum):
    ACCEPT = "accept"
    REQUEUE = "requeue"
    DROP = "drop"
    """Remove without handling and without dead-lettering."""


class Settlement(msgspec.Struct, frozen=True):
    delivery: Delivery
    verb: Verb
    delay: timedelta = timedelta()
    """With `REQUEUE` only."""
    headers: Headers | None = None
    """With `REQUEUE` only: replace the stored headers; needs `requeue_rewrites`."""


class Settled(StrEnum):
    DONE = "done"
    STALE = "stale"
    """The broker no longer holds it for us; nothing was changed."""
    FAILED = "failed"
    """Could not be told; it will come back by itself."""


class Renewal(msgspec.Struct, frozen=True):
    outcome: Literal["renewed", "lost", "failed"]
    """`failed`: not known, ask again while the lease lives."""
    until: float | None = None
    error: TransportError | None = None


# What a transport can do, and how it is


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    default: timedelta
    shortest: timedelta
    longest: timedelta
    step: timedelta
    """Granularity; values are rounded up to it."""
    renewable: bool


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """Honest per transport, and exact per queue or exchange through `Transport.capabilities_of`."""

    transport: str
    durable: bool
    """Accepted messages survive a restart of the server, as it is configured now."""
    delivery: Literal["at_least_once", "at_most_once"] = "at_least_once"
    ordering: Ordering = "none"
    """Of one publisher into one queue."""
    ordered_queues: bool = False
    requeue_place: Literal["head", "tail", "any"] = "any"
    unroutable: Literal["told", "checked", "unknown"] = "unknown"
    publish_delay: timedelta | None = None
    """Longest; `None`: cannot; `FOREVER`: any."""
    requeue_delay: timedelta | None = None
    requeue_rewrites: bool = False
    dead_letter_routes: bool = False
    """A queue may send what expires in it to an exchange: the rungs of a retry policy work (CONTRACT.md section 2)."""
    expiry: bool = False
    priorities: int = 0
    """Levels a queue may have."""
    lease: LeaseTerms | None = None
    hold_limit: timedelta | None = None
    """Longest a delivery may stay unsettled, renewals included."""
    fenced: bool = False
    """A stale settlement never changes anything."""
    counts_deliveries: bool = False
    delivery_limit: int | None = None
    """Deliveries after which the broker gives a message up by itself, as far as can be known; `None`: it never does."""
    exclusive: bool = False
    consumer_priority: bool = False
    consumer_arguments: bool = False
    """`subscribe` passes `arguments` of its options on to the broker."""
    transactions: bool = False
    max_length: bool = False
    streams: bool = False
    topic_patterns: Literal["full", "anchored", "none"] = "full"
    max_message: int | None = None
    """Encoded: body, headers, attributes."""
    max_batch: int | None = None
    max_batch_bytes: int | None = None
    depth: Literal["exact", "ready", "approximate", "none"] = "none"
    notes: tuple[str, ...] = ()
    """Plain sentences for a report."""


class Phase(StrEnum):
    NEW = "new"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    RECONNECTING = "reconnecting"
    CLOSING = "closing"
    CLOSED = "closed"


class TransportState(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase
    since: datetime
    endpoint: str
    """host:port/vhost or the like; no user, no secret."""
    blocked: str | None = None
    """The broker's reason while it refuses publishes."""
    last_error: str | None = None
    last_error_at: datetime | None = None
    terminal: bool = False
    """The last error will not go away by waiting."""
    dials: int = 0
    """Tries since last connected."""
    generation: int = 0
    """Connections made so far."""
    outstanding: int = 0
    """Publishes without a result."""


class SubscriptionPhase(StrEnum):
    ACTIVE = "active"
    PAUSED = "paused"
    WAITING = "waiting"
    """Exclusive, and held by another."""
    RECOVERING = "recovering"
    STOPPED = "stopped"
    CLOSED = "closed"


class SubscriptionState(msgspec.Struct, frozen=True, kw_only=True):
    phase: SubscriptionPhase
    since: datetime
    generation: int = 1
    """Registrations made."""
    gap: bool = False
    """The queue itself had to be made again: messages may have been missed."""
    held: int = 0
    last_contact: float | None = None
    error: str | None = None


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """How much is in a queue, by the broker's own word at `at`."""

    ready: int
    held: int | None
    """`None`: the broker does not say."""
    delayed: int | None
    exact: bool
    at: datetime


class ApplyMode(StrEnum):
    """What `declare` does about what is missing: make it, raise, or only report."""

    CREATE = "create"
    VERIFY = "verify"
    REPORT = "report"


# The port


class Sink(Protocol):
    """Given by the engine. Plain calls on the loop, in order, never two at once, never after `Subscription.close`."""

    def deliver(self, batch: Sequence[Delivery], /) -> None: ...
    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None: ...
    def changed(self, state: SubscriptionState, /) -> None: ...


class Subscription(Protocol):
    @property
    def queue(self) -> str: ...
    @property
    def state(self) -> SubscriptionState: ...
    def pause(self) -> None:
        """Take nothing new; what is out stays out."""
        ...

    def resume(self) -> None: ...
    async def stop(self) -> None:
        """No `deliver` after it returns; settling still works."""
        ...

    async def close(self) -> None:
        """Stop, then give back at once all that is unsettled."""
        ...


class Transport(Protocol):
    """A broker, as `shared` by all transports alike. Belongs to the event loop that opened it.

    After the first `open` has succeeded it recovers by itself for ever, with jittered back-off.
    """

    @property
    def capabilities(self) -> Capabilities:
        """Static before `open`, exact after it."""
        ...

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        """For one queue or exchange; no I/O."""
        ...

    @property
    def state(self) -> TransportState:
        """Readable at any time; no I/O."""
        ...

    async def open(self, *, within: timedelta) -> None:
        """Dial until the limit, then raise `NotConnected` naming every endpoint tried.

        `AccessDenied` and the like end it at once. Nothing is left behind after a failure.
        """
        ...

    async def close(self, grace: timedelta = ...) -> None:
        """Stop subscriptions, wait for what is outstanding up to `grace`, give back, hang up. Idempotent, bounded."""
        ...

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        """Look, then create what is missing (`CREATE`), raise (`VERIFY`) or only report. Never deletes or migrates."""
        ...

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        """One result a message, in order. `within` bounds the whole call; nothing is raised for one message."""
        ...

    async def subscribe(
        self,
        queue: str,
        sink: Sink,
        *,
        prefetch: int,
        exclusive: bool = False,
        lease: timedelta | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Subscription:
        """Registered on return; at most `prefetch` deliveries are unsettled. Raises `QueueMissing`, `NotConnected`.

        `options` has the consumer's `name`, always; what else it has and the transport lacks is a `CapabilityError`.
        """
        ...

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        """What is there, up to `most`, after at most `wait`; nothing is an empty list, an outage is `NotConnected`."""
        ...

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        """One answer an item, in order; nothing is raised for one item."""
        ...

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]: ...
    async def depth(self, queue: str) -> Depth: ...
    async def exists(self, name: str, kind: Kind = "queue") -> bool: ...
    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool: ...
    async def purge(self, queue: str) -> int | None: ...


@runtime_checkable
class Adviser(Protocol):
    """A transport that knows more of a topology than whether it is there. None needs to be one."""

    def advice(self, topology: Topology) -> Sequence[str]:
        """Sentences for a person, each beginning with what it is about; no I/O."""
        ...


@runtime_checkable
class GivesBack(Protocol):
    """A subscription whose deliveries may be held only so long (`hold_limit`). Others need not be one."""

    async def give_back(self) -> None:
        """Pause, and put all that is unsettled back in its place; an exclusive one goes on keeping others out.

        Undone by `resume`, and by the loss of the link. What was given back is not told as lost.
        """
        ...


@runtime_checkable
class Claims(Protocol):
    """A transport that can look whether a queue is taken before it asks for it alone. None needs to be one."""

    async def is_claimed(self, queue: str) -> bool:
        """Whether an exclusive subscription of another would have to wait now. Takes nothing, promises nothing."""
        ...


class Factory(Protocol):
    """Made known as an entry point of the group `acemq.transports`, named by URL scheme."""

    def __call__(self, url: str, /, **options: object) -> Transport:
        """Read the URL and refuse what is wrong with it; no I/O."""
        ...
