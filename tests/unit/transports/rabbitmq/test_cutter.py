"""Whatever a broker sends, in whatever pieces: the same deliveries, or one clear end of the link."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from acemq.transport import LostBy, Published
from acemq.transports.rabbitmq import frames
from acemq.transports.rabbitmq.lane import End
from tests.fuzz.received import CONSUMES, OUTSTANDING, PUBLISHES, PULLS, Outcome, receive, receive_cut
from tests.unit.transports.rabbitmq.kit import FOREIGN, OURS, Played, Rig, content, marshal, play, recorded

MOST = 128 * 1024
"""Bytes of a frame as long as none were agreed."""
PLACES = st.lists(st.integers(0, 3_000), max_size=30)


def deliver(tag: int = 1) -> Any:
    return commands.Basic.Deliver(consumer_tag="c", delivery_tag=tag, redelivered=False, exchange="e", routing_key="k")


def header(size: int) -> bytes:
    return marshal(ContentHeader(body_size=size, properties=commands.Basic.Properties(message_id="m")), OURS)


def body(part: bytes) -> bytes:
    return marshal(ContentBody(part), OURS)


# Random splits of a stream


@given(st.lists(st.integers(0, len(recorded()[0])), max_size=60))
async def test_a_recorded_stream_is_the_same_however_it_is_split(places: list[int]) -> None:
    stream, passed = recorded()
    edges = [0, *sorted(places), len(stream)]
    pieces = play(*(stream[begin:end] for begin, end in pairwise(edges)))
    assert pieces == play(stream)
    assert pieces.passed == passed
    assert pieces.end is None


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes], list[Published | None]]:
    """What a broker may send at once to all, the bodies in it, and what becomes of the publishes."""
    bodies = draw(st.lists(st.binary(max_size=200), max_size=8))
    split = draw(st.integers(1, 100))
    consumed = [
        frame for tag, each in enumerate(bodies, 1) for frame in content(CONSUMES, deliver(tag), each, split=split)
    ]
    confirmed: list[bytes] = []
    results: list[Published | None] = [None] * OUTSTANDING
    for tag in draw(st.permutations(range(1, OUTSTANDING + 1))):
        positive, unroutable = draw(st.booleans()), tag % 2 == 0 and draw(st.booleans())
        if unroutable:
            properties = commands.Basic.Properties(message_id=f"m{tag}")
            confirmed += [
                marshal(commands.Basic.Return(312, "NO_ROUTE", "", "gone"), PUBLISHES),
                marshal(ContentHeader(body_size=1, properties=properties), PUBLISHES),
                marshal(ContentBody(b"x"), PUBLISHES),
            ]
        confirmed.append(marshal((commands.Basic.Ack if positive else commands.Basic.Nack)(tag, False), PUBLISHES))
        outcome = Published.UNROUTABLE if unroutable else Published.ROUTED
        results[tag - 1] = outcome if positive else Published.FAILED
    others = draw(st.lists(st.sampled_from([marshal(Heartbeat(), 0), marshal(commands.Queue.PurgeOk(3), FOREIGN)])))
    stream = b""
    queues = [queue for queue in (consumed, confirmed, others) if queue]
    while queues:
        queue = draw(st.sampled_from(queues))
        stream += queue.pop(0)
        queues = [queue for queue in queues if queue]
    return stream, bodies, results


@given(streams(), PLACES)
async def test_any_stream_gives_the_same_deliveries_and_confirms_however_it_is_split(
    sent: tuple[bytes, list[bytes], list[Published | None]], places: list[int]
) -> None:
    stream, bodies, results = sent
    outcome = await receive_cut(stream, places)
    assert [found for _, found, *_ in outcome.delivered] == bodies
    assert outcome.published == results
    assert outcome.ends == [None] * 4


# Random bytes


@given(st.binary(min_size=8, max_size=400), PLACES)
@example(b"HTTP/1.1 400 Bad Request\r\n\r\n", [])
@example(b"AMQP\0\0\x09\x01", [])
@example(b"\x15\x03\x01\0\x02\x02\x28rest", [])
async def test_random_bytes_are_one_clear_end_of_the_link(data: bytes, places: list[int]) -> None:
    outcome = await receive_cut(data, places)
    end = outcome.ends[0]
    if data[0] not in (1, 2, 3, 8):
        assert end is not None
        assert "does not speak AMQP 0-9-1" in end.text


@given(streams(), st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), min_size=1, max_size=5), PLACES)
async def test_a_stream_with_some_bytes_changed_does_what_it_says_or_ends_the_link(
    sent: tuple[bytes, object, object], changes: list[tuple[int, int]], places: list[int]
) -> None:
    stream = bytearray(sent[0])
    for place, value in changes:
        stream[place % len(stream)] = value
    await receive_cut(bytes(stream), places)


@given(st.lists(st.tuples(st.sampled_from((1, 2, 3, 8)), st.integers(0, 4), st.binary(max_size=60))), PLACES)
async def test_frames_of_random_payloads_do_what_they_say_or_end_the_link(
    parts: list[tuple[int, int, bytes]], places: list[int]
) -> None:
    await receive_cut(
        b"".join(
            bytes((kind,)) + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + frames.END
            for kind, channel, payload in parts
        ),
        places,
    )


METHODS = [getattr(frames, name) for name in vars(frames) if name.startswith(("BASIC_", "CHANNEL_", "CONNECTION_"))]


@given(
    st.lists(
        st.tuples(st.sampled_from(METHODS), st.sampled_from((PUBLISHES, CONSUMES, PULLS)), st.binary(max_size=30))
    ),
    PLACES,
)
async def test_methods_with_random_arguments_do_what_they_say_or_end_the_link(
    methods: list[tuple[int, int, bytes]], places: list[int]
) -> None:
    stream = b""
    for method, channel, arguments in methods:
        payload = method.to_bytes(4, "big") + arguments
        stream += b"\x01" + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + frames.END
        if method in frames.WITH_CONTENT:
            empty = ContentHeader(body_size=0, properties=commands.Basic.Properties(message_id="m1"))
            stream += marshal(empty, channel)
    await receive_cut(stream, places)


# Each fault by name


def broken(*chunks: bytes) -> Played:
    """The link has ended for it, and nothing of it was taken or passed on."""
    played = play(*chunks)
    assert played.end is not None
    assert played.end.by is LostBy.CONNECTION
    return played


OTHER = marshal(Heartbeat(), 0)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (marshal(commands.Basic.Ack(7, True), OURS)[:-1] + b"\0", "a frame without its end"),
        (b"\x01\0\1\x7f\xff\xff\xff" + b"x", f"{2**31 - 1} bytes in a frame of type 1, which has 4 to {MOST - 8}"),
        (b"\x01\0\1" + (MOST - 7).to_bytes(4, "big") + b"x", f"{MOST - 7} bytes in a frame of type 1"),
        (b"\x04" + OTHER[1:], "a frame of the unknown type 4"),
        (b"HTTP/1.1", "a frame of the unknown type 72"),
        (body(b"a body"), "a frame of type 3 where one of type 1 is due"),
        (header(3), "a frame of type 2 where one of type 1 is due"),
        (b"\x08\0\1\0\0\0\0\xce", "a frame of type 8 where one of type 1 is due"),
        (marshal(deliver(), OURS) * 2, "a frame of type 1 where one of type 2 is due"),
        (marshal(deliver(), OURS) + body(b"a body"), "a frame of type 3 where one of type 2 is due"),
        (marshal(deliver(), OURS) + header(3) * 2, "a frame of type 2 where one of type 3 is due"),
        (marshal(deliver(), OURS) + header(3) + body(b"four"), "more of a body than it had announced"),
        (marshal(deliver(), OURS) + header(3) + body(b"abc") + body(b"d"), "a frame of type 3 where one of type 1"),
        (marshal(deliver(), OURS) + header(2**29 + 1), f"announced a body of {2**29 + 1} bytes"),
        (marshal(deliver(), OURS) + header(2**63), f"announced a body of {2**63} bytes"),
        (marshal(deliver(), OURS) + b"\x02\0\1\0\0\0\x03abc\xce", "3 bytes in a frame of type 2, which has 12"),
        (b"\x01\0\1\0\0\0\x03abc\xce", "3 bytes in a frame of type 1, which has 4"),
        (b"\x01\0\0\0\0\0\x03abc\xce", "3 bytes in a frame of type 1, which has 4"),
    ],
)
async def test_what_is_not_amqp_ends_the_link_in_clear_words(stream: bytes, said: str) -> None:
    rig = Rig()
    rig.lane.data_received(OTHER + stream)
    rig.lane.data_received(marshal(commands.Basic.Ack(1, False), OURS))
    assert rig.lane.end is not None
    assert (rig.lane.end.by, rig.lane.end.code) == (LostBy.CONNECTION, None)
    assert said in rig.lane.end.text
    assert rig.socket.is_aborted
    assert rig.ours.ends == rig.gets.ends == [rig.lane.end]
    assert not any(isinstance(seen[0], bytes) and seen[1] == b"a body" for seen in rig.ours.seen)
    assert (frames.BASIC_ACK, b"\0" * 7 + b"\x01\0") not in rig.ours.seen, "nothing behind it is believed"


@pytest.mark.parametrize("began", [b"AMQP\0\0\x09\x01", b"HTTP/1.1 400 Bad Request", b"\x15\x03\x01\0\x02\x02\x28\0"])
async def test_a_server_that_speaks_something_else_is_named_by_how_it_begins(began: bytes) -> None:
    end = play(began[:5], began[5:]).end
    assert end is not None
    assert end.text == f"the server does not speak AMQP 0-9-1: it began with {began[:8]!r}"


async def test_bytes_of_messages_are_not_in_the_words() -> None:
    whole = b"".join(content(OURS, deliver(), b"secret secret secret"))
    end = play(whole, b"secret secret").end
    assert end is not None
    assert "secret" not in str(end)


async def test_frames_of_channels_that_nobody_claims_pass_through_untouched() -> None:
    odd = (
        marshal(deliver(), FOREIGN) * 2 + marshal(ContentBody(b"no deliver"), FOREIGN) + b"\x01\0\x03\0\0\0\x04abcd\xce"
    )
    played = play(odd)
    assert played.passed == odd
    assert played.end is None


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([(CONSUMES, deliver(2)), (CONSUMES, deliver(2))], "delivery 2 behind delivery 2"),
        ([(CONSUMES, deliver(2)), (CONSUMES, deliver(1))], "delivery 1 behind delivery 2"),
        ([(PULLS, commands.Basic.GetOk(tag, False, "", "q", 9)) for tag in (1, 2, 3, 4)], "a basic.get that nobody"),
    ],
)
async def test_a_delivery_that_cannot_be_is_refused(sent: list[tuple[int, Any]], said: str) -> None:
    stream = b"".join(frame for channel, method in sent for frame in content(channel, method, b"x"))
    end = (await receive([stream])).ends[0]
    assert end is not None
    assert said in end.text


@pytest.mark.parametrize("cut_off", [1, 3, 8, 12, 14])
@pytest.mark.parametrize(
    ("channel", "method"),
    [(CONSUMES, deliver()), (PULLS, commands.Basic.GetOk(1, False, "", "q", 9)), (PUBLISHES, commands.Basic.Ack(1))],
)
async def test_arguments_that_end_too_soon_are_not_completed_from_what_stands_behind(
    channel: int, method: Any, cut_off: int
) -> None:
    payload = marshal(method, channel)[7:-1]
    payload = payload[: max(len(payload) - cut_off, 4)]
    stream = b"\x01" + channel.to_bytes(2, "big") + len(payload).to_bytes(4, "big") + payload + frames.END
    end = (await receive([stream + marshal(Heartbeat(), 0) * 5])).ends[0]
    assert end is not None
    assert end.text == "the broker sent a frame that ends too soon"


async def test_a_link_lost_in_the_middle_of_a_frame_leaves_nothing_half_delivered() -> None:
    whole = b"".join(content(OURS, deliver(), b"x" * 120, split=50))
    for at in range(1, len(whole)):
        rig = Rig()
        rig.lane.data_received(whole[:at])
        rig.lane.eof_received()
        assert rig.ours.ends == [End(LostBy.CONNECTION, "the server closed the connection")]
        assert not any(isinstance(seen[0], bytes) for seen in rig.ours.seen)
        assert rig.passed_on() == b""


async def test_a_channel_closed_with_publishes_outstanding_gives_each_its_own_fate() -> None:
    text = "ACCESS_REFUSED - write access to exchange 'amq.default' in vhost '/' refused for user 'guest'"
    properties = commands.Basic.Properties(message_id="m6")
    answered = (
        marshal(commands.Basic.Ack(2, True), PUBLISHES)
        + marshal(commands.Basic.Nack(4, False), PUBLISHES)
        + marshal(commands.Basic.Return(312, "NO_ROUTE", "", "gone"), PUBLISHES)
        + marshal(ContentHeader(body_size=0, properties=properties), PUBLISHES)
        + marshal(commands.Basic.Ack(6, False), PUBLISHES)
    )
    routed, failed, refused, unroutable = (
        Published.ROUTED,
        Published.FAILED,
        Published.REFUSED,
        Published.UNROUTABLE,
    )
    for code, said, left in ((403, text, refused), (404, "NOT_FOUND - no exchange 'x'", failed)):
        close = marshal(commands.Channel.Close(code, said, 60, 40), PUBLISHES)
        behind = marshal(commands.Basic.Ack(8, True), PUBLISHES)
        outcome = await receive_cut(answered + close + behind, [])
        assert outcome.published == [routed, routed, left, failed, left, unroutable, left, left]
        assert outcome.ends == [None, End(LostBy.CHANNEL, said, code), None, None]


async def test_confirms_of_what_was_never_published_change_nothing() -> None:
    outcome: Outcome = await receive([marshal(commands.Basic.Ack(OUTSTANDING + 1, False), PUBLISHES)])
    assert outcome.published == [None] * OUTSTANDING


# Memory


async def test_a_frame_that_comes_byte_by_byte_is_kept_once() -> None:
    rig = Rig()
    whole = b"".join(content(OURS, deliver(), b"x" * 100_000, split=100_000))
    tracemalloc.start()
    try:
        for at in range(len(whole) - 1):
            rig.lane.data_received(whole[at : at + 1])
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 150_000
    assert peak < 300_000
    rig.lane.data_received(whole[-1:])
    assert rig.ours.seen[-1][1] == b"x" * 100_000


@pytest.mark.parametrize("part", [b"", b"x"])
async def test_bodies_in_the_smallest_pieces_cost_their_bytes_and_no_more(part: bytes) -> None:
    rig = Rig()
    rig.lane.data_received(marshal(deliver(), OURS) + header(1_000_000))
    piece = body(part) * 1_000
    tracemalloc.start()
    try:
        for _ in range(200):
            rig.lane.data_received(piece)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 200_000 * len(part) * 1.3 + 20_000
