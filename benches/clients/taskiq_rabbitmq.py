"""Taskiq with its aio-pika broker; its worker runs in this process."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from taskiq.api import run_receiver_task
from taskiq_aio_pika import AioPikaBroker, Queue, QueueType

from benches.order import new_order
from benches.running import Figures, Meter, Task, meter_of, pump, serve


def _job_of(task: Task, meter: Meter) -> tuple[Any, Any]:
    """The broker, and the task that it sends and runs."""

    async def job(document: dict[str, Any]) -> None:
        meter.hit(document["t"])

    queue = Queue(name=task.queue, type=QueueType.CLASSIC, routing_key=task.queue)
    broker: Any = AioPikaBroker(task.url, qos=task.prefetch, task_queues=[queue])
    return broker, broker.register_task(job, task_name="job")


async def publish(task: Task) -> Figures:
    order = new_order(task.size)
    document = msgspec.to_builtins(order)
    broker, job = _job_of(task, meter_of(task))

    def send_one() -> Any:
        document["t"] = order.stamped().t
        return job.kiq(document)

    await broker.startup()
    try:
        return await pump(send_one, task)
    finally:
        await broker.shutdown()


async def consume(task: Task) -> Figures:
    meter = meter_of(task)
    broker, _ = _job_of(task, meter)
    broker.is_worker_process = True
    running = run_receiver_task(broker, max_async_tasks=task.prefetch, max_prefetch=task.prefetch, run_startup=True)
    worker = asyncio.ensure_future(running)
    await meter.over.wait()
    worker.cancel()
    await asyncio.wait([worker], timeout=2)
    return meter.figures()


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
