"""Clients that are not ours: what they read is what stands on RabbitMQ, what they write is what others write.

`Foreign` is pika; its calls block for a moment. pika hides how a header was typed, and cuts the fraction off a float;
`Wire` is a plain socket that hides nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from struct import pack, unpack_from
from typing import Any, NamedTuple, Self, TypeVar, cast
from urllib.parse import urlsplit

import pika
from pamqp import base, commands, frame
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker
from pika.spec import BasicProperties

F = TypeVar("F", bound=base.Frame)

PROPERTIES = (
    *("content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration"),
    *("message_id", "timestamp", "type", "user_id", "app_id", "cluster_id"),
)


@dataclass(frozen=True)
class Letter:
    """A message as pika reads it."""

    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]
    """Those that are set, without the headers."""
    exchange: str
    routing_key: str
    redelivered: bool

    @property
    def id(self) -> str:
        """Of the envelope."""
        return str(self.headers["x-acemq-id"])


class Refused(Exception):
    """The broker has closed the channel."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"{code} {text}")


class Foreign:
    """Another client on the same broker."""

    def __init__(self, url: str) -> None:
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0  # nothing is answered between two calls
        self._connection = pika.BlockingConnection(parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection.is_open:
            self._connection.close()

    # Messages

    def put(
        self,
        queue: str,
        body: bytes = b"{}",
        headers: Mapping[str, Any] | None = None,
        *,
        exchange: str = "",
        **properties: Any,
    ) -> None:
        """Return once the broker has confirmed and routed it. Nothing is added: no header, no property."""
        given: dict[str, Any] = {**properties, "headers": None if headers is None else dict(headers)}
        with self._channel() as channel:
            channel.confirm_delivery()
            channel.basic_publish(exchange, queue, body, BasicProperties(**given), mandatory=True)

    def take(self, queue: str) -> list[Letter]:
        """Everything that is there, first to last; it is gone then."""
        with self._channel() as channel:
            return list(_letters(channel, queue))

    def take_one(self, queue: str) -> Letter:
        """The only message that is there."""
        (letter,) = self.take(queue)
        return letter

    def look(self, queue: str) -> list[Letter]:
        """Everything that is there; it stays."""
        with self._channel() as channel:
            letters = list(_letters(channel, queue, keep=True))
            channel.basic_nack(0, multiple=True)
            return letters

    def depth(self, queue: str) -> int:
        with self._channel() as channel:
            return channel.queue_declare(queue, passive=True).method.message_count

    # Objects

    def declare(self, queue: str, **arguments: Any) -> None:
        """A durable queue with exactly these arguments; `Refused` when it is there with others."""
        with self._channel() as channel:
            channel.queue_declare(queue, durable=True, arguments=arguments or None)

    def declare_exchange(self, name: str, kind: str, **arguments: Any) -> None:
        with self._channel() as channel:
            channel.exchange_declare(name, kind, durable=True, arguments=arguments or None)

    def bind(self, queue: str, exchange: str, routing_key: str) -> None:
        with self._channel() as channel:
            channel.queue_bind(queue, exchange, routing_key)

    def delete(self, *queues: str) -> None:
        with self._channel() as channel:
            for queue in queues:
                channel.queue_delete(queue)

    @contextmanager
    def _channel(self) -> Iterator[BlockingChannel]:
        channel = self._connection.channel()
        try:
            yield channel
        except ChannelClosedByBroker as closed:
            raise Refused(closed.reply_code, closed.reply_text) from None
        finally:
            if channel.is_open:
                channel.close()


def _letters(channel: BlockingChannel, queue: str, *, keep: bool = False) -> Iterator[Letter]:
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=not keep)
        if method is None or properties is None or body is None:
            return
        found = {name: getattr(properties, name) for name in PROPERTIES}
        yield Letter(
            body=body,
            headers=cast("dict[str, Any]", properties.headers or {}),
            properties={name: value for name, value in found.items() if value is not None},
            exchange=method.exchange or "",
            routing_key=method.routing_key or "",
            redelivered=bool(method.redelivered),
        )


class Field(NamedTuple):
    """A value of a header table as it travels."""

    kind: str
    """Its type byte."""
    raw: bytes
    """Its bytes, without the length that stands before some."""


_SIZES = {
    kind: size for size, kinds in {0: "V", 1: "tbB", 2: "su", 4: "Iif", 5: "D", 8: "lLdT"}.items() for kind in kinds
}
_CHANNEL = 1
_METHOD, _HEADER, _BODY = 1, 2, 3


class Wire:
    """A channel to the broker, by hand."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        assert where.hostname is not None
        assert where.port is not None
        self._socket = socket.create_connection((where.hostname, where.port), timeout=10)
        self._file = self._socket.makefile("rb")
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        self._await(commands.Connection.Start)
        self._send(commands.Connection.StartOk({}, "PLAIN", f"\0{where.username}\0{where.password}"), 0)
        tune = self._await(commands.Connection.Tune)
        self._send(commands.Connection.TuneOk(tune.channel_max, tune.frame_max, 0), 0)
        self._send(commands.Connection.Open(), 0)
        self._await(commands.Connection.OpenOk)
        self._send(commands.Channel.Open())
        self._await(commands.Channel.OpenOk)
        self._send(commands.Confirm.Select())
        self._await(commands.Confirm.SelectOk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._send(commands.Connection.Close(200, "bye", 0, 0), 0)
            self._await(commands.Connection.CloseOk)
        self.hang_up()

    def hang_up(self) -> None:
        self._file.close()
        self._socket.close()

    def take(self, queue: str) -> dict[str, Field]:
        """The headers of the first message there, which is gone then."""
        self._send(commands.Basic.Get(queue=queue, no_ack=True))
        self._await(commands.Basic.GetOk)
        kind, payload = self._frame()
        assert kind == _HEADER
        (left,) = unpack_from(">Q", payload, 4)
        (flags,) = unpack_from(">H", payload, 12)
        at = 14
        if flags & 0x8000:
            at += 1 + payload[at]
        if flags & 0x4000:
            at += 1 + payload[at]
        while left:
            kind, part = self._frame()
            assert kind == _BODY
            left -= len(part)
        if not flags & 0x2000:
            return {}
        (size,) = unpack_from(">I", payload, at)
        return fields(payload[at + 4 : at + 4 + size])

    def put(self, queue: str, body: bytes, headers: Mapping[str, Field]) -> None:
        """Return once the broker has confirmed it. No property but the headers."""
        table = b"".join(_entry(name, field) for name, field in headers.items())
        self.put_properties(queue, body, pack(">HI", 0x2000, len(table)) + table)

    def put_properties(self, queue: str, body: bytes, properties: bytes) -> None:
        """The same with flags and properties as they are given, well formed or not."""
        header = pack(">HHQ", 60, 0, len(body)) + properties
        self._send(commands.Basic.Publish(routing_key=queue))
        self._socket.sendall(_framed(_HEADER, header) + _framed(_BODY, body))
        self._await(commands.Basic.Ack)

    def _send(self, method: base.Frame, channel: int = _CHANNEL) -> None:
        self._socket.sendall(frame.marshal(method, channel))

    def _await(self, kind: type[F]) -> F:
        number, payload = self._frame()
        assert number == _METHOD
        raw = _framed(_METHOD, payload)
        method = frame.unmarshal(raw)[2]
        assert isinstance(method, kind), f"{method} came, not {kind}"
        return method

    def _frame(self) -> tuple[int, bytes]:
        kind, _, size = unpack_from(">BHI", self._file.read(7))
        return kind, self._file.read(size + 1)[:-1]


def fields(table: bytes) -> dict[str, Field]:
    """The entries of a table, without the length before it."""
    out: dict[str, Field] = {}
    at = 0
    while at < len(table):
        behind = at + 1 + table[at]
        name = table[at + 1 : behind].decode()
        out[name], at = _field(table, behind)
    return out


def items(array: bytes) -> list[Field]:
    """The values of a list, without the length before it."""
    out: list[Field] = []
    at = 0
    while at < len(array):
        field, at = _field(array, at)
        out.append(field)
    return out


def _field(raw: bytes, at: int) -> tuple[Field, int]:
    kind = chr(raw[at])
    at += 1
    size = _SIZES.get(kind)
    if size is None:
        (size,) = unpack_from(">I", raw, at)
        at += 4
    return Field(kind, raw[at : at + size]), at + size


def _entry(name: str, field: Field) -> bytes:
    text = name.encode()
    length = b"" if field.kind in _SIZES else pack(">I", len(field.raw))
    return bytes((len(text),)) + text + field.kind.encode() + length + field.raw


def _framed(kind: int, payload: bytes) -> bytes:
    return pack(">BHI", kind, 0 if kind == _METHOD else _CHANNEL, len(payload)) + payload + b"\xce"
