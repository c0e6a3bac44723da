"""The patterns of acemq on RabbitMQ, and what each stands on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from statistics import median

import acemq
from acemq import AceMQ, EncryptedCodec, JsonCodec, Keyring, Message, Saga, Topology
from acemq.topology import SCHEDULE, SCHEDULE_QUEUE
from benches import filling
from benches.order import new_order
from benches.running import Figures, Meter, Task, pump, rss_mb, serve

ANSWERS = "bench.answers"
KIBIBYTE = "x" * 1_022
"""With its quotation marks."""


async def publish(task: Task) -> Figures:
    order = new_order()
    async with acemq.connect(task.url) as mq:
        return await pump(lambda: mq.send(task.queue, order.stamped()), task)


async def schedule(task: Task) -> Figures:
    order = new_order()
    async with acemq.connect(task.url) as mq, mq.scheduler() as later:
        figures = await pump(lambda: later.after(timedelta(hours=1), "", task.queue, order.stamped()), task)
        await _empty_ladder(mq)
        return figures


async def move(task: Task) -> Figures:
    """Messages that lie in the control queue and are due, each published where it is to go."""
    async with acemq.connect(task.url) as mq:
        async with mq.scheduler():
            pass
        await _empty_ladder(mq)
        await mq.send(
            SCHEDULE_QUEUE,
            new_order(),
            headers={
                "x-schedule-exchange": "",
                "x-schedule-routing-key": task.queue,
                "x-schedule-due-at": 1,
                "x-schedule-content-type": "application/json",
            },
        )
        await asyncio.to_thread(filling.clone, task.url, SCHEDULE_QUEUE, task.count)
        meter, before = Meter(task.count, task.limit), rss_mb()
        meter.start()
        async with mq.scheduler() as later:
            while later.counters.delivered < task.count and not meter.late:
                await asyncio.sleep(0.005)
            meter.messages = later.counters.delivered
            meter.stop()
        await _empty_ladder(mq)
    return {**meter.figures(), "grown_mb": round(rss_mb() - before, 2)}


async def _empty_ladder(mq: AceMQ) -> None:
    for queue in SCHEDULE.queues:
        await mq.purge(queue.name)


async def request(task: Task) -> Figures:
    async with acemq.connect(task.url) as mq:
        async with mq.respond(task.queue, int, _double):
            return await _round_trips(lambda n: mq.request("", task.queue, n, int), task)


async def _double(message: Message[int]) -> int:
    return 2 * message.payload


async def by_hand(task: Task) -> Figures:
    """A publish, and a consumer that publishes the answer to a queue whose consumer hands it to who waits."""
    waiting: dict[str, asyncio.Future[int]] = {}
    async with acemq.connect(task.url) as mq:

        async def answer(message: Message[int]) -> None:
            await mq.send(ANSWERS, 2 * message.payload, correlation_id=message.id)

        async def receive(message: Message[int]) -> None:
            waiting.pop(message.correlation_id).set_result(message.payload)

        async def ask(n: int) -> int:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            identity = f"by-hand-{n}"
            waiting[identity] = future
            await mq.send(task.queue, n, message_id=identity)
            return await future

        await mq.declare(Topology().queue(ANSWERS, type="classic"))
        async with mq.consume(task.queue, int, answer), mq.consume(ANSWERS, int, receive):
            return await _round_trips(ask, task)


async def _round_trips(ask: Callable[[int], Awaitable[int]], task: Task) -> Figures:
    took: list[float] = []
    end = time.perf_counter() + task.limit
    for n in range(task.count):
        began = time.perf_counter()
        assert await ask(n) == 2 * n
        took.append(time.perf_counter() - began)
        if took[-1] + began > end:
            break
    return {"p50_ms": round(median(took) * 1_000, 4), "rate": round(len(took) / sum(took), 1), "messages": len(took)}


async def plain(task: Task) -> Figures:
    async with acemq.connect(task.url) as mq:
        return await pump(lambda: mq.send(task.queue, KIBIBYTE), task)


async def encrypted(task: Task) -> Figures:
    codec = EncryptedCodec(JsonCodec(), Keyring({"k": os.urandom(32)}, current="k"))
    async with acemq.connect(task.url, codec=codec) as mq:
        return await pump(lambda: mq.send(task.queue, KIBIBYTE), task)


async def _step(subject: int) -> int:
    await asyncio.sleep(0)
    return subject


async def _undo(subject: int, given: int) -> None: ...


async def bare_awaits(task: Task) -> Figures:
    async def three() -> None:
        for _ in range(3):
            await _step(1)

    return await pump(three, task)


async def saga(task: Task) -> Figures:
    made = Saga("bench", int).step("a", _step).undo(_undo).step("b", _step).undo(_undo).step("c", _step)
    return await pump(lambda: made.run(1), task)


if __name__ == "__main__":
    jobs = (publish, schedule, move, request, by_hand, plain, encrypted, bare_awaits, saga)
    serve({job.__name__: job for job in jobs})
