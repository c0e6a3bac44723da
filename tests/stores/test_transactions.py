"""Whose transaction a record is in: published are exactly those whose transaction committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from acemq import AceMQ, ConfigurationError, DbOutboxStore, EncodeError, Envelope, OutboxRecord, Topology, TopologyError
from acemq.patterns.outbox import Outbox
from tests.proxy import Proxy
from tests.stores.places import Sql, begins_itself, engine_for
from tests.waiting import until_async


def record(n: int, **fields: Any) -> OutboxRecord:
    return OutboxRecord.of("", "announced", n, envelope=Envelope.of("t", id=f"m-{n}"), **fields)


@asynccontextmanager
async def outbox_at(place: Sql, mq: AceMQ) -> AsyncIterator[Outbox]:
    await mq.declare(Topology().queue("announced"))
    yield mq.outbox(await place.outbox())


async def published(mq: AceMQ, outbox: Outbox) -> list[int]:
    while (await outbox.sweep()).published:
        pass
    return sorted([message.payload for message in await mq.pull_many("announced", int, most=1_000)])


async def test_o064_published_are_exactly_the_committed(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox:
        # (a) a savepoint that was released, and then all of it is rolled back
        async with place.session() as session:
            async with session.begin_nested():
                await outbox.bind(session).send("announced", 1)
            await session.rollback()
        # (b) a savepoint that is rolled back, and what is outside of it is committed
        async with place.session() as session, session.begin():
            await outbox.bind(session).send("announced", 2)
            savepoint = await session.begin_nested()
            await outbox.bind(session).send("announced", 3)
            await savepoint.rollback()
        # (d) closed without a commit
        async with place.session() as session:
            await outbox.bind(session).send("announced", 4)
        # (e) two at once in one task, on a connection and in a session; SQLite has one writer
        async with place.session() as one:
            await outbox.bind(one).send("announced", 5)
            if place.name == "sqlite":
                await one.commit()
            async with place.engine.connect() as other:
                await outbox.bind(other).send("announced", 6)
                await other.rollback()
                await outbox.bind(other).send("announced", 7)
                await other.commit()
            await one.commit()
        assert await published(mq, outbox) == [2, 5, 7]


async def test_o064_synchronous_ones_too(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox:

        def work(session: Session) -> None:
            with session.begin_nested() as savepoint:
                outbox.bind_sync(session).send("announced", 1)
                savepoint.rollback()
            outbox.bind_sync(session).send("announced", 2)
            session.commit()
            outbox.bind_sync(session.connection()).send("announced", 3)
            session.rollback()

        async with place.session() as session:
            await session.run_sync(work)
        assert await published(mq, outbox) == [2]


async def test_m086_a_commit_that_fails_leaves_nothing(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox:
        await place.execute("CREATE TABLE parent (id INTEGER PRIMARY KEY)")
        deferred = "" if place.name == "mariadb" else "DEFERRABLE INITIALLY DEFERRED"
        await place.execute(f"CREATE TABLE child (id INTEGER, FOREIGN KEY (id) REFERENCES parent (id) {deferred})")
        session = place.session()
        await outbox.bind(session).send("announced", 1)
        inserting = session.execute(text("INSERT INTO child VALUES (1)"))
        if place.name == "mariadb":  # which defers no constraint
            with pytest.raises(IntegrityError):
                await inserting
        else:
            await inserting
            with pytest.raises(IntegrityError):
                await session.commit()
            await session.rollback()
        await session.close()
        async with place.session() as session, session.begin():
            await outbox.bind(session).send("announced", 2)
        assert await published(mq, outbox) == [2]


@pytest.mark.parametrize("place", ["postgresql", "psycopg", "mariadb"], indirect=True)
@pytest.mark.parametrize("when", ["before", "during"])
async def test_o064_a_connection_cut_before_and_during_its_commit(place: Sql, mq: AceMQ, when: str) -> None:
    url = place.engine.url
    assert url.host is not None
    assert url.port is not None
    async with outbox_at(place, mq) as outbox, Proxy(url.host, url.port) as proxy:
        await place.execute("CREATE TABLE work (id INTEGER)")
        engine = engine_for(url.set(port=proxy.port).render_as_string(hide_password=False))
        store = DbOutboxStore(engine)
        session = AsyncSession(engine)
        await session.execute(text("INSERT INTO work VALUES (1)"))
        await store.add(record(1), session)
        if when == "before":
            proxy.cut()
            with pytest.raises(DBAPIError):
                await session.commit()
        else:
            proxy.swallow("to_client")
            committing = asyncio.ensure_future(session.commit())

            async def is_there() -> bool:
                return bool(await place.execute("SELECT id FROM work"))

            await until_async(is_there)
            proxy.cut()
            with pytest.raises((DBAPIError, OSError)):
                await committing
        proxy.release()
        await session.close()
        await engine.dispose()
        worked = [row[0] for row in await place.execute("SELECT id FROM work")]
        assert worked == ([] if when == "before" else [1])
        assert await published(mq, outbox) == worked


async def test_a_session_is_not_flushed_and_not_ended(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox, place.session() as session:
        await outbox.bind(session).send("announced", 1)
        assert session.in_transaction()
        assert await outbox.store.pending_count() == 0
        await session.rollback()


async def test_scoped_sessions_are_sessions(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox:
        scoped = async_scoped_session(async_sessionmaker(place.engine), scopefunc=asyncio.current_task)
        store = outbox.store
        assert isinstance(store, DbOutboxStore)
        assert await store.add(record(1), scoped)
        await scoped.commit()
        await scoped.remove()
        assert await published(mq, outbox) == [1]


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_a_synchronous_engine_serves_writer_and_relay(place: Sql, mq: AceMQ) -> None:
    await mq.declare(Topology().queue("announced"))
    engine = create_engine(f"sqlite:///{place.engine.url.database}")
    begins_itself(engine)
    store = DbOutboxStore(engine)
    await store.create()
    sessions = scoped_session(sessionmaker(engine))
    assert store.add_sync(record(1), sessions)
    sessions.commit()
    sessions.remove()
    async with place.session() as session, session.begin():
        assert await store.add(record(2), session)  # by another driver, into the same file
    assert await published(mq, mq.outbox(store)) == [1, 2]
    engine.dispose()


# Bad input


async def test_an_id_is_taken_once(place: Sql) -> None:
    store = await place.outbox()
    assert await place.add(store, record(1), record(1), record(1, key="k")) == [True, False, False]
    assert await place.add(store, record(1)) == [False]
    assert await store.pending_count() == 1


@pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb"], indirect=True)
async def test_what_has_no_transaction_is_refused(place: Sql) -> None:
    store = await place.outbox()
    async with place.engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        with pytest.raises(ConfigurationError, match="autocommit"):
            await store.add(record(1), connection)
    async with place.engine.connect() as connection:
        pass
    with pytest.raises(ConfigurationError, match="closed"):
        await store.add(record(1), connection)
    nothing: Any = None
    with pytest.raises(ConfigurationError, match="no AsyncSession"):
        await store.add(record(1), nothing)
    asynchronous: Any = place.session()
    with pytest.raises(ConfigurationError, match="no Session"):
        store.add_sync(record(1), asynchronous)
    assert await store.pending_count() == 0


async def test_a_session_of_another_database_is_refused(place: Sql, tmp_path: Path) -> None:
    store = await place.outbox()
    elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
    async with AsyncSession(elsewhere) as session:
        with pytest.raises(ConfigurationError, match="one transaction cannot be on both"):
            await store.add(record(1), session)
    async with AsyncSession() as session:
        with pytest.raises(ConfigurationError, match="without one engine"):
            await store.add(record(1), session)
    await elsewhere.dispose()


@pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb"], indirect=True)
async def test_an_old_or_foreign_table_is_named_with_what_it_lacks(place: Sql) -> None:
    store, claims = DbOutboxStore(place.engine), await place.claims()
    assert claims.name == "acemq_idempotency"
    with pytest.raises(TopologyError, match="no table 'acemq_outbox'"):
        await store.check()
    async with place.session() as session:
        with pytest.raises(TopologyError, match="create_table_sql"):
            await store.add(record(1), session)
    await place.execute("CREATE TABLE acemq_outbox (id VARCHAR(64) PRIMARY KEY, payload TEXT)")
    with pytest.raises(TopologyError, match=r"it has no .*seq.*order_key.*published_at"):
        await store.check()
    async with place.session() as session:
        with pytest.raises(TopologyError, match="does not fit"):
            await store.add(record(1), session)
    with pytest.raises(TopologyError, match="does not fit"):
        await store.claim(10)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_a_name_that_is_no_identifier_is_refused(place: Sql) -> None:
    for table in ("", "a b", "1st", 'x"; DROP TABLE y', "a" * 49, "ä"):
        with pytest.raises(ConfigurationError, match="identifier"):
            DbOutboxStore(place.engine, table)
    with pytest.raises(ConfigurationError, match="schema="):
        DbOutboxStore(place.engine, schema="my schema")


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_engines_that_cannot_keep_an_outbox_are_refused(place: Sql) -> None:
    url: Any = "sqlite://"
    with pytest.raises(ConfigurationError, match="one connection"):
        DbOutboxStore(create_async_engine("sqlite+aiosqlite://"))
    with pytest.raises(ConfigurationError, match="no SQLAlchemy engine"):
        DbOutboxStore(url)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_a_record_that_no_column_holds_is_refused_before_any_query(place: Sql) -> None:
    message: Any = "message"
    store = await place.outbox()
    async with place.session() as session:
        refused: list[Callable[[], OutboxRecord]] = [
            lambda: record(1, key="k" * 256),
            lambda: record(1, key="a\0b"),
            lambda: OutboxRecord.of("", "q", 1, envelope=Envelope.of("t", id="x" * 65)),
            lambda: OutboxRecord.of("", "", 1),
            lambda: OutboxRecord.of("orders", "k" * 256, 1),
        ]
        for bad in refused:
            with pytest.raises(ConfigurationError):
                await store.add(bad(), session)
        with pytest.raises(EncodeError):
            OutboxRecord.of("", "q", object())
        with pytest.raises(ConfigurationError, match="no OutboxRecord"):
            await store.add(message, session)
        assert not session.in_transaction()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_an_sqlite_driver_that_begins_late_is_warned_of_once(place: Sql) -> None:
    await place.outbox()
    engine = create_async_engine(place.engine.url)
    store = DbOutboxStore(engine)
    async with AsyncSession(engine) as session, session.begin():
        with pytest.warns(UserWarning, match="savepoint"):
            assert await store.add(record(1), session)
        assert await store.add(record(2), session)
    await engine.dispose()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_options_that_a_record_does_not_keep_are_refused(place: Sql, mq: AceMQ) -> None:
    async with outbox_at(place, mq) as outbox, place.session() as session:
        bound: Any = outbox.bind(session)
        for option, value in (("delay", 1), ("mandatory", False), ("priority", 3), ("reply_to", "q"), ("timeout", 1)):
            with pytest.raises(ConfigurationError, match=f"{option}= is not kept"):
                await bound.send("announced", 1, **{option: value})
        with pytest.raises(TypeError, match="unexpected"):
            await bound.send("announced", 1, colour="red")
        assert not session.in_transaction()
