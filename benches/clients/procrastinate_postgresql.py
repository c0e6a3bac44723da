"""procrastinate as its documentation shows it: a batch of deferred jobs, one worker in this process."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import procrastinate

from benches.order import new_order
from benches.running import Figures, Meter, Task, pump, serve

CONCURRENCY = 10


def app_of(task: Task, meter: Meter | None = None) -> tuple[procrastinate.App, Any]:
    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=task.url))

    async def handle(order: dict[str, Any]) -> None:
        assert meter is not None
        meter.hit(order["t"])

    return app, app.task(name="job", queue=task.queue)(handle)


def rows(count: int, size: int) -> list[dict[str, Any]]:
    order = new_order(size)
    return [{"order": msgspec.to_builtins(order.stamped())} for _ in range(count)]


async def send(task: Task) -> Figures:
    app, job = app_of(task)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        return await pump(lambda: job.batch_defer_async(*rows(task.batch, task.size)), task)


async def consume(task: Task) -> Figures:
    logging.disable(logging.CRITICAL)
    meter = Meter(task.count, task.limit)
    app, job = app_of(task, meter)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        for _ in range(task.count // 500):
            await job.batch_defer_async(*rows(500, task.size))
        await app.connector.execute_query_async("ANALYZE")
        worker = asyncio.create_task(
            app.run_worker_async(queues=[task.queue], concurrency=CONCURRENCY, install_signal_handlers=False)
        )
        await meter.over.wait()
        worker.cancel()
        await asyncio.wait({worker}, timeout=5)
    return meter.figures()


if __name__ == "__main__":
    serve({"send": send, "consume": consume})
