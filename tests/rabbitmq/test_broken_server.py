"""A server that says what is not AMQP: one clear error, at any moment, and no waiting for more."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from acemq.retry import Backoff
from acemq.transport import NotConnected, Phase, SubscriptionPhase, Transport
from acemq.transports.rabbitmq import transport
from tests.rabbitmq.kit import SOON, Recorder, until
from tests.rabbitmq.speaker import Speaker

QUICK = Backoff(first=timedelta(milliseconds=10), ceiling=timedelta(milliseconds=50))

HUGE = b"\x01\0\0\x7f\xff\xff\xff"
NOT_ENDED = b"\x01\0\0\0\0\0\x04\0\x0a\0\x0a!"
UNREADABLE = b"\x01\0\0\0\0\0\x04\0\x63\0\x63\xce"
"""A frame well cut, of a method that there is not."""
GARBAGE = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "type 72|began with b'HTTP/1.1'"),
    "a frame of 2 GiB": (HUGE + b"x", "2147483647 bytes in a frame|began with"),
    "a frame without its end": (NOT_ENDED, "without its end|began with"),
    "an unknown method": (UNREADABLE, "Unknown method"),
}


@pytest.fixture
async def speaker() -> AsyncIterator[Speaker]:
    async with Speaker() as speaker:
        yield speaker


@pytest.mark.parametrize("asked", ["the header", "Connection.StartOk", "Connection.Open"])
@pytest.mark.parametrize("what", GARBAGE)
async def test_opening_ends_in_clear_words(speaker: Speaker, asked: str, what: str) -> None:
    speaker.says[asked], said = GARBAGE[what]
    one = transport(speaker.url, reconnect=QUICK)
    began = time.monotonic()
    with pytest.raises(NotConnected, match=said):
        await one.open(within=timedelta(seconds=0.5))
    assert time.monotonic() - began < 5
    assert speaker.accepted > 2, "none of the dials waited for more"


async def test_a_server_without_confirms_is_refused_at_once(speaker: Speaker) -> None:
    speaker.properties = {"product": "something else"}
    with pytest.raises(NotConnected, match="no publisher confirms"):
        await transport(speaker.url).open(within=SOON)


async def opened(speaker: Speaker) -> Transport:
    one = transport(speaker.url, reconnect=QUICK)
    await one.open(within=SOON)
    return one


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "the broker sent a frame of the unknown type 72"),
        (HUGE + b"x", "2147483647 bytes in a frame of type 1, which has 4 to 131064"),
        (NOT_ENDED, "without its end"),
        (UNREADABLE, "aiormq cannot read"),
    ],
)
async def test_a_live_link_is_given_up_in_clear_words_and_made_again(
    speaker: Speaker, said: bytes, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    one, sink = await opened(speaker), Recorder()
    await one.subscribe("q", sink, prefetch=5)
    speaker.say(said)
    await until(lambda: one.state.phase is Phase.RECONNECTING, "it is noticed", within=2)
    assert error in (one.state.last_error or "")
    await until(lambda: one.state.phase is Phase.CONNECTED, "it is made again")
    await until(lambda: sink.phases[-1:] == [SubscriptionPhase.ACTIVE], "and subscribed again")
    assert len([record for record in caplog.records if error in record.getMessage()]) == 2, "once a link"
    await one.close(timedelta(seconds=1))


async def test_the_agreed_size_of_a_frame_is_the_limit() -> None:
    async with Speaker(frame_max=8_192) as speaker:
        one = await opened(speaker)
        speaker.say(b"\x01\0\1" + (8_192 - 7).to_bytes(4, "big") + b"x")
        await until(lambda: one.state.phase is Phase.RECONNECTING, "it is noticed", within=2)
        assert "8185 bytes in a frame of type 1, which has 4 to 8184" in (one.state.last_error or "")
        await one.close(timedelta(seconds=1))


async def test_where_no_size_was_agreed_a_frame_may_be_as_large_as_a_body() -> None:
    async with Speaker(frame_max=0) as speaker:
        one = await opened(speaker)
        speaker.say(b"\x08\0\0" + (1 << 20).to_bytes(4, "big") + bytes(1 << 20) + b"\xce")
        speaker.say(HUGE + b"x")
        await until(lambda: one.state.phase is Phase.RECONNECTING, "it is noticed", within=2)
        assert "which has 4 to 536870904" in (one.state.last_error or "")
        await one.close(timedelta(seconds=1))
