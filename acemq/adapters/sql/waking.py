"""How a relay learns of a commit: by LISTEN on PostgreSQL, else where the commit is made in its own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from sqlalchemy import Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session, SessionTransaction

ALIVE_EVERY = 30.0
"""Seconds after which a listener that heard nothing asks whether its connection still is one."""
CLOSING = 1.0
COMMITTING = 0.02
"""Seconds. SQLAlchemy tells of the commit of a connection when it begins; what is slower, the interval finds."""


class Wakes:
    """The relays of this process that wait for one table."""

    def __init__(self) -> None:
        self._calls: list[Callable[[float], None]] = []
        self._armed: WeakSet[Session | Connection] = WeakSet()
        """In a transaction that holds a new record."""
        self._watched: WeakSet[Session | Connection] = WeakSet()

    def arm(self, within: Session | Connection) -> None:
        """Wake them when this transaction is over. If it was rolled back, they look for nothing."""
        if not self._calls:
            return
        self._armed.add(within)
        if within in self._watched:
            return
        self._watched.add(within)
        if isinstance(within, Session):
            event.listen(within, "after_transaction_end", self._session_ended)
        else:
            event.listen(within, "commit", self._connection_commits)

    def wake(self, after: float = 0.0) -> None:
        for call in tuple(self._calls):
            call(after)

    async def listen(self, wake: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def call(after: float) -> None:
            # The commit may be made in another thread.
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: loop.call_later(after, wake) if after else wake())

        self._calls.append(call)
        try:
            await asyncio.Event().wait()
        finally:
            self._calls.remove(call)

    def _session_ended(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None and session in self._armed:
            self._armed.discard(session)
            self.wake()

    def _connection_commits(self, connection: Connection) -> None:
        if connection in self._armed:
            self._armed.discard(connection)
            self.wake(COMMITTING)


async def listen_on(engine: AsyncEngine, channel: str, wake: Callable[[], None]) -> None:
    """Call `wake` for each notification, on a connection that is no part of the pool. Raises when that is lost."""
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        raw = await connection.get_raw_connection()
        driver: Any = raw.driver_connection
        # Out of the pool, so that a pool of one connection still has one.
        raw.detach()
        try:
            await connection.exec_driver_sql(f'LISTEN "{channel}"')
            wake()  # what was committed before it listened
            await (_asyncpg(driver, channel, wake) if hasattr(driver, "add_listener") else _psycopg(driver, wake))
        finally:
            # By the driver, as the pool has no hold on it any more; and not for long, as its server may be gone.
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await driver.close()


async def _asyncpg(driver: Any, channel: str, wake: Callable[[], None]) -> None:
    lost = asyncio.Event()

    def notified(*_: object) -> None:
        wake()

    def terminated(*_: object) -> None:
        lost.set()

    await driver.add_listener(channel, notified)
    driver.add_termination_listener(terminated)
    while True:
        try:
            async with asyncio.timeout(ALIVE_EVERY):
                await lost.wait()
        except TimeoutError:
            await driver.fetchval("SELECT 1", timeout=ALIVE_EVERY)
        else:
            raise ConnectionError("the connection that listens was lost")


async def _psycopg(driver: Any, wake: Callable[[], None]) -> None:
    while True:
        async for _ in driver.notifies(timeout=ALIVE_EVERY):
            wake()
        await driver.execute("SELECT 1")
