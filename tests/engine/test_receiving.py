"""Deliveries pushed and settled by hand: spec section 4, `receive`."""

from __future__ import annotations

import asyncio
import gc
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, ClosedError, ConfigurationError, DecodeError, MovableClock, Pulled, Receiving, TopologyError
from tests.waiting import until, until_async


async def some(receiving: Receiving[int], count: int) -> list[Pulled[int]]:
    return [await asyncio.wait_for(anext(receiving), 5) for _ in range(count)]


async def test_five_unsettled_are_all_there_is_and_closed_they_come_again_with_their_attempt(
    url: str, mq: AceMQ, queue: str
) -> None:
    await mq.send_many(queue, range(20))
    async with acemq.connect(url) as busy:
        receiving = await busy.receive(queue, int, prefetch=5)
        held = await some(receiving, 5)
        assert [each.payload for each in held] == [0, 1, 2, 3, 4]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(receiving), 0.2)
        assert (await mq.depth(queue)).ready == 15
        drained = await receiving.close()
        assert (drained.finished, drained.given_back) == (True, 5)
        assert not await held[0].accept()
    async with mq.receive(queue, int) as again:
        assert [(each.payload, each.attempt) for each in await some(again, 20)] == [(n, 1) for n in range(20)]


async def test_waiting_in_vain_leaves_nothing_behind(name: str) -> None:
    def abandoned() -> int:
        gc.collect()
        futures = [each for each in gc.get_objects() if type(each) is asyncio.Future]
        return sum(each.cancelled() for each in futures)

    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(acemq.Topology().queue("orders"))
        async with mq.receive("orders", int) as receiving:
            before = abandoned()
            for _ in range(20):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(receiving), 0.001)
            assert abandoned() <= before
            await mq.send("orders", 1)
            assert (await anext(receiving)).payload == 1


async def test_each_is_settled_in_any_order_from_any_task_and_the_next_one_comes(mq: AceMQ, queue: str) -> None:
    await mq.declare(acemq.Topology().queue(f"{queue}.dlq", type="classic").queue(f"{queue}.parked", type="classic"))
    await mq.send_many(queue, range(6))
    async with mq.receive(queue, int, prefetch=3) as receiving:
        first, second, third = await some(receiving, 3)
        assert await asyncio.create_task(third.accept())
        assert await asyncio.create_task(first.reject("bad"))
        assert await second.park()
        with pytest.raises(ClosedError, match="settled already"):
            await second.accept()
        fourth, fifth, sixth = await some(receiving, 3)
        assert [fourth.payload, fifth.payload, sixth.payload] == [3, 4, 5]
        assert await sixth.release()
        assert await fourth.retry(delay=timedelta())
        assert await fifth.accept()
        again = {each.payload: each for each in await some(receiving, 2)}
        assert (again[3].attempt, again[5].attempt) == (2, 1)
        for each in again.values():
            assert await each.accept()
    assert (await mq.depth(queue)).ready == 0
    assert (await mq.depth(f"{queue}.dlq")).ready == 1
    assert (await mq.depth(f"{queue}.parked")).ready == 1


async def test_an_async_for_ends_when_it_is_closed_and_what_cannot_be_decoded_is_for_the_reader(
    mq: AceMQ, queue: str
) -> None:
    receiving, got = await mq.receive(queue, int), list[int]()

    async def read() -> None:
        async for pulled in receiving:
            try:
                got.append(pulled.payload)
            except DecodeError:
                got.append(-1)
            await pulled.accept()

    reading = asyncio.create_task(read())
    await mq.send_many(queue, [1, "two", 3])
    await until(lambda: len(got) == 3)
    await receiving.close()
    await asyncio.wait_for(reading, 5)
    assert got == [1, -1, 3]
    with pytest.raises(StopAsyncIteration):
        await anext(receiving)


async def test_several_tasks_share_it_and_a_cancelled_one_takes_nothing_with_it(mq: AceMQ, queue: str) -> None:
    got: list[int] = []

    async def read(receiving: Receiving[int]) -> None:
        async for pulled in receiving:
            got.append(pulled.payload)
            await pulled.accept()

    async with mq.receive(queue, int) as receiving:
        readers = [asyncio.create_task(read(receiving)) for _ in range(3)]
        await asyncio.sleep(0)
        readers[0].cancel()
        await mq.send_many(queue, range(30))
        await until(lambda: len(got) == 30)
    await asyncio.wait(readers)
    assert sorted(got) == list(range(30))


async def test_a_pause_hands_out_nothing_and_a_long_one_gives_back_what_was_fetched(url: str, name: str) -> None:
    clock = MovableClock()
    async with acemq.connect(url, clock=clock) as mq:
        await mq.declare(acemq.Topology().queue(name, type="classic"))
        await mq.send_many(name, range(4))
        async with mq.receive(name, int) as receiving:
            (first,) = await some(receiving, 1)
            await until(lambda: receiving.held == 3)
            receiving.pause()
            waiting = asyncio.ensure_future(anext(receiving))
            await clock.advance(timedelta(seconds=59))
            assert receiving.held == 3
            await clock.advance(timedelta(seconds=1))

            async def given_back() -> bool:
                return (await mq.depth(name)).ready == 3

            await until_async(given_back)
            assert not waiting.done()
            assert await first.accept()
            receiving.resume()
            others = [await asyncio.wait_for(waiting, 5), *await some(receiving, 2)]
            assert [(each.payload, each.attempt) for each in others] == [(n, 1) for n in (1, 2, 3)]
            for each in others:
                await each.accept()
        await mq.delete(name)


async def test_closing_cuts_a_wait_for_a_retry_short_and_lets_a_copy_under_way_land(url: str, queue: str) -> None:
    async with acemq.connect(url) as mq:
        await mq.declare(acemq.Topology().queue(f"{queue}.dlq", type="classic"))
        await mq.send_many(queue, [1, 2])
        receiving = await mq.receive(queue, int)
        first, second = await some(receiving, 2)
        retrying = asyncio.create_task(first.retry(delay=timedelta(seconds=20)))
        rejecting = asyncio.create_task(second.reject("bad"))
        await asyncio.sleep(0)
        assert (await receiving.close()).finished
        assert await asyncio.wait_for(rejecting, 1)
        in_the_broker = mq.capabilities.requeue_rewrites
        assert await asyncio.wait_for(retrying, 1) is in_the_broker
        assert (await mq.depth(f"{queue}.dlq")).ready == 1
        if not in_the_broker:
            again = await mq.pull(queue, int, wait=timedelta(seconds=2))
            assert again is not None
            assert again.attempt == 1


async def test_the_connection_s_close_ends_it(url: str, mq: AceMQ, queue: str) -> None:
    await mq.send_many(queue, range(3))
    busy = await acemq.connect(url)
    receiving = await busy.receive(queue, int)
    await some(receiving, 2)
    drained = await busy.close()
    assert (drained.finished, drained.given_back) == (True, 3)
    with pytest.raises(StopAsyncIteration):
        await anext(receiving)


@pytest.mark.parametrize("prefetch", [0, 70_000])
async def test_a_prefetch_out_of_range_is_refused_at_the_call(mq: AceMQ, queue: str, prefetch: int) -> None:
    with pytest.raises(ConfigurationError, match="prefetch"):
        mq.receive(queue, int, prefetch=prefetch)


async def test_a_missing_queue_is_named(mq: AceMQ, name: str) -> None:
    with pytest.raises(TopologyError, match=name):
        await mq.receive(name, int)
