"""Processes whose clocks are wrong: on a server every instant is by the server's. Case T-027."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import acemq
from acemq import AceMQ, Message, Topology
from acemq.clock import SystemClock
from tests.waiting import until, until_async

MICROSECONDS = 1_000_000
SLACK = 0.5


class Lying(SystemClock):
    def __init__(self, by: timedelta) -> None:
        self._by = by

    def now(self) -> datetime:
        return super().now() + self._by


@pytest.fixture
async def engine(postgres_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
    yield engine
    await engine.dispose()


@pytest.fixture
async def both(postgres_url: str) -> AsyncIterator[tuple[AceMQ, AceMQ]]:
    """Ten minutes ahead, and ten minutes behind."""
    wrong, url = timedelta(minutes=10), f"{postgres_url}?create_schema=true&lease=3"
    async with (
        acemq.connect(url, clock=Lying(wrong)) as ahead,
        acemq.connect(url, clock=Lying(-wrong)) as behind,
    ):
        await ahead.declare(Topology().queue("q", dead_letter=True))
        yield ahead, behind


async def ask(engine: AsyncEngine, sql: str) -> float:
    async with engine.connect() as connection:
        return float((await connection.execute(sa.text(sql))).scalar_one())


async def server_time(engine: AsyncEngine) -> float:
    return await ask(engine, "SELECT extract(epoch FROM clock_timestamp())")


async def test_t027_a_delay_ends_by_the_servers_clock(both: tuple[AceMQ, AceMQ], engine: AsyncEngine) -> None:
    due: dict[int, tuple[float, float]] = {}
    came: dict[int, float] = {}

    async def take(message: Message[int]) -> None:
        came[message.payload] = await server_time(engine)

    for number, mq in enumerate(both * 2):
        began = await server_time(engine)
        await mq.send("q", number, delay=timedelta(seconds=2))
        due[number] = began + 2, await server_time(engine) + 2
        written = await ask(engine, "SELECT max(visible_at) FROM acemq_message") / MICROSECONDS
        assert due[number][0] <= written <= due[number][1]
    ahead, behind = both
    async with ahead.consume("q", int, take), behind.consume("q", int, take):
        await until(lambda: len(came) == len(due))
    for number, at in came.items():
        assert due[number][0] <= at < due[number][1] + SLACK


async def test_t027_no_lease_is_cut_short(both: tuple[AceMQ, AceMQ], engine: AsyncEngine) -> None:
    started: list[int] = []

    async def slow(message: Message[int]) -> None:
        started.append(message.payload)
        await asyncio.sleep(5)

    ahead, behind = both
    async with ahead.consume("q", int, slow) as one, behind.consume("q", int, slow) as other:
        for number, mq in enumerate(both):
            began = await server_time(engine)
            await mq.send("q", number)
            await until(lambda number=number: number in started)  # type: ignore[misc]
            ends = await ask(engine, "SELECT max(visible_at) FROM acemq_message WHERE state = 1") / MICROSECONDS
            assert began + 3 <= ends <= await server_time(engine) + 3
        await until(lambda: one.counters.acked + other.counters.acked == 2)
    assert sorted(started) == [0, 1]


async def test_t027_a_message_expires_by_the_servers_clock(both: tuple[AceMQ, AceMQ], engine: AsyncEngine) -> None:
    expires = 0.0
    for number, mq in enumerate(both):
        began = await server_time(engine)
        await mq.send("q", number, expires_in=timedelta(seconds=5))
        expires = await ask(engine, "SELECT max(expires_at) FROM acemq_message") / MICROSECONDS
        assert began + 5 <= expires <= await server_time(engine) + 5
    ahead, behind = both
    for mq in both:  # alive, whoever asks
        pulled = await mq.pull("q", int)
        assert pulled is not None
        await pulled.release()

    async def is_over() -> bool:
        return await server_time(engine) > expires

    await until_async(is_over)
    assert await ahead.pull("q", int) is None
    assert await behind.pull("q", int) is None
    assert (await ahead.depth("q.dlq")).ready == 2
