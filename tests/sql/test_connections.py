"""The connections to a PostgreSQL server: no more than may be, kept in hand, and let go of at the end."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Callable

import sqlalchemy as sa

import acemq
from acemq import Message, Topology
from acemq.transports.sql.port import SqlTransport
from tests.services import PostgreSQL
from tests.waiting import until, until_async

OURS = "SELECT count(*) FROM pg_stat_activity WHERE datname = '{}' AND pid <> pg_backend_pid()"
KILL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}' AND pid <> pg_backend_pid()"


async def test_there_are_no_more_than_may_be_whatever_goes_on_at_once(
    postgresql: PostgreSQL, postgres_url: str
) -> None:
    database, got = postgres_url.rpartition("/")[2], list[int]()

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    def ours() -> int:
        return int(postgresql.execute(OURS.format(database)))

    async with acemq.connect(f"{postgres_url}?create_schema=true&pool=2") as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take, concurrency=4):
            # What stands alone keeps its connection in hand; what needs a transaction must still get one.
            for first in range(0, 100, 20):
                await asyncio.gather(
                    *(mq.send("q", number) for number in range(first, first + 20)),
                    *(mq.declare(Topology().queue(f"q{number}")) for number in range(first, first + 5)),
                )
                assert await asyncio.to_thread(ours) <= 2 + 1 + 1  # one for a dial, one that listens
            await until(lambda: len(got) == 100)

    async def are_gone() -> bool:
        return await asyncio.to_thread(ours) == 0

    await until_async(are_gone)
    assert sorted(got) == list(range(100))


async def test_those_that_died_in_hand_are_replaced(postgresql: PostgreSQL, postgres_url: str) -> None:
    database = postgres_url.rpartition("/")[2]
    async with acemq.connect(f"{postgres_url}?create_schema=true") as mq:
        await mq.declare(Topology().queue("q"))
        for round in range(3):
            await asyncio.gather(*(mq.send("q", number) for number in range(20)))
            generation = mq.state.generation
            await asyncio.to_thread(postgresql.execute, KILL.format(database))
            await until(lambda generation=generation: mq.state.generation > generation)  # type: ignore[misc]
            assert (await mq.depth("q")).ready == 20 * (round + 1)


async def test_of_one_that_is_closed_nothing_is_kept(postgres_url: str) -> None:
    async with acemq.connect(f"{postgres_url}?create_schema=true") as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send("q", 1)
        transport = weakref.ref(mq.transport)
    del mq

    def is_gone() -> bool:
        gc.collect()
        return transport() is None

    await until(is_gone, within=3)


async def test_what_is_kept_in_hand_makes_room_for_transactions(postgres_url: str) -> None:
    def sleeping(seconds: float) -> Callable[[sa.Connection], object]:
        return lambda connection: connection.execute(sa.text(f"SELECT pg_sleep({seconds})"))

    async with acemq.connect(f"{postgres_url}?create_schema=true&pool=2") as mq:
        transport = mq.transport
        assert isinstance(transport, SqlTransport)
        assert transport._running is not None
        link = transport._running.link
        await asyncio.gather(*(link.start(sleeping(0.1), alone=True) for _ in range(2)))
        began = time.monotonic()
        await asyncio.gather(*(link.start(sleeping(2)) for _ in range(2)))
        assert time.monotonic() - began < 3.5  # side by side, and not one after the other
