"""FastStream as its documentation shows it. Its handler takes a dict, the fastest it has to offer."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from benches.order import new_order
from benches.running import Figures, Meter, Task, pump, serve


def _queue(task: Task) -> RabbitQueue:
    return RabbitQueue(task.queue, durable=True, queue_type=QueueType.CLASSIC)


async def publish(task: Task) -> Figures:
    order = new_order()
    document = msgspec.to_builtins(order)
    broker = RabbitBroker(task.url, logger=None)
    publisher = broker.publisher(_queue(task), persist=True)

    def send_one() -> Any:
        document["t"] = order.stamped().t
        return publisher.publish(document)

    await broker.start()
    try:
        return await pump(send_one, task)
    finally:
        await broker.stop()


async def consume(task: Task) -> Figures:
    meter = Meter(task.count, task.limit)
    broker = RabbitBroker(task.url, logger=None)

    async def handle(document: dict[str, Any]) -> None:
        assert document["t"]
        meter.hit()

    broker.subscriber(_queue(task), channel=Channel(prefetch_count=task.prefetch))(handle)
    await broker.start()
    try:
        await meter.over.wait()
    finally:
        await broker.stop()
    return meter.figures()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    serve({job.__name__: job for job in (publish, consume)})
