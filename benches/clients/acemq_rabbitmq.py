"""acemq on RabbitMQ, as its guide shows it."""

from __future__ import annotations

import asyncio

import acemq
from acemq import Message
from benches.order import Order, new_order, orders
from benches.running import Figures, Task, meter_of, pump, rss_mb, serve


async def publish(task: Task) -> Figures:
    order = new_order(task.size)
    async with acemq.connect(task.url) as mq:
        if task.batch > 1:
            return await pump(lambda: mq.send_many(task.queue, orders(task.batch, task.size)), task)
        return await pump(lambda: mq.send(task.queue, order.stamped()), task)


async def fill(task: Task) -> Figures:
    async with acemq.connect(task.url) as mq:
        receipts = await mq.send_many(task.queue, orders(task.count, task.size))
    return {"messages": len(receipts)}


async def consume(task: Task) -> Figures:
    meter = meter_of(task)

    async def handle(message: Message[Order]) -> None:
        assert message.id
        meter.hit(message.payload.t)

    async with acemq.connect(task.url) as mq:
        async with mq.consume(task.queue, Order, handle, prefetch=task.prefetch) as consumer:
            await meter.over.wait()
        assert consumer.counters.acked >= meter.messages
    return meter.figures()


async def growth(task: Task) -> Figures:
    """How much larger the process is after `task.count` messages than after the first thousand."""
    handled = asyncio.Semaphore(0)
    order = new_order()

    async def handle(message: Message[Order]) -> None:
        handled.release()

    async with acemq.connect(task.url) as mq:

        async def pass_on(count: int) -> None:
            some = Task(job="", count=count, window=task.window, limit=task.limit)
            sent = await pump(lambda: mq.send(task.queue, order.stamped()), some)
            for _ in range(int(sent["messages"])):
                await handled.acquire()

        async with mq.consume(task.queue, Order, handle, prefetch=task.prefetch):
            await pass_on(1_000)
            before = rss_mb()
            await pass_on(task.count)
            return {"grown_mb": round(rss_mb() - before, 2), "rss_mb": round(rss_mb(), 1)}


if __name__ == "__main__":
    serve({"publish": publish, "fill": fill, "consume": consume, "receive": consume, "growth": growth})
