"""A relay and a unit of work that are killed at each of their steps: at least once, never lost, never half."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq import AceMQ, DbIdempotencyStore, DbOutboxStore, Envelope, OutboxRecord, RelayState, Topology
from tests.conftest import StartRabbitMQ
from tests.crash.conftest import remove
from tests.crash.database import Kept
from tests.crash.process import Workers
from tests.services import RIPE
from tests.stores.places import Sql, place_at, url_for
from tests.waiting import until, until_async

EACH = pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb"], indirect=True)


@pytest.fixture
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sql]:
    kind: str = request.param
    async with place_at(kind, url_for(kind, request, tmp_path)) as place:
        await place.outbox()
        await place.claims()
        await place.execute("CREATE TABLE invoice (n INTEGER, cents INTEGER)")
        yield place


@pytest.fixture
async def announced(mq: AceMQ, name: str) -> AsyncIterator[str]:
    queue = f"{name}-announced"
    await mq.declare(Topology().queue(queue, type="classic"))
    yield queue
    await remove(mq, queue)


def kept(place: Sql, **plan: Any) -> Kept:
    return Kept(url=place.engine.url.render_as_string(hide_password=False), **plan)


async def arrived(mq: AceMQ, queue: str) -> list[str]:
    """The ids in the queue, in its order."""
    ids: list[str] = []
    while pulled := await mq.pull_many(queue, bytes, most=1_000):
        ids += [message.id for message in pulled]
        for message in pulled:
            await message.accept()
    return ids


async def written(place: Sql, queue: str, count: int, *, keys: int = 5, name: str = "m") -> list[str]:
    """So many in one transaction, every other one with a key."""
    store = DbOutboxStore(place.engine)
    ids = [f"{name}-{n:04}" for n in range(count)]
    records = [
        OutboxRecord.of("", queue, 1, envelope=Envelope.of("t", id=id), key=f"k-{n % keys}" if n % 2 else None)
        for n, id in enumerate(ids)
    ]
    await place.add(store, *records)
    return ids


async def nothing_pending(place: Sql) -> bool:
    return await DbOutboxStore(place.engine).pending_count() == 0


@pytest.mark.timeout(120)
@EACH
@pytest.mark.parametrize("step", ["after claim", "after publish", "before mark", "after mark"])
async def test_m087_o022_a_relay_killed_at_each_step_publishes_everything_with_the_same_ids(
    place: Sql, mq: AceMQ, announced: str, rabbit_url: str, workers: Workers, step: str
) -> None:
    ids = await written(place, announced, 100)
    dying = workers.start(rabbit_url, database=kept(place, relay=True, dies=step, at=40))
    await until(lambda: not dying.is_running, within=60)
    assert [line.id for line in workers.recorder.lines("died")] == [step.replace(" ", "-")], dying.last_words()
    held = [row[0] for row in await place.execute("SELECT id FROM acemq_outbox WHERE leased_until IS NOT NULL")]
    last_batch = {id.decode() if isinstance(id, bytes) else id for id in held}

    workers.start(rabbit_url, database=kept(place, relay=True))
    await until_async(lambda: nothing_pending(place), within=60)
    counted = Counter(await arrived(mq, announced))
    assert set(counted) == set(ids)
    twice = {id for id, times in counted.items() if times > 1}
    assert max(counted.values()) <= 2
    assert twice <= last_batch
    # It was there: what is confirmed and not marked, and nothing else, comes a second time.
    match step:
        case "after claim" | "after mark":
            assert not twice
        case "after publish":
            assert len(twice) == min(40, len(last_batch))
        case _:
            assert twice == last_batch


@pytest.mark.timeout(120)
@EACH
async def test_a_relay_killed_again_and_again_keeps_the_order_of_each_key(
    place: Sql, mq: AceMQ, announced: str, rabbit_url: str, workers: Workers
) -> None:
    ids = await written(place, announced, 60)
    for at in (1, 5):
        dying = workers.start(rabbit_url, database=kept(place, relay=True, dies="after publish", at=at, batch=10))
        await until(lambda running=dying: not running.is_running, within=60)  # type: ignore[misc]
    workers.start(rabbit_url, database=kept(place, relay=True))
    await until_async(lambda: nothing_pending(place), within=60)
    first_seen = list(dict.fromkeys(await arrived(mq, announced)))
    assert sorted(first_seen) == ids
    for key in range(5):
        of_key = [id for n, id in enumerate(ids) if n % 2 and n % 5 == key]
        assert [id for id in first_seen if id in of_key] == of_key


@pytest.mark.timeout(120)
@EACH
@pytest.mark.parametrize("step", ["before commit", "after commit", "after acceptance"])
async def test_m097_a_unit_of_work_killed_at_each_step_is_whole_or_nothing(
    place: Sql, mq: AceMQ, announced: str, name: str, rabbit_url: str, workers: Workers, step: str
) -> None:
    queue = f"{name}-orders"
    await mq.declare(Topology().queue(queue, type="classic"))
    await mq.send(queue, 7, message_id="m-7")
    plan: Any = {"units": queue, "announces": announced, "concurrency": 1}
    dying = workers.start(rabbit_url, database=kept(place, dies=step, **plan))
    await until(lambda: not dying.is_running, within=60)
    assert [line.id for line in workers.recorder.lines("died")] == [step.replace(" ", "-")], dying.last_words()
    counts = {"before commit": (0, 0), "after commit": (1, 1), "after acceptance": (1, 1)}
    assert await counted(place) == counts[step]

    second = workers.start(rabbit_url, grace=10, database=kept(place, **plan))
    await mq.send(queue, 8, message_id="m-8")  # one at a time: when it is done, the redelivery before it is over

    async def both_are_done() -> bool:
        return await counted(place) == (2, 2)

    await until_async(both_are_done, within=60)
    second.terminate()
    assert await second.ended() == 0, second.last_words()
    assert (await mq.depth(queue)).ready == 0, "the redelivery was not accepted"
    assert await counted(place) == (2, 2)
    await remove(mq, queue)


async def counted(place: Sql) -> tuple[int, int]:
    ((rows,),) = await place.execute("SELECT count(*) FROM invoice")
    ((records,),) = await place.execute("SELECT count(*) FROM acemq_outbox")
    return rows, records


async def is_empty(mq: AceMQ, queue: str) -> bool:
    return (await mq.depth(queue)).ready == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_a_thousand_messages_delivered_twice_and_twenty_kills_are_one_effect_each(
    place: Sql, mq: AceMQ, announced: str, name: str, rabbit_url: str, workers: Workers
) -> None:
    queue = f"{name}-orders"
    await mq.declare(Topology().queue(queue, type="classic"))
    for _ in range(2):
        for n in range(1_000):
            await mq.send(queue, n, message_id=f"m-{n}")
    plan: Any = {"units": queue, "announces": announced, "relay": True}
    deaths = 0
    while deaths < 20:
        worker = workers.start(rabbit_url, database=kept(place, dies="in the handler", at=30, **plan))
        await until(lambda running=worker: not running.is_running, within=120)  # type: ignore[misc]
        deaths += 1
    assert len(workers.recorder.lines("died")) >= 20
    workers.start(rabbit_url, database=kept(place, **plan))

    async def all_is_done() -> bool:
        return (await mq.depth(queue)).ready == 0 and await counted(place) == (1_000, 1_000)

    await until_async(all_is_done, within=120)
    await until_async(lambda: nothing_pending(place), within=60)
    rows = [row[0] for row in await place.execute("SELECT n FROM invoice ORDER BY n")]
    assert rows == list(range(1_000))
    assert set(await arrived(mq, announced)) == {f"invoice-{n}" for n in range(1_000)}
    await remove(mq, queue)


@pytest.mark.timeout(120)
@EACH
async def test_o021_four_processes_share_a_table_and_publish_each_record_once(
    place: Sql, mq: AceMQ, announced: str, rabbit_url: str, workers: Workers
) -> None:
    # Nobody dies here, and none may be taken for dead because the machine is slow.
    plan = kept(place, relay=True, batch=20, lease=60)
    started = [workers.start(rabbit_url, database=plan) for _ in range(4)]
    await until(lambda: len(workers.recorder.lines("ready")) == 4, within=60)  # none has a start over another
    ids = await written(place, announced, 2_000, keys=40)
    await until_async(lambda: nothing_pending(place), within=60)
    counted = Counter(await arrived(mq, announced))
    assert sorted(counted) == ids
    assert max(counted.values()) == 1
    shares = [sum(int(line.id) for line in workers.recorder.lines("marked", pid=each.pid)) for each in started]
    assert sum(shares) == 2_000
    assert max(shares) <= 1_800, shares


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_m091_a_broker_that_was_away_costs_no_record_an_attempt(
    place: Sql, name: str, start_rabbitmq: StartRabbitMQ
) -> None:
    server = await asyncio.to_thread(start_rabbitmq)
    async with acemq.connect(server.url) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        async with mq.outbox(DbOutboxStore(place.engine)).relay(interval=timedelta(milliseconds=100)) as relay:
            await asyncio.sleep(RIPE)
            await asyncio.to_thread(server.kill)
            await until(lambda: relay.state is RelayState.HELD_UP)
            sweeps = relay.counters.sweeps
            ids = await written(place, name, 30)
            await until(lambda: mq.state.dials >= 3, within=30)
            assert relay.counters.sweeps == sweeps, "it claimed what it cannot publish"
            await asyncio.to_thread(server.start)
            await until_async(lambda: nothing_pending(place), within=60)
            assert (relay.counters.failed, relay.counters.published) == (0, 30)
        assert sorted(await arrived(mq, name)) == ids


AWAY = 300.0
"""Seconds."""


@pytest.mark.slow
@pytest.mark.timeout(AWAY + 120)
@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_a_broker_that_is_away_for_five_minutes_retires_nothing(
    place: Sql, name: str, start_rabbitmq: StartRabbitMQ
) -> None:
    server, store = await asyncio.to_thread(start_rabbitmq), DbOutboxStore(place.engine)
    async with acemq.connect(server.url) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        async with mq.outbox(store).relay(interval=timedelta(milliseconds=100)) as relay:
            ids = await written(place, name, 2_000, keys=40, name="before")
            await until(lambda: relay.counters.published >= 100, within=30)
            await asyncio.to_thread(server.stop)  # with records in hand
            assert relay.counters.published < 2_000, "it was too late to find some pending"
            ids += await written(place, name, 100, name="meanwhile")
            began = time.monotonic()
            await until(lambda: relay.state is RelayState.HELD_UP)
            sweeps = relay.counters.sweeps
            await until(lambda: time.monotonic() > began + AWAY, within=AWAY + 1)
            assert relay.counters.sweeps == sweeps, "it claimed what it cannot publish"
            assert await store.retired() == []
            ((most, left),) = await place.execute(
                "SELECT max(attempts), count(*) FROM acemq_outbox WHERE published_at IS NULL"
            )
            # What was on its way when the link went may have arrived: that counts, once.
            assert most <= 1
            assert left >= 100
            await asyncio.to_thread(server.start)
            await until_async(lambda: nothing_pending(place), within=90)
            assert await store.retired() == []
        assert sorted(set(await arrived(mq, name))) == sorted(ids)


@pytest.mark.timeout(120)
@EACH
async def test_o055_a_claim_of_a_killed_process_is_free_after_its_lease_and_the_work_is_done(
    place: Sql, mq: AceMQ, name: str, rabbit_url: str, workers: Workers
) -> None:
    queue = f"{name}-mail"
    await mq.declare(Topology().queue(queue, type="classic"))
    await mq.send(queue, 1, message_id="m-1")
    dying = workers.start(rabbit_url, database=kept(place, claims=queue, dies="in the handler"))
    await until(lambda: not dying.is_running, within=60)
    workers.start(rabbit_url, database=kept(place, claims=queue))
    await until(lambda: len(workers.recorder.lines("ended")) == 1, within=60)
    await mq.send(queue, 1, message_id="m-1")
    await until_async(lambda: is_empty(mq, queue), within=30)
    (ended,) = workers.recorder.lines("ended")
    assert (ended.id, ended.attempt) == ("m-1", 1), "waiting for a claim spends no attempt"
    assert len(workers.recorder.lines("began")) == 2
    store = DbIdempotencyStore(place.engine)

    async def is_known() -> bool:
        return (await store.claim("m-1", lease=timedelta(seconds=1))).answer == "duplicate"

    await until_async(is_known)
    await remove(mq, queue)
