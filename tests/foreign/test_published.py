"""What a publish puts on the wire, read by another client: CONTRACT.md section 1."""

from __future__ import annotations

import re
import socket
import struct
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, Envelope, HeaderValue, Message, MsgpackCodec, RetryPolicy, TextCodec, Topology
from tests.foreign.client import Field, Foreign, Wire, fields, items
from tests.waiting import until

HOST = socket.gethostname()
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


async def test_a_send_without_options_writes_the_envelope_and_nothing_else(
    mq: AceMQ, foreign: Foreign, wire: Wire, queue: str
) -> None:
    before = time.time_ns() // 1_000_000
    receipt = await mq.send(queue, {"id": "o-1", "größe": 1.5})
    after = time.time_ns() // 1_000_000
    (letter,) = foreign.look(queue)
    assert UUID4.fullmatch(receipt.message_id)
    assert before <= letter.headers["x-acemq-first-seen"] <= after
    assert letter.headers == {
        "x-acemq-id": receipt.message_id,
        "x-acemq-type": queue,
        "x-acemq-version": 1,
        "x-acemq-correlation": receipt.message_id,
        "x-acemq-attempt": 1,
        "x-acemq-first-seen": letter.headers["x-acemq-first-seen"],
        "x-acemq-origin": f"shop@{HOST}",
    }
    assert letter.properties == {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": receipt.message_id,
    }
    assert letter.body == '{"id":"o-1","größe":1.5}'.encode()
    assert (letter.exchange, letter.routing_key) == ("", queue)
    assert {name: field.kind for name, field in wire.take(queue).items()} == {
        "x-acemq-id": "S",
        "x-acemq-type": "S",
        "x-acemq-version": "l",
        "x-acemq-correlation": "S",
        "x-acemq-attempt": "l",
        "x-acemq-first-seen": "l",
        "x-acemq-origin": "S",
    }


async def test_every_option_of_a_publish_is_where_the_contract_says(mq: AceMQ, foreign: Foreign, name: str) -> None:
    topology = Topology().exchange(name, "topic").queue(name, type="classic", priorities=10).bind(name, name, "order.#")
    await mq.declare(topology)
    await mq.publish(
        name,
        "order.placed",
        {"id": "o-1"},
        headers={"tenant": "acme", "acemq-reply-to": "answers"},
        message_id="m-1",
        type="order.placed.v2",
        version=2,
        correlation_id="c-1",
        causation_id="m-0",
        claim="where/the/body/lies",
        persistent=False,
        priority=7,
        expires_in=timedelta(minutes=1),
        reply_to="answers",
    )
    letter = foreign.take_one(name)
    seen = letter.headers.pop("x-acemq-first-seen")
    assert abs(seen - time.time() * 1000) < 5_000
    assert letter.headers == {
        "x-acemq-id": "m-1",
        "x-acemq-type": "order.placed.v2",
        "x-acemq-version": 2,
        "x-acemq-correlation": "c-1",
        "x-acemq-causation": "m-0",
        "x-acemq-claim": "where/the/body/lies",
        "x-acemq-attempt": 1,
        "x-acemq-origin": f"shop@{HOST}",
        "tenant": "acme",
        "acemq-reply-to": "answers",
    }
    assert letter.properties == {
        "content_type": "application/json",
        "delivery_mode": 1,
        "priority": 7,
        "reply_to": "answers",
        "expiration": "60000",
        "message_id": "m-1",
    }
    assert (letter.exchange, letter.routing_key) == (name, "order.placed")
    foreign.delete(name)
    await mq.delete(name, "exchange")


async def test_an_envelope_is_written_field_by_field(mq: AceMQ, foreign: Foreign, wire: Wire, queue: str) -> None:
    envelope = Envelope.of(
        "order",
        now=datetime(2026, 2, 3, 4, 5, 6, 789_000, tzinfo=UTC),
        id="m-1",
        version=3,
        correlation_id="c-1",
        causation_id="m-0",
        attempt=4,
        origin="other@host",
        error="exhausted 3 attempts: boom",
        claim="here",
        route="a,b",
        route_position=0,
        route_id="r-1",
        headers={"tenant": "acme"},
    )
    await mq.send(queue, b"\x00\xff", envelope=envelope, content_type="image/x-mine")
    (letter,) = foreign.look(queue)
    assert letter.headers == {
        "x-acemq-id": "m-1",
        "x-acemq-type": "order",
        "x-acemq-version": 3,
        "x-acemq-correlation": "c-1",
        "x-acemq-causation": "m-0",
        "x-acemq-attempt": 4,
        "x-acemq-first-seen": 1770091506789,
        "x-acemq-origin": "other@host",
        "x-acemq-error": "exhausted 3 attempts: boom",
        "x-acemq-claim": "here",
        "x-acemq-route": "a,b",
        "x-acemq-route-position": 0,
        "x-acemq-route-id": "r-1",
        "tenant": "acme",
    }
    assert letter.body == b"\x00\xff"
    assert letter.properties == {"content_type": "image/x-mine", "delivery_mode": 2, "message_id": "m-1"}
    raw = wire.take(queue)
    assert raw["x-acemq-route-position"] == Field("l", bytes(8))
    assert raw["x-acemq-route"] == Field("S", b"a,b")


async def test_an_optional_value_that_is_empty_is_no_header(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    await mq.send(queue, 1, causation_id="", claim="", correlation_id="", message_id="", reply_to="")
    letter = foreign.take_one(queue)
    assert letter.headers.keys().isdisjoint({"x-acemq-causation", "x-acemq-claim", "x-acemq-error", "x-acemq-route"})
    assert UUID4.fullmatch(letter.id)
    assert letter.headers["x-acemq-correlation"] == letter.id
    assert letter.properties == {"content_type": "application/json", "delivery_mode": 2, "message_id": letter.id}


@pytest.mark.parametrize(
    ("payload", "options", "body", "content_type"),
    [
        ({"a": [1, None]}, {}, b'{"a":[1,null]}', "application/json"),
        ("grün", {}, '"grün"'.encode(), "application/json"),
        ("grün", {"codec": TextCodec()}, "grün".encode(), "text/plain; charset=utf-8"),
        (b"\x00\xff{", {}, b"\x00\xff{", "application/octet-stream"),
        (b"<a/>", {"content_type": "application/xml"}, b"<a/>", "application/xml"),
        ({"a": 1}, {"codec": MsgpackCodec()}, b"\x81\xa1a\x01", "application/msgpack"),
        (b"", {}, b"", "application/octet-stream"),
    ],
    ids=["json", "text as json", "text", "bytes", "labelled bytes", "msgpack", "nothing"],
)
async def test_a_body_is_what_its_codec_wrote_byte_for_byte(
    mq: AceMQ, foreign: Foreign, queue: str, payload: object, options: Any, body: bytes, content_type: str
) -> None:
    await mq.send(queue, payload, **options)
    letter = foreign.take_one(queue)
    assert (letter.body, letter.properties["content_type"]) == (body, content_type)


async def test_a_body_of_several_frames_arrives_whole(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    body = bytes(range(256)) * 4_096
    await mq.send(queue, body)
    assert foreign.take_one(queue).body == body


def integer(value: int) -> Field:
    return Field("l", struct.pack(">q", value))


TYPED: dict[str, tuple[HeaderValue, Field]] = {
    "zero": (0, integer(0)),
    "octet": (128, integer(128)),
    "short": (65_535, integer(65_535)),
    "long": (2**31, integer(2**31)),
    "lowest": (-(2**63), integer(-(2**63))),
    "highest": (2**63 - 1, integer(2**63 - 1)),
    "yes": (True, Field("t", b"\x01")),
    "no": (False, Field("t", b"\x00")),
    "half": (0.5, Field("d", struct.pack(">d", 0.5))),
    "tenth": (0.1, Field("d", struct.pack(">d", 0.1))),
    "text": ("grün", Field("S", "grün".encode())),
    "empty": ("", Field("S", b"")),
    "bytes": (b"\x00\xff", Field("x", b"\x00\xff")),
    "nothing": (None, Field("V", b"")),
    "when": (datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC), Field("T", struct.pack(">Q", 1770091506))),
}
NESTED: HeaderValue = {"list": [1, b"x", None, [True]], "table": {"half": 0.5}}


def check_types(raw: dict[str, Field]) -> None:
    assert {name: raw[name] for name in TYPED} == {name: field for name, (_, field) in TYPED.items()}
    assert raw["deep"].kind == "F"
    deep = fields(raw["deep"].raw)
    assert [field.kind for field in items(deep["list"].raw)] == ["l", "x", "V", "A"]
    assert fields(deep["table"].raw) == {"half": Field("d", struct.pack(">d", 0.5))}


async def test_a_header_keeps_its_amqp_type_also_through_a_retry_and_a_dead_letter(
    mq: AceMQ, wire: Wire, queue: str
) -> None:
    headers: dict[str, HeaderValue] = {name: value for name, (value, _) in TYPED.items()} | {"deep": NESTED}
    await mq.send(queue, 1, headers=headers)
    check_types(wire.take(queue))

    async def fail(message: Message[int]) -> None:
        raise ValueError("boom")

    await mq.send(queue, 1, headers=headers)
    async with mq.consume(queue, int, fail, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1)
        assert consumer.counters.retried == 1
    check_types(wire.take(f"{queue}.dlq"))


async def test_a_batch_and_a_publisher_write_as_a_single_publish_does(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    await mq.send(queue, "one", headers={"tenant": "acme"})
    await mq.send_many(queue, ["one"], headers={"tenant": "acme"})
    await mq.publish_many("", queue, ["one"], headers={"tenant": "acme"})
    await mq.publisher("", queue, str, headers={"tenant": "acme"}).publish("one")
    letters = foreign.take(queue)
    assert len({letter.id for letter in letters}) == 4
    for letter in letters:
        for unique in ("x-acemq-id", "x-acemq-correlation", "x-acemq-first-seen"):
            del letter.headers[unique]
        del letter.properties["message_id"]
    assert letters == letters[:1] * 4


async def test_m022_what_a_handler_publishes_carries_correlation_and_cause_and_nothing_else_of_its_message(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    foreign.put(
        queue,
        b'"A"',
        {
            "x-acemq-id": "a",
            "x-acemq-correlation": "c",
            "x-acemq-attempt": 3,
            "x-acemq-error": "exhausted 3 attempts: boom",
            "x-acemq-claim": "here",
            "x-acemq-route": "one,two",
            "x-acemq-route-position": 1,
            "x-acemq-route-id": "r",
            "acemq-replayed-from": f"{queue}.dlq",
            "acemq-replay-count": 2,
            "tenant": "acme",
        },
        content_type="application/json",
    )

    async def answer(message: Message[str]) -> None:
        await mq.send(f"{queue}.parked", "B")

    async with mq.consume(queue, str, answer) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    letter = foreign.take_one(f"{queue}.parked")
    assert letter.id not in ("a", "c")
    assert letter.headers == {
        "x-acemq-id": letter.id,
        "x-acemq-type": f"{queue}.parked",
        "x-acemq-version": 1,
        "x-acemq-correlation": "c",
        "x-acemq-causation": "a",
        "x-acemq-attempt": 1,
        "x-acemq-first-seen": letter.headers["x-acemq-first-seen"],
        "x-acemq-origin": f"shop@{HOST}",
    }


async def test_a_connection_without_a_name_calls_itself_acemq(rabbit_url: str, foreign: Foreign, queue: str) -> None:
    async with acemq.connect(rabbit_url) as plain:
        await plain.send(queue, 1)
    assert foreign.take_one(queue).headers["x-acemq-origin"] == f"acemq@{HOST}"
