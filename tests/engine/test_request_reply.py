"""Questions and answers, in memory and on RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    ClosedError,
    ConfigurationError,
    DecodeError,
    Diagnostic,
    EncodeError,
    FatalError,
    MemoryIdempotencyStore,
    Message,
    MovableClock,
    PublishRefusedError,
    RequestTimeoutError,
    ResponderError,
    RetryPolicy,
    Topology,
    TopologyMode,
    UnroutableError,
)
from acemq.patterns import request_reply
from acemq.transports.memory import MemoryBroker
from tests.crash.census import objects
from tests.engine.conftest import Connect
from tests.waiting import until, until_async

SECOND = timedelta(seconds=1)


class Wanted(msgspec.Struct):
    sku: str


class Quote(msgspec.Struct):
    sku: str
    cents: int


async def quote(message: Message[Wanted]) -> Quote:
    return Quote(message.payload.sku, len(message.payload.sku))


async def dead_letter(mq: AceMQ, queue: str) -> Message[bytes]:
    pulled = await mq.pull(f"{queue}.dlq", bytes, wait=timedelta(seconds=2))
    assert pulled is not None
    await pulled.accept()
    return pulled


async def test_each_gets_its_own_answer(mq: AceMQ, queue: str) -> None:
    async with mq.respond(queue, Wanted, quote, concurrency=8) as responder:
        answers = await asyncio.gather(*(mq.request("", queue, Wanted("x" * n), Quote) for n in range(50)))
    assert [answer.cents for answer in answers] == list(range(50))
    assert responder.answered == 50
    assert (mq.requests.answered, mq.requests.waiting, mq.requests.unmatched) == (50, 0, 0)


async def test_a_plain_function_may_answer_and_none_is_an_answer(mq: AceMQ, queue: str) -> None:
    async with mq.respond(queue, int, lambda message: None if message.payload else [1, 2]):
        assert await mq.request("", queue, 1, object) is None
        assert await mq.request("", queue, 0, list[int]) == [1, 2]


async def test_o054_late_answers_time_out_and_are_never_anybody_elses(mq: AceMQ, queue: str) -> None:
    async def slow(message: Message[int]) -> int:
        await asyncio.sleep(message.payload * 0.3)  # the work itself
        return message.payload

    async def ask(n: int) -> Any:
        began = time.monotonic()
        try:
            return await mq.request("", queue, n, int, timeout=SECOND)
        except RequestTimeoutError:
            return round(time.monotonic() - began, 1)

    async with mq.respond(queue, int, slow, concurrency=20):
        answers = await asyncio.gather(*(ask(n) for n in range(1, 11)))
        assert answers[:3] == [1, 2, 3]
        assert all(abs(late - 1.0) <= 0.3 for late in answers[3:]), answers
        await until(lambda: mq.requests.unmatched == 7, within=5)
        assert [await mq.request("", queue, 0, int) for _ in range(20)] == [0] * 20
    counted = mq.requests
    assert (counted.waiting, counted.answered, counted.timed_out, counted.unmatched) == (0, 23, 7, 7)


async def test_m109_what_a_responder_raises_is_an_error_at_the_caller_at_once(mq: AceMQ, queue: str) -> None:
    async def fail(message: Message[Wanted]) -> Quote:
        raise LookupError("no such sku")

    async with mq.respond(queue, Wanted, fail) as responder:
        began = time.monotonic()
        with pytest.raises(ResponderError, match="no such sku") as failed:
            await mq.request("", queue, Wanted("x"), Quote)
        assert time.monotonic() - began < 1
        assert failed.value.reason == "no such sku"
        letter = await dead_letter(mq, queue)
    assert letter.attempt == 1
    assert responder.counters.retried == 0
    assert (responder.answered, responder.failed, mq.requests.failed) == (0, 1, 1)


@pytest.mark.parametrize(
    ("answer", "text"),
    [(Ack.accept(), "returned an Ack"), (object(), "cannot be written")],
    ids=["an Ack", "no payload"],
)
async def test_an_answer_that_is_none_is_an_error_at_the_caller(
    mq: AceMQ, queue: str, answer: object, text: str
) -> None:
    async with mq.respond(queue, int, lambda message: answer):
        with pytest.raises(ResponderError, match=text):
            await mq.request("", queue, 1, int)
        await dead_letter(mq, queue)


async def test_a_request_that_cannot_be_read_is_parked_and_the_caller_is_told(mq: AceMQ, queue: str) -> None:
    async with mq.respond(queue, Wanted, quote):
        with pytest.raises(ResponderError, match="sku"):
            await mq.request("", queue, {"nothing": 1}, Quote)
        await until_async(lambda: holds(mq, f"{queue}.parked", 1))


async def holds(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


async def test_an_answer_of_another_type_is_an_error_at_the_caller(mq: AceMQ, queue: str) -> None:
    async with mq.respond(queue, int, lambda message: "text"):
        with pytest.raises(DecodeError, match="int"):
            await mq.request("", queue, 1, int)
    assert (mq.requests.failed, mq.requests.waiting) == (1, 0)


async def test_m108_header_first_then_property_and_without_either_it_is_counted_and_accepted(
    mq: AceMQ, queue: str, name: str
) -> None:
    header, prop = f"{name}-h", f"{name}-p"
    await mq.declare(Topology().queue(header, type="classic").queue(prop, type="classic"))
    try:
        async with mq.respond(queue, int, lambda message: message.payload) as responder:
            await mq.send(queue, 1, headers={"acemq-reply-to": header})
            await mq.send(queue, 2, reply_to=prop)
            await mq.send(queue, 3, headers={"acemq-reply-to": header}, reply_to=prop)
            await mq.send(queue, 4)
            await until(lambda: responder.answered == 3 and responder.unanswerable == 1)
            await until_async(lambda: holds(mq, header, 2))
        found = [(await mq.pull_many(each, int, wait=SECOND)) for each in (header, prop)]
        assert [[pulled.payload for pulled in each] for each in found] == [[1, 3], [2]]
        for pulled in (*found[0], *found[1]):
            await pulled.accept()
        assert (await mq.depth(queue)).ready == 0
        assert not (await mq.depth(f"{queue}.dlq")).ready
    finally:
        await mq.delete(header)
        await mq.delete(prop)


async def test_an_address_that_is_gone_is_counted_said_once_and_not_tried_again(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    async with mq.respond(queue, int, lambda message: 1) as responder:
        for _ in range(3):
            await mq.send(queue, 1, reply_to="acemq.reply.of-somebody-dead")
        await until(lambda: responder.failed == 3)
        await until(lambda: responder.counters.acked == 3)
    assert responder.answered == 0
    assert [(each.name, each.level) for each in diagnostics] == [("acemq.reply.undelivered", "warning")]


async def test_a_request_that_no_queue_takes_fails_at_once(mq: AceMQ, name: str) -> None:
    with pytest.raises(UnroutableError):
        await mq.request("", f"{name}-nowhere", 1, int)
    assert (mq.requests.failed, mq.requests.waiting) == (1, 0)


async def test_one_reply_queue_is_made_at_the_first_request_and_removed_at_the_close(
    connect_anew: Connect, mq: AceMQ, queue: str
) -> None:
    async with mq.respond(queue, int, lambda message: message.reply_to):
        async with connect_anew() as asking:
            names = await asyncio.gather(*(asking.request("", queue, 1, str) for _ in range(20)))
            assert len(set(names)) == 1
            assert names[0].startswith("acemq.reply.")
            assert await mq.exists(names[0])
            assert not await mq.exists(f"{names[0]}.dlq")
            assert names[0] not in str(asking.declared())
        assert not await mq.exists(names[0])


@pytest.fixture
def connect_anew(url: str) -> Connect:
    def connect_anew(**options: Any) -> acemq.Opening[AceMQ]:
        return acemq.connect(url, **options)

    return connect_anew


async def test_a_cancelled_request_is_forgotten_and_its_answer_dropped(mq: AceMQ, queue: str) -> None:
    began, gate = asyncio.Event(), asyncio.Event()

    async def hold(message: Message[int]) -> int:
        began.set()
        await gate.wait()
        return 1

    async with mq.respond(queue, int, hold):
        asking = asyncio.ensure_future(mq.request("", queue, 1, int))
        await began.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert mq.requests.waiting == 0
        gate.set()
        await until(lambda: mq.requests.unmatched == 1)


async def test_a_close_ends_what_waits(connect_anew: Connect, mq: AceMQ, queue: str) -> None:
    asking_mq = await connect_anew()
    asking = asyncio.ensure_future(asking_mq.request("", queue, 1, int))
    await until_async(lambda: holds(mq, queue, 1))
    await asking_mq.close()
    with pytest.raises(ClosedError, match="before the answer"):
        await asking
    await mq.purge(queue)


async def test_a_handler_that_is_drained_still_gets_its_answer(
    connect_anew: Connect, mq: AceMQ, queue: str, name: str
) -> None:
    other = f"{name}-other"
    await mq.declare(Topology().queue(other, type="classic"))
    began, gate, got = asyncio.Event(), asyncio.Event(), list[int]()
    try:
        async with mq.respond(other, int, lambda message: message.payload + 1):
            draining = await connect_anew()

            async def handle(message: Message[int]) -> None:
                began.set()
                await gate.wait()
                got.append(await draining.request("", other, message.payload, int))

            await draining.request("", other, 0, int)  # the reply queue is there
            await draining.consume(queue, int, handle)
            await mq.send(queue, 1)
            await began.wait()
            closing = asyncio.ensure_future(draining.close())
            await asyncio.sleep(0)
            gate.set()
            assert (await closing).finished
        assert got == [2]
    finally:
        for each in (other, f"{other}.dlq", f"{other}.parked"):
            await mq.delete(each)


async def test_a_request_from_within_a_handler_is_caused_by_the_message_in_hand(
    mq: AceMQ, queue: str, name: str
) -> None:
    other = f"{name}-other"
    await mq.declare(Topology().queue(other, type="classic"))
    seen = asyncio.Queue[tuple[str, str | None, str]]()

    async def inner(message: Message[int]) -> int:
        await seen.put((message.correlation_id, message.envelope.causation_id, message.id))
        return message.payload * 2

    async def outer(message: Message[int]) -> int:
        return await mq.request("", other, message.payload, int)

    try:
        async with mq.respond(other, int, inner), mq.respond(queue, int, outer, concurrency=1):
            assert await mq.request("", queue, 4, int, message_id="m-1") == 8
            correlation, causation, identity = await seen.get()
        assert correlation == identity != "m-1"
        assert causation == "m-1"
    finally:
        for each in (other, f"{other}.dlq", f"{other}.parked"):
            await mq.delete(each)


async def test_a_request_to_its_own_queue_with_one_handler_times_out(mq: AceMQ, queue: str) -> None:
    async def ask_myself(message: Message[int]) -> int:
        return await mq.request("", queue, 1, int, timeout=timedelta(milliseconds=200))

    async with mq.respond(queue, int, ask_myself, concurrency=1):
        with pytest.raises(ResponderError, match="no answer to request"):
            await mq.request("", queue, 1, int)


async def test_5_000_requests_without_an_answer_leave_nothing_behind(mq: AceMQ, queue: str) -> None:
    with pytest.raises(RequestTimeoutError) as late:
        await mq.request("", queue, 0, int, timeout=timedelta(milliseconds=1))
    assert late.value.after == timedelta(milliseconds=1)

    async def ask(n: int) -> None:
        with pytest.raises(RequestTimeoutError):
            await mq.request("", queue, n, int, timeout=SECOND)

    before, tasks = objects(), len(asyncio.all_tasks())
    for _ in range(5):
        await asyncio.gather(*(ask(n) for n in range(1_000)))
        await mq.purge(queue)
    assert mq.requests.waiting == 0
    assert mq.requests.timed_out == 5_001
    assert len(asyncio.all_tasks()) <= tasks
    assert sum((objects() - before).values()) < 50


async def test_too_many_at_once_are_refused_before_anything_is_sent(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reply, "MOST_WAITING", 3)
    asking = [asyncio.ensure_future(mq.request("", queue, n, int)) for n in range(3)]
    await until_async(lambda: holds(mq, queue, 3))
    with pytest.raises(PublishRefusedError, match="3 requests wait"):
        await mq.request("", queue, 4, int)
    assert await mq.purge(queue) in (3, None)
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert mq.requests.waiting == 0


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"timeout": timedelta()}, ConfigurationError, "timeout"),
        ({"timeout": 5}, ConfigurationError, "timedelta"),
        ({"reply_to": "x"}, TypeError, "reply_to"),
        ({"correlation_id": "x"}, TypeError, "correlation_id"),
        ({"delay": SECOND}, TypeError, "delay"),
        ({"headers": {"acemq-reply-to": "x"}}, ConfigurationError, "acemq-reply-to"),
        ({"version": 0}, ConfigurationError, "version"),
    ],
)
async def test_bad_input_is_refused_before_there_is_a_reply_queue(
    mq: AceMQ, queue: str, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        await mq.request("", queue, 1, int, **options)
    assert mq._requests._queue is None
    assert (mq.requests.failed, mq.requests.waiting) == (0, 0)


async def test_what_cannot_be_sent_or_read_is_refused_by_name(mq: AceMQ, queue: str) -> None:
    with pytest.raises(EncodeError):
        await mq.request("", queue, object(), int)
    with pytest.raises(acemq.HandlerTypeError, match="names="):
        await mq.request("", queue, 1, acemq.one_of(Quote, Wanted))


async def test_a_responder_takes_no_policy_for_retries(mq: AceMQ, queue: str) -> None:
    given: list[dict[str, Any]] = [{"retry": RetryPolicy.fixed(3, SECOND)}, {"retry_for": lambda message, error: None}]
    for options in given:
        with pytest.raises(ConfigurationError, match="retry="):
            mq.respond(queue, int, lambda message: 1, **options)
    mq.respond(queue, int, lambda message: 1, retry=RetryPolicy.none())


async def test_a_connection_that_makes_nothing_says_what_it_lacks(connect_anew: Connect, queue: str) -> None:
    async with connect_anew(topology=TopologyMode.VERIFY) as verifying:
        with pytest.raises(ConfigurationError, match="reply queue of its own"):
            await verifying.request("", queue, 1, int)


async def test_a_reply_queue_that_somebody_has_deleted_is_made_again(mq: AceMQ, queue: str) -> None:
    async with mq.respond(queue, int, lambda message: message.reply_to):
        address = await mq.request("", queue, 1, str)
        await mq.delete(address)
        await until(lambda: any(each.queue == address and each.state == "recovering" for each in mq.consumers))

        async def answered() -> bool:
            try:
                return await mq.request("", queue, 1, str, timeout=SECOND) == address
            except RequestTimeoutError:
                return False

        await until_async(answered, within=20)


async def test_a_fatal_error_of_a_handler_is_told_as_well(mq: AceMQ, queue: str) -> None:
    async def refuse(message: Message[int]) -> int:
        raise FatalError("never")

    async with mq.respond(queue, int, refuse):
        with pytest.raises(ResponderError, match="never"):
            await mq.request("", queue, 1, int)
        assert (await dead_letter(mq, queue)).failure is not None


# With a store of what was answered


class Asker:
    """Asks with ids of its own choice, and keeps every answer that comes."""

    def __init__(self, mq: AceMQ, queue: str, address: str) -> None:
        self._mq, self._queue, self._address = mq, queue, address

    async def ask(self, n: int, id: str) -> None:
        await self._mq.send(self._queue, n, message_id=id, correlation_id=id, reply_to=self._address)

    async def answers(self) -> list[tuple[str, object]]:
        pulled = await self._mq.pull_many(self._address, object, most=100)
        for each in pulled:
            await each.accept()
        return [(each.correlation_id, each.headers.get("acemq-error", each.payload)) for each in pulled]


@pytest.fixture
async def asker(mq: AceMQ, queue: str) -> AsyncIterator[Asker]:
    address = f"{queue}.answers"
    await mq.declare(Topology().queue(address, type="classic"))
    yield Asker(mq, queue, address)
    await mq.delete(address)


async def test_a_request_that_was_answered_is_not_handled_and_not_answered_again(
    mq: AceMQ, queue: str, asker: Asker
) -> None:
    runs: list[int] = []

    async def double(message: Message[int]) -> int:
        runs.append(message.payload)
        return 2 * message.payload

    async with mq.respond(queue, int, double, idempotency=MemoryIdempotencyStore()) as responder:
        for n in (1, 2, 1, 1):
            await asker.ask(n, id=f"m-{n}")
        await until(lambda: responder.counters.acked == 4)
        assert responder.counters.duplicates == 2
        assert sorted(runs) == [1, 2]
        assert sorted(await asker.answers()) == [("m-1", 2), ("m-2", 4)]
        assert responder.answered == 2
        assert await mq.request("", queue, 3, int) == 6, "whose id is its own"


async def test_a_request_that_failed_may_be_asked_again_under_its_id(mq: AceMQ, queue: str, asker: Asker) -> None:
    runs: list[int] = []

    async def fails_once(message: Message[int]) -> int:
        runs.append(message.payload)
        if len(runs) == 1:
            raise LookupError("no such sku")
        return message.payload

    async with mq.respond(queue, int, fails_once, idempotency=MemoryIdempotencyStore()) as responder:
        await asker.ask(7, id="m")
        await until(lambda: responder.counters.dead_lettered == 1)
        await asker.ask(7, id="m")
        await until(lambda: responder.counters.acked == 1)
    assert runs == [7, 7]
    assert [answer for _, answer in await asker.answers()] == ["no such sku", 7]
    assert (await dead_letter(mq, queue)).id == "m"


async def test_an_answer_that_the_broker_did_not_take_frees_the_claim_and_is_given_by_the_next_run(name: str) -> None:
    clock = MovableClock()
    broker = MemoryBroker.named(name, clock=clock)
    runs: list[int] = []

    async def double(message: Message[int]) -> int:
        runs.append(message.payload)
        return 2 * message.payload

    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("q").queue("answers"))
        store = MemoryIdempotencyStore(clock=clock)
        async with mq.respond("q", int, double, idempotency=store) as responder:
            broker.faults.next("publish", "refuse", match=lambda out: out.routing_key == "answers")
            await mq.send("q", 4, message_id="m", reply_to="answers")
            await clock.advance(10 * SECOND)
            assert runs == [4, 4], "whoever asked has no answer yet, so the work is done again"
            assert (responder.answered, responder.counters.duplicates) == (1, 0)
        assert (await mq.depth("answers")).ready == 1
        assert (await mq.depth("q")).ready == 0
