"""A database as the broker: a SQLite file, a private PostgreSQL server, a private MariaDB server."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

import acemq
from acemq.testing.conformance import Impossible, TcpFaults, Timing, TransportConformance
from acemq.transport import Transport
from acemq.transports.sql import transport
from tests.services import Database, MariaDB, PostgreSQL
from tests.sql.abandoning import abandon

pytestmark = pytest.mark.timeout(150)

STEP = timedelta(milliseconds=500)
"""Twice that is the shortest lease."""
WIPED = ("message", "binding", "exclusive", "owner", "exchange", "queue")
INSERT = """
INSERT INTO acemq_message (queue_id, state, rank_key, visible_at, enqueued_at, exchange, routing_key, headers,
properties, body) SELECT id, 0, 0, 0, 0, '', name, '{headers}', '{{}}', {body} FROM acemq_queue WHERE name = '{queue}'
"""
WIPE = "; ".join([*(f"DELETE FROM acemq_{table}" for table in WIPED),
                  "UPDATE acemq_meta SET value = '' WHERE name = 'topology'"])  # fmt: skip
BROKEN = b"what was meant to be there"


class FileFaults:
    """What can happen to a file and those who use it. It has no server, and nobody stands between."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def cut(self) -> None:
        raise Impossible("a file has no link that could be cut")

    async def refuse(self, on: bool) -> None:
        raise Impossible("a file has no door that could be shut")

    async def swallow(self, on: bool) -> None:
        raise Impossible("a file has no link that could go silent")

    async def restart(self) -> None:
        raise Impossible("a file has no server; tests/sql kills every process that has it open")

    async def block(self, on: bool) -> None:
        raise Impossible("a file takes messages as long as there is room")

    async def wipe(self) -> None:
        with sqlite3.connect(self._path) as connection:
            connection.executescript(WIPE)
        connection.close()

    async def abandon(self, transport: Transport) -> None:
        abandon(transport)


class Mine:
    """A transaction of an application's."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.handle: object = connection
        self._connection = connection

    async def commit(self) -> None:
        await self._connection.commit()

    async def rollback(self) -> None:
        await self._connection.rollback()

    @asynccontextmanager
    async def rolled_back(self) -> AsyncGenerator[None]:
        savepoint = await self._connection.begin_nested()
        yield
        await savepoint.rollback()


@asynccontextmanager
async def transaction_on(url: str, driver: str) -> AsyncGenerator[Mine]:
    engine = create_async_engine(f"{driver}://{url.partition('://')[2]}")
    async with engine.connect() as connection:
        yield Mine(connection)
    await engine.dispose()


class TestSQLite(TransportConformance):
    label = "sqlite"
    one_writer = True
    version = acemq.__version__
    slow = frozenset({"C-066", "C-078", "C-082", "C-086", "C-105", "C-110", "C-111"})
    timing = Timing(step=STEP)

    @pytest.fixture(autouse=True)
    def file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "messages.db"

    def make(self, **options: object) -> Transport:
        return transport(f"sqlite:///{self.path}", **options)

    def server(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}"

    def faults(self) -> FileFaults:
        return FileFaults(self.path)

    async def put_raw(self, queue: str, body: bytes) -> None:
        self._put(queue, "{}", body)

    async def put_malformed(self, queue: str) -> bytes:
        self._put(queue, "no headers", BROKEN)
        return BROKEN

    def _put(self, queue: str, headers: str, body: bytes) -> None:
        with sqlite3.connect(self.path) as connection:
            connection.execute(INSERT.format(headers=headers, body=f"X'{body.hex()}'", queue=queue))
        connection.close()

    def no_access(self) -> tuple[Transport, str]:
        raise Impossible("a file has no users and no passwords")

    def transaction(self) -> AbstractAsyncContextManager[Mine]:
        return transaction_on(f"sqlite:///{self.path}", "sqlite+aiosqlite")


class OnServer(TransportConformance):
    version = acemq.__version__
    timing = Timing(step=STEP, silence=timedelta(seconds=12))
    slow = frozenset(
        {"C-066", "C-078", "C-082", "C-086", "C-092", "C-101", "C-103", "C-104", "C-105", "C-110", "C-111"}
    )
    hex: str
    """How the server writes bytes."""
    driver: str

    @pytest.fixture(autouse=True)
    def between(self, server_of_module: Database) -> Iterator[None]:
        self.database = database = server_of_module
        self.name_of_database = f"c_{secrets.token_hex(6)}"
        url = database.create_database(self.name_of_database)
        with TcpFaults(url, restart=self._restart, wipe=self._wipe, block=self._block) as tcp:
            self.tcp = tcp
            yield
        database.drop_database(self.name_of_database)

    def make(self, **options: object) -> Transport:
        return self.tcp.behind(lambda url: transport(f"{url}?create_schema=true", **options))

    def faults(self) -> TcpFaults:
        return self.tcp

    async def put_raw(self, queue: str, body: bytes) -> None:
        await self._put(queue, "{}", body)

    async def put_malformed(self, queue: str) -> bytes:
        await self._put(queue, "no headers", BROKEN)
        return BROKEN

    async def _put(self, queue: str, headers: str, body: bytes) -> None:
        statement = INSERT.format(headers=headers, body=self.hex.format(body.hex()), queue=queue)
        await asyncio.to_thread(self.database.execute, statement, self.name_of_database)

    def transaction(self) -> AbstractAsyncContextManager[Mine]:
        return transaction_on(self.database.url_of(self.name_of_database), self.driver)

    def _restart(self) -> None:
        self.database.kill()
        self.database.start()

    def _wipe(self) -> None:
        self.database.execute(WIPE, self.name_of_database)

    def _block(self, on: bool) -> None:
        raise Impossible("a database takes messages as long as there is room")


class TestPostgreSQL(OnServer):
    label = "postgresql"
    driver = "postgresql+asyncpg"
    hex = "decode('{}', 'hex')"

    def server(self) -> str:
        return f"PostgreSQL {self.database.execute('SHOW server_version').split()[0]}"

    def no_access(self) -> tuple[Transport, str]:
        secret = "not-the-password"
        return self.tcp.behind(lambda url: transport(url.replace("test@", f"stranger:{secret}@"))), secret

    @pytest.fixture
    def server_of_module(self, postgresql_of_module: PostgreSQL) -> Database:
        return postgresql_of_module


@pytest.mark.slow  # tests/sql runs on it every time
class TestMariaDB(OnServer):
    label = "mariadb"
    driver = "mariadb+asyncmy"
    hex = "X'{}'"
    # Nobody tells a consumer on MariaDB: it looks, every second at the latest.
    timing = Timing(step=STEP, late=timedelta(seconds=1.5), silence=timedelta(seconds=12))

    def server(self) -> str:
        return f"MariaDB {self.database.execute('SELECT VERSION()').partition('-')[0]}"

    def no_access(self) -> tuple[Transport, str]:
        secret = "not-the-password"
        return self.tcp.behind(lambda url: transport(url.replace("root@", f"root:{secret}@"))), secret

    @pytest.fixture
    def server_of_module(self, mariadb_of_module: MariaDB) -> Database:
        return mariadb_of_module


@pytest.fixture(scope="module")
def postgresql_of_module(start_postgresql_for_module: Callable[..., PostgreSQL]) -> PostgreSQL:
    """One of its users needs a password."""
    server = start_postgresql_for_module()
    server.execute("CREATE ROLE stranger LOGIN PASSWORD 'the-password'")
    rules = "ARRAY['host all stranger all scram-sha-256', 'host all all all trust', 'local all all trust']"
    server.execute(f"COPY (SELECT unnest({rules})) TO '{server.execute('SHOW hba_file').strip()}'")
    server.execute("SELECT pg_reload_conf()")
    return server


@pytest.fixture(scope="module")
def mariadb_of_module(start_mariadb_for_module: Callable[..., MariaDB]) -> MariaDB:
    return start_mariadb_for_module()
