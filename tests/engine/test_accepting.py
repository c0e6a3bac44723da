"""Where an acceptance is a call to a server, handlers go on meanwhile; and nothing is lost by that."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest

from acemq import AceMQ, Message, MovableClock
from acemq.consuming.accepting import Accepting
from acemq.consuming.suspects import Suspects
from acemq.transports.memory import MemoryBroker
from tests.engine.leased import broker as broker
from tests.engine.leased import clock as clock
from tests.engine.leased import mq as mq
from tests.waiting import until


@pytest.fixture(autouse=True)
def slow_settlements(mq: AceMQ, broker: MemoryBroker) -> Iterator[None]:
    """They take until they are let through."""
    broker.stall("settle")
    yield
    broker.release("settle")


@pytest.fixture
def suspect(monkeypatch: pytest.MonkeyPatch) -> int:
    """The payload of a message that may have killed a process."""
    monkeypatch.setattr(Suspects, "is_one", lambda self, delivery: delivery.body == b"13")
    return 13


class Handled(list[int]):
    async def __call__(self, message: Message[int]) -> None:
        self.append(message.payload)


async def left(mq: AceMQ) -> tuple[int, int | None]:
    depth = await mq.depth("q")
    return depth.ready, depth.held


async def test_a_worker_goes_on_while_what_it_accepted_is_under_way(mq: AceMQ, broker: MemoryBroker) -> None:
    handled = Handled()
    async with mq.consume("q", int, handled, concurrency=1, prefetch=3):
        await mq.send_many("q", range(5))
        await until(lambda: handled == [0, 1, 2])
        await asyncio.sleep(0.05)
        assert handled == [0, 1, 2], "what is not accepted keeps its prefetch slot"
        assert await left(mq) == (2, 3)
        broker.release("settle")
        await until(lambda: handled == [0, 1, 2, 3, 4])
    assert await left(mq) == (0, 0)


async def test_what_is_accepted_meanwhile_goes_in_one_call(
    mq: AceMQ, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled, calls, settle = Handled(), list[int](), mq.transport.settle

    async def counted(batch: Sequence[Any]) -> Any:
        calls.append(len(batch))
        return await settle(batch)

    monkeypatch.setattr(mq.transport, "settle", counted)
    async with mq.consume("q", int, handled, concurrency=1, prefetch=50):
        await mq.send("q", 0)
        await until(lambda: calls == [1])
        await mq.send_many("q", range(1, 50))
        await until(lambda: len(handled) == 50)
        broker.release("settle")
    assert calls == [1, 49]


async def test_where_order_counts_nothing_is_begun_before_it_is_accepted(mq: AceMQ, broker: MemoryBroker) -> None:
    handled = Handled()
    async with mq.consume("q", int, handled, concurrency=1, prefetch=3, exclusive=True):
        await mq.send_many("q", range(3))
        await until(lambda: handled == [0])
        await asyncio.sleep(0.05)
        assert handled == [0]
        broker.release("settle")
        await until(lambda: handled == [0, 1, 2])


async def test_a_message_that_may_kill_its_process_waits_until_all_before_it_is_accepted(
    mq: AceMQ, broker: MemoryBroker, suspect: int
) -> None:
    handled = Handled()
    async with mq.consume("q", int, handled, concurrency=2, prefetch=5):
        await mq.send_many("q", [1, suspect])
        await until(lambda: handled == [1])
        await asyncio.sleep(0.05)
        assert handled == [1]
        broker.release("settle")
        await until(lambda: handled == [1, suspect])


@pytest.mark.parametrize("meanwhile", ["closed", "paused", "lost"])
async def test_one_that_is_not_to_begin_any_more_does_not(
    mq: AceMQ, broker: MemoryBroker, suspect: int, meanwhile: str
) -> None:
    handled, again = Handled(), Handled()
    consumer = await mq.consume("q", int, handled, concurrency=2, prefetch=5)
    await mq.send_many("q", [1, suspect])
    await until(lambda: consumer.in_flight == 1 and handled == [1])
    closing = asyncio.create_task(consumer.close()) if meanwhile == "closed" else None
    if meanwhile == "paused":
        consumer.pause()
    if meanwhile == "lost":
        broker.disconnect("cut")
        await until(lambda: bool(consumer._gone))
        consumer.pause()
    await asyncio.sleep(0.05)
    broker.release("settle")
    await until(lambda: consumer.in_flight == 0)
    assert suspect not in handled
    if closing is not None:
        drained = await closing
        assert (drained.finished, drained.given_back) == (True, 1)
        await mq.consume("q", int, again)
    consumer.resume()
    await until(lambda: [*handled, *again].count(suspect) == 1)
    await mq.close()
    assert [*handled, *again].count(suspect) == 1


async def test_what_is_added_in_the_moment_of_an_end_goes_as_well() -> None:
    asked: list[list[Any]] = []

    class Mover:
        async def accept_all(self, batch: list[Any]) -> None:
            asked.append(batch)

    accepting = Accepting(
        cast("Any", Mover()), name="c", accepted=lambda batch: None, failed=lambda delivery: None, rests=lambda: None
    )
    accepting.add(cast("Any", "first"))
    while accepting.task is not None and not accepting.task.done():
        await asyncio.sleep(0)
    assert accepting.task is not None, "its end is not told yet"
    accepting.add(cast("Any", "second"))
    await accepting.at_rest()
    assert asked == [["first"], ["second"]]


async def test_a_listener_is_told_when_it_is_accepted_and_keeps_no_worker_waiting(
    mq: AceMQ, broker: MemoryBroker
) -> None:
    handled, told = list[int](), list[int]()

    async def handle(message: Message[int]) -> None:
        message.when_settled(lambda how: told.append(message.payload))
        handled.append(message.payload)

    async with mq.consume("q", int, handle, concurrency=1, prefetch=3):
        await mq.send_many("q", range(3))
        await until(lambda: handled == [0, 1, 2])
        assert told == []
        broker.release("settle")
        await until(lambda: sorted(told) == [0, 1, 2])


async def test_a_handler_may_close_its_consumer_while_something_is_under_way(mq: AceMQ, broker: MemoryBroker) -> None:
    handled = list[int]()

    async def handle(message: Message[int]) -> None:
        handled.append(message.payload)
        if message.payload == 1:
            asyncio.get_running_loop().call_later(0.05, broker.release, "settle")
            await consumer.close()

    consumer = await mq.consume("q", int, handle, concurrency=1, prefetch=2)
    await mq.send_many("q", range(2))
    await until(lambda: handled == [0, 1])
    await until(lambda: consumer.state == "closed")
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if "accepts" in task.get_name()] == []
    assert (await mq.depth("q")).held == 0


async def test_nothing_is_kept_of_what_was_lost_and_ended_afterwards(mq: AceMQ, broker: MemoryBroker) -> None:
    broker.release("settle")
    go = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        await go.wait()

    async with mq.consume("q", int, handle) as consumer:
        await mq.send("q", 1)
        await until(lambda: consumer.in_flight == 1)
        broker.disconnect("cut")
        await until(lambda: bool(consumer._gone))
        go.set()
        await until(lambda: consumer.in_flight == 0)
        assert not consumer._gone


async def test_a_stop_waits_for_what_is_under_way(mq: AceMQ, broker: MemoryBroker) -> None:
    handled = Handled()
    consumer = await mq.consume("q", int, handled, concurrency=1, prefetch=3)
    await mq.send_many("q", range(3))
    await until(lambda: len(handled) == 3)
    closing = asyncio.create_task(consumer.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    broker.release("settle")
    drained = await closing
    assert (drained.finished, drained.abandoned) == (True, 0)
    assert await left(mq) == (0, 0)


async def test_what_a_stop_could_not_wait_for_is_told_and_comes_again(mq: AceMQ, broker: MemoryBroker) -> None:
    handled, again = Handled(), Handled()
    consumer = await mq.consume("q", int, handled, concurrency=1, prefetch=3)
    await mq.send_many("q", range(3))
    await until(lambda: len(handled) == 3)
    drained = await consumer.drain(timedelta(seconds=0.1))
    assert (drained.finished, drained.abandoned) == (False, 3)
    broker.release("settle")
    async with mq.consume("q", int, again):
        await until(lambda: sorted(again) == [0, 1, 2])


async def test_what_is_lost_under_way_is_counted_as_stale_and_comes_again(mq: AceMQ, broker: MemoryBroker) -> None:
    handled = Handled()
    async with mq.consume("q", int, handled, concurrency=1, prefetch=3) as consumer:
        await mq.send("q", 7)
        await until(lambda: handled == [7])
        broker.lapse("q")
        broker.release("settle")
        await until(lambda: handled == [7, 7])
        await until(lambda: consumer.counters.stale == 1)
    assert await left(mq) == (0, 0)


async def test_a_fault_of_ours_in_between_loses_nothing(
    mq: AceMQ,
    broker: MemoryBroker,
    clock: MovableClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broker.release("settle")
    handled, settle = Handled(), mq.transport.settle

    async def broken(batch: Sequence[Any]) -> Any:
        monkeypatch.setattr(mq.transport, "settle", settle)
        raise ZeroDivisionError

    monkeypatch.setattr(mq.transport, "settle", broken)
    async with mq.consume("q", int, handled):
        await mq.send("q", 7)
        await until(lambda: handled == [7])
        await until(lambda: "failed inside the library" in caplog.text)
        await clock.advance(timedelta(seconds=2))
        await until(lambda: handled == [7, 7])
    assert await left(mq) == (0, 0)
