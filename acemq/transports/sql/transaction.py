"""Publishing inside the caller's transaction: rows written through a connection that is not ours to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from acemq.errors import CapabilityError
from acemq.transport import Published, PublishResult, TransportError

from .dialects import Trouble
from .publish import Prepared, Written, portions, write
from .raw import Raw, driver_of

if TYPE_CHECKING:
    from .running import Running

T = TypeVar("T")


async def write_in(
    transaction: object, running: Running, batch: Sequence[Prepared], within: float
) -> Sequence[PublishResult]:
    """`ROUTED` means: written, and the caller's to commit. Nothing is committed, rolled back or set here."""
    results: list[PublishResult] = []
    database = running.database

    def work(connection: sa.Connection) -> list[Written]:
        _check_same(connection, running)
        return [
            write(
                connection, running.now(), database.dialect, database.statements, running.routes, portion,
                notice=running.notice(),
            )
            for portion in portions(batch)
        ]  # fmt: skip

    try:
        async with asyncio.timeout(within):
            everything = await _run(transaction, work)
    except exc.DBAPIError as error:
        return [PublishResult(Published.FAILED, _told(error, running))] * len(batch)
    except TimeoutError:
        return [PublishResult(Published.FAILED, TransportError("no answer within the time"))] * len(batch)
    except (TransportError, CapabilityError) as error:
        return [PublishResult(Published.REFUSED, error)] * len(batch)
    touched: set[int] = set()
    for written in everything:
        results.extend(written.results)
        touched |= written.touched
    if touched and running.notice() is None:
        _ring_after_commit(transaction, running, touched)
    return results


async def _run(transaction: object, work: Callable[[sa.Connection], T]) -> T:
    match transaction:
        case AsyncSession():
            return await transaction.run_sync(lambda session: work(session.connection()))
        case AsyncConnection():
            return await transaction.run_sync(work)
        case Session():
            return work(transaction.connection())
        case sa.Connection():
            return work(transaction)
        case _:
            return await _run_raw(transaction, work)


async def _run_raw(transaction: object, work: Callable[[sa.Connection], T]) -> T:
    driver = driver_of(transaction)
    if driver is None:
        raise CapabilityError(
            "sql",
            f"a transaction that is a {type(transaction).__name__}",
            "transaction",
            "Give SQLAlchemy's AsyncSession, AsyncConnection, Session or Connection, or a connection of asyncpg, "
            "psycopg, aiosqlite, sqlite3 or asyncmy",
        )
    if driver.is_idle(transaction):
        raise TransportError(
            f"no transaction is in progress on the {type(transaction).__module__} connection: begin one before"
        )
    return await greenlet_spawn(work, cast("sa.Connection", Raw(driver, transaction)))


def _check_same(connection: sa.Connection, running: Running) -> None:
    """Another kind of database is seen at once; another of the same kind has no such table, or no such queue."""
    ours = running.database.dialect.name
    if connection.dialect.name not in ({"mariadb", "mysql"} if ours in ("mariadb", "mysql") else {ours}):
        raise TransportError(
            f"the transaction is one on {connection.dialect.name}, and the messages are in "
            f"{running.database.address.endpoint}: give one on the same database"
        )


def _told(error: exc.DBAPIError, running: Running) -> TransportError:
    told = running.database.told(error)
    if running.database.dialect.trouble(error) is Trouble.SCHEMA:
        table = running.database.tables.fill("{t}message", running.database.dialect)
        return type(told)(
            f"the transaction given does not see {table}: is it one on another database than "
            f"{running.database.address.endpoint}?"
        )
    return told


def _ring_after_commit(transaction: Any, running: Running, touched: set[int]) -> None:
    """For the consumers of this process; those of others look for themselves."""
    loop = running.loop

    def ring(*_: object) -> None:
        for queue in touched:
            loop.call_soon_threadsafe(running.ring, queue)

    match transaction:
        case AsyncSession():
            event.listen(transaction.sync_session, "after_commit", ring, once=True)
        case Session():
            event.listen(transaction, "after_commit", ring, once=True)
        case AsyncConnection() if transaction.sync_connection is not None:
            event.listen(transaction.sync_connection, "commit", ring, once=True)
        case sa.Connection():
            event.listen(transaction, "commit", ring, once=True)
        case _:
            pass
