"""What a connection holds it keeps: leases are renewed while work goes on, and a lost one ends the work."""

from __future__ import annotations

import asyncio

from acemq import AceMQ, Message, MovableClock
from acemq.transports.memory import MemoryBroker
from tests.engine.leased import LEASE
from tests.engine.leased import broker as broker
from tests.engine.leased import clock as clock
from tests.engine.leased import mq as mq
from tests.waiting import until


async def test_o33_a_handler_longer_than_its_lease_is_started_once(mq: AceMQ, clock: MovableClock) -> None:
    started, gate = list[int](), asyncio.Event()

    async def long(message: Message[int]) -> None:
        started.append(message.payload)
        await gate.wait()

    async with mq.consume("q", int, long, concurrency=1, prefetch=3) as consumer:
        for number in range(3):  # the other two wait, fetched and not started, and are kept as well
            await mq.send("q", number)
        await until(lambda: started == [0])
        await clock.advance(10 * LEASE)
        assert started == [0]
        gate.set()
        await until(lambda: consumer.counters.acked == 3)
        assert started == [0, 1, 2]
        assert consumer.counters.stale == 0


async def test_a_lost_lease_cancels_its_handler_and_settles_nothing(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    cancelled, done, gate = list[int](), list[tuple[int, int]](), asyncio.Event()

    async def slow(message: Message[int]) -> None:
        try:
            if not cancelled:
                await gate.wait()
        except asyncio.CancelledError:
            cancelled.append(message.payload)
            raise
        done.append((message.payload, message.attempt))

    async with mq.consume("q", int, slow, concurrency=1, prefetch=1) as consumer:
        await mq.send("q", 7)
        await until(lambda: consumer.in_flight == 1)
        broker.lapse("q")
        await until(lambda: done == [(7, 1)])
        assert cancelled == [7]
        await mq.send("q", 8)  # the worker that was cut off goes on
        await until(lambda: consumer.counters.acked == 2)


async def test_what_was_pulled_is_kept_until_it_is_settled(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("q", 1)
    pulled = await mq.pull("q", int)
    assert pulled is not None
    await clock.advance(5 * LEASE)
    assert await mq.pull("q", int) is None
    assert await pulled.accept()
    await clock.advance(5 * LEASE)
    assert await mq.pull("q", int) is None
