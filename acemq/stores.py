"""The ports to a place that remembers: an outbox, and the claims of idempotent handling. Anyone may implement them.

Each Protocol asks for the least: a store that is only relayed has five methods, and whatever else a store can do is a
Protocol of its own, which is looked for where it is of use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from acemq import headers as h
from acemq.clock import check_duration
from acemq.codec import Codec, Codecs
from acemq.envelope import Envelope, from_millis, to_millis
from acemq.errors import ConfigurationError
from acemq.headers import Headers, HeaderValue
from acemq.message import Message
from acemq.topology import check_key, check_name

MAX_ATTEMPTS = 10
"""Failures after which a record is retired (CONTRACT.md section 8)."""
RELAY_LEASE = timedelta(seconds=30)
ERROR_LIMIT = 1_000
"""Characters of an error that are kept with a record."""
CLAIM_LEASE = timedelta(minutes=5)
RETENTION = timedelta(hours=24)
PUT_BACK_AFTER = timedelta(seconds=5)
"""These three: CONTRACT.md section 13."""


# Outbox


class OutboxRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A message that is written down, encoded and with its headers rendered, to be published as it stands here."""

    id: str
    """The envelope's. A store takes it once."""
    exchange: str
    """Empty: the default exchange, whose routing key is the queue."""
    routing_key: str
    body: bytes
    content_type: str | None = None
    headers: Mapping[str, HeaderValue]
    key: str | None = None
    """Records of one key leave in the order in which their transactions committed; `None`: no order is promised."""
    created_at: datetime
    attempts: int = 0
    """Failures to publish it so far."""
    last_error: str | None = None

    @staticmethod
    def of(
        exchange: str,
        routing_key: str,
        payload: object,
        *,
        envelope: Envelope | None = None,
        key: str | None = None,
        codec: Codec | None = None,
        content_type: str | None = None,
    ) -> OutboxRecord:
        """A record without a connection at hand; its type is the routing key unless the envelope says otherwise.

        Encodes at once: `EncodeError` for a payload that cannot be written.
        """
        check_target(exchange, routing_key)
        body, written_as = (Codecs.default() if codec is None else Codecs.of(codec)).write(payload, content_type)
        envelope = Envelope.of(routing_key) if envelope is None else envelope
        return OutboxRecord.written(
            exchange, routing_key, body, content_type=written_as, headers=envelope.to_headers(), key=key
        )

    @staticmethod
    def written(
        exchange: str,
        routing_key: str,
        body: bytes,
        *,
        content_type: str | None,
        headers: Headers,
        key: str | None,
        now: datetime | None = None,
    ) -> OutboxRecord:
        """The same of what is encoded already. Its id is that of the headers."""
        return OutboxRecord(
            id=check_id(h.text(headers.get(h.ID)) or ""),
            exchange=exchange,
            routing_key=routing_key,
            body=body,
            content_type=content_type,
            headers=headers,
            key=None if key is None else check_key("key", key),
            created_at=from_millis(to_millis(now or datetime.now(UTC))),
        )


ID_LIMIT = 64
"""Bytes: the width of the column in the tables of this library and its siblings (CONTRACT.md section 8)."""


def check_id(id: str) -> str:
    if not check_key("id", id) or len(id.encode()) > ID_LIMIT:
        raise ConfigurationError(f"id {id!r} of an outbox record must have 1 to {ID_LIMIT} bytes")
    return id


def check_target(exchange: str, routing_key: str) -> None:
    if exchange:
        check_name("exchange", exchange)
        check_key("routing key", routing_key)
    else:
        check_name("queue", routing_key)


class OutboxBatch(msgspec.Struct, frozen=True):
    """Records that are ours for `lease`, counted from the moment before they were asked for.

    A length and no instant: the store's clock and the relay's need not agree.
    """

    records: Sequence[OutboxRecord] = ()
    """Oldest first; of each key the foremost alone."""
    token: int = 0
    """Larger than every token under which one of these was claimed before."""
    lease: timedelta = RELAY_LEASE


@runtime_checkable
class OutboxStore(Protocol):
    """What a relay needs."""

    async def claim(self, most: int, /) -> OutboxBatch:
        """Take up to `most` records that nobody holds, and nobody else gets them before the lease has run out.

        Left out are retired records, and every record of a key that is behind one of its own which is not published.
        """
        ...

    async def published(self, ids: Sequence[str], token: int, /) -> int:
        """They are out. How many rows changed: those that another has claimed since are not touched."""
        ...

    async def failed(self, id: str, error: str, token: int, /) -> bool:
        """One attempt more, and the lease released. False under an old token, and nothing changed."""
        ...

    async def give_back(self, ids: Sequence[str], token: int, /) -> int:
        """The lease released, nothing counted. How many rows changed."""
        ...

    async def pending_count(self) -> int:
        """What is not published, retired records included."""
        ...


@runtime_checkable
class OutboxWriter(Protocol):
    """A store that an application writes to, within its own transaction."""

    async def add(self, record: OutboxRecord, within: Any, /) -> bool:
        """False: that id is there already, and nothing changed."""
        ...

    def add_sync(self, record: OutboxRecord, within: Any, /) -> bool: ...


class OutboxStatus(msgspec.Struct, frozen=True):
    """What lies in an outbox."""

    pending: int
    """Not published, retired records included."""
    retired: int
    oldest: timedelta | None
    """Age of the oldest record that is pending and not retired; `None`: there is none."""


@runtime_checkable
class OutboxKeeper(Protocol):
    """A store that retires what cannot be published, and keeps what was published for a while."""

    @property
    def name(self) -> str:
        """Its table, or the like; for health and logs."""
        ...

    @property
    def max_attempts(self) -> int: ...
    async def check(self) -> None:
        """Raise `TopologyError` where there is no table, or one of another shape."""
        ...

    async def status(self) -> OutboxStatus: ...
    async def retired(self, most: int = ..., /) -> list[OutboxRecord]:
        """Oldest first."""
        ...

    async def release(self, id: str, /) -> bool:
        """Its attempts are 0 again. False: no such record is pending."""
        ...

    async def discard(self, id: str, reason: str, /) -> bool:
        """A retired record will not be published: kept as if it had been, with the reason. False: none is retired."""
        ...

    async def purge(self, *, before: datetime | None = ..., batch: int = ...) -> int:
        """Delete what was published long enough ago, at most `batch` at a time; how many that were."""
        ...


@runtime_checkable
class OutboxListening(Protocol):
    """A store that says when something was committed to it."""

    async def listen(self, wake: Callable[[], None], /) -> None:
        """Call `wake` on the loop whenever there may be something to claim; until cancelled, or until it raises."""
        ...


# Idempotent handling


class Claim(msgspec.Struct, frozen=True):
    """The answer of a store to a claim."""

    answer: Literal["claimed", "duplicate", "in_progress"]
    """duplicate: handled and confirmed; in_progress: another holds it, and its lease runs."""
    token: int = 0
    """Grows with every claim of the key; of a claim that was made."""


@runtime_checkable
class IdempotencyStore(Protocol):
    """Remembers which messages were handled, and which are being handled now. Time is that of the store's own clock."""

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        """Take the key, unless somebody holds it or it was confirmed; atomic.

        `IdempotencyConflictError` where the key is known with another fingerprint.
        """
        ...

    async def renew(self, key: str, token: int, /, *, lease: timedelta) -> bool:
        """Hold it for so long from now. False: another has taken it over."""
        ...

    async def confirm(self, key: str, token: int, /, *, retention: timedelta) -> bool:
        """Handled: for so long from now it is a duplicate. False: another has taken it over, and nothing changed."""
        ...

    async def release(self, key: str, token: int, /) -> bool:
        """Free for anybody. False: another has taken it over, and nothing changed."""
        ...


def envelope_id(message: Message[Any]) -> str:
    """The key of a message, unless another is named: the id of its envelope."""
    return message.id


def body_fingerprint(message: Message[Any]) -> bytes:
    """SHA-256 of the body, as it travelled."""
    return sha256(message.body).digest()


class Idempotency(msgspec.Struct, frozen=True, kw_only=True):
    """How a consumer keeps from handling a message twice: a claim on its key, beside the work."""

    store: IdempotencyStore
    key: Callable[[Message[Any]], str] = envelope_id
    lease: timedelta = CLAIM_LEASE
    """After it the claim of a process that died is free. Renewed while the handler runs."""
    retention: timedelta = RETENTION
    """How long a handled key is remembered: as long as duplicates can come, weighed against what one costs."""
    put_back_after: timedelta = PUT_BACK_AFTER
    fingerprint: Callable[[Message[Any]], bytes] | None = None
    """`body_fingerprint`: the same key with another body is a conflict, and no duplicate."""

    def __post_init__(self) -> None:
        if not isinstance(self.store, IdempotencyStore):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"idempotency={self.store!r} is no store: it needs claim, renew, confirm and release"
            )
        check_duration("lease", self.lease)
        check_duration("retention", self.retention)
        check_duration("put_back_after", self.put_back_after, zero=True)

    @staticmethod
    def of(given: IdempotencyStore | Idempotency) -> Idempotency:
        return given if isinstance(given, Idempotency) else Idempotency(store=given)


def check_claim_key(key: object) -> str:
    """Refuse what is no key: empty, over 255 bytes, neither text nor the UTF-8 of one."""
    text = key.decode(errors="replace") if isinstance(key, bytes) else key
    if not isinstance(text, str) or not text:
        raise ConfigurationError(f"idempotency key {key!r} must be text of 1 to 255 bytes")
    return check_key("idempotency key", text)
