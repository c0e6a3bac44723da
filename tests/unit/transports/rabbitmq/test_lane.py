"""The tap: however the bytes are cut, each frame reaches whom it is meant for, once and in order."""

from __future__ import annotations

import asyncio
import random

import pytest
from pamqp import commands

from acemq.transport import LostBy
from acemq.transports.rabbitmq import frames
from acemq.transports.rabbitmq.lane import End
from tests.unit.transports.rabbitmq.kit import OURS, Rig, Taker, marshal, play, recorded


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
        rig.lane.write(b"x" * 7_000)
    assert [len(written) for written in rig.socket.written] == [21_000]
    await asyncio.sleep(0)
    assert [len(written) for written in rig.socket.written] == [21_000, 14_000]


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
    _, _, passed, control, _ = play(blocked, blocked[:3], blocked[3:])
    assert [method for method, _ in control] == [frames.CONNECTION_BLOCKED] * 2
    assert passed == blocked * 2
