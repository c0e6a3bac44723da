"""Header names of the wire, and what a header value may be (CONTRACT.md section 1)."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeAlias, cast

import msgspec

from acemq.errors import ConfigurationError

HeaderValue: TypeAlias = (
    "str | bytes | bool | int | float | datetime | Sequence[HeaderValue] | Mapping[str, HeaderValue] | None"
)
Headers: TypeAlias = Mapping[str, HeaderValue]

RESERVED = "x-acemq-"
"""Headers of the library: never in an application's view, never set by one. A prefix, so that future names count."""

ID = "x-acemq-id"
TYPE = "x-acemq-type"
VERSION = "x-acemq-version"
CORRELATION = "x-acemq-correlation"
CAUSATION = "x-acemq-causation"
ATTEMPT = "x-acemq-attempt"
FIRST_SEEN = "x-acemq-first-seen"
ORIGIN = "x-acemq-origin"
ERROR = "x-acemq-error"
CLAIM = "x-acemq-claim"
ROUTE = "x-acemq-route"
ROUTE_POSITION = "x-acemq-route-position"
ROUTE_ID = "x-acemq-route-id"

EXPIRES_AT = "x-acemq-expires-at"
DUE_AT = "x-acemq-due-at"
"""Milliseconds of the epoch, as the one before; a consumer that gets it earlier puts it back."""

FAILED_QUEUE = "x-acemq-failed-queue"
FAILED_AT = "x-acemq-failed-at"
FAILED_AS = "x-acemq-failed-as"
FAILED_WITH = "x-acemq-failed-with"
FAILED_BY = "x-acemq-failed-by"
FORENSICS = (FAILED_QUEUE, FAILED_AT, FAILED_AS, FAILED_WITH, FAILED_BY)

DELIVERY_COUNT = "x-delivery-count"
"""A quorum queue's own count of deliveries. On a copy it would count against a queue that never delivered it."""

ROUTING_SLIP = "acemq-routing-slip"
REPLY_TO = "acemq-reply-to"
REPLY_ERROR = "acemq-error"
SCHEDULE_EXCHANGE = "x-schedule-exchange"
SCHEDULE_ROUTING_KEY = "x-schedule-routing-key"
SCHEDULE_DUE_AT = "x-schedule-due-at"
SCHEDULE_CONTENT_TYPE = "x-schedule-content-type"
REPLAYED_FROM = "acemq-replayed-from"
REPLAYED_AT = "acemq-replayed-at"
REPLAY_COUNT = "acemq-replay-count"
LEGACY_REPLAY = ("x-acemq-replayed-from", "x-acemq-replayed-at", "x-acemq-replay-count")
LEGACY_REPLAY_COUNT = LEGACY_REPLAY[2]

NAME_LIMIT = 128
"""Bytes. RabbitMQ clients cut longer names without a word."""


class ReadOnly(dict[str, HeaderValue]):
    """Headers that nothing changes at a distance: checked, or as they arrived."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("these headers are read-only; copy them with dict(headers)")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse  # pyright: ignore

    def __reduce__(self) -> tuple[Any, ...]:
        return ReadOnly, (dict(self),)


NONE = ReadOnly()


def application(headers: Headers) -> ReadOnly:
    """What a handler sees: every header but the library's own."""
    seen = {name: value for name, value in headers.items() if not name.startswith(RESERVED)}
    return ReadOnly(seen) if seen else NONE


def check_application(headers: Headers) -> ReadOnly:
    """The same headers, checked: refused are reserved names and values that would not arrive as they were sent."""
    for name, value in headers.items():
        if name.startswith(RESERVED):
            raise ConfigurationError(
                f"header {name!r} is reserved: names beginning with {RESERVED!r} belong to acemq. Choose another name"
            )
        check(name, value)
    return ReadOnly(headers)


def is_broken(text: str) -> bool:
    """Whether it holds half of a surrogate pair, which no UTF-8 can carry."""
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def check(name: str, value: object) -> None:
    """Refuse a header that a transport could not carry unchanged."""
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"header name {name!r} must be text")
    if not 1 <= len(name.encode(errors="replace")) <= NAME_LIMIT or is_broken(name):
        raise ConfigurationError(f"header name {name[:40]!r} must have 1 to {NAME_LIMIT} bytes of UTF-8")
    _check_value(name, value, depth=0)


def _check_value(name: str, value: object, depth: int) -> None:
    match value:
        case None | bool() | bytes() | float():
            return
        case int():
            if not -(2**63) <= value < 2**63:
                raise ConfigurationError(f"header {name!r}: {value} does not fit a signed 64-bit integer")
        case str():
            if is_broken(value):
                raise ConfigurationError(f"header {name!r} holds half of a surrogate pair, which no UTF-8 can carry")
        case datetime():
            _check_moment(name, value)
        case Mapping() | list() | tuple():
            if depth == 16:
                raise ConfigurationError(f"header {name!r} is nested more than 16 deep")
            inner = cast("Mapping[str, object] | Sequence[object]", value)
            if isinstance(inner, Mapping):
                for key in inner:
                    check(key, None)
                inner = list(inner.values())
            for item in inner:
                _check_value(name, item, depth + 1)
        case _:
            raise ConfigurationError(
                f"header {name!r} holds a {type(value).__name__}; a header is text, bytes, bool, int, float, "
                "an aware datetime, None, or lists and string-keyed dicts of these"
            )


def _check_moment(name: str, value: datetime) -> None:
    if value.utcoffset() is None:
        raise ConfigurationError(f"header {name!r} holds a naive datetime; give it a time zone, for example UTC")
    if value.microsecond:
        raise ConfigurationError(
            f"header {name!r}: {value.isoformat()} must be whole seconds; AMQP carries no fractions"
        )
    if not datetime(1970, 1, 1, tzinfo=UTC) <= value < datetime(2106, 1, 1, tzinfo=UTC):
        raise ConfigurationError(f"header {name!r}: {value.isoformat()} must lie between 1970 and 2105")


def text(value: object) -> str | None:
    """A text header as it may arrive: bytes are UTF-8 with replacement; what is empty or of another kind is missing."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, bytes):
        return value.decode(errors="replace") or None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def integer(value: object) -> int | None:
    """An integer header as it may arrive: a number, or text or bytes that read as one; a boolean is none."""
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, str | bytes):
        # int() takes more than other libraries read: underscores, and the digits of every script.
        digits = value if isinstance(value, bytes) else value.encode(errors="replace")
        read = int(digits) if _INTEGER.fullmatch(digits) else None
    else:
        read = value if isinstance(value, int) and not isinstance(value, bool) else None
    # What no header can hold could not be written on a copy either, and the message could never be moved.
    return read if read is not None and -(2**63) <= read < 2**63 else None


_INTEGER = re.compile(rb"\s*[+-]?[0-9]{1,20}\s*")


# Headers as one text, for brokers that have no tables of typed values


_JSON = msgspec.json.Encoder()
_READ_JSON = msgspec.json.Decoder(dict[str, Any])
_PLAIN = frozenset({str, int, bool, type(None)})
"""What JSON holds as it is."""
_OF_EVERY_MESSAGE = frozenset({ID, TYPE, VERSION, CORRELATION, CAUSATION, ATTEMPT, FIRST_SEEN, ORIGIN})


def to_text(headers: Headers) -> str:
    """One JSON object that `from_text` reads back equal, and of the same types.

    JSON has no bytes, instants or numbers that are not finite: these are objects of one key, `{"$b": base64}`,
    `{"$t": epoch seconds}` and `{"$f": "nan"}`; a dict with a key of that look is wrapped as `{"$o": …}`. Names of
    headers are never read as such a key. Raises `ConfigurationError` for what `check` refuses.
    """
    spelled: Headers = headers
    for name, value in headers.items():
        # What is written for every message is short ASCII and small numbers: `check` is for the rest.
        is_usual = value.isascii() if type(value) is str else type(value) is int and -(2**63) <= value < 2**63
        is_name = name in _OF_EVERY_MESSAGE or (name.isascii() and 1 <= len(name) <= NAME_LIMIT)
        if not is_usual or not is_name:
            check(name, value)
            if type(value) not in _PLAIN:
                spelled = cast("Headers", {each: _spell(given) for each, given in headers.items()})
    return _JSON.encode(spelled).decode()


def from_text(text: str | bytes) -> dict[str, HeaderValue]:
    """Raises `ValueError` where it is no such text."""
    try:
        headers: dict[str, Any] = _READ_JSON.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error
    if _is_nested(text):
        for name, value in headers.items():
            if type(value) in (dict, list):
                headers[name] = _read(value)
    return headers


def _is_nested(text: str | bytes) -> bool:
    """Whether there is more to read than a name and a plain value each; hardly any message has that."""
    if isinstance(text, str):
        return "[" in text or text.rfind("{") > 0
    return b"[" in text or text.rfind(b"{") > 0


def _spell(value: object) -> object:
    match value:
        case float():
            return value if math.isfinite(value) else {"$f": str(value)}
        case bytes():
            return {"$b": base64.b64encode(value).decode()}
        case datetime():
            return {"$t": int(value.timestamp())}
        case Mapping():
            spelled = {str(key): _spell(inner) for key, inner in cast("Mapping[str, object]", value).items()}
            return {"$o": spelled} if any(key.startswith("$") for key in spelled) else spelled
        case list() | tuple():
            return [_spell(inner) for inner in cast("Sequence[object]", value)]
        case _:
            return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(inner) for inner in cast("Sequence[Any]", value)]
    if not isinstance(value, dict):
        return value
    held: Mapping[str, Any] = cast("Mapping[str, Any]", value)
    if len(held) == 1:
        ((key, inner),) = held.items()
        match key, inner:
            case "$b", str(text):
                return base64.b64decode(text, validate=True)
            case "$t", int(seconds):
                return datetime.fromtimestamp(seconds, UTC)
            case "$f", str(text):
                return float(text)
            case "$o", _:
                held = cast("Mapping[str, Any]", inner)
            case _:
                pass
    return {key: _read(inner) for key, inner in held.items()}
