"""The statements of the transport through the driver alone: asyncpg, or the sqlite3 of Python. And a bare NOTIFY."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from statistics import quantiles
from typing import Any

import msgspec
from sqlalchemy import make_url

import acemq
from acemq import Topology
from acemq.transports.sql.dialects import DIALECTS, Statements, Tables
from benches.order import Order, new_order, orders
from benches.running import Figures, Meter, Task, pump, pump_blocking, serve

asyncpg: Any = import_module("asyncpg")  # without types

LEASE = 30_000_000
_encode, _decode = msgspec.json.encode, msgspec.json.Decoder(Order).decode


class Sample(msgspec.Struct):
    """What stands beside a body, of a message that acemq has sent: the same for all that are sent here."""

    queue: int
    topology: str
    exchange: str
    key: str
    headers: str
    properties: str


async def sample_of(task: Task) -> Sample:
    """Makes the tables where they are missing, and leaves them as they were."""
    async with acemq.connect(f"{task.url}?create_schema=true") as mq:
        await mq.declare(Topology().queue(task.queue).queue("sample"))
        await mq.send("sample", new_order(task.size))
    columns = "exchange, routing_key, headers, properties"
    queue = f"SELECT id FROM acemq_queue WHERE name = '{task.queue}'"
    topology = "SELECT value FROM acemq_meta WHERE name = 'topology'"
    row = f"SELECT {columns} FROM acemq_message WHERE queue_id = (SELECT id FROM acemq_queue WHERE name = 'sample')"
    if task.url.startswith("sqlite"):
        with opened(task) as file:
            return Sample(
                *(file.execute(sql).fetchone()[0] for sql in (queue, topology)), *file.execute(row).fetchone()
            )
    connection = await asyncpg.connect(task.url)
    try:
        return Sample(*[await connection.fetchval(sql) for sql in (queue, topology)], *await connection.fetchrow(row))
    finally:
        await connection.close()


# PostgreSQL


class Spoken:
    """A statement as asyncpg takes it."""

    def __init__(self, connection: Any, name: str) -> None:
        dialect = make_url("postgresql+asyncpg://").get_dialect()()
        made: Any = Statements(DIALECTS["postgresql"], Tables())[name].compile(dialect=dialect)
        self._connection, self._text, self._names = connection, str(made), made.positiontup or []

    async def __call__(self, **given: Any) -> Sequence[Any]:
        rows: Sequence[Any] = await self._connection.fetch(self._text, *(given[name] for name in self._names))
        return rows


async def send(task: Task) -> Figures:
    sample = await sample_of(task)
    if task.url.startswith("sqlite"):
        return send_to_file(task, sample)
    connection = await asyncpg.connect(task.url)
    publish, count = Spoken(connection, "publish_each"), task.batch

    async def batch() -> None:
        await publish(
            bodies=[_encode(order) for order in orders(count, task.size)],
            headers=[sample.headers] * count,
            properties=[sample.properties],
            exchanges=[""],
            keys=[task.queue],
            queues=[sample.queue] * count,
            ranks=[],
            delays=[],
            lives=[],
            topology=sample.topology,
            told=[],
            channel="",
            sender="",
        )

    figures = await pump(batch, task)
    await connection.close()
    return figures


async def consume(task: Task) -> Figures:
    sample = await sample_of(task)
    if task.url.startswith("sqlite"):
        return consume_from_file(task, sample)
    connection = await asyncpg.connect(task.url)
    claim, settle = Spoken(connection, "claim"), Spoken(connection, "settle")
    meter = Meter(task.count, task.limit)
    floor = 0
    meter.start()
    while not meter.over.is_set():
        rows = await claim(
            queue=sample.queue, most=task.prefetch, lease=LEASE, call="c", holder="", fence=None,
            due=False, rank=0, floor=floor,
        )  # fmt: skip
        floor = rows[0]["seq"]
        for row in rows:
            assert _decode(row["body"]).t
            meter.hit()
        seqs, tokens = [row["seq"] for row in rows], [row["token"] for row in rows]
        assert len(await settle(seqs=seqs, tokens=tokens, delays=[], headers=[], properties=[])) == len(rows)
    await connection.close()
    return meter.figures()


async def notify(task: Task) -> Figures:
    """From NOTIFY to the listener of another connection."""
    took, heard = list[float](), asyncio.Event()
    listening, speaking = await asyncpg.connect(task.url), await asyncpg.connect(task.url)
    await listening.add_listener("bench", lambda *_: heard.set())
    for _ in range(task.count):
        await asyncio.sleep(0.05)
        heard.clear()
        began = time.perf_counter()
        await speaking.execute("NOTIFY bench")
        await heard.wait()
        took.append(time.perf_counter() - began)
    await listening.close()
    await speaking.close()
    hundredths = quantiles(took, n=100)
    return {"p50_ms": round(hundredths[49] * 1_000, 3), "p99_ms": round(hundredths[98] * 1_000, 3)}


# SQLite


@contextmanager
def opened(task: Task) -> Iterator[sqlite3.Connection]:
    file = sqlite3.connect(task.url.removeprefix("sqlite:///"), isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "journal_size_limit=67108864"):
        file.execute(f"PRAGMA {pragma}").close()
    yield file
    file.close()


def text(name: str) -> str:
    return str(Statements(DIALECTS["sqlite"], Tables())[name])


def send_to_file(task: Task, sample: Sample) -> Figures:
    topology, insert = text("topology"), text("insert")
    with opened(task) as file:

        def batch() -> None:
            bodies = [_encode(order) for order in orders(task.batch, task.size)]
            at = time.time_ns() // 1_000
            file.execute("BEGIN IMMEDIATE")
            assert file.execute(topology, {"now": at}).fetchone()[0] == sample.topology
            file.executemany(
                insert,
                [
                    {
                        "queue_id": sample.queue,
                        "state": 0,
                        "rank_key": 0,
                        "visible_at": at,
                        "expires_at": None,
                        "enqueued_at": at,
                        "exchange": "",
                        "routing_key": task.queue,
                        "headers": sample.headers,
                        "properties": sample.properties,
                        "body": body,
                    }
                    for body in bodies
                ],
            )
            file.execute("COMMIT")

        return pump_blocking(batch, task)


def consume_from_file(task: Task, sample: Sample) -> Figures:
    claim, settle = text("claim"), text("remove_ours")
    meter = Meter(task.count, task.limit)
    with opened(task) as file:
        meter.start()
        while not meter.over.is_set():
            at = time.time_ns() // 1_000
            file.execute("BEGIN IMMEDIATE")
            asked = {"queue": sample.queue, "most": task.prefetch, "lease": LEASE, "call": "c", "now": at}
            rows = file.execute(claim, asked).fetchall()
            file.execute("COMMIT")
            for row in rows:
                assert _decode(row[8]).t
                meter.hit()
            file.execute("BEGIN IMMEDIATE")
            told = {"told": json.dumps({row[0]: row[1] for row in rows})}
            assert len(file.execute(settle, told).fetchall()) == len(rows)
            file.execute("COMMIT")
    return meter.figures()


if __name__ == "__main__":
    serve({job.__name__: job for job in (send, consume, notify)})
