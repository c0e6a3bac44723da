"""The broker is short of memory: publishes are refused with its reason, and consuming goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from acemq import AceMQ, BlockedError, Message, RetryPolicy, Topology
from tests.services import RabbitMQ
from tests.waiting import until


@pytest.fixture
async def alarm(rabbitmq: RabbitMQ) -> AsyncIterator[RabbitMQ]:
    """The shared node, whose alarm is off again after the test."""
    yield rabbitmq
    await asyncio.to_thread(rabbitmq.set_memory_alarm, False)


async def test_m017_a_publish_under_a_memory_alarm_is_refused_at_once_with_the_reason_while_a_consumer_goes_on(
    alarm: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    handled: list[int] = []
    turn = asyncio.Semaphore(5)
    target = f"{queue}.parked"

    async def handle(message: Message[int]) -> None:
        await turn.acquire()
        handled.append(message.payload)

    await mq.send_many(queue, range(40))
    async with mq.consume(queue, int, handle, concurrency=1, prefetch=5):
        await until(lambda: len(handled) == 5)
        await asyncio.to_thread(alarm.set_memory_alarm, True)
        # A broker says that it is blocked only after a first publish, which it does not read until the alarm is over.
        first = asyncio.create_task(mq.send(target, "first", timeout=timedelta(seconds=40)))
        await until(lambda: mq.state.blocked is not None)
        outstanding = mq.state.outstanding

        began = time.perf_counter()
        with pytest.raises(BlockedError, match="may be sent again") as blocked:
            await mq.send(target, "second")
        assert time.perf_counter() - began < 0.05
        assert blocked.value.reason == mq.state.blocked == "low on memory"
        assert blocked.value.outcome == "refused"
        assert mq.state.outstanding == outstanding == 1
        assert not first.done()

        for _ in range(35):
            turn.release()
        await until(lambda: len(handled) == 40)
        assert mq.state.blocked is not None

        await asyncio.to_thread(alarm.set_memory_alarm, False)
        assert (await first).routed
        assert (await mq.send(target, "third")).routed
        assert mq.state.blocked is None
        assert mq.state.generation == 1
        assert mq.outbound.permits.in_use == 0
    assert [pulled.payload for pulled in await mq.pull_many(target, str)] == ["first", "third"]
    assert sorted(handled) == list(range(40))


async def test_a_retry_decided_under_an_alarm_waits_for_its_end_and_is_not_lost(
    alarm: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    attempts: list[int] = []
    gate = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        attempts.append(message.attempt)
        await gate.wait()
        if message.attempt == 1:
            raise ValueError("boom")

    await mq.declare(Topology().queue(f"{queue}.dlq", type="classic"))
    async with mq.consume(queue, int, handle, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.in_flight == 1)
        await asyncio.to_thread(alarm.set_memory_alarm, True)
        first = asyncio.create_task(mq.send(f"{queue}.dlq", "first", timeout=timedelta(seconds=40)))
        await until(lambda: mq.state.blocked is not None)
        gate.set()
        await until(lambda: consumer.in_flight == 0 and consumer.held == 1)
        await asyncio.to_thread(alarm.set_memory_alarm, False)
        await until(lambda: consumer.counters.acked == 1)
        await first
        assert consumer.counters.move_failed == 0
    assert attempts == [1, 2]
