"""A driver's own connection in the caller's hand: spoken to as to one of SQLAlchemy's, and neither begun nor ended."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.engine import Dialect
from sqlalchemy.util import await_only

Row = Sequence[Any]


class Driver(msgspec.Struct, frozen=True):
    """How one driver is spoken to. What a call returns may have to be awaited."""

    url: str
    """Whose SQL and whose placeholders it takes, as SQLAlchemy calls it."""
    mark: str
    """What its connections have, and its pools and cursors have not."""
    is_idle: Callable[[Any], bool]
    """Whether no transaction is in progress, and none begins with the next statement."""
    ask: Callable[[Any, str, Any], Any]
    """Its rows, after one statement."""
    repeat: Callable[[Any, str, Sequence[Row]], Any] | None = None
    """One statement once for each row of values, where they are not one array each."""


def driver_of(connection: object) -> Driver | None:
    """`None`: it is no connection of a driver that is known."""
    driver = _DRIVERS.get(type(connection).__module__.partition(".")[0])
    return driver if driver is not None and hasattr(connection, driver.mark) else None


class Raw:
    """As much of a `sqlalchemy.Connection` as a publish asks for. Called in a greenlet, where it may await."""

    def __init__(self, driver: Driver, connection: Any) -> None:
        self.dialect = _dialect(driver.url)
        self._driver, self._connection = driver, connection

    def execute(self, statement: sa.TextClause, parameters: Mapping[str, Any] | None = None) -> Rows:
        made: Any = statement.compile(dialect=self.dialect)
        given = parameters or {}
        values: Any = (
            tuple(given[name] for name in made.positiontup)
            if made.positional
            else {name: given[name] for name in made.params}
        )
        return Rows(self._do(self._driver.ask, str(made), values))

    def exec_driver_sql(self, text: str, rows: Sequence[Row]) -> None:
        assert self._driver.repeat is not None
        self._do(self._driver.repeat, text, rows)

    def _do(self, call: Callable[[Any, str, Any], Any], text: str, values: Any) -> Any:
        try:
            done = call(self._connection, text, values)
            return await_only(done) if inspect.isawaitable(done) else done
        except Exception as error:
            raise exc.DBAPIError(text, None, error) from error


class Rows:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def first(self) -> Row | None:
        return self._rows[0] if self._rows else None

    def one(self) -> Row:
        (row,) = self._rows
        return row


@cache
def _dialect(url: str) -> Dialect:
    return sa.make_url(f"{url}://").get_dialect()()


# How each driver is spoken to. Rows are tuples, whatever its user has made of them.


async def _ask_asyncmy(connection: Any, text: str, values: Any) -> Any:
    async with connection.cursor(import_module("asyncmy.cursors").Cursor) as cursor:
        await cursor.execute(text, values)
        return await cursor.fetchall()


async def _repeat_asyncmy(connection: Any, text: str, rows: Sequence[Row]) -> None:
    async with connection.cursor(import_module("asyncmy.cursors").Cursor) as cursor:
        await cursor.executemany(text, rows)


def _ask_psycopg(connection: Any, text: str, values: Any) -> Any:
    cursor = connection.cursor(row_factory=import_module("psycopg.rows").tuple_row)
    done = cursor.execute(text, values)
    return _then_all(done, cursor) if inspect.isawaitable(done) else cursor.fetchall()


async def _then_all(executing: Any, cursor: Any) -> Any:
    await executing
    return await cursor.fetchall()


def _is_idle_in_sqlite(connection: Any) -> bool:
    begins = connection.isolation_level is not None  # by itself, before it writes
    return not connection.in_transaction and not begins


_DRIVERS: dict[str, Driver] = {
    "asyncpg": Driver(
        "postgresql+asyncpg",
        "is_in_transaction",
        lambda connection: not connection.is_in_transaction(),
        lambda connection, text, values: connection.fetch(text, *values),
    ),
    "psycopg": Driver(
        "postgresql+psycopg",
        "autocommit",
        lambda connection: connection.autocommit and connection.info.transaction_status == 0,
        _ask_psycopg,
    ),
    "aiosqlite": Driver(
        "sqlite",
        "in_transaction",
        _is_idle_in_sqlite,
        lambda connection, text, values: connection.execute_fetchall(text, values),
        lambda connection, text, rows: connection.executemany(text, rows),
    ),
    "sqlite3": Driver(
        "sqlite",
        "in_transaction",
        _is_idle_in_sqlite,
        lambda connection, text, values: connection.execute(text, values).fetchall(),
        lambda connection, text, rows: connection.executemany(text, rows),
    ),
    "asyncmy": Driver(
        "mariadb+asyncmy",
        "get_transaction_status",
        lambda connection: connection.get_autocommit() and not connection.get_transaction_status(),
        _ask_asyncmy,
        _repeat_asyncmy,
    ),
}
"""By the package that its connections come from."""
