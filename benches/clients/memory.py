"""`asyncio.Queue` and acemq on `memory://`: publish, deliver, decode, handle and accept in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import acemq
from acemq import Message, Topology
from benches.order import Order, new_order, orders
from benches.running import Figures, Meter, Task, rss_mb, serve

AHEAD = 200
"""Messages that a producer may be ahead of its consumer; neither a put nor a publish in memory waits by itself."""

QUEUE = "bench"


async def queue(task: Task) -> Figures:
    """The bare queue: put and get the payload object itself."""
    between: asyncio.Queue[Order] = asyncio.Queue()
    meter = Meter(task.count, task.limit)
    order = new_order()

    async def consume() -> None:
        while True:
            await between.get()
            meter.hit()

    consumer = asyncio.create_task(consume())
    meter.start()
    await _produce(lambda: between.put(order.stamped()), meter, task)
    consumer.cancel()
    return meter.figures()


async def engine(task: Task) -> Figures:
    """The same through all of acemq: envelope and JSON written, read, handled, accepted and counted."""
    meter = Meter(task.count, task.limit)
    order = new_order()

    async def handle(message: Message[Order]) -> None:
        assert message.id
        meter.hit()

    async with acemq.connect("memory://") as mq:
        await mq.declare(Topology().queue(QUEUE))
        async with mq.consume(QUEUE, Order, handle, prefetch=task.prefetch) as consumer:
            meter.start()
            await _produce(lambda: mq.send(QUEUE, order.stamped()), meter, task)
        assert consumer.counters.acked >= meter.messages
    return meter.figures()


async def _produce(put: Callable[[], Awaitable[object]], meter: Meter, task: Task) -> None:
    """Until the consumer has had enough."""
    sent = 0
    while sent < task.count and not meter.over.is_set():
        if sent - meter.messages < AHEAD:
            await put()
            sent += 1
        else:
            await asyncio.sleep(0)
    await meter.over.wait()


async def standing(task: Task) -> Figures:
    """Each message that is handled sends the next, so that `task.waiting` lie in the queue all the time."""
    meter = Meter(task.count, task.limit)
    order = new_order()

    async with acemq.connect("memory://") as mq:

        async def handle(message: Message[Order]) -> None:
            if not meter.over.is_set():
                await mq.send(QUEUE, order.stamped())
                meter.hit()

        await mq.declare(Topology().queue(QUEUE))
        await mq.send_many(QUEUE, orders(task.waiting))
        async with mq.consume(QUEUE, Order, handle, prefetch=task.prefetch):
            await meter.over.wait()
            await mq.purge(QUEUE)
    return meter.figures()


async def growth(task: Task) -> Figures:
    """How much larger the process is after `task.count` messages than after the first thousand."""
    handled = asyncio.Semaphore(0)

    async def handle(message: Message[Order]) -> None:
        handled.release()

    async with acemq.connect("memory://") as mq:

        async def pass_on(count: int) -> None:
            await mq.send_many(QUEUE, orders(count))
            for _ in range(count):
                await handled.acquire()

        await mq.declare(Topology().queue(QUEUE))
        async with mq.consume(QUEUE, Order, handle, prefetch=task.prefetch):
            await pass_on(1_000)
            before = rss_mb()
            for _ in range(task.count // 1_000):
                await pass_on(1_000)
            return {"grown_mb": round(rss_mb() - before, 2), "rss_mb": round(rss_mb(), 1)}


if __name__ == "__main__":
    serve({job.__name__: job for job in (queue, engine, standing, growth)})
