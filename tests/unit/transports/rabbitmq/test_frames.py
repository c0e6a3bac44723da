"""Our frames, as pamqp reads them, and pamqp's, as we read them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.header import ContentHeader

from acemq.errors import CapabilityError
from acemq.transport import BadHeader, MessageTooLarge, Outgoing, TransportError
from acemq.transports.rabbitmq import frames
from acemq.transports.rabbitmq.frames import PublishFrames

FRAME_MAX = 4096


def read(raw: bytes) -> list[tuple[int, Any]]:
    out: list[tuple[int, Any]] = []
    while raw:
        size, channel, frame = pamqp.frame.unmarshal(raw)
        out.append((channel, frame))
        raw = raw[size:]
    return out


def message(body: bytes = b"x", **given: Any) -> Outgoing:
    options: dict[str, Any] = {
        "exchange": "e",
        "routing_key": "k",
        "headers": {},
        "message_id": "m",
        "content_type": None,
    }
    return Outgoing(body=body, **options | given)


def written(outgoing: Outgoing) -> tuple[Any, ContentHeader, bytes]:
    out: list[bytes] = []
    size = PublishFrames(7, FRAME_MAX).append_to(out, outgoing)
    raw = b"".join(out)
    found = read(raw)
    assert {channel for channel, _ in found} == {7}
    assert size >= len(raw) - 64
    bodies = [frame for _, frame in found[2:]]
    assert all(isinstance(body, ContentBody) and len(body.value) <= FRAME_MAX - 8 for body in bodies)
    return found[0][1], found[1][1], b"".join(body.value for body in bodies)


@pytest.mark.parametrize("size", [0, 1, FRAME_MAX - 9, FRAME_MAX - 8, FRAME_MAX - 7, 3 * (FRAME_MAX - 8), 20_000])
def test_bodies_are_split_by_the_negotiated_frame_size(size: int) -> None:
    method, header, body = written(message(b"b" * size))
    assert (method.exchange, method.routing_key, method.mandatory, method.immediate) == ("e", "k", True, False)
    assert header.body_size == size
    assert body == b"b" * size


def test_the_properties_are_those_of_the_contract_and_no_others() -> None:
    _, header, _ = written(
        message(
            headers={"x-acemq-id": "m", "n": 1},
            content_type="application/json",
            reply_to="answers",
            priority=5,
            expires_in=timedelta(seconds=1.5),
            mandatory=False,
        )
    )
    found = {name: value for name, value in dict(header.properties).items() if value}
    assert found == {
        "content_type": "application/json",
        "headers": {"x-acemq-id": "m", "n": 1},
        "delivery_mode": 2,
        "priority": 5,
        "reply_to": "answers",
        "expiration": "1500",
        "message_id": "m",
    }
    method, bare, _ = written(message(message_id="", persistent=False, mandatory=False))
    assert {name: value for name, value in dict(bare.properties).items() if value} == {"delivery_mode": 1}
    assert method.mandatory is False


@pytest.mark.parametrize(
    ("expires_in", "text"),
    [
        (timedelta(), "0"),
        (timedelta(microseconds=1), "1"),
        (timedelta(milliseconds=1), "1"),
        (timedelta(seconds=-5), "0"),
        (timedelta(milliseconds=2**32 - 1), "4294967295"),
    ],
)
def test_an_expiry_is_whole_milliseconds_and_never_early(expires_in: timedelta, text: str) -> None:
    assert written(message(expires_in=expires_in))[1].properties.expiration == text


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"headers": {"h": "x" * FRAME_MAX}}, MessageTooLarge),
        ({"body": b"x" * frames.MAX_MESSAGE}, MessageTooLarge),
        ({"headers": {"h": 2**63}}, BadHeader),
        ({"routing_key": "k" * 256}, TransportError),
        ({"routing_key": "é" * 128}, TransportError),
        ({"routing_key": "\ud800"}, TransportError),
        ({"message_id": "m" * 256}, TransportError),
        ({"content_type": "c" * 256}, TransportError),
        ({"reply_to": "r" * 256}, TransportError),
        ({"priority": 256}, CapabilityError),
        ({"priority": -1}, CapabilityError),
        ({"expires_in": timedelta(days=50)}, CapabilityError),
        ({"delay": timedelta(seconds=1)}, CapabilityError),
    ],
)
def test_what_cannot_be_sent_is_refused_and_nothing_of_it_is_written(
    options: dict[str, Any], error: type[Exception]
) -> None:
    out: list[bytes] = []
    with pytest.raises(error):
        PublishFrames(1, FRAME_MAX).append_to(out, message(**options))
    assert out == []


def test_the_size_of_what_is_too_large_is_told_with_its_headers() -> None:
    with pytest.raises(MessageTooLarge) as refused:
        PublishFrames(1, 131_072).append_to([], message(b"x" * (frames.MAX_MESSAGE + 1)))
    assert refused.value.limit == frames.MAX_MESSAGE
    assert refused.value.size > frames.MAX_MESSAGE
    fits = frames.MAX_MESSAGE - (refused.value.size - frames.MAX_MESSAGE - 1)
    PublishFrames(1, 131_072).append_to([], message(b"x" * fits))
    with pytest.raises(MessageTooLarge):
        PublishFrames(1, 131_072).append_to([], message(b"x" * (fits + 1)))


def test_the_small_methods_are_what_pamqp_calls_them() -> None:
    ((_, ack),) = read(frames.ack(3, 9, multiple=True))
    assert (type(ack), ack.delivery_tag, ack.multiple) == (commands.Basic.Ack, 9, True)
    ((_, single),) = read(frames.ack(3, 2**62))
    assert (single.delivery_tag, single.multiple) == (2**62, False)
    ((_, nack),) = read(frames.nack(3, 9))
    assert (type(nack), nack.delivery_tag, nack.multiple, nack.requeue) == (commands.Basic.Nack, 9, False, True)
    ((_, cancel),) = read(frames.cancel(3, "tag"))
    assert (type(cancel), cancel.consumer_tag, cancel.nowait) == (commands.Basic.Cancel, "tag", True)
    ((channel, get),) = read(frames.get(3, "q"))
    assert (channel, type(get), get.queue, get.no_ack) == (3, commands.Basic.Get, "q", False)


texts = st.none() | st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(texts, texts, texts, texts, texts, texts, st.none() | st.integers(0, 255), st.none() | st.just({"a": 1}))
def test_properties_are_read_whichever_are_there(
    content_type: str | None,
    content_encoding: str | None,
    correlation_id: str | None,
    reply_to: str | None,
    message_id: str | None,
    app_id: str | None,
    priority: int | None,
    headers: dict[str, Any] | None,
) -> None:
    properties = commands.Basic.Properties(
        content_type=content_type,
        content_encoding=content_encoding,
        correlation_id=correlation_id,
        reply_to=reply_to,
        message_id=message_id,
        app_id=app_id,
        priority=priority,
        headers=headers,
        expiration="1000",
        delivery_mode=2,
    )
    raw = pamqp.frame.marshal(ContentHeader(body_size=5, properties=properties), 1)
    found = frames.read_properties(raw[7 + 12 : -1])
    assert found.content_type == content_type
    assert found.reply_to == reply_to
    assert found.message_id == message_id
    assert found.priority == priority
    assert found.headers == (headers or {})
    assert frames.expires_in(found.expiration) == timedelta(seconds=1)


@pytest.mark.parametrize(
    ("text", "found"), [(None, None), ("soon", None), ("", None), ("60000", timedelta(minutes=1)), ("9" * 40, None)]
)
def test_an_expiry_that_cannot_be_read_is_none(text: str | None, found: timedelta | None) -> None:
    assert frames.expires_in(text) == found


def test_a_return_names_where_the_message_was_to_go() -> None:
    raw = pamqp.frame.marshal(commands.Basic.Return(312, "NO_ROUTE", "news", "order.placed"), 1)
    error, route = frames.returned(raw[11:-1])
    assert route == ("news", "order.placed")
    assert error.code == 312
    assert "NO_ROUTE" in str(error)
    assert "'news'" in str(error)
