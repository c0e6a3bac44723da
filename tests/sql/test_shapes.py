"""What a claim costs does not depend on how much waits. Cases T-014, T-016."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import acemq
from acemq import AceMQ, Topology
from acemq.transports.sql import sweeping
from tests.sql.engines import engine_for
from tests.sql.filling import analyze, fill
from tests.waiting import until


@pytest.fixture
async def engine(url: str, mq: AceMQ) -> AsyncIterator[AsyncEngine]:
    engine = engine_for(url)
    yield engine
    await engine.dispose()


async def fill_up(mq: AceMQ, engine: AsyncEngine, rows: int) -> None:
    await mq.send("q", 1)
    async with engine.begin() as connection:
        await connection.run_sync(fill, "q", rows - 1)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.run_sync(analyze)


@contextmanager
def statements() -> Iterator[list[tuple[str, Any]]]:
    """What is said to the database meanwhile, with its parameters, as the driver has them."""
    said: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        said.append((statement, parameters))

    event.listen(sa.Engine, "before_cursor_execute", note)
    try:
        yield said
    finally:
        event.remove(sa.Engine, "before_cursor_execute", note)


async def plan_of(engine: AsyncEngine, statement: str, parameters: Any) -> str:
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    async with engine.connect() as connection:
        rows = await connection.exec_driver_sql(explain + statement, parameters)
        return "\n".join("\t".join(map(str, row)) for row in rows)


def scans(database: str, plan: str) -> bool:
    """Whether it goes through all of the messages."""
    match database:
        case "postgresql":
            return "Seq Scan on acemq_message" in plan
        case "sqlite":
            return "SCAN acemq_message" in plan
        case _:
            return any(
                "acemq_message" in line.split("\t")[2:3] and line.split("\t")[3] in ("ALL", "index")
                for line in plan.splitlines()
            )


ROWS = [20_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


@pytest.mark.parametrize("rows", ROWS)
async def test_t014_claim_renewal_and_settlement_use_the_indexes(
    mq: AceMQ, url: str, engine: AsyncEngine, rows: int
) -> None:
    database = url.partition(":")[0]
    await fill_up(mq, engine, rows)
    with statements() as said:
        pulled = await mq.pull_many("q", int, most=20)
        await mq.transport.renew([each.delivery for each in pulled], timedelta(seconds=30))
        await asyncio.gather(*(each.accept() for each in pulled[:10]))
        await asyncio.gather(*(each.release() for each in pulled[10:]))
    plans = {
        statement: await plan_of(engine, statement, parameters)
        for statement, parameters in said
        if "acemq_message" in statement
    }
    assert [plan for plan in plans.values() if scans(database, plan)] == []
    assert any("acemq_message_ready" in plan for plan in plans.values())
    key = {"postgresql": "acemq_message_pkey", "mariadb": "PRIMARY", "sqlite": "USING INTEGER PRIMARY KEY"}[database]
    assert sum(key in plan for plan in plans.values()) >= 3, plans  # taken, renewed, settled


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_t014_a_claim_of_a_million_is_as_quick_as_one_of_a_thousand(mq: AceMQ, engine: AsyncEngine) -> None:
    await fill_up(mq, engine, 1_000_000)
    await mq.send_many("r", range(1_000))
    took: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(200):
        for queue in ("q", "r"):
            began = time.perf_counter()
            pulled = await mq.pull_many(queue, int, most=20)
            took[queue].append(time.perf_counter() - began)
            assert len(pulled) == 20
            await asyncio.gather(*(each.accept() for each in pulled))
        await mq.send_many("r", range(20))
    assert median(took["q"]) <= 3 * median(took["r"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_t016_under_a_report_that_forgot_to_end_claims_stay_quick_and_in_order(
    mq: AceMQ, engine: AsyncEngine
) -> None:
    total, at_once = 200_000, 100
    await mq.send("q", -1)
    report = await engine.connect()
    await report.execution_options(isolation_level="REPEATABLE READ")
    await report.execute(sa.text("SELECT count(*) FROM acemq_message"))
    sent, took, came = 0, list[float](), list[int]()
    while len(came) <= total:
        if sent < total:
            await mq.send_many("q", range(sent, sent + 1_000))
            sent += 1_000
        for _ in range(10):
            began = time.perf_counter()
            pulled = await mq.pull_many("q", int, most=at_once)
            took.append(time.perf_counter() - began)
            came += [each.payload for each in pulled]
            await asyncio.gather(*(each.accept() for each in pulled))
    assert came == list(range(-1, total))
    assert median(took[-at_once - 10 : -10]) < 0.015  # of ten thousand; the last ten found nothing, or one
    await mq.send("q", 7)
    (again,) = await mq.pull_many("q", int, most=1)
    await again.release()
    async with asyncio.timeout(1.5):
        (again,) = await mq.pull_many("q", int, most=1, wait=timedelta(seconds=2))
    await again.accept()
    await report.close()


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_t016_a_snapshot_that_is_held_for_long_is_warned_of_once(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sweeping, "EVERY", (0.05, 0.1))
    monkeypatch.setattr(sweeping, "OLD_SNAPSHOT", timedelta(seconds=1))

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "snapshot" in record.getMessage()]

    engine = create_async_engine(url.partition("?")[0].replace("postgresql:", "postgresql+asyncpg:"))
    async with acemq.connect(url) as mq, engine.connect() as report:
        await mq.declare(Topology().queue("q"))
        await report.execution_options(isolation_level="REPEATABLE READ")
        await report.execute(sa.text("SELECT 1 FROM acemq_meta"))
        await until(lambda: len(said()) == 1)
        assert "1 s" in said()[0] or "2 s" in said()[0]
        await report.rollback()
        await asyncio.sleep(0.5)
    await engine.dispose()
    assert len(said()) == 1
