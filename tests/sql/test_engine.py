"""An engine of the application's in place of one of our own: it is used, and left as it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import acemq
from acemq import ConfigurationError, ConnectOptions, Credentials, Message, SecurityError, Tls, Topology
from acemq.transports.sql.port import SqlTransport
from tests.sql.engines import engine_for
from tests.waiting import QUICK, until


@pytest.fixture(params=["postgres_url", "mariadb_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = engine_for(url)
    yield engine
    await engine.dispose()


def made(url: str) -> str:
    return f"{url}?create_schema=true"


async def test_messages_go_through_it_and_it_works_on_after_the_close(url: str, engine: AsyncEngine) -> None:
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with acemq.connect(made(url), engine=engine) as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take):
            async with engine.begin() as connection:
                await mq.send("q", 1, transaction=connection)
            await mq.send("q", 2)
            await until(lambda: sorted(got) == [1, 2])
    pool: Any = engine.pool
    assert pool.checkedout() == 0
    async with engine.connect() as connection:
        assert (await connection.execute(sa.text("SELECT count(*) FROM acemq_message"))).scalar() == 0


async def test_what_it_does_for_others_is_not_cut_off_when_the_link_is_lost(url: str, engine: AsyncEngine) -> None:
    async with acemq.connect(made(url), engine=engine, reconnect=QUICK) as mq:
        await mq.declare(Topology().queue("q"))
        async with engine.connect() as connection:
            await connection.execute(sa.text("SELECT 1"))
            transport = mq.transport
            assert isinstance(transport, SqlTransport)
            assert transport._running is not None
            generation = mq.state.generation
            transport._running.link.lose("for the test")
            await until(lambda: mq.state.generation > generation)
            assert (await connection.execute(sa.text("SELECT 2"))).scalar() == 2
        await mq.send("q", 1)


async def test_its_isolation_level_is_as_it_was(url: str) -> None:
    engine = engine_for(url, isolation_level="REPEATABLE READ")
    async with acemq.connect(made(url), engine=engine) as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send_many("q", range(3))
        assert len(await mq.pull_many("q", int)) == 3
        for _ in range(3):
            async with engine.connect() as connection:
                assert await connection.get_isolation_level() == "REPEATABLE READ"
    await engine.dispose()


async def test_on_postgresql_it_is_listened_through_it(postgres_url: str) -> None:
    """The user of the URL is nobody's: whatever connects, connects as the engine does."""
    engine, got = engine_for(postgres_url), list[int]()
    nobody = postgres_url.replace("test@", "nobody@")

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with (
        acemq.connect(f"{nobody}?create_schema=true&poll=60", engine=engine) as mq,
        acemq.connect(postgres_url) as other,
    ):
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take):
            await asyncio.sleep(0.5)  # until it has looked, and will not again for seconds
            began = time.monotonic()
            await other.send("q", 1)
            await until(lambda: got == [1])
            assert time.monotonic() - began < 1
    listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    async with engine.connect() as connection:
        assert (await connection.execute(sa.text(listening))).scalar() == 0
    await engine.dispose()


async def test_an_engine_of_psycopg_is_enough_and_polls(postgres_url: str) -> None:
    engine, got = create_async_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:")), list[int]()

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with acemq.connect(made(postgres_url), engine=engine) as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take):
            await mq.send("q", 1)
            await until(lambda: got == [1])
    await engine.dispose()


async def test_what_does_not_fit_is_refused_at_the_call(postgres_url: str, tmp_path: Any) -> None:
    engine = engine_for(postgres_url)
    other = postgres_url.rpartition("/")[0] + "/another"
    wrong: tuple[tuple[str, ConnectOptions, str], ...] = (
        (f"sqlite:///{tmp_path}/x.db", {"engine": engine}, "opened by its name"),
        ("mariadb://root@localhost/test", {"engine": engine}, "the URL says mariadb"),
        (other, {"engine": engine}, "name the same"),
        (postgres_url, {"engine": engine.sync_engine}, "must be an AsyncEngine"),
        ("memory://", {"engine": engine}, "no option 'engine'"),
        ("amqp://localhost", {"engine": engine}, "option 'engine' of RabbitMQ"),
    )
    for url, options, says in wrong:
        with pytest.raises(ConfigurationError, match=says):
            acemq.connect(url, **options)
    with pytest.raises(SecurityError, match="beside engine="):
        acemq.connect(postgres_url, engine=engine, tls=Tls())
    with pytest.raises(SecurityError, match="beside engine="):
        acemq.connect(postgres_url, engine=engine, credentials=Credentials("a", "b"))
    mysql = create_async_engine("mysql+asyncmy://root@localhost/postgres")
    with pytest.raises(ConfigurationError, match="one of mysql"):
        acemq.connect(postgres_url, engine=mysql)
