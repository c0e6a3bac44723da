"""Health says what is not well by name, in time, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    Backoff,
    Batch,
    ConfigurationError,
    Health,
    HealthPart,
    Message,
    MovableClock,
    Topology,
    TopologyError,
)
from acemq.transports.memory import MemoryBroker
from tests.proxy import Proxy
from tests.secret import assert_unprinted
from tests.services import RabbitMQ
from tests.waiting import at_once, until, until_async

SOON = timedelta(milliseconds=200)


def part(health: Health, name: str) -> HealthPart:
    (found,) = [each for each in health.parts if each.name.startswith(name)]
    return found


async def test_a_connection_and_its_consumers_are_parts_by_name(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda message: None, name="ship") as consumer:
        health = await mq.health()
        assert [each.name for each in health.parts] == ["connection", "consumer ship"]
        assert health.status == "up"
        assert part(health, "connection").detail == ""
        assert json.loads(json.dumps(health.as_dict()))["parts"][1]["name"] == "consumer ship"
        await consumer.drain()
        assert [each.name for each in (await mq.health()).parts] == ["connection"]


async def test_each_of_several_consumers_of_one_name_is_a_part_of_its_own(name: str) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("orders").queue("bills"))
        mq.add_health("consumer lag", lambda: HealthPart("", "down", "too much"))
        mq.add_health("consumer alone", lambda: HealthPart("", "down", "ours"))
        async with (
            mq.consume("orders", int, lambda message: None, name="worker"),
            mq.consume("bills", int, lambda message: None, name="worker"),
            mq.consume("bills", int, lambda message: None, name="worker"),
            mq.consume("bills", int, lambda message: None, name="alone"),
        ):
            health = await mq.health()
            assert [(each.name, each.status) for each in health.parts] == [
                ("connection", "up"),
                ("consumer worker of orders", "up"),
                ("consumer worker of bills", "up"),
                ("consumer worker of bills (2)", "up"),
                ("consumer alone", "up"),
                ("consumer lag", "down"),
                ("consumer alone (2)", "down"),
            ]


async def test_a_paused_consumer_is_up_and_says_so(mq: AceMQ, queue: str) -> None:
    async with (
        mq.consume(queue, int, lambda message: None, name="one") as one,
        mq.consume_batches(queue, int, lambda batch: None, name="many") as many,
        mq.receive(queue, int) as receiving,
    ):
        for paused in (one, many, receiving):
            paused.pause()
        health = await mq.health()
        assert [each.name for each in health.parts] == [
            *("connection", "consumer one", "consumer many", f"consumer {receiving.name}")
        ]
        assert [(each.status, each.detail) for each in health.parts[1:]] == [("up", f"queue {queue!r}: paused")] * 3
        for paused in (one, many, receiving):
            paused.resume()
        assert all(": paused" not in each.detail for each in (await mq.health()).parts)
    assert [each.name for each in (await mq.health()).parts] == ["connection"]


async def test_what_is_held_by_hand_is_no_work_that_waits(name: str) -> None:
    clock = MovableClock()
    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.receive("orders", int, prefetch=1) as receiving:
            await mq.send_many("orders", [1, 2])
            first = await anext(receiving)
            assert (receiving.in_flight, receiving.held) == (1, 0)
            for _ in range(3):
                await clock.advance(timedelta(seconds=20))
                assert (await mq.health()).status == "up"
            await first.accept()
            await (await anext(receiving)).accept()
            assert (await mq.stats("orders")).counters.acked == 2
        assert (await mq.stats("orders")).counters.acked == 2


async def test_a_classic_queue_says_that_max_deliveries_has_no_effect(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda message: None):
        found = part(await mq.health(), "consumer")
    assert found.status == "up"
    assert ("keeps no count of deliveries" in found.detail) == (mq.capabilities.transport == "rabbitmq")


async def test_one_that_raises_or_hangs_is_down_by_name_and_the_others_are_there(mq: AceMQ) -> None:
    async def hangs() -> HealthPart:
        while True:  # it swallows its cancellation, too
            try:
                await asyncio.wait_for(done.wait(), 30)
                return HealthPart("", "up")
            except asyncio.CancelledError:
                continue

    done = asyncio.Event()

    def raises() -> HealthPart:
        raise RuntimeError("amqp://svc:s3cret@db.example is away")

    def lies() -> HealthPart:
        return {"status": "up"}  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    mq.add_health("hangs", hangs)
    mq.add_health("raises", raises)
    mq.add_health("lies", lies)
    mq.add_health("full", lambda: HealthPart("whatever it says", "degraded"))
    began = time.perf_counter()
    health = await mq.health(timeout=SOON)
    assert time.perf_counter() - began < 1
    done.set()
    assert health.status == "down"
    assert [(each.name, each.status, each.detail) for each in health.parts] == [
        ("connection", "up", ""),
        ("hangs", "down", "no answer within 0.2 s"),
        ("raises", "down", "RuntimeError: amqp://db.example is away"),
        ("lies", "down", "the check returned dict, expected HealthPart"),
        ("full", "degraded", "no detail given"),
    ]


async def test_a_name_that_is_taken_is_refused(mq: AceMQ) -> None:
    mq.add_health("database", lambda: HealthPart("", "up"))
    for name in ("database", "connection", ""):
        with pytest.raises(ConfigurationError, match="name="):
            mq.add_health(name, lambda: HealthPart("", "up"))


async def test_m111_a_consumer_whose_queue_is_gone_is_down_until_the_queue_is_back(
    mq: AceMQ, queue: str, name: str
) -> None:
    other = f"{name}-other"
    await mq.declare(Topology().queue(other, type="classic"))
    async with (
        mq.consume(queue, int, lambda message: None, name="one"),
        mq.consume(other, int, lambda message: None, name="two"),
    ):
        await mq.delete(queue)

        async def is_down() -> bool:
            return part(await mq.health(), "consumer one").status == "down"

        await until_async(is_down)
        health = await mq.health()
        assert f"queue {queue!r}" in part(health, "consumer one").detail
        assert part(health, "consumer two").status == part(health, "connection").status == "up"
        await mq.declare(Topology().queue(queue, type="classic"))

        async def is_up() -> bool:
            return (await mq.health()).status == "up"

        await until_async(is_up)
    for each in (other, f"{other}.dlq", f"{other}.parked"):
        await mq.delete(each)


async def test_copies_that_do_not_land_degrade_their_consumer(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda message: Ack.reject("bad")) as consumer:
        await mq.delete(f"{queue}.dlq")
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.move_failed >= 1)
        found = part(await mq.health(), "consumer")
    assert found.status == "degraded"
    assert "copies do not land" in found.detail


async def test_a_stuck_handler_degrades_its_consumer(mq: AceMQ, queue: str) -> None:
    release = asyncio.Event()

    async def stuck(message: Message[int]) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with mq.consume(queue, int, stuck, handler_timeout=timedelta(milliseconds=50)) as consumer:
        await mq.send(queue, 1)
        await until(lambda: len(consumer.stuck) == 1)
        found = part(await mq.health(), "consumer")
        assert (found.status, "twice their time limit" in found.detail) == ("degraded", True)
        release.set()
        await until(lambda: not consumer.stuck)


async def test_a_closed_connection_is_down_and_nothing_is_raised(url: str) -> None:
    async with acemq.connect(url) as mq:
        pass
    health = await mq.health()
    assert (health.status, [each.name for each in health.parts]) == ("down", ["connection"])
    assert "closed" in health.parts[0].detail


async def test_a_hundred_checks_leave_nothing_on_the_broker(rabbitmq: RabbitMQ, rabbit_url: str, name: str) -> None:
    def objects() -> tuple[str, ...]:
        kinds = (("list_queues", "name"), ("list_exchanges", "name"), ("list_channels", "number"))
        return tuple(
            "\n".join(sorted(line for line in rabbitmq.ctl(*kind, "--silent").splitlines() if "acemq" in line))
            for kind in kinds
        )

    async with acemq.connect(rabbit_url) as mq:
        before = await asyncio.to_thread(objects)
        tasks = len(asyncio.all_tasks())
        for _ in range(20):
            found = await asyncio.gather(*(mq.health() for _ in range(5)))
            assert {health.status for health in found} == {"up"}
        assert await asyncio.to_thread(objects) == before
        assert len(asyncio.all_tasks()) == tasks
        assert not await mq.exists("acemq.health")


@pytest.fixture
async def alarm(rabbitmq: RabbitMQ) -> AsyncIterator[RabbitMQ]:
    yield rabbitmq
    await asyncio.to_thread(rabbitmq.set_memory_alarm, False)


async def test_on_a_really_blocked_broker_the_answer_comes_at_once(alarm: RabbitMQ, rabbit_url: str, name: str) -> None:
    async with acemq.connect(rabbit_url) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        async with mq.consume(name, int, lambda message: None) as consumer:
            await asyncio.to_thread(alarm.set_memory_alarm, True)
            # A broker says that it is blocked only after a first publish.
            first = asyncio.create_task(mq.send(name, 1, timeout=timedelta(seconds=40)))
            await until(lambda: mq.state.blocked is not None)
            health = await at_once(mq.health)
            assert health.status == "up"
            assert part(health, "connection").detail == "blocked, no publishes now: low on memory"
            await asyncio.to_thread(alarm.set_memory_alarm, False)
            await first
            await until(lambda: consumer.counters.acked == 1)
        for each in (name, f"{name}.dlq", f"{name}.parked"):
            await mq.delete(each)


# On a clock that is moved


async def test_without_a_link_it_is_degraded_and_down_after_ten_seconds(name: str) -> None:
    clock = MovableClock()
    broker = MemoryBroker.named(name, clock=clock)
    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        broker.refuse_dials()
        broker.disconnect("pulled out")
        await clock.rest()
        assert (await mq.health()).status == "degraded"
        await clock.advance(timedelta(seconds=10))
        found = part(await mq.health(), "connection")
        assert found.status == "down"
        assert found.detail.startswith("no link for 10 s: ")
        broker.refuse_dials(False)
        await clock.advance(timedelta(minutes=1))
        assert (await mq.health()).status == "up"


async def test_a_broker_that_does_not_answer_is_down_after_the_probes_limit(name: str) -> None:
    broker = MemoryBroker.named(name)
    async with acemq.connect(f"memory://{name}") as mq:
        broker.stall("exists")
        health = await mq.health(timeout=SOON)
        assert health.status == "down"
        assert "within 0.2 s" in part(health, "connection").detail
        broker.release("exists")


async def test_a_stuck_handler_of_a_batch_degrades_its_consumer(mq: AceMQ, queue: str) -> None:
    release = asyncio.Event()

    async def stuck(batch: Batch[int]) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with mq.consume_batches(queue, int, stuck, most=1, handler_timeout=timedelta(milliseconds=50)) as consumer:
        await mq.send(queue, 1)
        await until(lambda: len(consumer.stuck) == 1)
        assert part(await mq.health(), "consumer").status == "degraded"
        release.set()
        await until(lambda: not consumer.stuck)


async def test_work_that_waits_while_nothing_is_fetched_degrades_its_consumer_after_thirty_seconds(
    name: str,
) -> None:
    clock = MovableClock()
    broker = MemoryBroker.named(name, clock=clock)
    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", int, lambda message: None) as consumer:
            broker.stall("deliver")
            await clock.advance(timedelta(hours=1))
            assert (await mq.health()).status == "up"
            await mq.send("orders", 1)
            await clock.advance(timedelta(seconds=5))
            assert (await mq.health()).status == "up"  # it may have come this very moment
            await clock.advance(timedelta(seconds=30))
            found = part(await mq.health(), "consumer")
            assert (found.status, "work waits" in found.detail) == ("degraded", True)
            broker.release("deliver")
            await until(lambda: consumer.counters.acked == 1)
            assert (await mq.health()).status == "up"


# Stats


async def test_stats_of_a_group_keep_what_those_that_left_have_counted(mq: AceMQ, queue: str) -> None:
    async with mq.consume_group(queue, int, lambda message: None, size=3) as group:
        await mq.send_many(queue, range(30))
        await until(lambda: group.counters.acked == 30)
        await group.scale(1)
        assert (await mq.stats(queue)).counters.acked == 30
        assert len((await mq.health()).parts) == 2


async def test_m125_stats_are_the_counters_of_this_process_and_the_brokers_depths(mq: AceMQ, queue: str) -> None:
    answers = {"dead": Ack.reject("d"), "park": Ack.park("p")}
    async with mq.consume(queue, str, lambda message: answers.get(message.payload)) as consumer:
        await mq.send_many(queue, ["ok"] * 10 + ["dead"] * 4 + ["park"])
        await until(lambda: consumer.counters.acked + consumer.counters.rejected + consumer.counters.parked == 15)
        await consumer.drain()
        await mq.send_many(queue, ["waits"] * 3)
        stats = await mq.stats(queue)
        assert (stats.counters.acked, stats.counters.rejected, stats.counters.parked) == (10, 4, 1)
    assert stats.queue == queue
    assert stats.published == 18
    assert stats.depth is not None
    assert stats.dead is not None
    assert stats.parked is not None
    assert (stats.depth.ready, stats.dead.ready, stats.parked.ready) == (3, 4, 1)
    assert stats.lanes == {}


async def test_m125_asked_a_hundred_times_in_a_second_the_broker_is_asked_once(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    depth = mq.transport.depth

    async def counted(name: str) -> acemq.Depth:
        asked.append(name)
        return await depth(name)

    monkeypatch.setattr(mq._depths, "_ask", counted)
    await asyncio.gather(*(mq.stats(queue) for _ in range(50)))
    for _ in range(50):
        await mq.stats(queue)
    stats = await mq.stats(queue)
    assert sorted(asked) == [queue, f"{queue}.dlq", f"{queue}.parked"]
    assert (stats.dead, stats.parked) == (None, None)


async def test_stats_of_a_queue_that_is_not_there_are_refused_until_it_is(mq: AceMQ, name: str) -> None:
    with pytest.raises(TopologyError, match=name):
        await mq.stats(name)
    await mq.declare(Topology().queue(name, type="classic"))
    assert (await mq.stats(name)).published == 0
    await mq.delete(name)


async def test_no_detail_shows_a_password(rabbitmq: RabbitMQ, name: str, proxy: Proxy, proxied: str) -> None:
    async with acemq.connect(proxied, reconnect=Backoff(ceiling=timedelta(milliseconds=100))) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        async with mq.consume(name, int, lambda message: None):
            proxy.refuse()
            proxy.cut()
            await until(lambda: mq.state.phase == "reconnecting" and mq.state.dials > 1)
            health = await mq.health()
            assert health.status != "up"
            assert_unprinted(f"{health} {health.as_dict()} {mq.state} {mq!r}", "the health of a connection")
            proxy.refuse(False)
            await until(lambda: mq.state.phase == "connected")
        for each in (name, f"{name}.dlq", f"{name}.parked"):
            await mq.delete(each)
