"""Stop is: stop fetching, wait, cancel, give back, within one budget. Cases M-046 … M-051, O-09."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Literal

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    Batch,
    ClosedError,
    ConsumerState,
    Diagnostic,
    Message,
    Receiving,
    RetryPolicy,
    Topology,
)
from acemq.telemetry import RUNG_MISSING
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until, until_async


async def all_back(mq: AceMQ, queue: str, count: int) -> None:
    async def ready() -> bool:
        return (await mq.depth(queue)).ready == count

    await until_async(ready)


async def test_m046_six_busy_consumers_close_within_the_budget_and_their_messages_come_again(
    url: str, mq: AceMQ, queue: str
) -> None:
    busy = await acemq.connect(url)

    async def slow(message: Message[int]) -> None:
        await asyncio.sleep(10)

    await mq.send_many(queue, range(6))
    consumers = [await busy.consume(queue, int, slow, concurrency=1, prefetch=1) for _ in range(6)]
    await until(lambda: all(consumer.in_flight == 1 for consumer in consumers))
    began = time.monotonic()
    drained = await busy.close(timedelta(milliseconds=500))
    assert time.monotonic() - began < 1.5
    assert (drained.finished, drained.abandoned, dict(drained.queues)) == (False, 6, {queue: 6})
    await all_back(mq, queue, 6)


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_m047_what_was_fetched_and_not_started_goes_back_with_attempt_and_order(
    url: str, mq: AceMQ, name: str, kind: Literal["classic", "quorum"]
) -> None:
    gate, queue = asyncio.Event(), name
    await mq.declare(Topology().queue(queue, type=kind))

    async def wait(message: Message[int]) -> None:
        await gate.wait()

    await mq.send_many(queue, range(100))
    async with acemq.connect(url) as busy:
        consumer = await busy.consume(queue, int, wait, concurrency=1, prefetch=100)
        await until(lambda: consumer.in_flight == 1 and consumer.held == 99)
        stopping = asyncio.ensure_future(busy.close(timedelta(seconds=5)))
        await asyncio.sleep(0)
        gate.set()
        drained = await stopping
    assert (drained.finished, drained.handled, drained.given_back) == (True, 1, 99)
    await all_back(mq, queue, 99)
    again = await mq.pull_many(queue, int, most=100)
    assert [(each.payload, each.attempt) for each in again] == [(n, 1) for n in range(1, 100)]
    for each in (queue, f"{queue}.dlq", f"{queue}.parked"):
        await mq.delete(each)


async def test_m048_a_wait_for_a_retry_is_cut_short_and_its_attempt_not_spent(url: str, mq: AceMQ, queue: str) -> None:
    async with acemq.connect(url) as busy:
        policy = RetryPolicy.fixed(3, timedelta(seconds=20))
        consumer = await busy.consume(queue, int, lambda m: Ack.retry("later"), retry=policy)
        await mq.send(queue, 1)
        if busy.capabilities.requeue_rewrites:
            await until(lambda: consumer.counters.retried == 1)  # the store keeps the wait: nothing is held here
        else:
            await until(lambda: consumer.held == 1 and consumer.in_flight == 0)
        began = time.monotonic()
        drained = await busy.close()
        assert time.monotonic() - began < 1
    if not busy.capabilities.requeue_rewrites:
        assert drained.given_back == 1
        await all_back(mq, queue, 1)
        again = await mq.pull(queue, int)
        assert again is not None
        assert again.attempt == 1


async def test_m049_close_from_inside_a_handler_does_not_wait_for_itself(url: str, mq: AceMQ, queue: str) -> None:
    busy = await acemq.connect(url)
    closed = asyncio.Event()

    async def last_one(message: Message[int]) -> None:
        await busy.close()
        closed.set()

    await busy.consume(queue, int, last_one)
    await mq.send(queue, 1)
    await asyncio.wait_for(closed.wait(), 5)
    await all_back(mq, queue, 1)


async def test_m050_cancelling_close_cancels_the_handlers_and_releases_the_connection(
    url: str, mq: AceMQ, queue: str
) -> None:
    busy = await acemq.connect(url)
    cancelled = asyncio.Event()

    async def slow(message: Message[int]) -> None:
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    consumer = await busy.consume(queue, int, slow)
    await mq.send(queue, 1)
    await until(lambda: consumer.in_flight == 1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(busy.close(), 0.2)
    assert cancelled.is_set()
    assert busy.state.phase == "closed"
    await all_back(mq, queue, 1)


async def test_m051_a_thread_that_never_ends_is_left_behind_and_settles_nothing(
    url: str, mq: AceMQ, queue: str
) -> None:
    release = threading.Event()

    def stuck(message: Message[int]) -> Ack:
        release.wait(20)
        return Ack.reject("too late")

    busy = await acemq.connect(url)
    consumer = await busy.consume(queue, int, stuck)
    await mq.send(queue, 1)
    await until(lambda: consumer.in_flight == 1)
    began = time.monotonic()
    drained = await busy.close(timedelta(milliseconds=300))
    assert time.monotonic() - began < 1.3
    assert (drained.finished, drained.abandoned) == (False, 1)
    release.set()
    await all_back(mq, queue, 1)
    assert (await mq.depth(f"{queue}.dlq")).ready == 0


async def test_a_handler_that_outlives_its_stop_settles_and_copies_nothing(url: str, mq: AceMQ, queue: str) -> None:
    release, ended = asyncio.Event(), asyncio.Event()

    async def stubborn(message: Message[int]) -> Ack:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        return Ack.reject("too late")

    busy = await acemq.connect(url)
    consumer = await busy.consume(queue, int, stubborn)
    await mq.send(queue, 1)
    await until(lambda: consumer.in_flight == 1)
    drained = await busy.close(timedelta(milliseconds=100))
    assert drained.abandoned == 1
    release.set()
    await ended.wait()
    await all_back(mq, queue, 1)
    assert (await mq.depth(f"{queue}.dlq")).ready == 0
    assert consumer.counters.rejected == 0


async def test_a_handler_that_runs_may_still_publish_while_its_connection_closes(
    url: str, mq: AceMQ, queue: str
) -> None:
    busy, gate = await acemq.connect(url), asyncio.Event()

    async def answer(message: Message[str]) -> None:
        await gate.wait()
        await busy.send(f"{queue}.dlq", "answer")

    consumer = await busy.consume(queue, str, answer)
    await mq.send(queue, "question")
    await until(lambda: consumer.in_flight == 1)
    closing = asyncio.ensure_future(busy.close())
    await asyncio.sleep(0)
    with pytest.raises(ClosedError):
        await busy.send(f"{queue}.dlq", "from outside a handler")
    gate.set()
    assert (await closing).handled == 1
    left = await mq.pull_many(f"{queue}.dlq", str)
    assert [each.payload for each in left] == ["answer"]


async def test_every_caller_of_close_gets_the_same_answer(url: str, queue: str) -> None:
    busy = await acemq.connect(url)
    first, second = await asyncio.gather(busy.close(), busy.close())
    assert first is second
    assert await busy.close() is first
    with pytest.raises(ClosedError):
        await busy.pull(queue, int)


async def test_leaving_the_block_of_a_consumer_finishes_what_runs(mq: AceMQ, queue: str) -> None:
    started, finished = asyncio.Event(), 0

    async def handle(message: Message[int]) -> None:
        nonlocal finished
        started.set()
        await asyncio.sleep(0.05)
        finished += 1

    await mq.send(queue, 1)
    async with mq.consume(queue, int, handle):
        await started.wait()
    assert finished == 1
    assert (await mq.depth(queue)).ready == 0


@pytest.mark.parametrize("stop", ["consumer", "connection"])
async def test_m049_a_handler_that_asks_for_a_stop_which_another_has_asked_for_is_not_waited_for(
    url: str, mq: AceMQ, queue: str, stop: str
) -> None:
    busy = await acemq.connect(url)
    started, both = asyncio.Event(), asyncio.Event()

    async def last_one(message: Message[int]) -> None:
        started.set()
        await both.wait()
        await stopped.close()

    consumer = await busy.consume(queue, int, last_one)
    stopped = consumer if stop == "consumer" else busy
    await mq.send(queue, 1)
    await started.wait()
    stopping = asyncio.ensure_future(stopped.close())
    await until(lambda: consumer.state is ConsumerState.DRAINING)
    both.set()
    await asyncio.wait_for(stopping, 5)
    await busy.close()
    await all_back(mq, queue, 1)


async def test_a_handler_of_a_batch_that_asks_for_a_stop_under_way_is_not_waited_for(mq: AceMQ, queue: str) -> None:
    started, both = asyncio.Event(), asyncio.Event()

    async def last_ones(batch: Batch[int]) -> None:
        started.set()
        await both.wait()
        await consumer.close()

    consumer = await mq.consume_batches(queue, int, last_ones, most=1)
    await mq.send(queue, 1)
    await started.wait()
    stopping = asyncio.ensure_future(consumer.close())
    await until(lambda: consumer.state is ConsumerState.DRAINING)
    both.set()
    await asyncio.wait_for(stopping, 5)


@pytest.mark.parametrize("verb", ["exists", "apply", "subscribe"])
async def test_what_was_starting_while_its_connection_closed_is_closed_and_handles_nothing(
    name: str, verb: Literal["exists", "apply", "subscribe"]
) -> None:
    broker, handled, gate = MemoryBroker.named(name), list[int](), asyncio.Event()

    async def slow(message: Message[int]) -> None:
        await gate.wait()

    async def handle(message: Message[int]) -> None:
        handled.append(message.payload)

    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q").queue("slow"))
        busy = await mq.consume("slow", int, slow)
        await mq.send("slow", 0)
        await mq.send("q", 1)
        await until(lambda: busy.in_flight == 1)
        broker.stall(verb)
        opening = asyncio.ensure_future(mq.consume("q", int, handle).__aenter__())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(mq.close())
        await until(lambda: busy.state is ConsumerState.DRAINING)
        broker.release(verb)
        with pytest.raises(ClosedError):
            await opening
        gate.set()
        assert (await closing).finished
    assert handled == []
    async with acemq.connect(f"memory://{name}") as mq:
        await all_back(mq, "q", 1)


async def test_a_consumer_or_receiving_that_is_closed_while_it_starts_subscribes_to_nothing(name: str) -> None:
    broker = MemoryBroker.named(name)
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send("q", 1)
        broker.stall("subscribe")
        openings = [
            asyncio.ensure_future(mq.consume("q", int, lambda message: None).__aenter__()),
            asyncio.ensure_future(mq.receive("q", int).__aenter__()),
        ]
        await until(lambda: len(list(mq.consumers)) == 2)
        starting = list(mq.consumers)
        assert {type(each) for each in starting} == {acemq.Consumer, Receiving}
        for each in starting:
            await each.close()
        broker.release("subscribe")
        for opening in openings:
            with pytest.raises(ClosedError, match="closed while it started"):
                await opening
        assert [each.state for each in starting] == [ConsumerState.CLOSED] * 2
        assert list(mq.consumers) == []
        await all_back(mq, "q", 1)


async def test_a_pulled_message_that_waits_for_its_retry_ends_with_the_connection_and_keeps_its_attempt(
    name: str, diagnostics: list[Diagnostic]
) -> None:
    kept = MemoryBroker.named(name, profile=Profile.RABBITMQ)  # where a wait without a rung is spent in the call
    busy = await acemq.connect(f"memory://{name}", on_diagnostic=diagnostics.append)
    await busy.declare(Topology().queue("orders"))
    await busy.send("orders", 1)
    pulled = await busy.pull("orders", int)
    assert pulled is not None
    retrying = asyncio.ensure_future(pulled.retry("later", delay=timedelta(seconds=30)))
    await until(lambda: [each.name for each in diagnostics] == [RUNG_MISSING])
    await busy.close()
    assert retrying.done()
    assert not await retrying
    assert len(diagnostics) == 1
    async with acemq.connect(f"memory://{name}") as mq:
        again = await mq.pull("orders", int)
        assert again is not None
        assert again.attempt == 1
    assert kept is MemoryBroker.named(name)


async def test_a_pulled_message_on_its_way_to_the_dead_letters_lands_before_the_connection_is_closed(name: str) -> None:
    broker = MemoryBroker.named(name)
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("orders").queue("orders.dlq"))
        async with acemq.connect(f"memory://{name}") as busy:
            await mq.send("orders", 1)
            pulled = await busy.pull("orders", int)
            assert pulled is not None
            broker.stall("publish")
            rejecting = asyncio.ensure_future(pulled.reject("bad"))
            await asyncio.sleep(0)
            closing = asyncio.ensure_future(busy.close())
            await asyncio.sleep(0)
            broker.release("publish")
            await closing
            assert await rejecting
        assert (await mq.depth("orders")).ready == 0
        assert (await mq.depth("orders.dlq")).ready == 1
