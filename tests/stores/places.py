"""Where the stores of these tests live: in memory, and in databases whose clock a test may move."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from acemq import DbIdempotencyStore, DbOutboxStore, InMemoryOutboxStore, MemoryIdempotencyStore, OutboxRecord
from acemq.adapters.sql import database
from acemq.clock import MovableClock
from acemq.envelope import from_millis, to_millis

Outbox: TypeAlias = DbOutboxStore | InMemoryOutboxStore
DATABASES = ("sqlite", "postgresql", "mariadb")

DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "psycopg": "postgresql+psycopg",
    "mariadb": "mariadb+asyncmy",
}


def begins_itself(engine: Engine) -> None:
    """SQLite as a database: a transaction begins where SQLAlchemy says so, and savepoints are in it."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")


def url_for(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    """A database of the test's own."""
    if kind == "sqlite":
        return f"{DRIVERS[kind]}:///{folder / 'test.db'}"
    fixture = "mariadb_url" if kind == "mariadb" else "postgres_url"
    url: str = request.getfixturevalue(fixture)
    return f"{DRIVERS[kind]}:{url.partition(':')[2]}"


def engine_for(url: str, **options: Any) -> AsyncEngine:
    engine = create_async_engine(url, **options)
    if engine.dialect.name == "sqlite":
        begins_itself(engine.sync_engine)
    return engine


class Place:
    """In memory, with a clock of its own."""

    name = "memory"

    def __init__(self) -> None:
        self.clock = MovableClock(datetime.now(UTC))

    async def outbox(self, **options: Any) -> Outbox:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return InMemoryOutboxStore(clock=self.clock, **options)

    async def claims(self) -> DbIdempotencyStore | MemoryIdempotencyStore:
        return MemoryIdempotencyStore(clock=self.clock)

    async def add(self, store: Outbox, *records: OutboxRecord) -> list[bool]:
        """Committed."""
        assert isinstance(store, InMemoryOutboxStore)
        return [await store.add(record) for record in records]

    async def advance(self, by: timedelta) -> None:
        await self.clock.advance(by)

    async def lease(self, store: Outbox, id: str, until_ms: int) -> None:
        """As if somebody had claimed it until then."""
        assert isinstance(store, InMemoryOutboxStore)
        store._rows[id].leased_until = from_millis(until_ms)


class Sql(Place):
    """A database whose time is what a row says, once a test has moved it."""

    def __init__(self, name: str, engine: AsyncEngine) -> None:
        super().__init__()
        self.name, self.engine = name, engine

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine, expire_on_commit=False)

    async def outbox(self, **options: Any) -> DbOutboxStore:
        store = DbOutboxStore(self.engine, **options)
        await store.create()
        return store

    async def claims(self) -> DbIdempotencyStore:
        store = DbIdempotencyStore(self.engine)
        await store.create()
        return store

    async def add(self, store: Outbox, *records: OutboxRecord) -> list[bool]:
        assert isinstance(store, DbOutboxStore)
        async with self.session() as session, session.begin():
            return [await store.add(record, session) for record in records]

    async def set_clock(self, now: datetime) -> None:
        self.clock = MovableClock(now)
        await self._tell()

    async def advance(self, by: timedelta) -> None:
        await self.clock.advance(by)
        await self._tell()

    async def lease(self, store: Outbox, id: str, until_ms: int) -> None:
        await self.execute("UPDATE acemq_outbox SET leased_until = :until WHERE id = :id", until=until_ms, id=id)

    async def _tell(self) -> None:
        await self.execute("UPDATE test_clock SET ms = :ms", ms=to_millis(self.clock.now()))

    async def execute(self, statement: str, **given: Any) -> list[Any]:
        async with self.engine.begin() as connection:
            result = await connection.execute(text(statement), given)
            return list(result.all()) if result.returns_rows else []


@asynccontextmanager
async def place_at(name: str, url: str, *, movable: bool = False) -> AsyncIterator[Sql]:
    """`movable`: stores that are made here go by the clock of the place."""
    engine = engine_for(url)
    place = Sql(name, engine)
    now: dict[Any, str] = dict.fromkeys(database.NOW, "(SELECT ms FROM test_clock)")
    try:
        if movable:
            await place.execute("CREATE TABLE test_clock (ms BIGINT)")
            await place.execute("INSERT INTO test_clock VALUES (0)")
            await place.set_clock(datetime.now(UTC))
        with patch.dict(database.NOW, now if movable else {}):
            yield place
    finally:
        await engine.dispose()
