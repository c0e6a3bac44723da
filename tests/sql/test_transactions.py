"""Sent inside the caller's transaction: what it commits is there, and nothing else. Cases T-017, C-115 to C-119."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import acemq
from acemq import AceMQ, CapabilityError, Message, PublishRefusedError, Topology
from tests.sql.engines import engine_for
from tests.waiting import until

_SYNC = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


@pytest.fixture
async def engine(url: str, mq: AceMQ) -> AsyncIterator[AsyncEngine]:
    """The application's own, on the same database."""
    engine = engine_for(url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("CREATE TABLE business (n INT)")
    yield engine
    await engine.dispose()


async def bodies(mq: AceMQ, queue: str) -> list[int]:
    found: list[int] = []
    while (pulled := await mq.pull(queue, int)) is not None:
        found.append(pulled.payload)
        await pulled.accept()
    return found


async def rows(engine: AsyncEngine) -> list[int]:
    async with engine.connect() as connection:
        return [row[0] for row in await connection.exec_driver_sql("SELECT n FROM business ORDER BY n")]


def insert(number: int) -> sa.TextClause:
    return sa.text(f"INSERT INTO business VALUES ({number})")


async def test_t017_a_session_commits_row_and_message_together(mq: AceMQ, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session:
        await session.execute(insert(1))
        await mq.send("q", 1, transaction=session)
        await session.commit()
        await session.execute(insert(2))
        await mq.send("q", 2, transaction=session)
        await session.rollback()
        await session.execute(insert(3))
        await mq.send("q", 3, transaction=session)
        savepoint = await session.begin_nested()
        await session.execute(insert(4))
        await mq.send("q", 4, transaction=session)
        await savepoint.rollback()
        await session.commit()
    assert await rows(engine) == [1, 3]
    assert await bodies(mq, "q") == [1, 3]


async def test_t017_a_connection_commits_row_and_message_together(mq: AceMQ, engine: AsyncEngine) -> None:
    async with engine.connect() as connection:
        for number, ends in ((1, AsyncConnection.commit), (2, AsyncConnection.rollback)):
            await connection.execute(insert(number))
            await mq.send_many("q", [number, number * 10], transaction=connection)
            await ends(connection)
    assert await rows(engine) == [1]
    assert await bodies(mq, "q") == [1, 10]


async def test_c118_a_fan_out_in_a_transaction_is_there_in_every_queue_or_in_none(
    mq: AceMQ, engine: AsyncEngine
) -> None:
    async with engine.connect() as connection:
        await mq.publish("x", "", 1, transaction=connection)
        await connection.rollback()
        await mq.publish("x", "", 2, transaction=connection)
        await connection.commit()
    assert [await bodies(mq, "q"), await bodies(mq, "r")] == [[2], [2]]


async def test_c115_it_is_seen_after_the_commit_and_an_idle_consumer_is_woken(mq: AceMQ, engine: AsyncEngine) -> None:
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with mq.consume("q", int, take):
        async with AsyncSession(engine) as session:
            await mq.send("q", 1, transaction=session)
            if engine.dialect.name != "sqlite":  # where one writes, others wait
                assert (await mq.depth("q")).ready == 0
            await session.commit()
        await until(lambda: got == [1])


async def test_c116_a_connection_that_ends_before_the_commit_leaves_nothing(mq: AceMQ, engine: AsyncEngine) -> None:
    connection = await engine.connect()
    await mq.send("q", 1, transaction=connection)
    await connection.invalidate()
    await connection.close()
    assert await bodies(mq, "q") == []


async def test_nothing_is_begun_or_ended_on_the_callers_connection(mq: AceMQ, engine: AsyncEngine) -> None:
    said: list[str] = []
    async with engine.connect() as connection:
        await connection.execute(insert(1))  # the transaction is the caller's, and begun

        def note(conn: object, cursor: object, statement: str, *_: object) -> None:
            said.append(statement)

        event.listen(engine.sync_engine, "before_cursor_execute", note)
        await mq.send("q", 1, transaction=connection)
        event.remove(engine.sync_engine, "before_cursor_execute", note)
        await connection.rollback()
    words = {statement.split()[0].upper() for statement in said}
    assert words
    assert not words & {"BEGIN", "COMMIT", "ROLLBACK", "SET", "SAVEPOINT"}


async def test_t018_a_transaction_left_open_keeps_nobody(mq: AceMQ, url: str, engine: AsyncEngine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("a SQLite file has one writer at a time: whoever writes while it is open waits for its end")
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with engine.connect() as connection, mq.consume("q", int, take):
        await mq.send("q", 0, transaction=connection)
        async with asyncio.timeout(5):
            await mq.send_many("q", range(1, 20))
            await mq.declare(Topology().queue("later").exchange("x", "fanout").bind("later", "x"))
            await until(lambda: len(got) == 19)
            async with acemq.connect(url) as other:
                await other.send("q", 20)
            await until(lambda: len(got) == 20)
        assert 0 not in got
        await connection.commit()
        await until(lambda: 0 in got)


async def test_a_transaction_on_another_database_is_refused_and_says_so(mq: AceMQ) -> None:
    foreign = create_async_engine("sqlite+aiosqlite://")
    try:
        async with foreign.connect() as connection:
            with pytest.raises(acemq.PublishError, match=r"same database|another database"):
                await mq.send("q", 1, transaction=connection)
    finally:
        await foreign.dispose()
    with pytest.raises(PublishRefusedError, match="a transaction that is a str"):
        await mq.send("q", 1, transaction="BEGIN")
    assert await bodies(mq, "q") == []


async def test_transports_without_transactions_refuse_the_option() -> None:
    async with acemq.connect("memory://") as mq:
        await mq.declare(Topology().queue("q"))
        with pytest.raises(CapabilityError, match="transaction"):
            await mq.send("q", 1, transaction=object())


@pytest.fixture
def session(request: pytest.FixtureRequest, url: str, mq: AceMQ) -> Iterator[Session]:
    """Of an application that does not know asyncio."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    if scheme not in _SYNC:
        pytest.skip(f"no synchronous driver of {scheme} is among the extras")
    engine = sa.create_engine(f"{_SYNC[scheme]}://{rest}")
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE business (n INT)")
    with Session(engine) as session:
        yield session
    engine.dispose()


async def test_t017_a_synchronous_session_commits_row_and_message_together(mq: AceMQ, session: Session) -> None:
    for number, end in ((1, session.commit), (2, session.rollback), (3, session.commit)):
        session.execute(insert(number))
        await mq.send("q", number, transaction=session)
        with session.begin_nested() as savepoint:
            await mq.send("q", number * 10, transaction=session)
            savepoint.rollback()
        end()
    assert session.scalars(sa.text("SELECT n FROM business ORDER BY n")).all() == [1, 3]
    session.rollback()
    assert await bodies(mq, "q") == [1, 3]


async def test_t017_a_program_without_an_event_loop_commits_row_and_message_together(
    mq: AceMQ, session: Session, url: str
) -> None:
    def program() -> list[int]:
        with acemq.blocking.connect(url) as blocking:
            for number, end in ((1, session.commit), (2, session.rollback), (3, session.commit)):
                session.execute(insert(number))
                blocking.send("q", number, transaction=session)
                blocking.send_many("q", [number * 10, number * 100], transaction=session)
                with session.begin_nested() as savepoint:
                    blocking.send("q", -number, transaction=session)
                    savepoint.rollback()
                end()
            engine = session.get_bind()
            assert isinstance(engine, sa.Engine)
            with engine.connect() as connection:
                blocking.publish("x", "", 7, transaction=connection)
                connection.commit()
        return list(session.scalars(sa.text("SELECT n FROM business ORDER BY n")))

    assert await asyncio.to_thread(program) == [1, 3]
    await asyncio.to_thread(session.rollback)
    assert await bodies(mq, "q") == [1, 10, 100, 3, 30, 300, 7]


async def test_a_batch_in_a_transaction_is_written_in_order(mq: AceMQ, engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        receipts = await mq.send_many("q", range(1200), transaction=connection, delay=timedelta())
    assert len(receipts) == 1200
    assert await bodies(mq, "r") == []
    pulled = await mq.pull_many("q", int, most=1000)
    assert [each.payload for each in pulled] == list(range(1000))
