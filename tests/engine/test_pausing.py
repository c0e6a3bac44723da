"""A pause starts nothing, keeps what was fetched for a minute, then gives it back. Case M-039."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, ConsumerState, Message, MovableClock
from tests.waiting import until, until_async


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def mq(url: str, clock: MovableClock) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url, clock=clock) as mq:
        yield mq


class Gated:
    """Waits at a gate, and notes what it was given and what it has ended."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.started, self.ended = list[int](), list[tuple[int, int]]()

    async def __call__(self, message: Message[int]) -> None:
        self.started.append(message.payload)
        await self.gate.wait()
        self.ended.append((message.payload, message.attempt))


async def ready(mq: AceMQ, queue: str, count: int) -> None:
    async def is_ready() -> bool:
        return (await mq.depth(queue)).ready == count

    await until_async(is_ready)


async def test_m039_what_was_fetched_is_kept_for_a_minute_and_then_given_back_with_its_attempt(
    mq: AceMQ, queue: str, clock: MovableClock
) -> None:
    gated = Gated()
    await mq.send_many(queue, range(20))
    async with mq.consume(queue, int, gated, concurrency=2) as consumer:
        await until(lambda: consumer.in_flight == 2 and consumer.held == 18)
        consumer.pause()
        assert consumer.state is ConsumerState.PAUSED
        gated.gate.set()
        await until(lambda: consumer.in_flight == 0)
        await clock.advance(timedelta(seconds=59))
        assert consumer.held == 18
        await clock.advance(timedelta(seconds=1))
        await until(lambda: consumer.held == 0)
        await ready(mq, queue, 18)
        assert gated.started == [0, 1]
        assert consumer.counters.acked == 2
        assert consumer.counters.released == 0
        consumer.resume()
        await until(lambda: consumer.counters.acked == 20 and consumer.state is ConsumerState.RUNNING)
    assert sorted(gated.ended) == [(n, 1) for n in range(20)]


async def test_a_short_pause_keeps_what_was_fetched_and_goes_on_in_order(mq: AceMQ, queue: str) -> None:
    gated = Gated()
    await mq.send_many(queue, range(10))
    async with mq.consume(queue, int, gated, concurrency=1, prefetch=10) as consumer:
        await until(lambda: consumer.in_flight == 1 and consumer.held == 9)
        consumer.pause()
        consumer.pause()
        gated.gate.set()
        await until(lambda: consumer.in_flight == 0)
        assert consumer.held == 9
        consumer.resume()
        await until(lambda: consumer.counters.acked == 10)
    assert gated.started == list(range(10))


async def test_a_paused_consumer_fetches_nothing_so_that_others_get_it(url: str, mq: AceMQ, queue: str) -> None:
    seen: list[int] = []
    async with mq.consume(queue, int, lambda m: seen.append(-1)) as paused:
        paused.pause()
        async with acemq.connect(url) as other, other.consume(queue, int, lambda m: seen.append(m.payload)) as consumer:
            await mq.send_many(queue, range(50))
            await until(lambda: consumer.counters.acked == 50)
    assert sorted(seen) == list(range(50))


async def test_paused_with_a_backlog_it_closes_as_soon_as_the_running_handler_ends(mq: AceMQ, queue: str) -> None:
    gated = Gated()
    await mq.send_many(queue, range(20))
    consumer = await mq.consume(queue, int, gated, concurrency=1)
    await until(lambda: consumer.in_flight == 1 and consumer.held == 19)
    consumer.pause()
    closing = asyncio.ensure_future(consumer.close())
    await asyncio.sleep(0)
    began = time.monotonic()
    gated.gate.set()
    drained = await closing
    assert time.monotonic() - began < 0.5
    assert (drained.finished, drained.handled, drained.given_back) == (True, 1, 19)
    await ready(mq, queue, 19)
    again = await mq.pull_many(queue, int, most=100)
    assert [(each.payload, each.attempt) for each in again] == [(n, 1) for n in range(1, 20)]


async def test_pausing_what_is_closed_changes_nothing(mq: AceMQ, queue: str) -> None:
    consumer = await mq.consume(queue, int, lambda m: None)
    await consumer.close()
    consumer.pause()
    consumer.resume()
    assert consumer.state is ConsumerState.CLOSED
