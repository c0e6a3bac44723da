"""AMQP field tables, by hand: what message headers are on the wire.

pamqp is not used for them: it writes floats as 32 bits, refuses `bytes`, cuts names without a word, and takes five
times as long. Types written: `l` integer, `d` float, `S` text, `x` bytes, `t` bool, `T` datetime, `V` None, `A` list,
`F` dict. Every type that RabbitMQ knows is read.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from struct import Struct
from struct import error as StructError
from typing import TypeVar, cast, overload

from acemq import headers as h
from acemq.errors import ConfigurationError
from acemq.headers import Headers, HeaderValue, check
from acemq.transport import BadHeader

D = TypeVar("D")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_SECOND = 253_402_300_799
"""Of the year 9999. What lies beyond, such as milliseconds by mistake, is read as an integer."""

_LONGEST_NAME = 255

_LENGTH = Struct(">I")
_TEXT = Struct(">cI")
_INTEGER = Struct(">cq")
_DOUBLE = Struct(">cd")
_MOMENT = Struct(">cQ")
_DECIMAL = Struct(">cBi")
_length_at: Callable[[bytes, int], tuple[int]] = _LENGTH.unpack_from
_integer_at: Callable[[bytes, int], tuple[int]] = Struct(">q").unpack_from


class _FarMoment(int):
    """An AMQP timestamp that no datetime reaches. It leaves as it came."""


# Writing


def encode(headers: Headers) -> bytes:
    """The table with its length before it. `BadHeader` names the header that AMQP cannot carry."""
    entries = _entries(headers)
    return _LENGTH.pack(len(entries)) + entries


def _entries(table: Mapping[str, HeaderValue]) -> bytes:
    out: list[bytes] = []
    for name, value in table.items():
        try:
            if name in _REPEATED and type(value) is str and len(value) <= _SHORT:
                out.append(_entry(name, value))
                continue
            out.append(_name(name))
            if type(value) is str:
                text = value.encode()
                out.append(_TEXT.pack(b"S", len(text)))
                out.append(text)
            elif type(value) is int:
                out.append(_INTEGER.pack(b"l", value))
            else:
                out.append(_value(value))
        except BadHeader:
            raise
        except Exception as error:
            raise _refusal(name, value, error) from None
    return b"".join(out)


_REPEATED = frozenset({h.TYPE, h.ORIGIN, h.SCHEDULE_EXCHANGE, h.SCHEDULE_ROUTING_KEY, h.SCHEDULE_CONTENT_TYPE})
"""Headers that say the same in message after message."""
_SHORT = 256


@lru_cache(1_024)
def _entry(name: str, text: str) -> bytes:
    value = text.encode()
    return _name(name) + _TEXT.pack(b"S", len(value)) + value


@lru_cache(4096)
def _name(name: str) -> bytes:
    """As it stands in a table: its length in one byte, then UTF-8. Names come again and again, hence the cache.

    What an application may not send, an empty name or one of over 128 bytes, others do; and a message that arrived with
    it must be able to leave on a copy.
    """
    text = name.encode()
    if len(text) > _LONGEST_NAME:
        raise BadHeader(f"header name {name[:40]!r} has {len(text)} bytes; AMQP carries {_LONGEST_NAME}", name=name)
    return bytes((len(text),)) + text


def _value(value: HeaderValue | Decimal) -> bytes:
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case str():
            text = value.encode()
            return _TEXT.pack(b"S", len(text)) + text
        case _FarMoment():
            return _MOMENT.pack(b"T", value)
        case int():
            return _INTEGER.pack(b"l", value)
        case float():
            if not isfinite(value):
                raise ValueError("RabbitMQ knows finite numbers only, and hangs up on who sends another")
            return _DOUBLE.pack(b"d", value)
        case bytes():
            return _TEXT.pack(b"x", len(value)) + value
        case datetime():
            if value.microsecond:
                raise ValueError("AMQP carries whole seconds only")
            return _MOMENT.pack(b"T", (value - _EPOCH) // timedelta(seconds=1))
        case Decimal():  # written by another client, and read by us
            sign, digits, exponent = value.as_tuple()
            unscaled = int("".join(map(str, digits)))
            return _DECIMAL.pack(b"D", -int(exponent), -unscaled if sign else unscaled)
        case Mapping():
            entries = _entries(value)
            return _TEXT.pack(b"F", len(entries)) + entries
        case _:
            if not isinstance(value, list | tuple):
                raise TypeError(type(value).__name__)
            items = b"".join(map(_value, value))
            return _TEXT.pack(b"A", len(items)) + items


def _refusal(name: object, value: object, error: Exception) -> BadHeader:
    """The same words as at the call where headers are checked; the driver's own only where that has none."""
    try:
        check(cast("str", name), value)
    except ConfigurationError as refusal:
        return BadHeader(str(refusal), name=str(name))
    return BadHeader(f"header {name!r} cannot be carried: {error}", name=str(name))


# Reading


class Table(Mapping[str, HeaderValue]):
    """A table as it arrived, taken apart once and only when asked for something that it may hold.

    A delivery that nobody asks for a header costs nothing, and asking for a missing one costs a search for its name.
    Entries behind a broken one cannot be found and are not there.
    """

    __slots__ = ("_entries", "_raw")

    def __init__(self, raw: bytes) -> None:
        """`raw` without the length before it."""
        self._raw = raw
        self._entries: dict[str, HeaderValue] | None = None

    def _all(self) -> dict[str, HeaderValue]:
        if self._entries is None:
            self._entries = decode(self._raw)
        return self._entries

    def _is_absent(self, name: object) -> bool:
        # The bytes of the name may also stand in a value; only their absence proves something.
        return self._entries is None and (type(name) is not str or _wanted(name) not in self._raw)

    def __getitem__(self, name: str) -> HeaderValue:
        if self._is_absent(name):
            raise KeyError(name)
        return self._all()[name]

    @overload
    def get(self, name: str, /) -> HeaderValue: ...
    @overload
    def get(self, name: str, /, default: HeaderValue | D) -> HeaderValue | D: ...
    def get(self, name: str, /, default: object = None) -> object:
        if self._entries is not None:
            return self._entries.get(name, default)
        return default if self._is_absent(name) else self._all().get(name, default)

    def __contains__(self, name: object) -> bool:
        return not self._is_absent(name) and name in self._all()

    # The mixins of Mapping would look up every name by itself.

    def items(self) -> ItemsView[str, HeaderValue]:
        return self._all().items()

    def keys(self) -> KeysView[str]:
        return self._all().keys()

    def values(self) -> ValuesView[HeaderValue]:
        return self._all().values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


NO_HEADERS: Headers = Table(b"")


@lru_cache(1024)
def _wanted(name: str) -> bytes:
    text = name.encode(errors="surrogatepass")
    return bytes((len(text) & 255,)) + text


def decode(raw: bytes) -> dict[str, HeaderValue]:
    """The entries of a table, without the length before it, up to the first that is broken."""
    out: dict[str, HeaderValue] = {}
    at, end = 0, len(raw)
    try:
        while at < end:
            behind = at + 1 + raw[at]
            name = _text_of(raw[at + 1 : behind])
            kind = raw[behind]
            if kind == 83:  # S, by far the most frequent
                at = behind + 5 + _length_at(raw, behind + 1)[0]
                if at > end:
                    break
                out[name] = _text(raw[behind + 5 : at])
            elif kind == 108:  # l, all numbers of an envelope
                out[name] = _integer_at(raw, behind + 1)[0]
                at = behind + 9
            else:
                out[name], at = _READERS[kind](raw, behind + 1)
    except (IndexError, KeyError, StructError, RecursionError):
        pass
    return out


@lru_cache(4096)
def _text_of(name: bytes) -> str:
    return name.decode(errors="replace")


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw  # unchanged, so that a copy of the message carries the same bytes


_Reader = Callable[[bytes, int], tuple[HeaderValue, int]]
"""From the bytes and the place behind the type, to the value and the place behind it."""


def _fixed(layout: str, make: Callable[..., HeaderValue] | None = None) -> _Reader:
    shape = Struct(f">{layout}")
    unpack, size = shape.unpack_from, shape.size

    def read(raw: bytes, at: int) -> tuple[HeaderValue, int]:
        values = unpack(raw, at)
        return (make(*values) if make else cast("HeaderValue", values[0])), at + size

    return read


def _sized(make: Callable[[bytes], HeaderValue]) -> _Reader:
    def read(raw: bytes, at: int) -> tuple[HeaderValue, int]:
        end = at + 4 + _length_at(raw, at)[0]
        if end > len(raw):
            raise IndexError
        return make(raw[at + 4 : end]), end

    return read


def _moment(seconds: int) -> HeaderValue:
    return _EPOCH + timedelta(seconds=seconds) if seconds <= _LAST_SECOND else _FarMoment(seconds)


def _decimal(scale: int, unscaled: int) -> HeaderValue:
    # Not a HeaderValue of ours: nobody who checks his headers can have sent it, but a copy must carry it on.
    return cast("HeaderValue", Decimal(unscaled).scaleb(-scale))


def _list(raw: bytes) -> HeaderValue:
    out: list[HeaderValue] = []
    at = 0
    while at < len(raw):
        value, at = _READERS[raw[at]](raw, at + 1)
        out.append(value)
    return out


_READERS: dict[int, _Reader] = {
    ord("S"): _sized(_text),
    ord("x"): _sized(bytes),
    ord("F"): _sized(decode),
    ord("A"): _sized(_list),
    ord("t"): _fixed("?"),
    ord("b"): _fixed("b"),
    ord("B"): _fixed("B"),
    ord("s"): _fixed("h"),
    ord("U"): _fixed("h"),
    ord("u"): _fixed("H"),
    ord("I"): _fixed("i"),
    ord("i"): _fixed("I"),
    ord("l"): _fixed("q"),
    ord("L"): _fixed("q"),
    ord("f"): _fixed("f"),
    ord("d"): _fixed("d"),
    ord("D"): _fixed("Bi", _decimal),  # signed, as every client writes it
    ord("T"): _fixed("Q", _moment),
    ord("V"): lambda _, at: (None, at),
}
