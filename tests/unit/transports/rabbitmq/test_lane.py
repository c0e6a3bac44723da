"""The tap: however the bytes are cut, each frame reaches whom it is meant for, once and in order."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pamqp.frame
import pytest
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from acemq.transport import LostBy
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

    def method(self, method: int, data: bytes, at: int, end: int) -> bool:
        self.seen.append((method, data[at:end]))
        return method in (frames.BASIC_DELIVER, frames.BASIC_RETURN, frames.BASIC_ACK, frames.BASIC_NACK)

    def content(self, properties: bytes, body: bytes) -> None:
        self.seen.append((properties, body))

    def ended(self, end: End) -> None:
        self.ends.append(end)


class Rig:
    def __init__(self) -> None:
        self.control: list[tuple[int, bytes]] = []
        self.lane = Lane(15, lambda method, data, at: self.control.append((method, data[at : at + 8])))
        self.socket = Socket(self.lane)
        self.ours, self.gets = Taker(), Taker()
        self.lane.claim(OURS, self.ours)
        self.lane.claim(GETS, self.gets)

    def passed_on(self) -> bytes:
        self.lane.reader.feed_eof()
        return bytes(getattr(self.lane.reader, "_buffer"))  # noqa: B009  # a test may look


def marshal(frame: Any, channel: int) -> bytes:
    return pamqp.frame.marshal(frame, channel)


def content(channel: int, method: Any, body: bytes, split: int = 50) -> list[bytes]:
    header = ContentHeader(body_size=len(body), properties=commands.Basic.Properties(message_id="m", delivery_mode=2))
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


def play(*chunks: bytes) -> tuple[list[Any], list[Any], bytes, list[Any]]:
    rig = Rig()
    for chunk in chunks:
        rig.lane.data_received(chunk)
    return rig.ours.seen, rig.gets.seen, rig.passed_on(), rig.control


async def test_a_stream_cut_at_any_byte_is_the_same_stream() -> None:
    stream, passed = recorded()
    whole = play(stream)
    assert whole[2] == passed
    assert [seen[1] for seen in whole[0] if isinstance(seen[0], bytes)] == [
        b"first",
        b"",
        b"returned",
        bytes(range(256)) * 2,
    ]
    for at in range(len(stream) + 1):
        assert play(stream[:at], stream[at:]) == whole


async def test_a_stream_cut_at_random_is_the_same_stream() -> None:
    stream, _ = recorded()
    whole = play(stream)
    order = random.Random(2)
    for _ in range(100):
        cuts = sorted(order.randrange(len(stream) + 1) for _ in range(order.randrange(1, 60)))
        assert play(*(stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True))) == whole
    assert play(*(stream[at : at + 1] for at in range(len(stream)))) == whole


async def test_another_protocol_version_passes_on_as_it_is() -> None:
    assert play(b"AMQP\0\0\x09\x01")[2] == b"AMQP\0\0\x09\x01"


async def test_a_frame_without_its_end_is_left_to_aiormq() -> None:
    broken = marshal(commands.Basic.Ack(7, True), OURS)[:-1] + b"\0"
    ours, _, passed, _ = play(broken)
    assert ours == []
    assert passed == broken


async def test_aiormq_is_fed_a_heartbeat_when_all_traffic_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    frame = marshal(commands.Basic.Ack(1, False), OURS)
    rig.lane.data_received(frame)
    now += 8
    rig.lane.data_received(frame + frame[:5])
    now += 1
    rig.lane.data_received(frame[5:])
    assert rig.passed_on() == frames.HEARTBEAT
    assert rig.lane.heard_at == now


async def test_what_is_written_in_one_turn_leaves_as_one_write_in_order() -> None:
    rig = Rig()
    rig.lane.before_flush(lambda: rig.lane.write(b"last"))
    rig.lane.write(b"one")
    rig.lane.out.append(b"two")
    rig.lane.gathered(3)
    assert rig.socket.written == []
    await asyncio.sleep(0)
    assert rig.socket.written == [b"onetwolast"]
    await asyncio.sleep(0)
    assert rig.socket.written == [b"onetwolast"]


async def test_what_is_written_at_once_takes_along_what_was_gathered_before_it() -> None:
    rig = Rig()
    rig.lane.write(b"first ")
    rig.lane.out.append(b"second")
    rig.lane.gathered(6, at_once=True)
    assert rig.socket.written == [b"first second"]
    rig.lane.write(b"third")
    assert rig.socket.written == [b"first second"]
    await asyncio.sleep(0)
    assert rig.socket.written == [b"first second", b"third"]


async def test_gathering_is_bounded() -> None:
    rig = Rig()
    for _ in range(5):
        rig.lane.write(b"x" * 100_000)
    assert [len(written) for written in rig.socket.written] == [300_000]
    await asyncio.sleep(0)
    assert sum(map(len, rig.socket.written)) == 500_000


async def test_back_pressure_is_told_and_its_end_rings() -> None:
    rig = Rig()
    rig.lane.pause_writing()
    assert rig.lane.is_congested
    waiting = asyncio.ensure_future(rig.lane.writable.heard())
    await asyncio.sleep(0)
    rig.lane.resume_writing()
    assert await waiting
    assert not rig.lane.is_congested


async def test_a_closed_channel_ends_its_taker_before_aiormq_can_answer() -> None:
    rig = Rig()
    rig.lane.write(b"on its way")
    close = marshal(commands.Channel.Close(404, "NOT_FOUND - no queue", 60, 20), OURS)
    ack = marshal(commands.Basic.Ack(1, False), OURS)
    rig.lane.data_received(close + ack)
    assert rig.ours.ends == [End(LostBy.CHANNEL, "NOT_FOUND - no queue", 404)]
    assert rig.socket.written == [b"on its way"], "behind aiormq's answer it would cost the connection"
    assert rig.passed_on() == close + ack
    assert rig.gets.ends == []


async def test_a_channel_that_we_close_is_given_up_when_the_broker_agrees() -> None:
    rig = Rig()
    rig.lane.data_received(marshal(commands.Channel.CloseOk(), OURS))
    assert [end.by for end in rig.ours.ends] == [LostBy.CHANNEL]


async def test_the_end_of_the_link_ends_every_taker_once_and_drops_what_is_written_later() -> None:
    rig = Rig()
    rig.lane.write(b"gathered")
    rig.lane.finish(End(LostBy.CONNECTION, "first"))
    rig.lane.write(b"too late")
    await asyncio.sleep(0)
    rig.lane.eof_received()
    await rig.lane.hang_up("second")
    assert rig.socket.written == []
    assert [taker.ends for taker in (rig.ours, rig.gets)] == [[End(LostBy.CONNECTION, "first")]] * 2
    late = Taker()
    rig.lane.claim(9, late)
    assert late.ends == [End(LostBy.CONNECTION, "first")]
    assert rig.socket.is_aborted
    assert rig.lane.closed.done()


async def test_methods_of_channel_0_are_shown_and_passed_on() -> None:
    blocked = marshal(commands.Connection.Blocked("low on memory"), 0)
    _, _, passed, control = play(blocked, blocked[:3], blocked[3:])
    assert [method for method, _ in control] == [frames.CONNECTION_BLOCKED] * 2
    assert passed == blocked * 2
