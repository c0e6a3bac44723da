"""The outbox and `once()` in a database, and what each stands on there. Every run empties the tables first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from statistics import median, quantiles
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

import acemq
from acemq import DbIdempotencyStore, DbOutboxStore, Envelope, Message, OutboxRecord, Topology, Unit
from benches.order import new_order
from benches.running import Figures, Meter, Task, serve

UNHURRIED = 0.05
"""Seconds between two commits that are timed, so that the relay is idle again."""


class Place:
    """A database with an outbox, an inbox and a table of invoices in it."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.is_postgresql = engine.dialect.name == "postgresql"
        self.outbox, self.inbox = DbOutboxStore(engine), DbIdempotencyStore(engine)

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine)

    async def execute(self, *statements: str) -> None:
        async with self.engine.begin() as connection:
            for statement in statements:
                await connection.execute(text(statement))

    async def make(self) -> None:
        await self.outbox.create()
        await self.inbox.create()
        await self.execute("CREATE TABLE IF NOT EXISTS bench_invoice (n INTEGER)")
        # Not DELETE on PostgreSQL: deleted rows go on being looked at until somebody vacuums.
        emptied = "TRUNCATE" if self.is_postgresql else "DELETE FROM"
        await self.execute(*(f"{emptied} {each}" for each in ("acemq_outbox", "acemq_idempotency", "bench_invoice")))

    async def analyze(self) -> None:
        """As autovacuum does within a minute."""
        if self.is_postgresql:
            await self.execute("ANALYZE acemq_outbox")


@asynccontextmanager
async def place_at(url: str) -> AsyncIterator[Place]:
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def connected(connection: Any, _: object) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA journal_mode = WAL")

        @event.listens_for(engine.sync_engine, "begin")
        def begun(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

    place = Place(engine)
    await place.make()
    try:
        yield place
    finally:
        await engine.dispose()


def record(queue: str) -> OutboxRecord:
    return OutboxRecord.of("", queue, new_order())


# What is committed goes out


async def relay(task: Task) -> Figures:
    async with place_at(task.database) as place, acemq.connect(task.url) as mq:
        async with place.session() as session, session.begin():
            for _ in range(task.count):
                await place.outbox.add(record(task.queue), session)
        await place.analyze()
        meter = Meter(task.count, task.limit)
        meter.start()
        async with mq.outbox(place.outbox).relay(batch=256) as relaying:
            while relaying.counters.published < task.count and not meter.late:
                await asyncio.sleep(0.002)
            meter.messages = relaying.counters.published
            meter.stop()
    return meter.figures()


async def wake(task: Task) -> Figures:
    """From the moment before the commit to the broker's confirm."""
    took: list[float] = []
    async with place_at(task.database) as place, acemq.connect(task.url) as mq:
        async with mq.outbox(place.outbox).relay(interval=timedelta(seconds=30)) as relaying:
            await asyncio.sleep(0.5)  # until it listens
            move_some, out = mq.outbound.move_some, asyncio.Event()

            async def moved(batch: Any, within: timedelta) -> Any:
                results = await move_some(batch, within)
                out.set()
                return results

            mq.outbound.move_some = moved  # type: ignore[method-assign]
            for number in range(task.count):
                out.clear()
                async with place.session() as session:
                    await place.outbox.add(record(task.queue), session)
                    began = time.perf_counter()
                    await session.commit()
                    await out.wait()
                    took.append(time.perf_counter() - began)
                while relaying.counters.published <= number:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(UNHURRIED)
    return _times(took)


async def notify(task: Task) -> Figures:
    """A bare NOTIFY until it is heard on another connection, and then one publish until it is confirmed."""
    took: list[float] = []
    heard, order = asyncio.Event(), new_order()
    async with place_at(task.database) as place, acemq.connect(task.url) as mq, place.engine.connect() as listening:
        driver: Any = (await listening.get_raw_connection()).driver_connection
        await driver.add_listener("bench", lambda *_: heard.set())
        async with place.engine.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            for _ in range(task.count):
                heard.clear()
                began = time.perf_counter()
                await connection.execute(text("NOTIFY bench"))
                await heard.wait()
                await mq.send(task.queue, order.stamped())
                took.append(time.perf_counter() - began)
                await asyncio.sleep(UNHURRIED)
    return _times(took)


async def idle(task: Task) -> Figures:
    """Between two rounds of its housekeeping, which asks once or twice in half a minute."""
    asked = 0

    def counted(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal asked
        asked += statement != "BEGIN"

    async with place_at(task.database) as place, acemq.connect(task.url) as mq:
        async with mq.outbox(place.outbox).relay():
            await asyncio.sleep(1.5)
            event.listen(place.engine.sync_engine, "before_cursor_execute", counted)
            await asyncio.sleep(task.limit)
    return {"queries": asked / task.limit}


# In the caller's transaction


async def add(task: Task) -> Figures:
    records = [record(task.queue) for _ in range(task.count)]
    async with place_at(task.database) as place, place.session() as session, session.begin():
        began = time.perf_counter()
        for each in records:
            await place.outbox.add(each, session)
        return {"ms": (time.perf_counter() - began) / task.count * 1_000}


async def insert(task: Task) -> Figures:
    """The same columns through the same session, by the plainest statement that there is."""
    columns = "id, exchange_name, routing_key, body, content_type, headers, created_at"
    statement = text(f"INSERT INTO acemq_outbox ({columns}) VALUES (:id, '', :q, :body, :type, :headers, :at)")
    whole = record(task.queue)
    given = {"q": task.queue, "body": whole.body, "type": whole.content_type, "headers": "x" * 300, "at": 1}
    rows = [{"id": Envelope.of("t").id, **given} for _ in range(task.count)]
    async with place_at(task.database) as place, place.session() as session, session.begin():
        began = time.perf_counter()
        for row in rows:
            await session.execute(statement, row)
        return {"ms": (time.perf_counter() - began) / task.count * 1_000}


# The table, long or short


async def claim(task: Task) -> Figures:
    took: list[float] = []
    async with place_at(task.database) as place:
        for count, at in ((task.sent, "n"), (task.waiting, "NULL")):
            await place.execute(_filling(count, at, is_postgresql=place.is_postgresql))
        await place.analyze()
        for _ in range(task.count):
            began = time.perf_counter()
            batch = await place.outbox.claim(100)
            took.append(time.perf_counter() - began)
            await place.outbox.give_back([record.id for record in batch.records], batch.token)
    return {**_times(took), "messages": task.sent + task.waiting}


def _filling(count: int, published_at: str, *, is_postgresql: bool) -> str:
    columns = "id, exchange_name, routing_key, body, headers, created_at, published_at"
    if is_postgresql:
        numbers, body = f"generate_series(1, {count}) n", "CAST('' AS BYTEA)"
    else:
        counted = f"WITH RECURSIVE g (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {count})"
        numbers, body = f"({counted} SELECT n FROM g WHERE {count} > 0)", "x'00'"
    values = f"'{published_at}-' || n, '', 'q', {body}, '{{}}', n, {published_at}"
    return f"INSERT INTO acemq_outbox ({columns}) SELECT {values} FROM {numbers}"


# The unit of work


async def once(task: Task) -> Figures:
    async def bill(message: Message[int], unit: Unit) -> None:
        await unit.session.execute(_INVOICE)

    async with place_at(task.database) as place:
        sessions = async_sessionmaker(place.engine)
        return await _handle(task, place, lambda mq: mq.once(bill, session=sessions, inbox=place.inbox))


async def without(task: Task) -> Figures:
    """The same handler in a transaction of its own, and no claim."""
    async with place_at(task.database) as place:

        async def bill(message: Message[int]) -> None:
            async with place.session() as session, session.begin():
                await session.execute(_INVOICE)

        return await _handle(task, place, lambda _: bill)


_INVOICE = text("INSERT INTO bench_invoice VALUES (1)")


async def _handle(task: Task, place: Place, handler: Callable[[acemq.AceMQ], Any]) -> Figures:
    async with acemq.connect("memory://") as mq:
        await mq.declare(Topology().queue("units"))
        await mq.send_many("units", [1] * task.count)
        with Spent(place.engine) as spent:
            async with mq.consume("units", int, handler(mq), concurrency=1) as consumer:
                while consumer.counters.acked < task.count:
                    await asyncio.sleep(0.002)
    return {"ms": spent.seconds / task.count * 1_000}


class Spent:
    """Seconds in the database: between the statements that go out and their answers, commits included."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.seconds = 0.0
        self._dialect: Any = engine.sync_engine.dialect

    def __enter__(self) -> Spent:
        names = ("do_execute", "do_commit", "do_begin", "do_rollback")
        self._kept = {name: getattr(self._dialect, name) for name in names}
        for name, call in self._kept.items():
            setattr(self._dialect, name, self._timed(call))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._kept.items():
            setattr(self._dialect, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def _times(took: list[float]) -> Figures:
    return {
        "p50_ms": round(median(took) * 1_000, 4),
        "p99_ms": round(quantiles(took, n=100)[98] * 1_000, 4),
    }


if __name__ == "__main__":
    serve({job.__name__: job for job in (relay, wake, notify, idle, add, insert, claim, once, without)})
