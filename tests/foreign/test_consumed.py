"""What other libraries write is read as the contract says: CONTRACT.md sections 1, 3, 4, 7 and 9."""

from __future__ import annotations

import struct
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from acemq import AceMQ, Ack, Itinerary, Message, RetryPolicy, Route, RoutingSlip
from acemq.headers import HeaderValue
from tests.foreign.client import Field, Foreign, Wire
from tests.waiting import until

LONG_AGO = 1_700_000_000_123


async def received(mq: AceMQ, queue: str) -> Message[bytes]:
    """The message that is in the queue, through a handler that accepts it."""
    seen: list[Message[bytes]] = []
    async with mq.consume(queue, bytes, seen.append) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    (message,) = seen
    return message


async def test_numbers_that_came_as_text_and_text_that_came_as_bytes_are_read(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    headers = {
        "x-acemq-id": b"m-1",
        "x-acemq-type": "grün".encode(),
        "x-acemq-version": " 2 ",
        "x-acemq-correlation": b"c-\xff",
        "x-acemq-causation": b"m-0",
        "x-acemq-attempt": b"3",
        "x-acemq-first-seen": str(LONG_AGO),
        "x-acemq-origin": b"billing@elsewhere",
        "x-acemq-claim": b"here",
        "x-acemq-error": b"exhausted 2 attempts",
    }
    foreign.put(queue, b"body", headers)
    envelope = (await received(mq, queue)).envelope
    assert (envelope.id, envelope.type, envelope.version, envelope.attempt) == ("m-1", "grün", 2, 3)
    assert (envelope.correlation_id, envelope.causation_id) == ("c-\ufffd", "m-0")
    assert (envelope.origin, envelope.claim, envelope.error) == ("billing@elsewhere", "here", "exhausted 2 attempts")
    assert envelope.age_known
    assert envelope.first_seen == datetime.fromtimestamp(LONG_AGO // 1_000, UTC) + timedelta(milliseconds=123)


@pytest.mark.parametrize(
    "field",
    [
        Field("b", struct.pack(">b", 7)),
        Field("B", struct.pack(">B", 7)),
        Field("s", struct.pack(">h", 7)),
        Field("u", struct.pack(">H", 7)),
        Field("I", struct.pack(">i", 7)),
        Field("i", struct.pack(">I", 7)),
        Field("l", struct.pack(">q", 7)),
        Field("S", b"7"),
        Field("S", b" 7\n"),
        Field("x", b"7"),
    ],
    ids=lambda field: f"{field.kind}{len(field.raw)}",
)
async def test_an_integer_is_read_whatever_its_width(mq: AceMQ, wire: Wire, queue: str, field: Field) -> None:
    wire.put(queue, b"{}", {"x-acemq-attempt": field, "x-acemq-version": field, "n": field})
    message = await received(mq, queue)
    assert (message.attempt, message.envelope.version) == (7, 7)
    text: dict[str, HeaderValue] = {"S": field.raw.decode(), "x": field.raw}
    assert message.headers == {"n": text.get(field.kind, 7)}, "the application's is handed on as it came"


@pytest.mark.parametrize(
    "broken",
    [
        Field("S", b"three"),
        Field("S", b""),
        Field("x", b"\xff"),
        Field("t", b"\x01"),
        Field("V", b""),
        Field("l", struct.pack(">q", 0)),
        Field("l", struct.pack(">q", -5)),
        Field("F", b""),
        Field("A", b""),
    ],
    ids=lambda field: f"{field.kind}-{field.raw.hex()}",
)
async def test_a_number_that_cannot_be_read_takes_its_default_and_stops_nothing(
    mq: AceMQ, wire: Wire, queue: str, broken: Field
) -> None:
    numbers = ("x-acemq-attempt", "x-acemq-version", "x-acemq-first-seen", "x-acemq-route-position")
    wire.put(queue, b"{}", dict.fromkeys(numbers, broken) | {"x-acemq-route": Field("S", b"a,b")})
    message = await received(mq, queue)
    assert (message.attempt, message.envelope.version) == (1, 1)
    assert not message.envelope.age_known
    assert message.age is None
    slip = RoutingSlip.of(message)
    assert slip is not None
    assert slip.current == "a"


async def test_a_message_without_any_header_is_a_first_attempt_named_after_its_routing_key(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    before = datetime.now(UTC) - timedelta(seconds=1)
    foreign.put(queue, b"body", message_id="m-1")
    foreign.put(queue, b"body")
    seen: list[Message[bytes]] = []
    async with mq.consume(queue, bytes, seen.append) as consumer:
        await until(lambda: consumer.counters.acked == 2)
    with_id, without = seen
    assert (with_id.id, with_id.correlation_id) == ("m-1", "m-1")
    assert without.id == without.correlation_id
    assert len(without.id) == 36
    for message in seen:
        envelope = message.envelope
        assert (envelope.type, envelope.version, envelope.attempt) == (queue, 1, 1)
        assert (envelope.origin, envelope.causation_id, envelope.error, envelope.claim) == (None, None, None, None)
        assert before < envelope.first_seen <= datetime.now(UTC)
        assert not envelope.age_known
        assert message.headers == {}


@pytest.mark.parametrize("seen", [None, "yesterday", 0, -1], ids=["missing", "text", "zero", "negative"])
async def test_a_message_of_unknown_age_is_retried_whatever_the_limit(
    mq: AceMQ, foreign: Foreign, queue: str, seen: object
) -> None:
    policy = RetryPolicy.fixed(3, timedelta()).give_up_after(timedelta(milliseconds=1))
    attempts: list[int] = []

    async def fail(message: Message[bytes]) -> Ack | None:
        attempts.append(message.attempt)
        return Ack.retry("boom") if message.attempt == 1 else None

    foreign.put(queue, b"body", {"tenant": "acme"} if seen is None else {"x-acemq-first-seen": seen})
    async with mq.consume(queue, bytes, fail, retry=policy) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    assert attempts == [1, 2]


async def test_reserved_names_are_hidden_from_the_handler_and_others_arrive_as_they_were_sent(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    application: dict[str, Any] = {
        "tenant": "acme",
        "X-ACEMQ-UPPER": "the prefix is compared with its case",
        "n": 2**40,
        "yes": True,
        "raw": b"\x00\xff",
        "nothing": None,
        "when": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
        "list": [1, b"x", {"a": None}],
        "table": {"price": [Decimal("9.95"), Decimal("-9.95")]},
        "acemq-reply-to": "answers",
        "x-schedule-due-at": 5,
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    reserved = {"x-acemq-shiny": 1, "x-acemq-replay-count": "2", "x-acemq-replayed-from": "q.dlq"}
    foreign.put(queue, b"body", application | reserved)
    message = await received(mq, queue)
    assert message.headers == application
    assert {name: type(value) for name, value in message.headers.items()} == {
        name: type(value) for name, value in application.items()
    }
    assert message.wire_headers == application | reserved


async def test_the_address_of_an_answer_is_read_from_the_header_first(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    foreign.put(queue, b"1", {"acemq-reply-to": "header"}, reply_to="property")
    foreign.put(queue, b"2", {"acemq-reply-to": ""}, reply_to="property")
    foreign.put(queue, b"3", {"x-acemq-reply-to": "no address"})
    seen: list[Message[bytes]] = []
    async with mq.consume(queue, bytes, seen.append, concurrency=1) as consumer:
        await until(lambda: consumer.counters.acked == 3)
    assert [message.reply_to for message in seen] == ["header", "property", None]


async def test_a_dead_letter_of_another_library_tells_its_text_and_no_more(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    dead = {"x-acemq-id": "m-1", "x-acemq-attempt": 5, "x-acemq-error": "gave up after 5 attempt(s): boom"}
    foreign.declare(f"{queue}.dlq")
    foreign.put(f"{queue}.dlq", b"body", dead)
    letter = await mq.pull(f"{queue}.dlq", bytes)
    assert letter is not None
    assert letter.attempt == 5
    assert letter.failure is not None
    assert letter.failure.text == "gave up after 5 attempt(s): boom"
    assert (letter.failure.queue, letter.failure.at, letter.failure.how, letter.failure.by) == (None,) * 4
    await letter.accept()


# Replays


@pytest.mark.parametrize(
    ("stamped", "count"),
    [
        ({}, 1),
        ({"x-acemq-replay-count": 3}, 4),
        ({"x-acemq-replay-count": "3"}, 4),
        ({"acemq-replay-count": b"7", "x-acemq-replay-count": 3}, 8),
        ({"acemq-replay-count": "often", "x-acemq-replay-count": 3}, 1),
        ({"acemq-replay-count": 2, "acemq-replayed-at": "2026-02-03T04:05:06.123456+00:00"}, 3),
    ],
    ids=["never", "legacy", "legacy text", "bytes", "unreadable", "microseconds"],
)
async def test_m101_the_stamps_of_other_replays_are_counted_on(
    mq: AceMQ, foreign: Foreign, queue: str, stamped: dict[str, Any], count: int
) -> None:
    foreign.declare(f"{queue}.dlq")
    foreign.put(f"{queue}.dlq", b"body", {"x-acemq-id": "m-1", "x-acemq-attempt": 5, **stamped})
    await mq.replay(f"{queue}.dlq").run()
    letter = foreign.take_one(queue)
    assert letter.headers == {
        "x-acemq-id": "m-1",
        "x-acemq-attempt": 1,
        "acemq-replayed-from": f"{queue}.dlq",
        "acemq-replayed-at": letter.headers["acemq-replayed-at"],
        "acemq-replay-count": count,
    }


async def test_a_dead_letter_without_an_id_is_replayed_under_a_new_one(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    foreign.declare(f"{queue}.dlq")
    foreign.put(f"{queue}.dlq", b"body")
    await mq.replay(f"{queue}.dlq").run()
    letter = foreign.take_one(queue)
    assert len(letter.properties["message_id"]) == 36
    assert letter.body == b"body"


# Slips


@pytest.mark.parametrize(
    ("headers", "slip"),
    [
        ({"x-acemq-route": " a , b ,,c "}, RoutingSlip(("a", "b", "c"), 0, "")),
        ({"x-acemq-route": b"a,b", "x-acemq-route-position": "1"}, RoutingSlip(("a", "b"), 1, "")),
        ({"x-acemq-route": "a", "x-acemq-route-position": -1, "x-acemq-route-id": b"r"}, RoutingSlip(("a",), 0, "r")),
        ({"x-acemq-route": "a,b", "x-acemq-route-position": 9}, RoutingSlip(("a", "b"), 9, "")),
        ({"x-acemq-route": " , ,"}, None),
        ({"x-acemq-route": "", "x-acemq-route-position": 1}, None),
    ],
    ids=["trimmed", "text position", "negative", "past the end", "no names", "empty"],
)
async def test_a_declared_slip_is_read_leniently(
    mq: AceMQ, foreign: Foreign, queue: str, headers: dict[str, Any], slip: RoutingSlip | None
) -> None:
    foreign.put(queue, b"body", headers)
    assert Route.of(await received(mq, queue)) == slip


FROM_PYTHON = (
    '{"steps": [{"exchange": "", "routingKey": "%s.b", "name": "b"}, {"exchange": "x", "routingKey": 7, "more": 1}], '
    '"done": [{"exchange": "", "routingKey": "first", "completedAt": "2026-02-03T04:05:06.123456+00:00"}], "id": "r"}'
)


async def test_an_itinerary_with_spaces_and_foreign_keys_is_followed_and_its_stamps_are_kept(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    slip = FROM_PYTHON % queue
    declared = {"x-acemq-route": "other,route", "x-acemq-route-position": 0, "x-acemq-route-id": "r"}
    foreign.put(queue, b"body", {"acemq-routing-slip": slip.encode(), "x-acemq-id": "m-1", **declared})
    foreign.declare(f"{queue}.parked")

    async def on(message: Message[bytes]) -> None:
        here = Route.of(message)
        assert isinstance(here, Itinerary), "it wins over a declared slip beside it"
        assert [stop.label for stop in here.steps] == ["b", "x/7"]
        moved = here.advance(now=datetime(2026, 2, 3, 5, tzinfo=UTC))
        onward = Itinerary((), moved.done).then("", f"{queue}.parked")
        await mq.forward(onward, message.payload, message.envelope)

    async with mq.consume(queue, bytes, on) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    letter = foreign.take_one(f"{queue}.parked")
    assert letter.headers["acemq-routing-slip"] == (
        f'{{"steps":[{{"exchange":"","routingKey":"{queue}.parked"}}],'
        '"done":[{"exchange":"","routingKey":"first","completedAt":"2026-02-03T04:05:06.123456+00:00"},'
        f'{{"exchange":"","routingKey":"{queue}.b","name":"b","completedAt":"2026-02-03T05:00:00Z"}}]}}'
    )
    assert letter.headers["x-acemq-id"] == "m-1"


@pytest.mark.parametrize(
    "slip",
    [b"", "", 5, "[]", "{", '{"steps":{}}', '{"steps":["a"]}', '{"steps":[],"done":1}'],
    ids=["empty bytes", "empty", "number", "array", "broken", "steps object", "step text", "done number"],
)
async def test_a_malformed_itinerary_is_fatal_also_beside_a_good_slip(
    mq: AceMQ, foreign: Foreign, queue: str, slip: object
) -> None:
    foreign.put(queue, b"body", {"acemq-routing-slip": slip, "x-acemq-route": "a,b", "x-acemq-route-id": "r"})
    runs = 0

    async def on(message: Message[bytes]) -> None:
        nonlocal runs
        runs += 1
        Route.of(message)

    async with mq.consume(queue, bytes, on) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1)
    assert runs == 1
    letter = foreign.take_one(f"{queue}.dlq")
    assert letter.headers["acemq-routing-slip"] == slip
    assert letter.headers["x-acemq-failed-as"] == "fatal"


# Pipelines


@pytest.fixture
async def pipeline(mq: AceMQ, foreign: Foreign, name: str) -> AsyncIterator[str]:
    yield name
    foreign.delete(*(f"{name}.{step}{suffix}" for step in ("a", "b", "c") for suffix in ("", ".dlq", ".parked")))
    await mq.delete(name, "exchange")


@pytest.mark.parametrize(
    ("headers", "goes_to", "route", "position"),
    [
        ({"x-acemq-route": " a , c ", "x-acemq-route-position": "0"}, "c", "a,c", 1),
        ({"x-acemq-route": "a,b,c", "x-acemq-route-position": 2}, "b", "a,b,c", 1),
        ({"x-acemq-route": "c,a,b", "x-acemq-route-position": 0, "x-acemq-route-id": "r"}, "b", "c,a,b", 2),
        ({}, "b", "a,b,c", 1),
    ],
    ids=["trimmed and shorter", "the queue beats the slip", "reordered", "no slip"],
)
async def test_a_step_sends_on_what_another_library_put_into_its_queue(
    mq: AceMQ, foreign: Foreign, pipeline: str, headers: dict[str, Any], goes_to: str, route: str, position: int
) -> None:
    async def add(number: int) -> int:
        return number + 1

    described = mq.pipeline(pipeline, int).step("a", add).elsewhere("b", int).elsewhere("c", int)
    identity = {"x-acemq-id": "m-1", "x-acemq-correlation": "c-1", "x-acemq-attempt": 4, "tenant": "acme"}
    async with described.start():
        foreign.put(f"{pipeline}.a", b"1", headers | identity, content_type="application/json")
        await until(lambda: foreign.depth(f"{pipeline}.{goes_to}") == 1)
    letter = foreign.take_one(f"{pipeline}.{goes_to}")
    assert letter.body == b"2"
    assert (letter.headers["x-acemq-route"], letter.headers["x-acemq-route-position"]) == (route, position)
    assert (letter.id, letter.headers["x-acemq-correlation"], letter.headers["tenant"]) == ("m-1", "c-1", "acme")
    assert letter.headers["x-acemq-attempt"] == 1
    assert "x-acemq-route-id" in letter.headers, "all three are written together"


async def test_a_step_follows_an_itinerary_written_with_spaces(mq: AceMQ, foreign: Foreign, pipeline: str) -> None:
    async def add(number: int) -> int:
        return number + 1

    slip = (
        f'{{"steps": [{{"exchange": "", "routingKey": "{pipeline}.a", "name": "a"}}, '
        f'{{"exchange": "", "routingKey": "{pipeline}.c", "name": "c"}}], "done": []}}'
    )
    described = mq.pipeline(pipeline, int).step("a", add).elsewhere("b", int).elsewhere("c", int)
    async with described.start():
        foreign.put(f"{pipeline}.a", b"1", {"acemq-routing-slip": slip}, content_type="text/json")
        await until(lambda: foreign.depth(f"{pipeline}.c") == 1)
    letter = foreign.take_one(f"{pipeline}.c")
    assert letter.body == b"2"
    assert letter.headers["acemq-routing-slip"].startswith(
        f'{{"steps":[{{"exchange":"","routingKey":"{pipeline}.c","name":"c"}}],"done":[{{"exchange":"",'
    )


async def test_a_flood_of_odd_messages_leaves_the_consumer_alive(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    odd: list[dict[str, Any]] = [
        {"x-acemq-id": {"a": 1}, "x-acemq-type": [1], "x-acemq-correlation": True},
        {"x-acemq-first-seen": 2**62, "x-acemq-attempt": -(2**63)},
        {"x-acemq-first-seen": datetime(2026, 1, 1, tzinfo=UTC), "x-acemq-version": Decimal("1.5")},
        {"x-acemq-attempt": 2**63 - 1, "x-acemq-id": "last"},
        {"x-acemq-expires-at": "soon", "x-delivery-count": "many", "x-death": "not a list"},
        {"\xe9" * 60: "ü" * 300},
    ]
    for headers in odd:
        foreign.put(queue, b"body", headers)
    began = time.monotonic()
    async with mq.consume(queue, bytes, lambda message: Ack.retry("boom"), retry=RetryPolicy.none()) as consumer:
        await until(lambda: foreign.depth(f"{queue}.dlq") == len(odd))
        assert consumer.counters.move_failed == 0
    assert time.monotonic() - began < 10
    for put, letter in zip(odd, foreign.take(f"{queue}.dlq"), strict=True):
        assert letter.body == b"body"
        application = {name: value for name, value in put.items() if not name.startswith(("x-acemq-", "x-delivery-"))}
        assert {name: letter.headers.get(name) for name in application} == application


@pytest.mark.parametrize(
    ("header", "field"),
    [
        ("", Field("S", b"x")),
        ("n" * 255, Field("S", b"x")),
        ("\xe9" * 127, Field("S", b"x")),
        ("nested", Field("F", b"\x00S\x00\x00\x00\x01x")),
        ("when", Field("T", struct.pack(">Q", 2**63))),
        ("when", Field("T", struct.pack(">Q", 2**62))),
        ("text", Field("S", b"\xff")),
    ],
    ids=["no name", "long name", "long name in UTF-8", "no name inside", "after all ages", "after our age", "no UTF-8"],
)
async def test_a_header_that_we_would_not_write_ourselves_stops_no_copy(
    mq: AceMQ, wire: Wire, foreign: Foreign, queue: str, header: str, field: Field
) -> None:
    wire.put(queue, b"body", {header: field})

    async def fail(message: Message[bytes]) -> Ack:
        return Ack.retry("boom") if message.attempt == 1 else Ack.reject("bad")

    async with mq.consume(queue, bytes, fail, retry=RetryPolicy.fixed(3, timedelta())) as consumer:
        await until(lambda: consumer.counters.rejected + consumer.counters.move_failed == 1)
        assert consumer.counters.move_failed == 0
    assert wire.take(f"{queue}.dlq")[header].raw == field.raw
