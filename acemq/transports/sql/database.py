"""How statements get to the database: a pool of connections to a server, or a file and the one thread that has it open.

A piece of work is a plain function of a SQLAlchemy `Connection`, the same for every database and for a connection of
the caller's. It is never cut off in the middle: who is cancelled only stops waiting for it.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sqlite3
import ssl
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from acemq.errors import AcemqError, ConfigurationError, SecurityError
from acemq.security import Credentials, check_answer, is_loopback
from acemq.transport import AccessDenied, NotConnected, SchemaMissing, ServerTooOld, TransportError

from . import schema
from .address import Address, Options
from .dialects import Dialect, Statements, Tables, Trouble, text_of
from .securing import context_of, distrust, for_libpq

log = logging.getLogger("acemq.sql")

T = TypeVar("T")
Work = Callable[[sa.Connection], T]

DIAL_LIMIT = 10.0
"""Seconds for one try to connect."""
BUSY = 5000
"""Milliseconds that SQLite waits for another process to end its transaction."""


class Facts:
    """What a look at the database has told."""

    def __init__(self, server: str = "", max_packet: int | None = None) -> None:
        self.server, self.max_packet = server, max_packet


class Database(ABC):
    can_go_silent = True
    """Whether to wait for an answer may be in vain."""

    def __init__(self, address: Address, options: Options) -> None:
        self.address, self.options = address, options
        self.dialect: Dialect = address.dialect
        self.tables = Tables(options.prefix, options.schema)
        self.statements = Statements(address.dialect, self.tables)
        self.facts = Facts()

    @abstractmethod
    async def dial(self) -> None:
        """Connect anew and look whether all is as it should be. Raises a `TransportError`."""

    @abstractmethod
    async def run(self, work: Work[T], *, alone: bool = False, reading: bool = False) -> T:
        """In a transaction, committed when it returns.

        `alone`: each statement of it may stand alone, so that a trip is saved where that costs one. `reading`: it
        writes nothing, so nobody has to wait for it.
        """

    @abstractmethod
    def abort(self) -> None:
        """Cut every connection, so that whatever waits for an answer ends."""

    @abstractmethod
    async def drop_idle(self) -> None:
        """Forget what waits in a pool: it goes with the link."""

    @abstractmethod
    async def close(self) -> None: ...

    def _look(self, connection: sa.Connection) -> None:
        """Refuse an old server, and tables that are missing; make them if that is asked for."""
        self.facts = _facts(connection, self.dialect)
        create = self.options.create_schema
        version = schema.found(connection, self.dialect, self.tables, self.statements)
        if version < schema.VERSION and (self.dialect.name == "sqlite" if create is None else create):
            if self.dialect.name != "sqlite":
                connection.rollback()  # else the new transaction would see what the old one saw
            version = schema.create(connection, self.dialect, self.tables, self.statements)
        schema.check(version, self.dialect, self.tables, self.address.endpoint)

    def told(self, error: BaseException) -> TransportError:
        """What a driver has raised, as an error of the port. No secret: drivers' texts name users and hosts only."""
        where = self.address.endpoint
        if isinstance(error, TransportError):
            return error
        text = said(error)
        match self.dialect.trouble(error):
            case Trouble.DENIED:
                return AccessDenied(f"{where} refuses us: {text}")
            case Trouble.SCHEMA:
                return SchemaMissing(
                    f"{where}: {text}. Are the tables in another schema or under another prefix? What makes them: "
                    f"python -m acemq.transports.sql.schema {self.dialect.name}"
                )
            case Trouble.LOST:
                return NotConnected(f"{where}: {text}", hosts=(where,), last=text)
            case _:
                return TransportError(f"{where}: {text}")


def said(error: BaseException) -> str:
    """A driver's own words, without the statement and its parameters, which hold people's data."""
    cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    first = str(cause).strip().partition("\n")[0]
    return first.rpartition(">: ")[2] or type(cause).__name__


class Server(Database):
    """PostgreSQL, MariaDB or MySQL."""

    def __init__(self, address: Address, options: Options) -> None:
        super().__init__(address, options)
        self._engine: AsyncEngine | None = None
        self._atomic: AsyncEngine
        self._alone: AsyncEngine
        self._warned = False
        self._raw: set[Any] = set()
        """Connections of the driver, to cut them."""
        self._kept: deque[AsyncConnection] = deque()
        """In hand for the next statement that stands alone: to the pool and back costs more than the statement does.

        The one that has waited longest is used next, so that none goes silent without being noticed.
        """
        self.login = Credentials(address.url.username or "", address.url.password or "")
        self.context: ssl.SSLContext | None = None

    async def dial(self) -> None:
        host = self.address.url.host or ""
        tls = self.options.tls
        if tls is None and not self._warned and not is_loopback(host):
            self._warned = True
            log.warning("the way to %s is not encrypted; tls=Tls() is", host)
        if tls is not None and not tls.is_verified:
            log.warning("the certificate of %s is not checked: %r", self.address.endpoint, tls)
        await self._ask_who_we_are()
        if self._engine is None:
            self._make_engine()
        try:
            async with asyncio.timeout(DIAL_LIMIT), self._atomic.connect() as connection:
                await connection.run_sync(self._look)
        except AcemqError:
            raise
        except Exception as error:
            raise distrust(self.address.endpoint, error) or self.told(error) from error

    async def run(self, work: Work[T], *, alone: bool = False, reading: bool = False) -> T:
        if (alone or reading) and self.dialect.array_statements:
            if self.options.engine is None:
                return await self._run_alone(work)
            async with self._alone.connect() as connection:
                return await self._do(connection, work)
        if self._kept:
            await self._kept.popleft().close()  # there are no more than there may be work at a time
        async with self._atomic.connect() as connection:
            done = await self._do(connection, work)
            await connection.commit()
            return done

    async def _run_alone(self, work: Work[T]) -> T:
        connection = self._kept.popleft() if self._kept else await self._alone.connect()
        try:
            done = await connection.run_sync(work)
        except BaseException:
            await asyncio.shield(connection.close())
            raise
        self._kept.append(connection)
        return done

    async def _let_go(self) -> None:
        while self._kept:
            with suppress(Exception):
                await self._kept.popleft().close()

    async def _do(self, connection: AsyncConnection, work: Work[T]) -> T:
        if self.options.engine is None:
            return await connection.run_sync(work)
        # Of the application's connections we cut those alone that our work is on.
        raw = (await connection.get_raw_connection()).driver_connection
        self._raw.add(raw)
        try:
            return await connection.run_sync(work)
        finally:
            self._raw.discard(raw)

    @property
    def can_listen(self) -> bool:
        if self.dialect.name != "postgresql" or not self.options.listen:
            return False
        return self.options.engine is None or self.options.engine.dialect.driver == "asyncpg"

    async def to_listen(self) -> tuple[Any, AsyncConnection | None]:
        """A connection of asyncpg's own, which is in no pool; and what else is to be closed after it."""
        if self._engine is not None and self.options.engine is not None:
            connection = await self._engine.connect()
            try:
                raw = await connection.get_raw_connection()
                driver = raw.driver_connection
                raw.detach()
            except BaseException:
                await connection.close()
                raise
            return driver, connection
        url = self.address.url
        return await import_module("asyncpg").connect(
            host=url.host,
            port=url.port,
            database=url.database,
            user=self.login.user or None,
            password=self.login.password or None,
            ssl=self.context,
        ), None

    def abort(self) -> None:
        for raw in tuple(self._raw):
            with suppress(Exception):
                _cut(raw)
        self._raw.clear()

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self.options.engine is None:
            with suppress(Exception):
                async with asyncio.timeout(1):
                    await self._let_go()
                    await engine.dispose()
            # SQLAlchemy would keep the engine for ever, and with it whoever listens to it: all of the connection.
            event.remove(engine.sync_engine, "do_connect", self._introduce)
        self.abort()

    async def drop_idle(self) -> None:
        if self._engine is not None and self.options.engine is None:
            await self._let_go()
            await self._engine.dispose(close=False)

    def _make_engine(self) -> None:
        engine: AsyncEngine
        level: dict[str, Any] = {}
        if self.options.engine is not None:
            engine, level = self.options.engine, {"isolation_level": "READ COMMITTED"}
        else:
            # One more than there is work at a time: for the look whether the server still answers.
            options: dict[str, Any] = {"pool_size": self.options.pool + 1, "max_overflow": 0}
            # Each piece of work ends its own transaction, and a ROLLBACK after a COMMIT is a trip for nothing.
            options["pool_reset_on_return"] = None
            if self.dialect.name != "postgresql":
                options["connect_args"] = {"async_creator_fn": _dial_asyncmy}
            engine = create_async_engine(self.address.url, isolation_level="READ COMMITTED", **options)
            event.listen(engine.sync_engine, "do_connect", self._introduce)
            event.listen(engine.sync_engine, "connect", self._connected)
        self._engine = engine
        self._atomic = engine.execution_options(**level)
        self._alone = engine.execution_options(isolation_level="AUTOCOMMIT")

    def _introduce(self, dialect: object, record: object, args: object, parameters: dict[str, Any]) -> None:
        if self.login.user:
            parameters["user"] = self.login.user
        if self.login.password:
            parameters["password"] = self.login.password
        if self.options.tls is not None and self.address.url.drivername.endswith("+psycopg"):
            parameters.update(for_libpq(self.options.tls))
        elif self.context is not None:
            parameters["ssl"] = self.context

    def _connected(self, connection: Any, record: object) -> None:
        self._raw = {raw for raw in self._raw if not _is_cut(raw)}
        self._raw.add(connection.driver_connection)

    async def _ask_who_we_are(self) -> None:
        source = self.options.credentials
        if self.options.tls is not None:
            self.context = await asyncio.to_thread(context_of, self.options.tls, self.address.endpoint)
        if source is None or isinstance(source, Credentials):
            self.login = source or self.login
            return
        try:
            answer = source() if inspect.iscoroutinefunction(source) else await asyncio.to_thread(source)
            self.login = check_answer(await answer if inspect.isawaitable(answer) else answer)
        except SecurityError:
            raise
        except Exception as error:
            # Its text is not ours to show: it was written beside a secret.
            failure = f"the source given as credentials= raised {type(error).__name__}"
        else:
            return
        raise NotConnected(failure)


class File(Database):
    """SQLite. One thread has the file open for as long as the transport is: a transaction is one trip to it."""

    can_go_silent = False
    # While another holds the file the thread waits its turn, and a second look would wait behind it.

    def __init__(self, address: Address, options: Options) -> None:
        super().__init__(address, options)
        self._thread: ThreadPoolExecutor | None = None
        self._engine: sa.Engine | None = None
        self._connection: sa.Connection | None = None
        self._reading = False
        self.watch: sqlite3.Connection | None = None
        """For `PRAGMA data_version`, which a connection sees change by the commits of others only."""

    async def dial(self) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="acemq sqlite")
        try:
            async with asyncio.timeout(DIAL_LIMIT):
                await self._in_thread(self._open)
        except AcemqError:
            raise
        except Exception as error:
            raise self.told(error) from error
        if self.watch is None:
            self.watch = sqlite3.connect(self.address.path, isolation_level=None)

    async def run(self, work: Work[T], *, alone: bool = False, reading: bool = False) -> T:
        return await self._in_thread(self._do, work, reading)

    def abort(self) -> None:
        """What waits for the file goes on to its end, which a lock may put off by `BUSY` at most."""

    async def drop_idle(self) -> None:
        """There is one connection, and the next dial replaces it."""

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if thread is not None:
            with suppress(RuntimeError):
                thread.submit(self._shut)
            # Not waited for beyond this: it may stand in a lock for as long as `BUSY`.
            thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[..., T], *arguments: object) -> T:
        assert self._thread is not None
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    # In the thread

    def _open(self) -> None:
        if self._connection is not None:
            self._shut()
        folder = Path(self.address.path).parent
        if not folder.is_dir():
            raise AccessDenied(f"{self.address.endpoint}: there is no folder {str(folder)!r}; make it first")
        level = "FULL" if self.options.durability == "power" else "NORMAL"
        self._engine = sa.create_engine(
            self.address.url, poolclass=sa.StaticPool, connect_args={"timeout": BUSY / 1000}
        )

        def connected(connection: sqlite3.Connection, record: object) -> None:
            connection.isolation_level = None  # transactions are ours to begin
            for pragma in ("journal_mode=WAL", f"synchronous={level}", "journal_size_limit=67108864"):
                _patiently(lambda text=pragma: connection.execute(f"PRAGMA {text}").close())  # type: ignore[misc]

        def begin(connection: sa.Connection) -> None:
            # A transaction that begins by reading and then writes fails at once where another one writes.
            file: Any = connection.connection.driver_connection
            if file.in_transaction:
                file.rollback()  # its commit has failed, after which SQLAlchemy leaves it as it is
            file.execute("BEGIN" if self._reading else "BEGIN IMMEDIATE").close()

        event.listen(self._engine, "connect", connected)
        event.listen(self._engine, "begin", begin)
        self._connection = self._engine.connect()
        self._do(self._look, False)

    def _do(self, work: Work[T], reading: bool) -> T:
        connection, self._reading = self._connection, reading
        if connection is None:
            raise sqlite3.InterfaceError("the file is closed")
        with connection.begin():
            return work(connection)

    def _shut(self) -> None:
        connection, engine, self._connection, self._engine = self._connection, self._engine, None, None
        with suppress(Exception):
            if connection is not None:
                connection.close()
        if engine is not None:
            engine.dispose()


def _patiently(call: Callable[[], object]) -> None:
    """The change to WAL does not wait for a lock as everything else does."""
    deadline = time.monotonic() + BUSY / 1000
    while True:
        try:
            call()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _facts(connection: sa.Connection, dialect: Dialect) -> Facts:
    def ask(sql: str) -> str:
        return text_of(connection.exec_driver_sql(sql).scalar())

    match dialect.name:
        case "sqlite":
            found = ask("SELECT sqlite_version()")
            dialect.check_version(found)
            return Facts(f"SQLite {found}")
        case "postgresql":
            found = ask("SHOW server_version")
            dialect.check_version(found)
            return Facts(f"PostgreSQL {found}")
        case _:
            found = ask("SELECT VERSION()")
            check_mysql(dialect, found, ask("SELECT @@log_bin"), ask("SELECT @@binlog_format"))
            return Facts(f"{dialect.title} {found}", int(ask("SELECT @@max_allowed_packet")))


def check_mysql(dialect: Dialect, found: str, log_bin: str, binlog_format: str) -> None:
    """MariaDB says so in its version; each is refused under the other's name, since they differ where it matters."""
    is_mariadb = "mariadb" in found.lower()
    if is_mariadb is not (dialect.name == "mariadb"):
        right = "mariadb://" if is_mariadb else "mysql://"
        raise ConfigurationError(f"the server says that it is {found}; write {right} in its URL")
    dialect.check_version(found)
    if log_bin == "1" and binlog_format.upper() == "STATEMENT":
        raise ServerTooOld(
            f"{dialect.title} {found} writes its binary log with binlog_format=STATEMENT, under which SKIP LOCKED is "
            "unsafe; set binlog_format=ROW or MIXED",
            found="binlog_format=STATEMENT",
            wanted="ROW or MIXED",
        )


def _is_cut(raw: Any) -> bool:
    match getattr(raw, "is_closed", None), getattr(raw, "connected", None):
        case (None, None):
            return bool(raw.closed)  # psycopg
        case (None, connected):
            return not connected  # asyncmy
        case (closed, _):
            return bool(closed())


def _cut(raw: Any) -> None:
    """Each driver has its own way to end a connection without waiting for the other side."""
    if hasattr(raw, "terminate"):
        raw.terminate()
    elif hasattr(raw, "pgconn"):
        raw.pgconn.finish()
    else:
        raw.close()


async def _dial_asyncmy(**parameters: Any) -> Any:
    """As the driver does it, which leaves its socket open when it is given up on the way."""
    connection = import_module("asyncmy.connection").Connection(**parameters)
    try:
        await connection.connect()
    except BaseException:
        connection.close()
        raise
    return connection
