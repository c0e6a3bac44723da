"""The few AMQP frames that we write and read ourselves, because one of each travels with every message.

All else goes through aiormq. A frame: type (1 method, 2 content header, 3 body), channel, size, payload, 0xCE.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from acemq.errors import AcemqError, CapabilityError
from acemq.headers import Headers
from acemq.transport import MessageTooLarge, Outgoing, TransportError, Unroutable

from . import table

METHOD, HEADER, BODY, BEAT = 1, 2, 3, 8
END = b"\xce"
END_BYTE = 0xCE
HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"

# Methods, as class id and method id in one number.
CONNECTION_CLOSE = 10 << 16 | 50
CONNECTION_BLOCKED = 10 << 16 | 60
CONNECTION_UNBLOCKED = 10 << 16 | 61
CHANNEL_CLOSE = 20 << 16 | 40
CHANNEL_CLOSE_OK = 20 << 16 | 41
BASIC_CANCEL = 60 << 16 | 30
BASIC_PUBLISH = 60 << 16 | 40
BASIC_RETURN = 60 << 16 | 50
BASIC_DELIVER = 60 << 16 | 60
BASIC_GET = 60 << 16 | 70
BASIC_GET_OK = 60 << 16 | 71
BASIC_GET_EMPTY = 60 << 16 | 72
BASIC_ACK = 60 << 16 | 80
BASIC_NACK = 60 << 16 | 120

WITH_CONTENT = frozenset((BASIC_RETURN, BASIC_DELIVER, BASIC_GET_OK))
"""What a broker sends with a content header and a body behind it."""

MAX_MESSAGE = 16 * 1024 * 1024
"""Body and properties. The broker's own limit cannot be asked for; this is that of RabbitMQ 4."""
LARGEST_BODY = 512 * 1024 * 1024
"""Of what is received: the most that RabbitMQ can be set to carry. What others could send must not stop us."""
SHORT_LIMIT = 255
"""Bytes of a name, a routing key, a content type, a message id."""
LONGEST_EXPIRY = timedelta(milliseconds=2**32 - 1)
"""RabbitMQ closes the channel of whoever asks for more."""


class Malformed(Exception):
    """What came is not AMQP. Nothing behind it can be trusted, so it costs the link."""


# Typed here, where `unpack_from` can only say that it gives a tuple.
head_at: Callable[[bytes, int], tuple[int, int, int]] = Struct(">BHI").unpack_from
u16_at: Callable[[bytes, int], tuple[int]] = Struct(">H").unpack_from
u32_at: Callable[[bytes, int], tuple[int]] = Struct(">I").unpack_from
u64_at: Callable[[bytes, int], tuple[int]] = Struct(">Q").unpack_from

_head = Struct(">BHI").pack
_settle = Struct(">BHIIQBB").pack
_content = Struct(">BHIHHQH").pack
_PLAIN_FRAME = 8
"""Bytes of a frame round its payload."""
_MILLISECOND = timedelta(milliseconds=1)


# Writing


def ack(channel: int, tag: int, multiple: bool = False) -> bytes:
    return _settle(METHOD, channel, 13, BASIC_ACK, tag, multiple, END_BYTE)


def nack(channel: int, tag: int, multiple: bool = False) -> bytes:
    """Requeue one message, or all up to this one."""
    return _settle(METHOD, channel, 13, BASIC_NACK, tag, 3 if multiple else 2, END_BYTE)


def cancel(channel: int, consumer: str) -> bytes:
    """Without an answer, so that nobody has to wait for one."""
    return _method(channel, BASIC_CANCEL, _short(consumer), b"\x01")


def get(channel: int, queue: str) -> bytes:
    return _method(channel, BASIC_GET, b"\0\0", _short(queue), b"\0")


def _method(channel: int, method: int, *arguments: bytes) -> bytes:
    payload = method.to_bytes(4, "big") + b"".join(arguments)
    return _head(METHOD, channel, len(payload)) + payload + END


@lru_cache(4096)
def _short(text: str) -> bytes:
    raw = text.encode()
    return bytes((len(raw),)) + raw


@lru_cache(4096)
def _publish_method(channel: int, exchange: str, routing_key: str, mandatory: bool) -> bytes:
    if len(routing_key.encode()) > SHORT_LIMIT:
        raise TransportError(
            f"routing key {routing_key[:40]!r}… has {len(routing_key.encode())} bytes; AMQP allows {SHORT_LIMIT}"
        )
    return _method(channel, BASIC_PUBLISH, b"\0\0", _short(exchange), _short(routing_key), bytes((mandatory,)))


class PublishFrames:
    """Messages as frames for one channel."""

    def __init__(self, channel: int, frame_max: int) -> None:
        self._channel = channel
        self._room = frame_max - _PLAIN_FRAME

    def append_to(self, out: list[bytes], message: Outgoing) -> int:
        """Append all frames of the message and return their bytes; raise, and append nothing, if it cannot be sent.

        What is raised is the error of the result: `TransportError` or `CapabilityError`.
        """
        channel, body, room = self._channel, message.body, self._room
        if message.delay:
            raise CapabilityError("rabbitmq", "delayed publishing", "delay")
        try:
            method = _publish_method(channel, message.exchange, message.routing_key, message.mandatory)
            flags, properties = _properties(message)
        except UnicodeEncodeError as error:
            raise TransportError(f"half of a surrogate pair in {error.object!r}, which no UTF-8 can carry") from None
        size = len(body)
        payload = 14 + len(properties)
        if payload > room:
            raise MessageTooLarge(
                f"headers and properties have {payload} bytes; they must fit one frame of {room}",
                size=payload,
                limit=room,
            )
        if size + payload > MAX_MESSAGE:
            raise MessageTooLarge(
                f"the message has {size + payload} bytes with its headers; at most {MAX_MESSAGE} are sent",
                size=size + payload,
                limit=MAX_MESSAGE,
            )
        head = _content(HEADER, channel, payload, 60, 0, size, flags)
        if size <= room:
            if size:
                out += (method, head, properties, END, _head(BODY, channel, size), body, END)
            else:
                out += (method, head, properties, END)
            return len(method) + payload + size + 2 * _PLAIN_FRAME
        out += (method, head, properties, END)
        for at in range(0, size, room):
            part = body[at : at + room]
            out += (_head(BODY, channel, len(part)), part, END)
        return len(method) + payload + size + (size // room + 2) * _PLAIN_FRAME


def _properties(message: Outgoing) -> tuple[int, bytes]:
    """Flags and values. Those of CONTRACT.md section 1 and no others."""
    flags = 0
    out: list[bytes] = []
    if message.content_type:
        flags |= 0x8000
        out.append(_short_value("content type", message.content_type))
    if message.headers:
        flags |= 0x2000
        out.append(table.encode(message.headers))
    flags |= 0x1000
    out.append(b"\x02" if message.persistent else b"\x01")
    if message.priority is not None:
        flags |= 0x0800
        out.append(_priority(message.priority))
    if message.reply_to:
        flags |= 0x0200
        out.append(_short_value("reply_to", message.reply_to))
    if message.expires_in is not None:
        flags |= 0x0100
        out.append(_expiration(message.expires_in))
    if message.message_id:
        flags |= 0x0080
        raw = message.message_id.encode()
        if len(raw) > SHORT_LIMIT:
            raise _too_long("message id", message.message_id)
        out.append(bytes((len(raw),)))
        out.append(raw)
    return flags, b"".join(out)


@lru_cache(1024)
def _short_value(what: str, text: str) -> bytes:
    if len(text.encode()) > SHORT_LIMIT:
        raise _too_long(what, text)
    return _short(text)


def _too_long(what: str, text: str) -> TransportError:
    return TransportError(f"{what} {text[:40]!r}… is longer than {SHORT_LIMIT} bytes")


def _priority(priority: int) -> bytes:
    if not 0 <= priority <= 255:
        raise CapabilityError("rabbitmq", "priorities beyond 0 to 255", f"priority={priority}")
    return bytes((priority,))


def _expiration(expires_in: timedelta) -> bytes:
    if expires_in > LONGEST_EXPIRY:
        raise CapabilityError("rabbitmq", f"an expiry of more than {LONGEST_EXPIRY}", f"expires_in={expires_in}")
    millis = max(0, -(-expires_in // _MILLISECOND))  # rounded up: never gone before its time
    return _short(str(millis))


REFUSALS: tuple[type[AcemqError], ...] = (TransportError, CapabilityError)
"""What `PublishFrames.append_to` may raise."""


# Reading


class Properties(NamedTuple):
    """What a delivery tells; the rest of AMQP's properties are skipped."""

    content_type: str | None
    headers: Headers
    priority: int | None
    reply_to: str | None
    expiration: str | None
    message_id: str | None


NO_PROPERTIES = Properties(None, table.NO_HEADERS, None, None, None, None)


def read_properties(raw: bytes) -> Properties:
    """From the flags on, as in a content header behind the body's size. IndexError or struct.error: broken."""
    (flags,) = u16_at(raw, 0)
    if not flags & 0xAB80:
        return NO_PROPERTIES
    at = 2
    content_type = reply_to = expiration = message_id = None
    headers, priority = table.NO_HEADERS, None
    if flags & 0x8000:
        end = at + 1 + raw[at]
        content_type = text(raw[at + 1 : end])
        at = end
    if flags & 0x4000:  # content encoding
        at += 1 + raw[at]
    if flags & 0x2000:
        end = at + 4 + u32_at(raw, at)[0]
        headers = table.Table(raw[at + 4 : end])
        at = end
    if flags & 0x1000:  # delivery mode
        at += 1
    if flags & 0x0800:
        priority = raw[at]
        at += 1
    if flags & 0x0400:  # correlation id
        at += 1 + raw[at]
    if flags & 0x0200:
        end = at + 1 + raw[at]
        reply_to = text(raw[at + 1 : end])
        at = end
    if flags & 0x0100:
        end = at + 1 + raw[at]
        expiration = text(raw[at + 1 : end])
        at = end
    if flags & 0x0080:
        end = at + 1 + raw[at]
        message_id = raw[at + 1 : end].decode(errors="replace")
        at = end
    if at > len(raw):
        raise IndexError
    return Properties(content_type, headers, priority, reply_to, expiration, message_id)


@lru_cache(4096)
def text(raw: bytes) -> str:
    """Of something that comes again and again."""
    return raw.decode(errors="replace")


@lru_cache(4096)
def route(raw: bytes) -> tuple[str, str]:
    """Exchange and routing key, from two short texts in a row and nothing else."""
    middle = 1 + raw[0]
    if middle + 1 + raw[middle] != len(raw):
        raise IndexError
    return raw[1:middle].decode(errors="replace"), raw[middle + 1 : middle + 1 + raw[middle]].decode(errors="replace")


def expires_in(expiration: str | None) -> timedelta | None:
    try:
        return None if expiration is None else int(expiration) * _MILLISECOND
    except (ValueError, OverflowError):
        return None


def reason(arguments: bytes) -> tuple[int, str]:
    """Code and text of Connection.Close and Channel.Close."""
    return u16_at(arguments, 0)[0], short_at(arguments, 2)


def returned(arguments: bytes) -> tuple[Unroutable, tuple[str, str]]:
    """The broker's words, and where the message was to go, from Basic.Return."""
    code, words = reason(arguments)
    exchange, routing_key = route(arguments[3 + arguments[2] :])
    where = f"queue {routing_key!r}" if not exchange else f"exchange {exchange!r} with key {routing_key!r}"
    return Unroutable(f"{code} {words}: nothing takes messages for {where}", code=code), (exchange, routing_key)


def short_at(data: bytes, at: int) -> str:
    return data[at + 1 : at + 1 + data[at]].decode(errors="replace")
