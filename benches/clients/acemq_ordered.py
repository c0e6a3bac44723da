"""acemq's ordered queue, and beside it the same queues without an order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from itertools import cycle

import msgspec

import acemq
from acemq import AceMQ, Message, OrderedQueue
from benches.order import Order, new_order, orders
from benches.running import Figures, Meter, Task, pump, serve

PARTITIONS = 8
KEYS = 512


def key_of(order: Order) -> str:
    return str(order.id % KEYS)


async def declared(mq: AceMQ, task: Task) -> OrderedQueue[Order]:
    return await mq.ordered(task.queue, Order).partitions(PARTITIONS).keyed_by(key_of).declare()


async def fill(task: Task) -> Figures:
    """A fresh queue, with its messages spread evenly over the keys."""
    async with acemq.connect(task.url) as mq:
        for number in range(PARTITIONS):
            await mq.delete(f"{task.queue}.{number}")
        ledger = await declared(mq, task)
        given = [msgspec.structs.replace(order, id=number) for number, order in enumerate(orders(task.count))]
        if given:
            await ledger.send_many(given)
        return {"messages": len(given)}


async def ordered(task: Task) -> Figures:
    meter = Meter(task.count, task.limit)

    async def handle(message: Message[Order]) -> None:
        meter.hit()

    async with acemq.connect(task.url) as mq:
        ledger = await declared(mq, task)
        async with ledger.consume(handle):
            await meter.over.wait()
        assert ledger.counters.handled >= meter.messages
    return meter.figures()


async def plain(task: Task) -> Figures:
    meter = Meter(task.count, task.limit)

    async def handle(message: Message[Order]) -> None:
        meter.hit()

    async with AsyncExitStack() as consumers:
        mq = await consumers.enter_async_context(acemq.connect(task.url))
        for number in range(PARTITIONS):
            queue = f"{task.queue}.{number}"
            await consumers.enter_async_context(mq.consume(queue, Order, handle, concurrency=1, prefetch=1))
        await meter.over.wait()
    return meter.figures()


async def send_ordered(task: Task) -> Figures:
    order = new_order()
    keys = cycle(map(str, range(KEYS)))
    async with acemq.connect(task.url) as mq:
        ledger = await declared(mq, task)
        return await pump(lambda: ledger.send(order.stamped(), key=next(keys)), task)


async def send_plain(task: Task) -> Figures:
    order = new_order()
    async with acemq.connect(task.url) as mq:
        ledger = await declared(mq, task)
        queues = cycle([ledger.queues[ledger.partition_of(str(key))] for key in range(KEYS)])
        return await pump(lambda: mq.send(next(queues), order.stamped()), task)


async def own(task: Task) -> Figures:
    """Serve all partitions, say so, and wait to be killed."""
    async with acemq.connect(task.url) as mq:
        ledger = await declared(mq, task)
        async with ledger.consume(lambda message: None):
            print("owns", flush=True)
            await asyncio.Event().wait()
    return {}


async def take_over(task: Task) -> Figures:
    """Milliseconds from the death of the owner to the first message handled by the one that stood by."""
    handled = asyncio.Event()

    async def handle(message: Message[Order]) -> None:
        handled.set()

    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benches.clients.acemq_ordered"),
        msgspec.json.encode(msgspec.structs.replace(task, job="own")).decode(),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None
        assert await owner.stdout.readline() == b"owns\n"
        async with acemq.connect(task.url) as mq:
            ledger = await declared(mq, task)
            async with ledger.consume(handle):
                assert not ledger.owned_partitions
                os.kill(owner.pid, signal.SIGKILL)
                await owner.wait()
                died = time.perf_counter()
                await ledger.send(new_order())
                await handled.wait()
                return {"ms": round((time.perf_counter() - died) * 1000, 1)}
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()


if __name__ == "__main__":
    serve({job.__name__: job for job in (fill, ordered, plain, send_ordered, send_plain, own, take_over)})
