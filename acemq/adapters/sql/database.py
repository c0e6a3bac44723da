"""A database as a store sees it: its own short transactions, and the caller's, which it joins and never ends."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, TypeVar, cast

from sqlalchemy import Connection, Engine, MetaData, Table, inspect, make_url, text
from sqlalchemy.exc import DBAPIError, NoSuchTableError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.schema import CreateIndex, CreateTable

from acemq.errors import ConfigurationError, TopologyError

R = TypeVar("R")
Kind: TypeAlias = Literal["postgresql", "mysql", "sqlite"]
AsyncWithin: TypeAlias = AsyncSession | AsyncConnection | async_scoped_session[Any]
SyncWithin: TypeAlias = Session | Connection | scoped_session[Any]

_KINDS: dict[str, Kind] = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite"}
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
"""Room is left for the names of indexes, which PostgreSQL cuts at 63."""

NOW: dict[Kind, str] = {
    "postgresql": "CAST(EXTRACT(EPOCH FROM statement_timestamp()) * 1000 AS BIGINT)",
    # UNIX_TIMESTAMP(NOW()) would go through the session's time zone, and back by an hour in autumn.
    "mysql": "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000",
    "sqlite": "CAST(ROUND((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)",
}
"""Milliseconds since 1970 by the clock of the database: relays and consumers on many machines have one time."""


class Database:
    """An engine, asynchronous or not, and what its dialect is."""

    def __init__(self, engine: AsyncEngine | Engine) -> None:
        if not isinstance(engine, AsyncEngine | Engine):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"engine={engine!r} is no SQLAlchemy engine; make one with create_async_engine()")
        self.sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        self.dialect = self.sync_engine.dialect
        self.kind: Kind = kind_of(self.dialect.name)
        if isinstance(self.sync_engine.pool, StaticPool | SingletonThreadPool):
            raise ConfigurationError(
                "an in-memory SQLite database has one connection: a store's commit on it would commit its callers' "
                "work. Use a file: sqlite+aiosqlite:///orders.db"
            )
        self.identity = _identity(self.sync_engine)
        self._warned = False
        self._engine = engine

    @property
    def is_async(self) -> bool:
        return isinstance(self._engine, AsyncEngine)

    @property
    def async_engine(self) -> AsyncEngine:
        assert isinstance(self._engine, AsyncEngine)
        return self._engine

    async def run(self, work: Callable[[Connection], R]) -> R:
        """In a short transaction of the store's own. A synchronous engine runs it in a thread.

        On PostgreSQL a transaction is one statement, which spares it two round trips; whatever needs more asks for it.
        """
        return await self._run(work, _OWN[self.kind])

    async def _run(self, work: Callable[[Connection], R], isolation: str | None) -> R:
        def transaction(connection: Connection) -> R:
            if isolation is not None:
                # Of the connection, as what an engine was given wins over what is said of it later.
                connection.execution_options(isolation_level=isolation)
            with connection.begin():
                return work(connection)

        engine = self._engine
        if isinstance(engine, AsyncEngine):
            async with engine.connect() as connected:
                return await connected.run_sync(transaction)

        def now() -> R:
            with engine.connect() as connection:
                return transaction(connection)

        return await asyncio.to_thread(now)

    # In the caller's transaction

    async def run_within(self, within: object, work: Callable[[Connection, Session | None], R]) -> R:
        """In the caller's, which begins with it if it has not begun. It is never committed here, nor rolled back."""
        given = cast("object", within()) if isinstance(within, async_scoped_session) else within
        if isinstance(given, AsyncSession):
            return await given.run_sync(lambda session: self.run_within_sync(session, work))
        if isinstance(given, AsyncConnection):
            return await given.run_sync(lambda connection: self.run_within_sync(connection, work))
        synchronous = isinstance(given, Session | Connection | scoped_session)
        advice = "use the verb for synchronous ones" if synchronous else _ADVICE
        raise ConfigurationError(f"within={_kind_name(given)} is no AsyncSession and no AsyncConnection; {advice}")

    def run_within_sync(self, within: object, work: Callable[[Connection, Session | None], R]) -> R:
        kind = type(within).__name__
        given = cast("object", within()) if isinstance(within, scoped_session) else within
        if not isinstance(given, Session | Connection):
            raise ConfigurationError(f"within={kind} is no Session and no Connection; {_ADVICE}")
        session = given if isinstance(given, Session) else None
        connection = self._connection_of(given)
        self._check_transaction(connection)
        return work(connection, session)

    def _connection_of(self, given: Session | Connection) -> Connection:
        if isinstance(given, Connection):
            if given.closed:
                raise ConfigurationError("within= is a connection that is closed; give the one your transaction is on")
            bind: Engine | Connection = given
        else:
            try:
                bind = given.get_bind()
            except UnboundExecutionError as error:
                raise ConfigurationError(
                    f"within= is a session without one engine for all it holds: {error}"
                ) from error
        self.check_same(bind.engine, "within= is on")
        # Not `Session.execute`, which might flush what the caller is not done with.
        return given if isinstance(given, Connection) else given.connection()

    def check_same(self, engine: AsyncEngine | Engine, what: str) -> None:
        """Refuse an engine of another database: the two would not commit together."""
        engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if engine.pool is not self.sync_engine.pool and _identity(engine) != self.identity:
            raise ConfigurationError(
                f"{what} {_named(engine)}, and the store on {_named(self.sync_engine)}: "
                "one transaction cannot be on both. Make the store with the engine of the session"
            )

    def _check_transaction(self, connection: Connection) -> None:
        isolation = connection.get_execution_options().get("isolation_level")
        if isolation is None:
            isolation = getattr(connection.dialect, "_on_connect_isolation_level", None)
        if isolation == "AUTOCOMMIT":
            raise ConfigurationError("within= is in autocommit mode: it has no transaction that a record could join")
        if not connection.in_transaction():
            connection.begin()
        if self.kind == "sqlite":
            self._check_sqlite(connection)

    def _check_sqlite(self, connection: Connection) -> None:
        driver = _sqlite_driver(connection)
        if getattr(driver, "autocommit", _LEGACY) is False:
            return
        if driver.isolation_level is None:
            if not driver.in_transaction:
                raise ConfigurationError(
                    "within= is on an SQLite connection that commits each statement; have the engine's 'begin' event "
                    "send BEGIN, as the page on the outbox shows"
                )
        elif not self._warned:
            self._warned = True
            warnings.warn(
                "this SQLite driver begins transactions by itself, and late: a savepoint that is rolled back may leave "
                "its records. The page on the outbox shows the two event hooks that mend it",
                stacklevel=2,
            )

    # Tables

    def statements(self, metadata: MetaData, kind: str | None = None) -> list[str]:
        """What makes these tables and their indexes. On MySQL, which knows no IF NOT EXISTS for an index, only once."""
        dialect = self.dialect if kind is None else _dialect(kind)
        once = dialect.name in ("mysql", "mariadb")
        made: list[CreateTable | CreateIndex] = []
        for table in metadata.sorted_tables:
            indexes = sorted(table.indexes, key=lambda each: str(each.name))
            made += [CreateTable(table, if_not_exists=True)]
            made += [CreateIndex(index, if_not_exists=not once) for index in indexes]
        return [str(each.compile(dialect=dialect)).strip() for each in made]

    async def create(self, metadata: MetaData, name: str, fill: Callable[[Connection], object] | None = None) -> None:
        """Make what is missing of them, also from many processes at once; then `fill` them."""

        def work(connection: Connection) -> None:
            # IF NOT EXISTS looks first and makes second: two at once would both make.
            match self.kind:
                case "mysql":
                    lock = {"name": f"acemq.{name}"}
                    connection.execute(text("SELECT GET_LOCK(:name, 30)"), lock)
                    try:
                        metadata.create_all(connection)
                        if fill is not None:
                            fill(connection)
                    finally:
                        connection.execute(text("SELECT RELEASE_LOCK(:name)"), lock)
                    return
                case "postgresql":
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": number_of("create", name)})
                case "sqlite":
                    # A writer from the beginning, which waits for its turn: one that has looked first is refused at
                    # once when another has written meanwhile.
                    if _sqlite_driver(connection).in_transaction:
                        connection.exec_driver_sql("ROLLBACK")
                    connection.exec_driver_sql("BEGIN IMMEDIATE")
            for statement in self.statements(metadata):
                connection.exec_driver_sql(statement)

        # A whole transaction on PostgreSQL, too, as its lock would else be over with the statement that takes it.
        await self._run(work, "READ COMMITTED" if self.kind == "postgresql" else _OWN[self.kind])

    async def check(self, table: Table) -> None:
        """Raise one `TopologyError` that names every column which is missing."""

        def missing(connection: Connection) -> list[str] | None:
            try:
                found = {each["name"] for each in inspect(connection).get_columns(table.name, schema=table.schema)}
            except NoSuchTableError:
                return None
            return [column.name for column in table.columns if column.name not in found] if found else None

        lacking = await self.run(missing)
        if lacking is None:
            advice = f"Is the name right, and is this its database? {_MAKE}"
            raise TopologyError(f"there is no table {table.fullname!r}", advice=advice)
        if lacking:
            raise TopologyError(
                f"table {table.fullname!r} is an old one or somebody else's: it has no {', '.join(lacking)}",
                advice="Rename it, or give the store a table= of its own",
            )

    @contextmanager
    def translated(self, table: Table) -> Generator[None]:
        """A table that is missing or of another shape is a `TopologyError`, whichever driver says so."""
        try:
            yield
        except DBAPIError as error:
            if _is_about_the_table(error):
                raise TopologyError(f"table {table.fullname!r} does not fit: {error.orig}", advice=_MAKE) from error
            raise


_OWN: dict[Kind, str | None] = {
    "postgresql": "AUTOCOMMIT",
    "mysql": "READ COMMITTED",  # its own would lock gaps, and keep callers from inserting
    "sqlite": None,
}
"""The isolation of the store's own transactions, whatever the application has chosen for its."""
_LEGACY = -1
_ADVICE = "give the session or connection that your transaction runs in"
_MAKE = "Make it: create_table_sql(), table(metadata) for Alembic, or await create()"


def check_identifier(what: str, name: str) -> str:
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"{what}={name!r} is no plain identifier: up to 48 letters, digits and underscores, no digit first"
        )
    return name


def quoted(table: Table, dialect: Any) -> str:
    name: str = dialect.identifier_preparer.format_table(table)
    return name


def number_of(*parts: str) -> int:
    """A signed 64-bit number for a name, the same in every process; for advisory locks."""
    return int.from_bytes(blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big", signed=True)


def private_metadata(schema: str | None) -> MetaData:
    return MetaData(schema=None if schema is None else check_identifier("schema", schema))


def _kind_name(within: object) -> str:
    return type(within).__name__


def _identity(engine: Engine) -> object:
    """What two engines of one database have in common, whatever their drivers."""
    url = engine.url
    host = "localhost" if url.host in (None, "127.0.0.1", "::1") else url.host
    return _KINDS.get(engine.dialect.name), host, url.port, url.database


def _named(engine: Engine) -> str:
    return f"{engine.dialect.name} {engine.url.host or ''}/{engine.url.database or ''}"


def kind_of(dialect: str) -> Kind:
    if dialect not in _KINDS:
        raise ConfigurationError(f"dialect={dialect!r} is none of {', '.join(sorted(_KINDS))}")
    return _KINDS[dialect]


def _dialect(kind: str) -> Any:
    kind_of(kind)
    return make_url(f"{kind}://").get_dialect()()


def _sqlite_driver(connection: Connection) -> Any:
    driver = connection.connection.driver_connection
    return getattr(driver, "_conn", driver)  # that of aiosqlite is a shell round the standard one


def is_duplicate(error: DBAPIError) -> bool:
    """Of MySQL, where a statement that failed leaves its transaction as it was."""
    orig: Any = error.orig
    return bool(getattr(orig, "args", ()) and orig.args[0] == 1062)


def _is_about_the_table(error: DBAPIError) -> bool:
    orig: Any = error.orig
    state = getattr(orig, "sqlstate", None) or getattr(orig, "pgcode", None)
    number = orig.args[0] if getattr(orig, "args", ()) else None
    said = str(orig)
    return (
        state in ("42P01", "42703")  # PostgreSQL: undefined table, undefined column
        or number in (1146, 1054, 1176)  # MySQL and MariaDB: the same, and an undefined index
        or said.startswith(("no such table", "no such column"))
        or " has no column named " in said
    )
