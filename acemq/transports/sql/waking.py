"""Hearing of what other processes have published: PostgreSQL says so, SQLite is asked whether its file has changed."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any, Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from .database import DIAL_LIMIT, Database, File, Server, said
from .dialects import Tables

log = logging.getLogger("acemq.sql")

OFTEN = 0.02
"""Seconds between two looks whether a file has changed: three microseconds each."""
HUSH = 0.025
"""Seconds for which a queue is not spoken of again: a notification makes commits wait for each other."""
LISTENING_POLL = 5.0
"""Seconds between two looks of a consumer that is told."""
TOPOLOGY = "t"
"""What is said when the topology has changed."""


class Waker(Protocol):
    @property
    def is_live(self) -> bool: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...


def channel_of(tables: Tables) -> str:
    return f"acemq_{sha256(f'{tables.schema}.{tables.prefix}'.encode()).hexdigest()[:8]}"


def waker(database: Database, heard: Callable[[int | None], None], lost: Callable[[str], None], me: str) -> Waker:
    """`heard` is called with a queue's number, or with `None` when it may be any of them."""
    if isinstance(database, File):
        return FileWatch(database, heard)
    if isinstance(database, Server) and database.can_listen:
        return Listener(database, heard, lost, me)
    return Nobody()


class Nobody:
    """Nothing wakes us: consumers look for themselves."""

    is_live = False

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class FileWatch:
    def __init__(self, file: File, heard: Callable[[int | None], None]) -> None:
        self._file, self._heard = file, heard
        self._timer: asyncio.TimerHandle | None = None
        self._seen: object = None
        self.is_live = False

    async def start(self) -> None:
        if self._timer is None:
            self._look()

    async def stop(self) -> None:
        self.is_live = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        watch = self._file.watch
        self.is_live = False
        if watch is not None:
            with suppress(sqlite3.Error):  # the link notices by itself
                (seen,) = watch.execute("PRAGMA data_version").fetchone()
                self.is_live = True
                if seen != self._seen:
                    first, self._seen = self._seen is None, seen
                    if not first:
                        self._heard(None)
        self._timer = asyncio.get_running_loop().call_later(OFTEN, self._look)


class Listener:
    """A connection of its own, on which PostgreSQL speaks."""

    def __init__(
        self, server: Server, heard: Callable[[int | None], None], lost: Callable[[str], None], me: str
    ) -> None:
        self._server, self._heard, self._lost, self._me = server, heard, lost, me
        self._connection: Any = None
        self._beside: AsyncConnection | None = None
        """Of an engine of the application's, what it was taken from."""
        self._warned = False
        self._stopping = False

    @property
    def is_live(self) -> bool:
        return self._connection is not None and not self._connection.is_closed()

    async def start(self) -> None:
        """Whatever it could not do it says once; then consumers look for themselves."""
        if self.is_live:
            return
        await self.stop()
        self._stopping = False
        try:
            async with asyncio.timeout(DIAL_LIMIT):
                connection, self._beside = await self._server.to_listen()
                self._connection = connection
                connection.add_termination_listener(self._ended)
                await connection.add_listener(channel_of(self._server.tables), self._told)
        except Exception as error:
            await self.stop()
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s does not let us listen: %s; looking every %s instead. Behind a pooler that gives out a session "
                    "per transaction write listen=false",
                    self._server.address.endpoint,
                    said(error),
                    self._server.options.poll,
                )
            return
        self._heard(None)

    async def stop(self) -> None:
        connection, self._connection = self._connection, None
        self._stopping = True
        if connection is not None:
            connection.terminate()
        beside, self._beside = self._beside, None
        if beside is not None:
            with suppress(Exception):
                await beside.close()

    def _ended(self, connection: object) -> None:
        if connection is self._connection and not self._stopping:
            self._connection = None
            self._lost("the connection that listens has ended")

    def _told(self, connection: object, pid: int, channel: str, payload: object) -> None:
        what, _, sender = str(payload).partition("@")
        if sender == self._me:
            return
        self._heard(int(what) if what.isdecimal() else None)


class Hush:
    """Which queues other processes were told of a moment ago, and which are owed a word once that is over."""

    def __init__(self, say: Callable[[set[int]], None]) -> None:
        self._say = say
        self._said_at: dict[int, float] = {}
        self._owed: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def hushed(self) -> frozenset[int]:
        now = time.monotonic()
        self._said_at = {queue: at for queue, at in self._said_at.items() if now - at < HUSH}
        return frozenset(self._said_at)

    def said(self, queues: set[int]) -> None:
        now = time.monotonic()
        self._said_at.update(dict.fromkeys(queues, now))
        self._owed -= queues

    def owe(self, queues: set[int]) -> None:
        self._owed |= queues
        if self._owed and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(HUSH, self._pay)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pay(self) -> None:
        self._timer = None
        owed, self._owed = self._owed, set()
        if owed:
            self.said(owed)
            self._say(owed)
