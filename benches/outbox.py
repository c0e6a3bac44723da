"""The outbox and the unit of work: `python -m benches.outbox [--rounds 5] [--quick]`, on servers of its own.

Each figure is a ratio of two things that were measured in turn on one machine, so that a slow machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import aio_pika
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

import acemq
from acemq import DbIdempotencyStore, DbOutboxStore, Envelope, Message, OutboxRecord, Topology, Unit
from benches.results import ENOUGH, conclude, summary, write
from benches.rounds import Run
from benches.targets import Target
from tests.services import PostgreSQL, RabbitMQ

HERE = Path(__file__).parent
QUEUE = "bench.outbox"
PAYLOAD = {"id": "o-1", "text": "x" * 220}
DATABASES = ("postgresql", "sqlite")


def targets() -> list[Target]:
    found: list[Target] = []
    for database, least in (("postgresql", 0.6), ("sqlite", 0.5)):
        relay, adding, once = (f"{what}, {database}" for what in ("relay", "add a record", "once"))
        found += [
            Target(name=f"{relay}, of aio-pika", measure=relay, ours="acemq", peer="aio-pika", at_least=least),
            Target(name=adding, measure=adding, ours="acemq", peer="insert", figure="seconds", at_most=1.5),
            Target(name=once, measure=once, ours="acemq", peer="without", figure="seconds", at_most=2.0),
        ]
        claim = f"claim, {database}"
        found += [
            Target(name=f"{claim}, p50", measure=claim, ours="full", peer="small", figure="p50", at_most=2.0),
            Target(name=f"{claim}, p99", measure=claim, ours="full", peer="small", figure="p99", at_most=3.0),
        ]
    waking = "commit to published, postgresql"
    return [
        *found,
        Target(name=waking, measure=waking, ours="acemq", peer="notify + publish", figure="seconds", at_most=5.0),
    ]


class Bench:
    def __init__(self, engine: AsyncEngine, broker: str, *, quick: bool) -> None:
        self.engine, self.broker = engine, broker
        self.database = engine.dialect.name
        self.count = 1_000 if quick else 10_000
        self.rows = 10_000 if quick else 1_000_000
        self.claims = 200 if quick else 2_000
        self.store = DbOutboxStore(engine)

    async def fill(self, count: int) -> None:
        async with AsyncSession(self.engine) as session, session.begin():
            for _ in range(count):
                await self.store.add(OutboxRecord.of("", QUEUE, PAYLOAD), session)

    async def empty(self) -> None:
        """As new: rows that are only deleted go on being looked at until somebody vacuums."""
        async with self.engine.begin() as connection:
            await connection.execute(
                text(f"{'TRUNCATE' if self.database == 'postgresql' else 'DELETE FROM'} acemq_outbox")
            )

    async def relay(self) -> dict[str, float]:
        await self.empty()
        await self.fill(self.count)
        async with acemq.connect(self.broker) as mq:
            await mq.purge(QUEUE)
            began = time.perf_counter()
            async with mq.outbox(self.store).relay(batch=256) as relay:
                while relay.counters.published < self.count:
                    await asyncio.sleep(0.002)
            took = time.perf_counter() - began
        return {"rate": self.count / took}

    async def raw(self) -> dict[str, float]:
        connection = await aio_pika.connect(self.broker)
        async with connection:
            channel = await connection.channel()
            body = OutboxRecord.of("", QUEUE, PAYLOAD).body
            numbers = iter(range(self.count))

            async def publisher() -> None:
                for _ in numbers:
                    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                    await channel.default_exchange.publish(message, QUEUE, mandatory=True)

            began = time.perf_counter()
            await asyncio.gather(*(publisher() for _ in range(256)))
            return {"rate": self.count / (time.perf_counter() - began)}

    async def add(self) -> dict[str, float]:
        records = [OutboxRecord.of("", QUEUE, PAYLOAD) for _ in range(self.count // 5)]
        async with AsyncSession(self.engine) as session, session.begin():
            began = time.perf_counter()
            for record in records:
                await self.store.add(record, session)
            return {"seconds": (time.perf_counter() - began) / len(records)}

    async def insert(self) -> dict[str, float]:
        """The same columns through the same session, by the plainest statement that there is."""
        columns = "id, exchange_name, routing_key, body, content_type, headers, created_at"
        statement = text(f"INSERT INTO acemq_outbox ({columns}) VALUES (:id, '', :q, :body, :type, :headers, :at)")
        record = OutboxRecord.of("", QUEUE, PAYLOAD)
        rows = [
            {
                "id": Envelope.of("t").id,
                "q": QUEUE,
                "body": record.body,
                "type": record.content_type,
                "headers": "x" * 300,
                "at": 1,
            }
            for _ in range(self.count // 5)
        ]
        async with AsyncSession(self.engine) as session, session.begin():
            began = time.perf_counter()
            for row in rows:
                await session.execute(statement, row)
            return {"seconds": (time.perf_counter() - began) / len(rows)}

    async def claim(self, sent: int, pending: int) -> dict[str, float]:
        await self.empty()
        for count, at in ((sent, "n"), (pending, "NULL")):
            await self._bulk(count, at)
        if self.database == "postgresql":
            async with self.engine.begin() as connection:
                await connection.execute(text("ANALYZE acemq_outbox"))  # as autovacuum does within a minute
        took: list[float] = []
        for _ in range(self.claims):
            began = time.perf_counter()
            batch = await self.store.claim(100)
            took.append(time.perf_counter() - began)
            await self.store.give_back([record.id for record in batch.records], batch.token)
        return {"p50": median(took), "p99": quantiles(took, n=100)[98]}

    async def _bulk(self, count: int, published_at: str) -> None:
        numbers = (
            f"generate_series(1, {count}) n"
            if self.database == "postgresql"
            else f"(WITH RECURSIVE g (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {count}) SELECT n FROM g)"
        )
        empty = "CAST('' AS BYTEA)" if self.database == "postgresql" else "x'00'"
        columns = "id, exchange_name, routing_key, body, headers, created_at, published_at"
        async with self.engine.begin() as connection:
            await connection.execute(
                text(
                    f"INSERT INTO acemq_outbox ({columns}) SELECT '{published_at}-' || n, '', 'q', {empty}, '{{}}', n, "
                    f"{published_at} FROM {numbers}"
                )
            )

    async def unit(self, *, once: bool) -> dict[str, float]:
        """A handler that writes one row, with and without claim and announcement around it."""
        sessions, inbox = async_sessionmaker(self.engine), DbIdempotencyStore(self.engine)
        statement = text("INSERT INTO bench_invoice VALUES (1)")

        async def in_unit(message: Message[Any], unit: Unit) -> None:
            await unit.session.execute(statement)

        async def alone(message: Message[Any]) -> None:
            async with sessions() as session, session.begin():
                await session.execute(statement)

        spent = _Spent(self.engine)
        count = self.count // 10
        async with acemq.connect("memory://bench-outbox") as mq:
            await mq.declare(Topology().queue("units"))
            handler = mq.once(in_unit, session=sessions, inbox=inbox) if once else alone
            await mq.send_many("units", [1] * count)
            with spent:
                async with mq.consume("units", int, handler, concurrency=1) as consumer:
                    while consumer.counters.acked < count:
                        await asyncio.sleep(0.002)
        return {"seconds": spent.seconds / count}

    async def wake(self) -> dict[str, float]:
        took: list[float] = []
        async with (
            acemq.connect(self.broker) as mq,
            mq.outbox(self.store).relay(interval=timedelta(seconds=30)),
        ):
            await asyncio.sleep(0.5)  # until it listens
            move_some, out = mq.outbound.move_some, asyncio.Event()

            async def moved(batch: Any, within: timedelta) -> Any:
                results = await move_some(batch, within)
                out.set()
                return results

            mq.outbound.move_some = moved  # type: ignore[method-assign]
            for _ in range(100):
                out.clear()
                session = AsyncSession(self.engine)
                await self.store.add(OutboxRecord.of("", QUEUE, PAYLOAD), session)
                began = time.perf_counter()
                await session.commit()
                await out.wait()
                took.append(time.perf_counter() - began)
                await session.close()
                await asyncio.sleep(0.05)  # until the relay is idle again
        return {"seconds": median(took)}

    async def notify_and_publish(self) -> dict[str, float]:
        took: list[float] = []
        heard = asyncio.Event()
        async with acemq.connect(self.broker) as mq, self.engine.connect() as listening:
            raw: Any = (await listening.get_raw_connection()).driver_connection
            await raw.add_listener("bench", lambda *_: heard.set())
            async with self.engine.connect() as connection:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                for _ in range(100):
                    heard.clear()
                    began = time.perf_counter()
                    await connection.execute(text("NOTIFY bench"))
                    await heard.wait()
                    await mq.send(QUEUE, PAYLOAD)
                    took.append(time.perf_counter() - began)
        return {"seconds": median(took)}


class _Spent:
    """Seconds in the database: between the statements that go out and their answers, commits included."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.seconds = 0.0
        self._engine = engine.sync_engine

    def __enter__(self) -> None:
        dialect: Any = self._engine.dialect
        self._kept = {name: getattr(dialect, name) for name in ("do_execute", "do_commit", "do_begin", "do_rollback")}
        for name, call in self._kept.items():
            setattr(dialect, name, self._timed(call))

    def __exit__(self, *_: object) -> None:
        for name, call in self._kept.items():
            setattr(self._engine.dialect, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@asynccontextmanager
async def bench_at(url: str, broker: str, *, quick: bool) -> AsyncIterator[Bench]:
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def connected(connection: Any, _: object) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA journal_mode = WAL")

        @event.listens_for(engine.sync_engine, "begin")
        def begun(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

    bench = Bench(engine, broker, quick=quick)
    await bench.store.create()
    await DbIdempotencyStore(engine).create()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS bench_invoice (n INTEGER)"))
    try:
        yield bench
    finally:
        await engine.dispose()


async def measure(url: str, broker: str, rounds: int, *, quick: bool) -> list[Run]:
    runs: list[Run] = []
    async with acemq.connect(broker) as mq:
        await mq.declare(Topology().queue(QUEUE, type="classic"))
    async with bench_at(url, broker, quick=quick) as bench:
        at = bench.database
        plan: list[tuple[str, str, Callable[[], Awaitable[dict[str, float]]]]] = [
            (f"relay, {at}", "acemq", bench.relay),
            (f"relay, {at}", "aio-pika", bench.raw),
            (f"add a record, {at}", "acemq", bench.add),
            (f"add a record, {at}", "insert", bench.insert),
            (f"once, {at}", "acemq", lambda: bench.unit(once=True)),
            (f"once, {at}", "without", lambda: bench.unit(once=False)),
        ]
        if at == "postgresql":
            plan += [
                (f"commit to published, {at}", "acemq", bench.wake),
                (f"commit to published, {at}", "notify + publish", bench.notify_and_publish),
            ]
        for number in range(rounds):
            for name, candidate, run in plan:
                if candidate == "acemq" and name.startswith("commit"):
                    await bench.empty()
                figures = await run()
                runs.append(Run(measure=name, candidate=candidate, round=number, figures=figures))
                print(f"  {number + 1} {name}: {candidate} {figures}", file=sys.stderr)
        # Once: it takes long to fill, and its figures are of thousands of claims.
        for candidate, sent, pending in (("small", 0, 1_000), ("full", bench.rows, bench.rows)):
            figures = await bench.claim(sent, pending)
            runs.append(Run(measure=f"claim, {at}", candidate=candidate, round=0, figures=figures))
            print(f"  claim, {at}: {candidate} {figures}", file=sys.stderr)
    return runs


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.outbox", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few records: a first look, no verdict")
    parser.add_argument("--rounds", type=int, default=ENOUGH)
    options = parser.parse_args(arguments)
    with RabbitMQ.obtain() as broker, PostgreSQL.obtain() as postgres, TemporaryDirectory() as folder:
        urls = (
            postgres.url.replace("postgresql:", "postgresql+asyncpg:"),
            f"sqlite+aiosqlite:///{folder}/bench.db",
        )
        runs = [
            run for url in urls for run in asyncio.run(measure(url, broker.url, options.rounds, quick=options.quick))
        ]
    results = conclude("outbox", targets(), runs, rounds=options.rounds, quick=options.quick)
    path = write(results, HERE / ("scratch" if options.quick or options.rounds < ENOUGH else "results"))
    print(f"\n{summary(results)}\n-> {path.relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
