"""Consumers resized and stopped as one. Case M-038."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, ClosedError, ConfigurationError, ConsumerState, Message, TopologyError
from acemq.transport import NotConnected
from acemq.transports.memory import MemoryBroker
from tests.waiting import until, until_async


async def test_m038_a_group_grows_and_shrinks_with_work_running_and_loses_and_cuts_off_nothing(
    mq: AceMQ, queue: str, rabbit: Any
) -> None:
    handled: list[int] = []

    async def work(message: Message[int]) -> None:
        await asyncio.sleep(0.01)
        handled.append(message.payload)

    async with mq.consume_group(queue, int, work, size=3, concurrency=2, name="workers") as group:
        assert [member.name for member in group.consumers] == ["workers/1", "workers/2", "workers/3"]
        await mq.send_many(queue, range(100))
        for size in (5, 2):
            await group.scale(size)
            assert group.size == size
            assert [member.name for member in group.consumers] == [f"workers/{n}" for n in range(1, size + 1)]
            await rabbit(queue, size)
        await mq.send_many(queue, range(100, 200))
        await until(lambda: group.counters.acked == 200, within=20)
    assert sorted(handled) == list(range(200))
    assert {member.state for member in group.consumers} == {ConsumerState.CLOSED}
    assert group.counters.acked == 200


@pytest.fixture
def rabbit(request: pytest.FixtureRequest, url: str) -> Any:
    """Wait until the broker counts so many consumers; in memory there is nobody to ask."""

    async def counts(queue: str, wanted: int) -> None:
        if url.startswith("memory:"):
            return
        server = request.getfixturevalue("rabbitmq")

        async def as_many() -> bool:
            rows = await asyncio.to_thread(server.list_queues, "name", "consumers")
            return any(row["name"] == queue and row["consumers"] == wanted for row in rows)

        await until_async(as_many)

    return counts


async def test_a_member_that_cannot_start_closes_those_that_have_and_its_error_is_raised(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch, rabbit: Any
) -> None:
    subscribe, calls = mq.transport.subscribe, 0

    async def second_fails(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise NotConnected("the link is away")
        return await subscribe(*args, **options)

    monkeypatch.setattr(mq.transport, "subscribe", second_fails)
    with pytest.raises(acemq.ConnectionFailedError, match="the link is away"):
        await mq.consume_group(queue, int, lambda m: None, size=3)
    assert calls == 2
    await rabbit(queue, 0)
    await mq.send(queue, 1)
    alone = await mq.pull(queue, int, wait=timedelta(seconds=2))
    assert alone is not None

    calls = -1  # the second of the next group starts, the third does not
    async with mq.consume_group(queue, int, lambda m: None, size=1) as group:
        with pytest.raises(acemq.ConnectionFailedError):
            await group.scale(3)
        assert group.size == 1
        assert group.consumers[0].state is ConsumerState.RUNNING
        await rabbit(queue, 1)


async def test_a_new_prefetch_holds_for_every_member_and_its_name_stays(mq: AceMQ, queue: str) -> None:
    gate = asyncio.Event()

    async def wait(message: Message[int]) -> None:
        await gate.wait()

    async with mq.consume_group(queue, int, wait, size=2, concurrency=1, prefetch=5) as group:
        names = [member.name for member in group.consumers]
        await group.set_prefetch(2)
        assert [member.name for member in group.consumers] == names
        await mq.send_many(queue, range(10))
        await until(lambda: sum(member.in_flight + member.held for member in group.consumers) == 4)
        assert (await mq.depth(queue)).ready == 6
        with pytest.raises(ConfigurationError, match="prefetch"):
            await group.set_prefetch(0)
        gate.set()
        await until(lambda: group.counters.acked == 10)


async def test_a_paused_group_starts_nothing_new_members_included(mq: AceMQ, queue: str) -> None:
    started: list[int] = []
    async with mq.consume_group(queue, int, lambda m: started.append(m.payload), size=1) as group:
        group.pause()
        await group.scale(2)
        await mq.send_many(queue, range(10))
        assert [member.state for member in group.consumers] == [ConsumerState.PAUSED] * 2
        assert (await mq.depth(queue)).ready == 10
        assert started == []
        group.resume()
        await until(lambda: group.counters.acked == 10)


async def test_a_group_closes_within_one_budget(mq: AceMQ, queue: str) -> None:
    async def slow(message: Message[int]) -> None:
        await asyncio.sleep(30)

    await mq.send_many(queue, range(4))
    group = await mq.consume_group(queue, int, slow, size=4, concurrency=1, prefetch=1)
    await until(lambda: all(member.in_flight == 1 for member in group.consumers))
    loop = asyncio.get_running_loop()
    began = loop.time()
    drained = await group.drain(timedelta(milliseconds=300))
    assert loop.time() - began < 1.3
    assert (drained.finished, drained.abandoned, dict(drained.queues)) == (False, 4, {queue: 4})
    with pytest.raises(ClosedError):
        await group.scale(5)


@pytest.mark.parametrize("change", ["set_prefetch", "scale"])
async def test_what_starts_while_its_group_is_drained_is_closed_and_handles_nothing_afterwards(
    name: str, change: str
) -> None:
    broker, handled = MemoryBroker.named(name), list[int]()
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(acemq.Topology().queue("orders"))
        group = await mq.consume_group("orders", int, lambda m: handled.append(m.payload), size=2)
        broker.stall("subscribe")
        changing = asyncio.ensure_future(group.set_prefetch(50) if change == "set_prefetch" else group.scale(3))
        await until(lambda: len(list(mq.consumers)) == 3)
        assert (await group.drain()).finished
        broker.release("subscribe")
        with pytest.raises(ClosedError, match="group"):
            await changing
        await mq.send("orders", 7)
        assert await mq.pull("orders", int) is not None
        assert (handled, list(mq.consumers)) == ([], [])
        assert {member.state for member in group.consumers} == {ConsumerState.CLOSED}


async def test_a_group_paused_while_it_grows_is_paused_as_a_whole(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mq.consume_group(queue, int, lambda m: None, size=1) as group:
        subscribe, calls = mq.transport.subscribe, 0

        async def pause_meanwhile(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                group.pause()
            return await subscribe(*args, **options)

        monkeypatch.setattr(mq.transport, "subscribe", pause_meanwhile)
        await group.scale(3)
        assert [member.state for member in group.consumers] == [ConsumerState.PAUSED] * 3


async def test_what_is_wrong_with_a_group_is_refused_at_the_call(mq: AceMQ, queue: str) -> None:
    with pytest.raises(ConfigurationError, match="size=0"):
        mq.consume_group(queue, int, lambda m: None, size=0)
    with pytest.raises(ConfigurationError, match="concurrency=0"):
        mq.consume_group(queue, int, lambda m: None, size=2, concurrency=0)
    with pytest.raises(TopologyError, match="missing-"):
        await mq.consume_group("missing-" + queue, int, lambda m: None, size=2)
    async with mq.consume_group(queue, int, lambda m: None, size=2) as group:
        with pytest.raises(ConfigurationError, match="size=0"):
            await group.scale(0)
