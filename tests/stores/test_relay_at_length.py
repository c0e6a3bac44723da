"""Relays on a long day: transactions and tables that are larger than anybody planned, and listeners that are cut."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from acemq import AceMQ, DbOutboxStore
from acemq.patterns.relay import OutboxRelay
from tests.stores.places import Sql
from tests.stores.test_relay import EACH, LISTENING, Log, drained, listening, log, record
from tests.waiting import until, until_async

__all__ = ["log"]

SQLITE_AND_POSTGRES = pytest.mark.parametrize("place", ["sqlite", "postgresql"], indirect=True)


@pytest.mark.slow
@SQLITE_AND_POSTGRES
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_o023_what_a_long_transaction_writes_is_out_once_after_its_commit_and_never_before(
    place: Sql, mq: AceMQ, log: Log, ending: str
) -> None:
    interval, lease = timedelta(milliseconds=500), timedelta(seconds=2)
    await place.outbox()
    async with AsyncExitStack() as opened:
        relays: list[OutboxRelay] = []
        for _ in range(2):
            store = DbOutboxStore(place.engine, lease=lease)
            relays.append(await opened.enter_async_context(mq.outbox(store).relay(interval=interval)))
        store = DbOutboxStore(place.engine)
        async with place.session() as session:
            await store.add(record("long"), session)
            await asyncio.sleep(8)  # the work itself, four leases long
            assert log.ids == []
            await (session.commit() if ending == "commit" else session.rollback())
            if ending == "commit":
                await until(lambda: log.ids == ["long"], within=2 * interval.total_seconds())
        # Long enough for each of both to have taken it a second time.
        ended = time.monotonic()
        passes = [relay.counters.sweeps for relay in relays]
        await until(lambda: time.monotonic() > ended + lease.total_seconds() + 1)
        assert all(relay.counters.sweeps > before for relay, before in zip(relays, passes, strict=True))
        assert log.ids == (["long"] if ending == "commit" else [])
        assert await store.pending_count() == 0


SENT, FAILED, PENDING = 500_000, 20, 1_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@SQLITE_AND_POSTGRES
async def test_o024_half_a_million_sent_rows_slow_nobody_down_and_go_while_it_is_busy(
    place: Sql, mq: AceMQ, log: Log
) -> None:
    keep = timedelta(hours=1)
    store: Any = await place.outbox(keep=keep)
    await fill(place, "sent", SENT, to="q", published_ago=2 * keep)
    await fill(place, "failed", FAILED, to="nowhere", attempts=3)
    await fill(place, "m", PENDING, to="q")
    await place.execute("ANALYZE")

    took: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        batch = await store.claim(100)
        took.append(time.perf_counter() - began)
        assert len(batch.records) == 100
        await store.give_back([each.id for each in batch.records], batch.token)
    assert median(took) < 0.1, took
    plan = await plan_of_a_claim(place, store)
    assert "acemq_outbox_pending" in plan
    assert not any(sign in plan for sign in ("Seq Scan", "SCAN acemq_outbox\n", "Sort", "TEMP B-TREE")), plan

    purge, purges, added = store.purge, list[float](), 0

    async def timed(**given: Any) -> int:
        began = time.perf_counter()
        gone: int = await purge(**given)
        purges.append(time.perf_counter() - began)
        assert gone <= 1_000
        return gone

    store.purge = timed
    async with mq.outbox(store).relay(interval=timedelta(milliseconds=200)):
        await until(lambda: len(log.of("m-")) == PENDING, within=30)
        began, rate = time.monotonic(), 50
        while (now := time.monotonic() - began) < 10:
            if added < now * rate:
                await place.add(store, record(f"new-{added}"))
                added += 1
            else:
                await asyncio.sleep(0.005)
        out, purged_meanwhile = len(log.of("new-")), len(purges)
        assert await store.pending_count() >= FAILED, "it was idle"
        assert added > rate
        assert out > 0.7 * added, f"{out} of {added} while it was purged"
        assert purged_meanwhile > 20, "it waited until there was nothing else to do"

        async def old_ones_are_gone() -> bool:
            ((left,),) = await place.execute("SELECT count(*) FROM acemq_outbox WHERE id LIKE 'sent-%'")
            return bool(left == 0)

        await until_async(old_ones_are_gone, within=150)
    assert median(purges) < 0.5, sorted(purges)[-5:]
    assert max(purges) < 1.5, sorted(purges)[-5:]  # where others use the machine
    ((kept,),) = await place.execute("SELECT count(*) FROM acemq_outbox WHERE published_at IS NOT NULL")
    assert kept == PENDING + added


async def fill(
    place: Sql, name: str, count: int, *, to: str, attempts: int = 0, published_ago: timedelta | None = None
) -> None:
    """Rows by one statement. What was published is as much older."""
    now = round(time.time() * 1_000)
    at = "NULL" if published_ago is None else str(now - round(published_ago.total_seconds() * 1_000))
    columns = "id, exchange_name, routing_key, body, headers, created_at, attempts, published_at"
    body = "CAST('1' AS BYTEA)" if place.name == "postgresql" else "CAST('1' AS BLOB)"
    await place.execute(
        f"WITH RECURSIVE n (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < {count - 1}) "
        f"INSERT INTO acemq_outbox ({columns}) SELECT '{name}-' || n, '', '{to}', {body}, '{{}}', {now}, {attempts}, "
        f"{at} FROM n"
    )


async def plan_of_a_claim(place: Sql, store: DbOutboxStore) -> str:
    """As it was carried out on PostgreSQL, and undone; as it would be on SQLite."""
    explain = "EXPLAIN QUERY PLAN" if place.name == "sqlite" else "EXPLAIN (ANALYZE)"
    from sqlalchemy import text

    async with place.engine.connect() as connection:
        given = {"ceiling": 10, "most": 100, "lease": 1}
        rows = await connection.execute(text(f"{explain} {store._sql.claim.text}"), given)
        plan = "\n".join(str(row[-1]) for row in rows.all()) + "\n"
        await connection.rollback()
    return plan


@EACH
async def test_o025_a_record_that_is_never_taken_is_tried_five_times_over_a_restart_and_then_waits_for_somebody(
    place: Sql, mq: AceMQ, log: Log
) -> None:
    said: Any = {"max_attempts": 5, "backoff": timedelta(milliseconds=100)}
    store = await place.outbox(**said)
    tried: list[float] = []
    failed = DbOutboxStore.failed

    async def timed(store: DbOutboxStore, id: str, error: str, token: int, /) -> bool:
        changed = await failed(store, id, error, token)
        tried.append(time.monotonic())
        return changed

    await place.add(store, record("bad", queue="nowhere"), *(record(f"good-{n}") for n in range(50)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DbOutboxStore, "failed", timed)
        async with mq.outbox(store).relay(interval=timedelta(milliseconds=20)):
            await until(lambda: len(tried) == 2)
        again = DbOutboxStore(place.engine, **said)
        async with mq.outbox(again).relay(interval=timedelta(milliseconds=20)) as relay:

            async def is_retired() -> bool:
                return [each.id for each in await again.retired()] == ["bad"]

            await until_async(is_retired)
            passes = relay.counters.sweeps
            await until(lambda: relay.counters.sweeps > passes + 10)
    assert log.of("bad") == ["bad"] * 5
    waits = [later - earlier for earlier, later in pairwise(tried)]
    for wait, least in zip(waits, (0.1, 0.2, 0.4, 0.8), strict=True):
        assert least - 0.05 < wait < least + 1.5, waits
    assert sorted(log.of("good")) == sorted(f"good-{n}" for n in range(50))
    assert log.ids.index("bad", log.ids.index("good-49")) > 0, "the good ones went out before it was given up"
    (retired,) = await again.retired()
    assert retired.attempts == 5
    assert "nowhere" in (retired.last_error or "")

    assert await again.release("bad")
    (fresh,) = (await again.claim(10)).records
    assert (fresh.id, fresh.attempts) == ("bad", 0)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["postgresql", "psycopg"], indirect=True)
async def test_o027_a_listener_that_is_cut_three_times_hears_again_and_burns_no_processor(
    place: Sql, mq: AceMQ, log: Log
) -> None:
    store = await place.outbox()
    async with mq.outbox(store).relay(interval=timedelta(seconds=10)):
        began, processor = time.monotonic(), time.process_time()
        for _ in range(3):
            await until_async(lambda: listening(place))
            await place.execute(f"SELECT pg_terminate_backend(pid) {LISTENING}")
            await asyncio.sleep(0.1)  # for it to be gone from the list
        cut = time.monotonic()
        assert cut - began < 5
        await until_async(lambda: listening(place), within=10)
        spent, over = time.process_time() - processor, time.monotonic() - began
        assert spent < 0.3 * over, f"{spent:.2f} s of processor in {over:.2f} s"

        took: list[float] = []
        for n in range(10):
            committed = time.monotonic()
            await place.add(store, record(f"m-{n}"))
            await until(lambda: log.ids[-1:] == [f"m-{n}"], within=11)  # noqa: B023
            took.append(time.monotonic() - committed)
            await asyncio.sleep(max(0.0, committed + 1 - time.monotonic()))
    assert median(took) < 1, took
    await drained(store)
