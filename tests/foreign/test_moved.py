"""What the library's own copies look like to another client: CONTRACT.md sections 2, 3, 4 and 7."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, Ack, Itinerary, Message, RetryPolicy, RoutingSlip, SlipForm, Topology
from tests.foreign.client import Field, Foreign, Wire
from tests.waiting import until, until_async

ORIGIN = f"shop@{socket.gethostname()}"
RUN_ID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
COUNT = "x-delivery-count"
"""Added by quorum queues to what they deliver."""
SECONDS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")

BODY = b'{"id": "o-1"} \x00\xff'
FROM_ELSEWHERE: dict[str, Any] = {
    "x-acemq-id": "m-1",
    "x-acemq-type": "order",
    "x-acemq-version": 3,
    "x-acemq-correlation": "c-1",
    "x-acemq-causation": "m-0",
    "x-acemq-attempt": 2,
    "x-acemq-first-seen": 1_700_000_000_000,
    "x-acemq-origin": "billing@elsewhere",
    "x-acemq-claim": "here",
    "x-acemq-shiny": "a name that we do not know",
    "tenant": "acme",
    "n": 5,
    "raw": b"\x00\xff",
    "when": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
    "deep": {"a": [1, "x"]},
}
PUT: dict[str, Any] = {
    "content_type": "application/x-theirs",
    "reply_to": "answers",
    "message_id": "m-1",
    "delivery_mode": 1,
    "correlation_id": "not ours",
    "timestamp": 1_700_000_000,
    "type": "not ours",
    "app_id": "not ours",
}
MOVED = {"content_type": "application/x-theirs", "reply_to": "answers", "message_id": "m-1", "delivery_mode": 2}


async def test_a_dead_letter_keeps_body_and_headers_and_says_why(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    async def fail(message: Message[bytes]) -> None:
        raise LookupError("no such sku")

    foreign.put(queue, BODY, FROM_ELSEWHERE, **PUT)
    async with mq.consume(queue, bytes, fail, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1)
    letter = foreign.take_one(f"{queue}.dlq")
    assert letter.body == BODY
    assert letter.properties == MOVED
    assert (letter.exchange, letter.routing_key) == ("", f"{queue}.dlq")
    failed_at = letter.headers.pop("x-acemq-failed-at")
    assert abs(failed_at - time.time() * 1000) < 10_000
    assert letter.headers == FROM_ELSEWHERE | {
        "x-acemq-error": "exhausted 2 attempts: no such sku",
        "x-acemq-failed-queue": queue,
        "x-acemq-failed-as": "exhausted",
        "x-acemq-failed-with": "builtins.LookupError",
        "x-acemq-failed-by": ORIGIN,
    }


async def test_a_parked_message_keeps_body_and_headers_and_says_why(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    foreign.put(queue, BODY, FROM_ELSEWHERE, **PUT, expiration="60000", priority=3)
    async with mq.consume(queue, bytes, lambda message: Ack.park("look at it")) as consumer:
        await until(lambda: consumer.counters.parked == 1)
    letter = foreign.take_one(f"{queue}.parked")
    assert letter.body == BODY
    assert letter.properties == MOVED, "neither expiration nor priority"
    del letter.headers["x-acemq-failed-at"]
    assert letter.headers == FROM_ELSEWHERE | {
        "x-acemq-error": "the handler parked it: look at it",
        "x-acemq-failed-queue": queue,
        "x-acemq-failed-as": "parked",
        "x-acemq-failed-by": ORIGIN,
    }


async def test_what_cannot_be_decoded_is_parked_byte_for_byte(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    foreign.put(queue, b'{"a": \xff', None, content_type="application/json")
    async with mq.consume(queue, object, lambda message: None) as consumer:
        await until(lambda: consumer.counters.parked == 1)
    letter = foreign.take_one(f"{queue}.parked")
    assert letter.body == b'{"a": \xff'
    assert letter.properties == {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": letter.headers["x-acemq-id"],
    }
    assert letter.headers["x-acemq-error"].startswith("could not be decoded: ")
    assert letter.headers["x-acemq-attempt"] == 1
    assert letter.headers["x-acemq-type"] == queue


async def test_a_retry_writes_the_next_attempt_and_nothing_else_new(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    foreign.put(queue, BODY, FROM_ELSEWHERE, **PUT)

    async def fail(message: Message[bytes]) -> None:
        if message.attempt == 2:
            raise ValueError("boom")
        await asyncio.Event().wait()  # held until the consumer is closed, then given back as it came

    async with mq.consume(queue, bytes, fail, retry=RetryPolicy.fixed(5, timedelta())) as consumer:
        await until(lambda: consumer.counters.retried == 1 and consumer.in_flight == 1)
        await consumer.drain(timedelta())
    await until(lambda: foreign.depth(queue) == 1)
    letter = foreign.take_one(queue)
    assert letter.body == BODY
    assert letter.headers == FROM_ELSEWHERE | {"x-acemq-attempt": 3}
    assert letter.properties == MOVED


async def test_a_copy_on_a_rung_is_the_message_with_its_next_attempt_and_no_expiration(
    mq: AceMQ, foreign: Foreign, wire: Wire, queue: str
) -> None:
    foreign.put(queue, BODY, FROM_ELSEWHERE, **PUT)
    policy = RetryPolicy.fixed(5, timedelta(seconds=40))
    async with mq.consume(queue, bytes, lambda message: Ack.retry("not yet"), retry=policy) as consumer:
        await until(lambda: consumer.counters.retried == 1)
    (letter,) = foreign.look(f"{queue}.retry.40s")
    assert letter.body == BODY
    assert letter.headers == FROM_ELSEWHERE | {"x-acemq-attempt": 3}
    assert letter.properties == MOVED
    assert letter.routing_key == f"{queue}.retry.40s"
    raw = wire.take(f"{queue}.retry.40s")
    assert raw["x-acemq-attempt"] == Field("l", (3).to_bytes(8, "big"))
    assert raw["raw"] == Field("x", b"\x00\xff")


@pytest.mark.parametrize("wait", [0, 40], ids=["in the consumer", "on a rung"])
@pytest.mark.parametrize("levels", [0, 10], ids=["a queue without levels", "a queue with levels"])
async def test_a_retry_keeps_the_priority_whatever_its_queue_makes_of_it(
    mq: AceMQ, foreign: Foreign, name: str, levels: int, wait: int
) -> None:
    await mq.declare(Topology().queue(name, type="classic", priorities=levels))
    foreign.put(name, b"1", {"x-acemq-id": "m-1"}, content_type="application/json", priority=3)
    seen: list[int | None] = []

    async def fail(message: Message[int]) -> Ack | None:
        seen.append(message.delivery.priority)
        return Ack.retry("not yet") if message.attempt == 1 else None

    async with mq.consume(name, int, fail, retry=RetryPolicy.fixed(3, timedelta(seconds=wait))) as consumer:
        await until(lambda: consumer.counters.retried == 1)
        assert consumer.counters.move_failed == 0
        if wait:
            seen.append(foreign.take_one(f"{name}.retry.40s").properties["priority"])
        await until(lambda: len(seen) == 2)
    assert seen == [3, 3]
    foreign.delete(name, f"{name}.dlq", f"{name}.parked", f"{name}.retry.40s")


async def test_a_count_of_deliveries_does_not_follow_a_message_into_another_queue(
    rabbit_url: str, mq: AceMQ, foreign: Foreign, name: str
) -> None:
    """A quorum queue writes its count into what it delivers; in a copy elsewhere it would count for that queue."""
    await mq.declare(Topology().queue(name))
    await mq.send(name, 1)
    for _ in range(20):
        pulled = await mq.pull(name, int, wait=timedelta(seconds=5))
        assert pulled is not None
        await pulled.release()
    handled: list[int | None] = []
    async with mq.consume(name, int, lambda message: Ack.reject("bad"), max_deliveries=None) as consumer:
        await until(lambda: consumer.counters.rejected == 1)
    async with acemq.connect(rabbit_url) as other:
        dead_letters = other.consume(f"{name}.dlq", int, lambda message: handled.append(message.deliveries))
        async with dead_letters as repair:
            await until(lambda: repair.counters.acked + repair.counters.dead_lettered == 1)
    assert handled == [None], "a classic queue counts nothing, and its consumer gives nothing up for that"
    foreign.delete(name, *(f"{name}{suffix}" for suffix in (".dlq", ".parked", ".dlq.dlq", ".dlq.parked")))


async def test_an_expiry_goes_through_a_rung_as_a_header_and_never_as_an_expiration(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    seen = time.time_ns() // 1_000_000
    foreign.put(queue, b"1", {"x-acemq-first-seen": seen}, content_type="application/json", expiration="600000")
    policy = RetryPolicy.fixed(5, timedelta(seconds=40))
    async with mq.consume(queue, int, lambda message: Ack.retry("not yet"), retry=policy) as consumer:
        await until(lambda: consumer.counters.retried == 1)
    letter = foreign.take_one(f"{queue}.retry.40s")
    assert "expiration" not in letter.properties
    assert letter.headers["x-acemq-expires-at"] == seen + 600_000


async def test_a_copy_comes_home_from_its_rung(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    seen: list[tuple[int, bytes, object]] = []

    async def handle(message: Message[bytes]) -> Ack | None:
        seen.append((message.attempt, message.body, message.headers.get("tenant")))
        return Ack.retry("not yet") if message.attempt == 2 else None

    foreign.put(queue, BODY, FROM_ELSEWHERE, **PUT)
    policy = RetryPolicy.fixed(5, timedelta(seconds=1)).wait_in_broker_from(timedelta(seconds=1))
    async with mq.consume(queue, bytes, handle, retry=policy) as consumer:
        await until(lambda: consumer.counters.retried == 1)
        assert foreign.depth(f"{queue}.retry.1s") == 1
        await until(lambda: consumer.counters.acked == 1)
    assert seen == [(2, BODY, "acme"), (3, BODY, "acme")]


async def test_a_replayed_message_is_stamped_and_begins_again(
    mq: AceMQ, foreign: Foreign, wire: Wire, queue: str
) -> None:
    source = f"{queue}.dlq"
    foreign.declare(source)
    dead = FROM_ELSEWHERE | {
        "x-acemq-error": "exhausted 2 attempts: boom",
        "x-acemq-failed-queue": queue,
        "x-acemq-failed-as": "exhausted",
        "x-acemq-failed-at": 1_700_000_000_000,
        "x-acemq-failed-with": "builtins.ValueError",
        "x-acemq-failed-by": "other@host",
        "x-acemq-expires-at": 1_700_000_000_000,
        "x-acemq-replayed-from": "an.old.one",
        "x-acemq-replayed-at": "2020-01-01T00:00:00Z",
        "x-acemq-replay-count": "3",
    }
    foreign.put(source, BODY, dead, **PUT, expiration="60000", priority=3)
    before = datetime.now(UTC).replace(microsecond=0)
    result = await mq.replay(source).run()
    assert result.replayed == 1
    assert foreign.depth(source) == 0
    (letter,) = foreign.look(queue)
    assert letter.body == BODY
    assert letter.properties == MOVED
    assert letter.routing_key == queue
    stamp = letter.headers.pop("acemq-replayed-at")
    assert SECONDS.fullmatch(stamp)
    assert before <= datetime.fromisoformat(stamp) <= datetime.now(UTC)
    assert letter.headers == FROM_ELSEWHERE | {
        "x-acemq-attempt": 1,
        "acemq-replayed-from": source,
        "acemq-replay-count": 4,
    }
    raw = wire.take(queue)
    assert (raw["acemq-replay-count"].kind, raw["acemq-replayed-at"].kind) == ("l", "S")


async def test_what_a_replay_refuses_stays_in_its_place_untouched(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    source = f"{queue}.dlq"
    foreign.declare(source)
    for number in range(5):
        foreign.put(
            source, b"%d" % number, {"x-acemq-id": f"m-{number}", "tenant": "acme" if number in (1, 3) else "b"}
        )
    await mq.replay(source).where(lambda message: message.headers["tenant"] == "acme").run()
    await until_async(lambda: ready(mq, source, 3))
    assert [(letter.body, len(letter.headers)) for letter in foreign.take(source)] == [(b"0", 2), (b"2", 2), (b"4", 2)]
    assert [letter.body for letter in foreign.take(queue)] == [b"1", b"3"]


async def ready(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


# Slips and pipelines


@dataclass
class Order:
    id: str


@dataclass
class Priced:
    id: str
    cents: int


async def price(order: Order) -> Priced:
    return Priced(order.id, 995)


@pytest.fixture
async def pipeline(mq: AceMQ, foreign: Foreign, name: str) -> AsyncIterator[str]:
    yield name
    foreign.delete(*(f"{name}.{step}{suffix}" for step in ("a", "b") for suffix in ("", ".dlq", ".parked")))
    await mq.delete(name, "exchange")


async def test_a_hop_of_a_pipeline_carries_the_declared_slip_and_keeps_its_identity(
    mq: AceMQ, foreign: Foreign, wire: Wire, pipeline: str
) -> None:
    described = mq.pipeline(pipeline, Order).step("a", price).elsewhere("b", Priced)
    async with described.start(only=()) as waiting:
        receipt = await waiting.send(Order("o-1"), headers={"tenant": "acme"})
    (entered,) = foreign.look(f"{pipeline}.a")
    del entered.headers[COUNT]
    assert RUN_ID.fullmatch(entered.headers["x-acemq-route-id"])
    assert entered.headers == {
        "x-acemq-id": receipt.message_id,
        "x-acemq-type": pipeline,
        "x-acemq-version": 1,
        "x-acemq-correlation": receipt.message_id,
        "x-acemq-attempt": 1,
        "x-acemq-first-seen": entered.headers["x-acemq-first-seen"],
        "x-acemq-origin": ORIGIN,
        "x-acemq-route": "a,b",
        "x-acemq-route-position": 0,
        "x-acemq-route-id": entered.headers["x-acemq-route-id"],
        "tenant": "acme",
    }
    assert (entered.exchange, entered.routing_key) == ("", f"{pipeline}.a")
    async with described.start():
        await until(lambda: foreign.depth(f"{pipeline}.b") == 1)
    (hopped,) = foreign.look(f"{pipeline}.b")
    del hopped.headers[COUNT]
    assert hopped.headers == entered.headers | {"x-acemq-route-position": 1}
    assert hopped.body == b'{"id":"o-1","cents":995}'
    assert hopped.properties == {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": receipt.message_id,
    }
    assert (hopped.exchange, hopped.routing_key) == ("", f"{pipeline}.b")
    assert wire.take(f"{pipeline}.b")["x-acemq-route-position"] == Field("l", (1).to_bytes(8, "big"))


async def test_a_hop_of_a_pipeline_carries_the_itinerary_byte_for_byte(
    mq: AceMQ, foreign: Foreign, wire: Wire, pipeline: str
) -> None:
    described = mq.pipeline(pipeline, Order).step("a", price).elsewhere("b", Priced).writing_slip_as(SlipForm.ITINERARY)
    async with described.start() as running:
        await running.send(Order("o-1"))
        await until(lambda: foreign.depth(f"{pipeline}.b") == 1)
    (hopped,) = foreign.look(f"{pipeline}.b")
    text = hopped.headers["acemq-routing-slip"]
    stamp = json.loads(text)["done"][0]["completedAt"]
    assert SECONDS.fullmatch(stamp)
    assert text == (
        f'{{"steps":[{{"exchange":"","routingKey":"{pipeline}.b","name":"b"}}],'
        f'"done":[{{"exchange":"","routingKey":"{pipeline}.a","name":"a","completedAt":"{stamp}"}}]}}'
    )
    assert hopped.headers.keys().isdisjoint({"x-acemq-route", "x-acemq-route-position", "x-acemq-route-id"})
    assert wire.take(f"{pipeline}.b")["acemq-routing-slip"] == Field("S", text.encode())


async def test_a_declared_slip_goes_along_from_queue_to_queue(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    following = f"{queue}.parked"
    foreign.declare(following)
    slip = RoutingSlip.start_of(queue, following)
    receipt = await mq.send_along(slip, {"id": "o-1"}, headers={"tenant": "acme"})
    (sent,) = foreign.look(queue)
    assert sent.headers == {
        "x-acemq-id": receipt.message_id,
        "x-acemq-type": queue,
        "x-acemq-version": 1,
        "x-acemq-correlation": receipt.message_id,
        "x-acemq-attempt": 1,
        "x-acemq-first-seen": sent.headers["x-acemq-first-seen"],
        "x-acemq-origin": ORIGIN,
        "x-acemq-route": f"{queue},{following}",
        "x-acemq-route-position": 0,
        "x-acemq-route-id": slip.run_id,
        "tenant": "acme",
    }

    async def on(message: Message[dict[str, str]]) -> None:
        here = RoutingSlip.of(message)
        assert here is not None
        await mq.forward(here.advance(), message.payload, message.envelope)

    async with mq.consume(queue, dict[str, str], on) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    arrived = foreign.take_one(following)
    assert arrived.headers == sent.headers | {"x-acemq-route-position": 1}
    assert arrived.properties["message_id"] == receipt.message_id
    assert arrived.body == b'{"id":"o-1"}'


async def test_an_itinerary_goes_along_over_exchanges_in_raw_utf8(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    exchange, following = f"{queue}-x", f"{queue}.parked"
    foreign.declare(following)
    await mq.declare(Topology().exchange(exchange, "topic").queue(queue, type="classic").bind(queue, exchange, "to.#"))
    itinerary = Itinerary().then(exchange, "to.check", "prüfen & <so>").then("", following)
    await mq.send_along(itinerary, 1)
    (sent,) = foreign.look(queue)
    assert sent.headers["acemq-routing-slip"] == (
        f'{{"steps":[{{"exchange":"{exchange}","routingKey":"to.check","name":"prüfen & <so>"}},'
        f'{{"exchange":"","routingKey":"{following}"}}]}}'
    )
    assert sent.headers["x-acemq-type"] == "prüfen & <so>"
    assert (sent.exchange, sent.routing_key) == (exchange, "to.check")

    async def on(message: Message[int]) -> None:
        here = Itinerary.of(message)
        assert here is not None
        await mq.forward(here.advance(), message.payload, message.envelope)

    async with mq.consume(queue, int, on) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    arrived = foreign.take_one(following)
    done = json.loads(arrived.headers["acemq-routing-slip"])["done"][0]["completedAt"]
    assert arrived.headers["acemq-routing-slip"] == (
        f'{{"steps":[{{"exchange":"","routingKey":"{following}"}}],'
        f'"done":[{{"exchange":"{exchange}","routingKey":"to.check","name":"prüfen & <so>","completedAt":"{done}"}}]}}'
    )
    unchanged = {name: value for name, value in sent.headers.items() if name != "acemq-routing-slip"}
    assert {name: arrived.headers[name] for name in unchanged} == unchanged
    await mq.delete(exchange, "exchange")


@pytest.mark.slow
async def test_m025_by_default_five_attempts_on_a_queue_that_another_client_has_declared(
    mq: AceMQ, foreign: Foreign, name: str
) -> None:
    attempts: list[int] = []

    def fail(message: Message[int]) -> None:
        attempts.append(message.attempt)
        raise ValueError("boom")

    foreign.declare(name)
    foreign.put(name, b"1")
    async with mq.consume(name, int, fail) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1, within=30)
    (letter,) = foreign.take(f"{name}.dlq")
    assert (letter.body, letter.headers["x-acemq-attempt"]) == (b"1", 5)
    assert letter.headers["x-acemq-error"] == "exhausted 5 attempts: boom"
    assert attempts == [1, 2, 3, 4, 5]
    foreign.delete(name, f"{name}.dlq", f"{name}.parked")
