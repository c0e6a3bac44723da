"""The broker is short of memory: publishes are refused with its reason, and consuming goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from acemq import AceMQ, BlockedError, Message, Receipt, RetryPolicy, Topology
from tests.services import RabbitMQ
from tests.waiting import refused_at_once, until


async def blocked(mq: AceMQ, queue: str) -> asyncio.Task[Receipt]:
    """A publish that has run into the alarm: it is written, and the broker reads it when the alarm is over.

    Only such a first one makes the broker say that it is blocked.
    """
    while True:
        publish = asyncio.create_task(mq.send(queue, "first", timeout=timedelta(seconds=40)))
        await until(lambda: publish.done() or mq.state.blocked is not None)  # noqa: B023
        if not publish.done():
            return publish
        await publish  # it was faster than the alarm


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
        first = await blocked(mq, target)
        outstanding = mq.state.outstanding

        refused = await refused_at_once(lambda: mq.send(target, "second"), BlockedError)
        assert "may be sent again" in str(refused)
        assert refused.reason == mq.state.blocked == "low on memory"
        assert refused.outcome == "refused"
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
    assert list(dict.fromkeys(pulled.payload for pulled in await mq.pull_many(target, str))) == ["first", "third"]
    assert sorted(handled) == list(range(40))


@pytest.mark.timeout(120)
async def test_t034_a_backlog_is_worked_off_under_an_alarm_and_what_fails_waits_for_its_end(
    alarm: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    runs: Counter[int] = Counter()
    gate = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        runs[message.payload] += 1
        if len(runs) > 200:
            await gate.wait()
        if message.payload in failing and message.attempt == 1:
            raise ValueError("boom")

    failing = range(220, 1_000, 20)  # none whose copy could be the first publish to run into the alarm
    await mq.declare(Topology().queue(f"{queue}.parked", type="classic"))
    await mq.send_many(queue, range(1_000))
    policy = RetryPolicy.fixed(3, timedelta(seconds=1)).with_jitter(0)
    async with mq.consume(queue, int, handle, prefetch=100, retry=policy) as consumer:
        await until(lambda: len(runs) > 200)
        await asyncio.to_thread(alarm.set_memory_alarm, True)
        first = await blocked(mq, f"{queue}.parked")
        acked = consumer.counters.acked
        gate.set()
        # Every other one is handled and accepted; those that failed are held, and do not spin.
        await until(lambda: len(runs) == 1_000 and consumer.in_flight == 0, within=20)
        await until(lambda: consumer.held == len(failing), within=20)
        assert consumer.counters.acked == 1_000 - len(failing) > acked
        assert mq.state.blocked == "low on memory"
        await asyncio.to_thread(alarm.set_memory_alarm, False)
        await first
        await until(lambda: consumer.counters.acked == 1_000, within=40)
        assert consumer.counters.retried == len(failing)
        assert consumer.counters.move_failed == 0
    assert runs == {n: 2 if n in failing else 1 for n in range(1_000)}


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
        first = await blocked(mq, f"{queue}.dlq")
        gate.set()
        await until(lambda: consumer.in_flight == 0 and consumer.held == 1)
        await asyncio.to_thread(alarm.set_memory_alarm, False)
        await until(lambda: consumer.counters.acked == 1)
        await first
        assert consumer.counters.move_failed == 0
    assert attempts == [1, 2]
