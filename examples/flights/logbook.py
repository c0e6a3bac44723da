"""What has happened to each flight, a line each beside the messages, so that a later run goes on where one was stopped.

On a broker that is no file nothing is written, and every run begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from acemq import RunningPipeline
from examples.flights.flights import Arrival, Desk, Row


class Line(msgspec.Struct, array_like=True):
    step: str
    flight: str
    arrival: Arrival | None = None


def log_of(database: Path) -> Path:
    return database.with_suffix(".log")


class Logbook:
    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lines = path.open("ab") if path is not None else None
        self.replaying = False
        """All departures were sent and had ended, and the replay had begun."""

    def read_into(self, desk: Desk) -> None:
        """What earlier runs have done. A step that was under way when one of them was killed may run again."""
        if self.path is None:
            return
        for written in self.path.read_bytes().splitlines(keepends=True):
            if written.endswith(b"\n"):  # the last one may have been cut off
                line = msgspec.json.decode(written, type=Line)
                if line.step == "replay":
                    self.replaying = True
                else:
                    desk.remember(line.step, line.flight, line.arrival)

    def note(self, step: str, flight: str, arrival: Arrival | None = None) -> None:
        if self._lines is not None:
            self._lines.write(msgspec.json.encode(Line(step, flight, arrival)) + b"\n")
            self._lines.flush()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


class Sender:
    """Sends a window of rows and its size in one transaction of the file, so that none is sent twice or left out."""

    def __init__(self, database: Path) -> None:
        self._engine = create_async_engine(f"sqlite+aiosqlite:///{database}", connect_args={"timeout": 30})
        self.sent = 0
        """Rows that are on their way, or through."""

    async def open(self) -> None:
        """Read how far an earlier run has come."""
        await to_its_end(self._open())

    async def _open(self) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(text("CREATE TABLE IF NOT EXISTS flights_sent (many INTEGER)"))
            found = await connection.execute(text("SELECT coalesce(sum(many), 0) FROM flights_sent"))
            self.sent = found.scalar_one()

    async def send(self, running: RunningPipeline[Row, Any], window: Sequence[Row]) -> None:
        await to_its_end(self._send(running, window))

    async def _send(self, running: RunningPipeline[Row, Any], window: Sequence[Row]) -> None:
        async with AsyncSession(self._engine) as session:
            for row in window:
                await running.send(row, transaction=session)
            await session.execute(text("INSERT INTO flights_sent VALUES (:many)"), {"many": len(window)})
            await session.commit()
        self.sent += len(window)

    async def close(self) -> None:
        await self._engine.dispose()


async def to_its_end(transaction: Coroutine[Any, Any, None]) -> None:
    """Not cut off within a statement: aiosqlite would leave it open behind it, and with it the file locked."""
    task = asyncio.create_task(transaction)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


@asynccontextmanager
async def sender_to(database: Path | None) -> AsyncGenerator[Sender | None]:
    """`None`: the broker is no file."""
    if database is None:
        yield None
        return
    sender = Sender(database)
    try:
        await sender.open()
        yield sender
    finally:
        await sender.close()
