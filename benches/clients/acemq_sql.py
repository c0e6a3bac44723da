"""acemq on a database, as its guide shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from statistics import quantiles
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import acemq
from acemq import AceMQ, Message, Topology
from acemq.transport import Settlement, Verb
from benches.order import Order, new_order, orders
from benches.running import Figures, Meter, Task, pump, rss_mb, serve
from tests.sql.filling import analyze, fill

_ASYNC = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy"}


@asynccontextmanager
async def connected(task: Task) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"{task.url}?create_schema=true") as mq:
        await mq.declare(Topology().queue(task.queue))
        yield mq


async def send(task: Task) -> Figures:
    async with connected(task) as mq:
        figures = await pump(lambda: mq.send_many(task.queue, orders(task.batch, task.size)), task)
        assert (await mq.depth(task.queue)).ready == figures["messages"]
    return figures


async def fill_queue(task: Task) -> Figures:
    async with connected(task) as mq:
        receipts = await mq.send_many(task.queue, orders(task.count, task.size))
    return {"messages": len(receipts)}


async def consume(task: Task) -> Figures:
    meter = Meter(task.count, task.limit)

    async def handle(message: Message[Order]) -> None:
        assert message.id
        meter.hit(message.payload.t)

    async with connected(task) as mq:
        async with mq.consume(task.queue, Order, handle, prefetch=task.prefetch) as consumer:
            await meter.over.wait()
        assert consumer.counters.acked >= meter.messages
    return meter.figures()


async def claims(task: Task) -> Figures:
    """Each is settled, and as many are sent, so that the queue stays as long as it was."""
    took: list[float] = []
    async with connected(task) as mq:
        await mq.send(task.queue, new_order(task.size))
        await _fill_up(task)
        for number in range(task.count + 50):
            began = time.perf_counter()
            taken = await mq.transport.pull(task.queue, most=20, wait=timedelta(0))
            if number >= 50:
                took.append(time.perf_counter() - began)
            assert len(taken) == 20
            await mq.transport.settle([Settlement(delivery=each, verb=Verb.ACCEPT) for each in taken])
            await mq.send_many(task.queue, orders(20, task.size))
    return _times(took)


async def _fill_up(task: Task) -> None:
    scheme, _, rest = task.url.partition("://")
    engine = create_async_engine(f"{_ASYNC[scheme]}://{rest}")
    async with engine.begin() as connection:
        await connection.run_sync(fill, task.queue, task.waiting - 1)
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await connection.run_sync(analyze)
    await engine.dispose()


async def wake(task: Task) -> Figures:
    """From a commit to the handler of a consumer that has nothing to do."""
    took, heard, order = list[float](), asyncio.Event(), new_order(task.size)

    async def handle(message: Message[Order]) -> None:
        heard.set()

    engine = create_async_engine(task.url.replace("postgresql:", "postgresql+asyncpg:"))
    async with connected(task) as mq, mq.consume(task.queue, Order, handle):
        for _ in range(task.count):
            await asyncio.sleep(0.05)  # until it is idle again
            heard.clear()
            async with AsyncSession(engine) as session:
                await mq.send(task.queue, order.stamped(), transaction=session)
                began = time.perf_counter()
                await session.commit()
                await heard.wait()
                took.append(time.perf_counter() - began)
    await engine.dispose()
    return _times(took)


async def idle(task: Task) -> Figures:
    """What a consumer asks that has long had nothing to do, whoever asks it in this process."""
    asked = 0

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        nonlocal asked
        asked += not statement.startswith("BEGIN")

    async def handle(message: Message[Order]) -> None:
        raise AssertionError

    async with connected(task) as mq, mq.consume(task.queue, Order, handle):
        await asyncio.sleep(5)
        event.listen(sa.Engine, "before_cursor_execute", count)
        await asyncio.sleep(task.limit)
        return {"queries": round(asked / task.limit, 2)}


async def growth(task: Task) -> Figures:
    """How much larger the process is after `task.count` messages than after the first ten thousand."""
    handled = asyncio.Semaphore(0)

    async def handle(message: Message[Order]) -> None:
        handled.release()

    async with connected(task) as mq:

        async def pass_on(count: int) -> None:
            for _ in range(count // task.batch):
                await mq.send_many(task.queue, orders(task.batch))
                for _ in range(task.batch):
                    await handled.acquire()

        async with mq.consume(task.queue, Order, handle, prefetch=task.prefetch):
            await pass_on(task.count // 10)
            before = rss_mb()
            await pass_on(task.count)
            return {"grown_mb": round(rss_mb() - before, 2), "rss_mb": round(rss_mb(), 1)}


def _times(took: Sequence[float]) -> Figures:
    hundredths = quantiles(took, n=100)
    return {"p50_ms": round(hundredths[49] * 1_000, 3), "p99_ms": round(hundredths[98] * 1_000, 3)}


if __name__ == "__main__":
    serve(
        {
            **{job.__name__: job for job in (send, consume, claims, wake, idle, growth)},
            "fill": fill_queue,
        }
    )
