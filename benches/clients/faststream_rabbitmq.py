"""FastStream as its documentation shows it. Its handler takes a dict, the fastest it has to offer."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from faststream.rabbit import Channel, QueueType, RabbitBroker, RabbitQueue

from benches.order import new_order
from benches.running import Figures, Task, meter_of, pump, serve


def _queue(task: Task) -> Any:
    kind: Any = QueueType(task.queue_type)  # its overloads take only literals
    return RabbitQueue(task.queue, durable=True, queue_type=kind)


async def publish(task: Task) -> Figures:
    order = new_order(task.size)
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
    meter = meter_of(task)
    broker = RabbitBroker(task.url, logger=None)

    async def handle(document: dict[str, Any]) -> None:
        meter.hit(document["t"])

    broker.subscriber(_queue(task), channel=Channel(prefetch_count=task.prefetch))(handle)
    await broker.start()
    try:
        await meter.over.wait()
    finally:
        await broker.stop()
    return meter.figures()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    serve({"publish": publish, "consume": consume, "receive": consume})
