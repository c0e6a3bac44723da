"""Many messages for one call, an outcome for each: spec section 4, "Batches"."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    Batch,
    ClosedError,
    ConfigurationError,
    HandlerTypeError,
    HeaderValue,
    Message,
    MovableClock,
    RetryPolicy,
    current_message,
)
from acemq import headers as h
from acemq.envelope import to_millis
from acemq.transport import Outgoing
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until, until_async

JSON = "application/json"
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
AT_ONCE = RetryPolicy.fixed(2, timedelta())


class Noting:
    """Notes the payloads of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    async def __call__(self, batch: Batch[Any]) -> None:
        self.batches.append([message.payload for message in batch])


async def ready(mq: AceMQ, queue: str, count: int) -> None:
    async def is_ready() -> bool:
        return (await mq.depth(queue)).ready == count

    await until_async(is_ready)


async def test_250_messages_come_in_batches_of_at_most_100_in_order_and_the_last_in_time(mq: AceMQ, queue: str) -> None:
    noting = Noting()
    await mq.send_many(queue, range(250))
    async with mq.consume_batches(queue, int, noting, most=100) as consumer:
        await until(lambda: consumer.counters.acked >= 200)
        began = time.monotonic()
        await until(lambda: consumer.counters.acked == 250)
        assert time.monotonic() - began < 1
    assert [payload for batch in noting.batches for payload in batch] == list(range(250))
    assert max(map(len, noting.batches)) == 100
    assert len(noting.batches) <= 4
    assert (await mq.depth(queue)).ready == 0


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def timed(name: str, clock: MovableClock) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}-timed", clock=clock) as mq:
        await mq.declare(acemq.Topology().queue("q"))
        yield mq


async def test_a_batch_is_handed_over_when_it_is_full_or_so_long_after_its_first(
    timed: AceMQ, clock: MovableClock
) -> None:
    noting = Noting()
    async with timed.consume_batches("q", int, noting, most=3, within=timedelta(seconds=10)) as consumer:
        await timed.send_many("q", [1, 2])
        await clock.advance(timedelta(seconds=9))
        assert noting.batches == []
        assert consumer.held == 2
        await clock.advance(timedelta(seconds=1))
        assert noting.batches == [[1, 2]]
        await timed.send_many("q", [3, 4, 5, 6])
        await clock.rest()
        assert noting.batches == [[1, 2], [3, 4, 5]]
        await clock.advance(timedelta(seconds=10))
        assert noting.batches == [[1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("raises", [True, False])
async def test_three_of_ten_settled_by_hand_have_their_own_outcome_and_the_rest_that_of_the_batch(
    mq: AceMQ, queue: str, raises: bool
) -> None:
    attempts: dict[int, list[int]] = {}

    async def load(batch: Batch[int]) -> None:
        for message in batch:
            attempts.setdefault(message.payload, []).append(message.attempt)
        if batch[0].attempt > 1:
            return
        assert len(batch) == 10
        batch.settle(batch[1], Ack.accept())
        batch.settle(batch[4], Ack.reject("no such account"))
        batch.settle(batch[7], Ack.park())
        if raises:
            raise ConnectionError("the database is away")

    await mq.send_many(queue, range(10))
    async with mq.consume_batches(queue, int, load, most=10, within=timedelta(seconds=1), retry=AT_ONCE) as consumer:
        counters = consumer.counters
        wanted = (8, 1, 1, 7 if raises else 0)
        await until(lambda: (counters.acked, counters.rejected, counters.parked, counters.retried) == wanted)
    assert (await mq.depth(queue)).ready == 0
    rejected, parked = await mq.pull(f"{queue}.dlq", int), await mq.pull(f"{queue}.parked", int)
    assert rejected is not None
    assert parked is not None
    assert (rejected.payload, parked.payload) == (4, 7)
    assert rejected.failure is not None
    assert rejected.failure.text == "the handler rejected it: no such account"
    retried = {payload for payload, seen in attempts.items() if seen == [1, 2]}
    assert retried == ({0, 2, 3, 5, 6, 8, 9} if raises else set())


async def test_a_message_is_settled_once_with_an_ack_in_its_own_batch_and_before_the_handler_ends(
    mq: AceMQ, queue: str
) -> None:
    errors: list[str] = []
    kept: list[Batch[int]] = []
    await mq.send(queue, 0)
    elsewhere = await mq.pull(queue, int)
    assert elsewhere is not None

    def refused(batch: Batch[int], message: Message[int], outcome: Any) -> None:
        try:
            batch.settle(message, outcome)
        except (ClosedError, ConfigurationError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    async def load(batch: Batch[int]) -> None:
        kept.append(batch)
        batch.settle(batch[0], Ack.accept())
        refused(batch, batch[0], Ack.accept())
        refused(batch, elsewhere, Ack.accept())
        refused(batch, batch[0], None)

    await mq.send(queue, 1)
    async with mq.consume_batches(queue, int, load, most=1) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    refused(kept[0], kept[0][0], Ack.reject())
    assert [error.split(":")[0] for error in errors] == [
        *("ClosedError", "ConfigurationError", "ConfigurationError", "ClosedError")
    ]


async def test_what_does_not_decode_or_has_expired_never_enters_a_batch(timed: AceMQ, clock: MovableClock) -> None:
    async def send_expiring(payload: bytes, at: timedelta) -> None:
        # As on a transport that cannot expire one message: the instant travels with it.
        expires_at = to_millis(clock.now() + at)
        headers: dict[str, HeaderValue] = {h.ID: "m", h.TYPE: "t", h.EXPIRES_AT: expires_at}
        await timed.outbound.move(
            Outgoing(exchange="", routing_key="q", body=payload, headers=headers, message_id="m", content_type=JSON)
        )

    noting = Noting()
    async with timed.consume_batches("q", int, noting, most=10, within=HOUR) as consumer:
        await timed.send("q", 1)
        await timed.send("q", "two")
        await send_expiring(b"3", timedelta())
        await send_expiring(b"4", timedelta(minutes=59))
        await clock.rest()
        assert (consumer.counters.parked, consumer.counters.expired, consumer.held) == (1, 1, 2)
        await clock.advance(HOUR)
        assert noting.batches == [[1]]
        assert (consumer.counters.expired, consumer.counters.dead_lettered, consumer.counters.acked) == (2, 2, 1)


async def test_a_batch_has_no_current_message_and_what_it_publishes_no_correlation_of_it(mq: AceMQ, queue: str) -> None:
    current: list[object] = []

    async def outer(message: Message[int]) -> None:
        # Started from within a handler: its message is not the batch's either.
        await mq.consume_batches(f"{queue}.dlq", int, inner, most=1, declare=False)

    async def inner(batch: Batch[int]) -> None:
        current.append(current_message())
        await mq.send(f"{queue}.parked", "from a batch")

    async with mq.consume(queue, int, outer) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
        await mq.send(f"{queue}.dlq", 1, correlation_id="theirs")
        await until(lambda: bool(current))
        sent = await mq.pull(f"{queue}.parked", str, wait=timedelta(seconds=5))
    assert current == [None]
    assert sent is not None
    assert sent.correlation_id not in ("theirs", "")
    await sent.accept()


async def test_a_stop_gives_back_a_batch_that_was_not_handed_over(url: str, mq: AceMQ, queue: str) -> None:
    noting = Noting()
    async with acemq.connect(url) as busy:
        consumer = await busy.consume_batches(queue, int, noting, most=10, within=HOUR)
        await mq.send_many(queue, range(4))
        await until(lambda: consumer.held == 4)
        drained = await busy.close()
    assert (drained.finished, drained.given_back, noting.batches) == (True, 4, [])
    again = await mq.pull_many(queue, int, wait=timedelta(seconds=2))
    assert [(each.payload, each.attempt) for each in again] == [(n, 1) for n in range(4)]


async def test_a_pause_hands_over_nothing_and_takes_the_batch_up_again(timed: AceMQ, clock: MovableClock) -> None:
    noting = Noting()
    async with timed.consume_batches("q", int, noting, most=3, within=timedelta(seconds=1)) as consumer:
        await timed.send_many("q", [1, 2])
        await clock.rest()
        consumer.pause()
        await clock.advance(timedelta(seconds=30))
        assert noting.batches == []
        assert consumer.held == 2
        consumer.resume()
        await clock.advance(timedelta(seconds=1))
        assert noting.batches == [[1, 2]]


async def test_concurrency_counts_batches_and_prefetch_fills_them_all(mq: AceMQ, queue: str) -> None:
    gate, sizes = asyncio.Event(), list[int]()

    async def load(batch: Batch[int]) -> None:
        sizes.append(len(batch))
        await gate.wait()

    await mq.send_many(queue, range(100))
    async with mq.consume_batches(queue, int, load, most=20, concurrency=3, prefetch=5) as consumer:
        await until(lambda: consumer.in_flight == 3)
        assert sizes == [20, 20, 20]
        assert (await mq.depth(queue)).ready == 40
        gate.set()
        await until(lambda: consumer.counters.acked == 100)


async def test_the_time_limit_is_the_batch_s_and_costs_each_message_an_attempt(mq: AceMQ, queue: str) -> None:
    async def sleepy(batch: Batch[int]) -> None:
        if batch[0].attempt == 1:
            await asyncio.sleep(30)

    limit = timedelta(milliseconds=100)
    await mq.send_many(queue, range(3))
    async with mq.consume_batches(
        queue, int, sleepy, most=3, within=20 * SECOND, handler_timeout=limit, retry=AT_ONCE
    ) as consumer:
        await until(lambda: consumer.counters.acked == consumer.counters.retried == 3)


async def test_a_plain_function_handles_batches_in_a_thread_and_its_wrong_answer_is_fatal_for_each(
    mq: AceMQ, queue: str
) -> None:
    def load(batch: Batch[int]) -> Any:
        return {"loaded": sum(message.payload for message in batch)}

    await mq.send_many(queue, [1, 2])
    async with mq.consume_batches(queue, int, load, most=2) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 2)
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert "'load' returned dict" in letter.failure.text


async def test_a_batch_handler_may_close_the_connection_and_publish_while_it_closes(
    url: str, mq: AceMQ, queue: str
) -> None:
    busy, closed = await acemq.connect(url), asyncio.Event()

    async def last(batch: Batch[int]) -> None:
        closing = asyncio.ensure_future(busy.close())
        await asyncio.sleep(0)
        await busy.send(f"{queue}.dlq", "from a batch")
        await closing
        closed.set()

    await busy.consume_batches(queue, int, last, most=1)
    await mq.send(queue, 1)
    await asyncio.wait_for(closed.wait(), 5)
    await ready(mq, queue, 1)
    assert (await mq.depth(f"{queue}.dlq")).ready == 1


async def test_a_listener_of_a_message_in_a_batch_is_told_its_own_outcome(mq: AceMQ, queue: str) -> None:
    told: list[str] = []

    async def load(batch: Batch[int]) -> None:
        for message in batch:
            message.when_settled(lambda handled: told.append(handled.outcome))
        batch.settle(batch[1], Ack.reject())

    await mq.send_many(queue, [1, 2])
    async with mq.consume_batches(queue, int, load, most=2):
        await until(lambda: len(told) == 2)
    assert sorted(told) == ["acked", "rejected"]


async def test_what_is_delivered_again_and_again_is_a_batch_of_its_own(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    noting = Noting()
    async with acemq.connect(f"memory://{broker.name}") as mq:
        await mq.declare(acemq.Topology().queue("q", type="quorum"))
        await mq.send_many("q", [1, 2])
        for _ in range(2):
            for held in await mq.pull_many("q", int):
                await held.release()
        await mq.send_many("q", [3, 4])
        async with mq.consume_batches("q", int, noting, most=10, within=timedelta(milliseconds=50)) as consumer:
            await until(lambda: consumer.counters.acked == 4)
    assert noting.batches == [[1], [2], [3, 4]]


def takes_messages(message: Message[int]) -> None: ...
def takes_texts(batch: Batch[str]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "options", "error", "match"),
    [
        (takes_messages, {}, HandlerTypeError, "is given a Batch"),
        (takes_texts, {}, HandlerTypeError, r"Batch\[str\].*int"),
        (Noting(), {"most": 0}, ConfigurationError, "most=0"),
        (Noting(), {"most": 40_000, "concurrency": 2}, ConfigurationError, "65,535"),
        (Noting(), {"within": timedelta()}, ConfigurationError, "within"),
        (Noting(), {"concurrency": 0}, ConfigurationError, "concurrency=0"),
        (Noting(), {"wihtin": 1}, TypeError, "wihtin"),
    ],
)
async def test_what_makes_no_batches_is_refused_at_the_call(
    mq: AceMQ, queue: str, handler: Any, options: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        mq.consume_batches(queue, int, handler, **options)
