"""A store in a database, opened for one command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import msgspec

from acemq.errors import ConfigurationError, ConnectionFailedError, MissingExtraError
from acemq.health import without_secrets

if TYPE_CHECKING:
    from sqlalchemy import URL, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from acemq.adapters.sql.outbox import DbOutboxStore

T = TypeVar("T")

_DRIVERS = {
    "postgresql": ("postgresql+asyncpg", "postgres"),
    "mysql": ("mysql+asyncmy", "mysql"),
    "mariadb": ("mariadb+asyncmy", "mysql"),
    "sqlite": ("sqlite+aiosqlite", "sql"),
}
"""The driver of a URL that names none, and the extra that it comes with."""
_KNOWN = "postgresql://, mariadb://, mysql:// or sqlite:///"


class OutboxAt(msgspec.Struct, frozen=True, kw_only=True):
    """Which outbox is meant: what the application's own `DbOutboxStore` was made with."""

    url: str
    table: str
    schema: str | None
    max_attempts: int
    within: timedelta
    """How long to try to connect."""

    def run(self, work: Callable[[DbOutboxStore], Awaitable[T]]) -> T:
        """What `work` makes of the store, whose table is there and fits. Ctrl-C cancels it.

        `ConnectionFailedError`: the database does not answer, or does not let us do it.
        """
        return asyncio.run(self._run(work))

    async def _run(self, work: Callable[[DbOutboxStore], Awaitable[T]]) -> T:
        url = _url(self.url)
        from sqlalchemy.exc import DBAPIError
        from sqlalchemy.ext.asyncio import AsyncEngine

        from acemq.adapters.sql.outbox import DbOutboxStore

        engine = _engine(url)
        where = f"{url.get_backend_name()} {url.host or ''}/{url.database or ''}"
        try:
            store = DbOutboxStore(engine, self.table, schema=self.schema, max_attempts=self.max_attempts)
            async with asyncio.timeout(self.within.total_seconds()):
                await store.check()
            return await work(store)
        except TimeoutError:
            said = f"{where} did not answer within {self.within.total_seconds():g} s"
            raise ConnectionFailedError(said, hosts=(where,)) from None
        except (DBAPIError, OSError) as error:
            said = without_secrets(str(error.orig if isinstance(error, DBAPIError) else error))
            raise ConnectionFailedError(f"{where}: {said}", hosts=(where,), last=said) from error
        finally:
            if isinstance(engine, AsyncEngine):
                await engine.dispose()
            else:
                engine.dispose()


def _url(text: str) -> URL:
    """Refused, without a word of what it holds, where no store could be at it."""
    scheme = urlsplit(text).scheme if "://" in text else ""
    name = scheme.partition("+")[0]
    if name in ("amqp", "amqps", "redis", "rediss", "memory"):
        raise ConfigurationError(
            f"--database is {scheme}://…, which is a broker; an outbox is in the application's own database: {_KNOWN}"
        )
    if name not in _DRIVERS:
        raise ConfigurationError(f"--database is no URL of a database that an outbox can be in: {_KNOWN}")
    try:
        from sqlalchemy import make_url
        from sqlalchemy.exc import ArgumentError
    except ModuleNotFoundError:
        raise MissingExtraError("An outbox in a database", "sql") from None
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"--database cannot be read; it reads {name}://user:password@host/database, and in a password "
            "'/', '?', '#', '@' are written %2F, %3F, %23, %40"
        ) from None
    if name == "sqlite" and not Path(url.database or "").is_file():
        # To open it would make it, and find an empty database.
        raise ConfigurationError(f"there is no file {url.database or ''!r}; a SQLite outbox is sqlite:///path/to/it.db")
    return url if "+" in url.drivername else url.set(drivername=_DRIVERS[name][0])


def _engine(url: URL) -> AsyncEngine | Engine:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import NoSuchModuleError
    from sqlalchemy.ext.asyncio import create_async_engine

    try:
        return create_async_engine(url) if url.get_dialect().is_async else create_engine(url)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise MissingExtraError(f"The driver of {url.drivername}://", _DRIVERS[url.get_backend_name()][1]) from None
