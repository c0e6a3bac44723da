"""What travels with a body besides the body, and how it stands in headers (CONTRACT.md section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TypedDict, Unpack

import msgspec
from msgspec.structs import force_setattr, replace

from acemq import headers as h
from acemq.errors import ConfigurationError
from acemq.headers import Headers, HeaderValue
from acemq.ids import new_id

ERROR_LIMIT = 1_000
"""Characters of an error text on the wire; longer ones are cut."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


class EnvelopeFields(TypedDict, total=False):
    id: str
    version: int
    correlation_id: str
    causation_id: str | None
    attempt: int
    first_seen: datetime
    age_known: bool
    origin: str | None
    error: str | None
    claim: str | None
    route: str | None
    route_position: int
    route_id: str | None
    headers: Mapping[str, HeaderValue]


class EnvelopeChanges(EnvelopeFields, total=False):
    type: str


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen. `first_seen` is aware, in UTC and of whole milliseconds; `headers` are the application's, read-only."""

    id: str
    type: str
    version: int = 1
    correlation_id: str
    causation_id: str | None = None
    attempt: int = 1
    first_seen: datetime
    age_known: bool = True
    origin: str | None = None
    error: str | None = None
    claim: str | None = None
    route: str | None = None
    route_position: int = 0
    route_id: str | None = None
    headers: Mapping[str, HeaderValue] = msgspec.field(default_factory=lambda: h.NONE)

    def __post_init__(self) -> None:
        if self.first_seen.utcoffset() is None:
            raise ConfigurationError(f"first_seen={self.first_seen.isoformat()} is naive; give it a time zone")
        if self.version < 1 or self.attempt < 1:
            raise ConfigurationError(f"version={self.version} and attempt={self.attempt} must be 1 or more")
        if self.first_seen.tzinfo is not UTC or self.first_seen.microsecond % 1000:
            force_setattr(self, "first_seen", from_millis(to_millis(self.first_seen)))
        if not isinstance(self.headers, h.ReadOnly):
            force_setattr(self, "headers", h.check_application(self.headers))

    @classmethod
    def of(cls, type: str, *, now: datetime | None = None, **fields: Unpack[EnvelopeFields]) -> Envelope:
        """A first attempt seen `now`, with a new id that is its own correlation, unless `fields` say otherwise."""
        fields.setdefault("correlation_id", fields.setdefault("id", new_id()))
        fields.setdefault("first_seen", from_millis(to_millis(now or datetime.now(UTC))))
        return cls(type=type, **fields)

    def replace(self, **fields: Unpack[EnvelopeChanges]) -> Envelope:
        return replace(self, **fields)

    def age(self, now: datetime) -> timedelta | None:
        """Since it was first seen, never negative; `None` when that is not known."""
        return max(now - self.first_seen, timedelta()) if self.age_known else None

    def to_headers(self) -> dict[str, HeaderValue]:
        """As it stands on the wire, application headers beside."""
        return write(
            id=self.id,
            type=self.type,
            version=self.version,
            correlation_id=self.correlation_id,
            causation_id=self.causation_id,
            attempt=self.attempt,
            first_seen_ms=to_millis(self.first_seen),
            origin=self.origin,
            error=self.error,
            claim=self.claim,
            route=self.route,
            route_position=self.route_position,
            route_id=self.route_id,
            headers=self.headers,
        )

    @classmethod
    def from_headers(
        cls, headers: Headers | None, *, routing_key: str, message_id: str | None, now: datetime | None = None
    ) -> Envelope:
        """Read what arrived. Nothing malformed is an error: it reads as its default.

        `now` is asked for where nothing says when the message was first seen; the system's clock unless given.
        """
        headers = headers or h.NONE
        get, text, integer = headers.get, _text, h.integer
        identity = identity_of(headers, message_id) or new_id()
        seen = integer(get(h.FIRST_SEEN))
        known = seen is not None and 0 < seen < _END_OF_TIME_MS
        return cls(
            id=identity,
            type=text(get(h.TYPE)) or routing_key,
            version=max(integer(get(h.VERSION)) or 1, 1),
            correlation_id=text(get(h.CORRELATION)) or identity,
            causation_id=text(get(h.CAUSATION)),
            attempt=max(integer(get(h.ATTEMPT)) or 1, 1),
            first_seen=from_millis(seen if seen is not None and known else to_millis(now or datetime.now(UTC))),
            age_known=known,
            origin=text(get(h.ORIGIN)),
            error=text(get(h.ERROR)),
            claim=text(get(h.CLAIM)),
            route=text(get(h.ROUTE)),
            route_position=max(integer(get(h.ROUTE_POSITION)) or 0, 0),
            route_id=text(get(h.ROUTE_ID)),
            headers=h.application(headers),
        )


def identity_of(headers: Headers, message_id: str | None) -> str | None:
    """The id that a message came with; one without any is given its own by `Envelope.from_headers`."""
    return _text(headers.get(h.ID)) or message_id


def _text(value: object) -> str | None:
    # Nearly always text or nothing, and asked for nine times a message.
    if value is None:
        return None
    return value or None if type(value) is str else h.text(value)


_END_OF_TIME_MS = 253_402_300_800_000  # the year 10000, beyond which no datetime reaches


def write(
    *,
    id: str,
    type: str,
    correlation_id: str,
    first_seen_ms: int,
    version: int = 1,
    attempt: int = 1,
    origin: str | None = None,
    causation_id: str | None = None,
    error: str | None = None,
    claim: str | None = None,
    route: str | None = None,
    route_position: int = 0,
    route_id: str | None = None,
    headers: Headers | None = None,
) -> dict[str, HeaderValue]:
    """The one place where an envelope becomes headers. What is empty is not written."""
    out: dict[str, HeaderValue] = {
        h.ID: id,
        h.TYPE: type,
        h.VERSION: version,
        h.CORRELATION: correlation_id,
        h.ATTEMPT: attempt,
        h.FIRST_SEEN: first_seen_ms,
    }
    if origin:
        out[h.ORIGIN] = origin
    if causation_id:
        out[h.CAUSATION] = causation_id
    if error:
        out[h.ERROR] = error[:ERROR_LIMIT]
    if claim:
        out[h.CLAIM] = claim
    if route:
        out[h.ROUTE] = route
        out[h.ROUTE_POSITION] = route_position
        out[h.ROUTE_ID] = route_id or ""
    if headers:
        out.update(headers)
    return out


def to_millis(moment: datetime) -> int:
    return (moment - _EPOCH) // _MILLISECOND


def from_millis(millis: int) -> datetime:
    return _EPOCH + millis * _MILLISECOND
