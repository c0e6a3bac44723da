"""A lane on a socket that is none, takers that record, and a stream as a broker sends it."""

from __future__ import annotations

import asyncio
import random
from typing import Any, NamedTuple

import pamqp.frame
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from acemq.transports.rabbitmq import frames
from acemq.transports.rabbitmq.lane import End, Lane

OURS, GETS, FOREIGN = 1, 2, 3
"""Channels: one whose deliveries and confirms we take, one claimed of which we take no basic.get, and aiormq's own."""


class Socket(asyncio.Transport):
    def __init__(self, protocol: Lane) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def pause_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def close(self) -> None:
        self.abort()


class Taker:
    """Takes deliveries, returns and confirms, and keeps all that it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.ends: list[End] = []

    def method(self, method: int, arguments: bytes) -> bool:
        self.seen.append((method, arguments))
        return method in (frames.BASIC_DELIVER, frames.BASIC_RETURN, frames.BASIC_ACK, frames.BASIC_NACK)

    def content(self, properties: bytes, body: bytes) -> None:
        self.seen.append((properties, body))

    def ended(self, end: End) -> None:
        self.ends.append(end)


class Rig:
    def __init__(self) -> None:
        self.control: list[tuple[int, bytes]] = []
        self.lane = Lane(15, lambda method, arguments: self.control.append((method, arguments)))
        self.socket = Socket(self.lane)
        self.ours, self.gets = Taker(), Taker()
        self.lane.claim(OURS, self.ours)
        self.lane.claim(GETS, self.gets)

    def passed_on(self) -> bytes:
        self.lane.reader.feed_eof()
        return bytes(getattr(self.lane.reader, "_buffer"))  # noqa: B009  # a test may look


def marshal(frame: Any, channel: int) -> bytes:
    return pamqp.frame.marshal(frame, channel)


def content(channel: int, method: Any, body: bytes, split: int = 50, headers: Any = None) -> list[bytes]:
    properties = commands.Basic.Properties(message_id="m", delivery_mode=2, headers=headers)
    header = ContentHeader(body_size=len(body), properties=properties)
    bodies = [marshal(ContentBody(body[at : at + split]), channel) for at in range(0, len(body), split)]
    return [marshal(method, channel), marshal(header, channel), *bodies]


def recorded() -> tuple[bytes, bytes]:
    """A stream as a broker may send it, channels interleaved between frames; and what of it is aiormq's."""
    deliver = commands.Basic.Deliver(consumer_tag="c", delivery_tag=1, redelivered=False, exchange="e", routing_key="k")
    got = commands.Basic.GetOk(delivery_tag=1, redelivered=True, exchange="e", routing_key="k", message_count=3)
    ours = [
        *content(OURS, deliver, b"first"),
        *content(OURS, deliver, b""),
        *content(OURS, commands.Basic.Return(312, "NO_ROUTE", "e", "k"), b"returned"),
        marshal(commands.Basic.Ack(7, True), OURS),
        marshal(commands.Basic.Nack(8, False), OURS),
        *content(OURS, deliver, bytes(range(256)) * 2),
    ]
    theirs = [
        *content(GETS, got, b"got " * 30),
        marshal(commands.Queue.DeclareOk("q", 1, 2), FOREIGN),
        *content(FOREIGN, deliver, b"a delivery of aiormq's own"),
        marshal(Heartbeat(), 0),
        marshal(commands.Connection.Unblocked(), 0),
    ]
    order = random.Random(1)
    # On one channel nothing ever comes between a method and its content, so this one stands in front.
    stream = passed = marshal(commands.Basic.ConsumeOk("c"), OURS)
    first, second = list(ours), list(theirs)
    while first or second:
        source = first if first and (not second or order.random() < 0.6) else second
        frame = source.pop(0)
        stream += frame
        if source is second:
            passed += frame
    return stream, passed


class Played(NamedTuple):
    ours: list[Any]
    gets: list[Any]
    passed: bytes
    control: list[Any]
    end: End | None


def play(*chunks: bytes) -> Played:
    """What becomes of bytes that come in these pieces."""
    rig = Rig()
    for chunk in chunks:
        rig.lane.data_received(chunk)
    return Played(rig.ours.seen, rig.gets.seen, rig.passed_on(), rig.control, rig.lane.end)
