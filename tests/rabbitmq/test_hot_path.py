"""What a message may cost on its way in and out: no task, one frame for many, nothing read that nobody asked for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import pytest

import acemq
from acemq import AceMQ, Consumer, Message
from acemq.consuming.suspects import Suspects
from acemq.transports.rabbitmq.ledger import Receipt
from acemq.transports.rabbitmq.table import Table
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare
from tests.rabbitmq.kit import until
from tests.waiting import until_async

ACK = 21
"""Bytes of a Basic.Ack."""


class Order(msgspec.Struct):
    id: int


@contextmanager
def counted_tasks() -> Iterator[list[str]]:
    """The tasks that were made meanwhile, by what they do."""
    loop, made = asyncio.get_running_loop(), list[str]()

    def make(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        made.append(repr(work))
        return asyncio.Task(work, loop=loop, **options)

    loop.set_task_factory(make)  # type: ignore[arg-type]  # pyright: ignore
    try:
        yield made
    finally:
        loop.set_task_factory(None)


async def has_ready(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


async def all_accepted(consumer: Consumer, count: int) -> None:
    await until(lambda: consumer.counters.acked == count, f"{count} are accepted", within=30)


async def test_workers_live_as_long_as_the_consumer_and_no_message_makes_a_task(
    rabbit_url: str, declare: Declare
) -> None:
    queue = await declare()
    workers: set[asyncio.Task[Any] | None] = set()

    async def note(message: Message[Order]) -> None:
        workers.add(asyncio.current_task())

    async with acemq.connect(rabbit_url) as mq, mq.consume(queue, Order, note, concurrency=3) as consumer:
        await mq.send(queue, Order(0))
        await all_accepted(consumer, 1)
        with counted_tasks() as made:
            await mq.send_many(queue, map(Order, range(1_000)))
            for number in range(100):
                await mq.send(queue, Order(number))
            await all_accepted(consumer, 1_101)
        # A heartbeat of the driver may make one.
        assert len(made) < 10, made
        assert 1 <= len(workers) <= 3


async def test_what_is_accepted_in_one_turn_leaves_as_one_acknowledgement(
    proxy: Proxy, proxied: str, declare: Declare, rabbit_url: str
) -> None:
    queue, go = await declare(), asyncio.Event()

    async def wait(message: Message[Order]) -> None:
        await go.wait()

    async with acemq.connect(rabbit_url) as filling:
        await filling.send_many(queue, map(Order, range(50)))
    async with acemq.connect(f"{proxied}?heartbeat=600") as mq:
        async with mq.consume(queue, Order, wait, concurrency=50, prefetch=50) as consumer:
            await until(lambda: consumer.in_flight == 50, "all are in work")
            before = proxy.taken["to_server"]
            go.set()
            await all_accepted(consumer, 50)
            await until(lambda: proxy.taken["to_server"] > before, "it has left")
            assert proxy.taken["to_server"] - before == ACK


async def test_t037_handlers_that_end_in_random_order_share_acknowledgements(
    proxy: Proxy, proxied: str, declare: Declare, rabbit_url: str
) -> None:
    """How it stands with crashes: tests/crash/test_consumer_killed.py."""
    queue, count, dice = await declare(), 10_000, random.Random(37)

    async def work(message: Message[Order]) -> None:
        await asyncio.sleep(dice.uniform(0, 0.004))  # the work itself

    async with acemq.connect(rabbit_url) as filling:
        await filling.send_many(queue, map(Order, range(count)))
    async with acemq.connect(f"{proxied}?heartbeat=600") as mq:
        before = proxy.taken["to_server"]
        async with mq.consume(queue, Order, work, prefetch=200) as consumer:
            await all_accepted(consumer, count)
    written = (proxy.taken["to_server"] - before) / ACK
    assert written < 0.4 * count, "frames, of which a few are no acknowledgements"
    async with acemq.connect(rabbit_url) as looking:
        assert (await looking.depth(queue)).ready == 0


async def test_before_what_may_kill_the_process_all_that_was_accepted_has_left(
    rabbit_url: str, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, waiting = await declare(), list[list[int]]()
    retry = acemq.RetryPolicy.delays(timedelta(seconds=20))

    async def work(message: Message[Order]) -> None:
        receipt = message.delivery.receipt
        assert isinstance(receipt, Receipt)
        waiting.append(list(receipt.ledger._accepted))
        if message.payload.id == 0:
            raise ValueError("held for its retry, and so nothing behind it is in turn")

    monkeypatch.setattr(Suspects, "is_one", lambda self, delivery: b'"id":2}' in delivery.body)
    async with acemq.connect(rabbit_url) as filling:
        await filling.send_many(queue, map(Order, range(100)))
        assert len(await filling.pull_many(queue, Order, most=100)) == 100, "and they come again"
    async with acemq.connect(rabbit_url) as mq, mq.consume(queue, Order, work, prefetch=100, retry=retry):
        await until(lambda: len(waiting) >= 3, "the third began")
    assert waiting[2] == []


async def test_what_was_pulled_and_accepted_out_of_turn_is_not_lost_by_closing_at_once(
    rabbit_url: str, declare: Declare
) -> None:
    queue = await declare()
    async with acemq.connect(rabbit_url) as mq:
        await mq.send_many(queue, map(Order, range(100)))
        pulled = await mq.pull_many(queue, Order, most=100)
        assert len(pulled) == 100
        assert await pulled[50].accept()
    async with acemq.connect(rabbit_url) as mq:
        await until_async(lambda: has_ready(mq, queue, 99))


async def test_neither_envelope_nor_headers_are_read_unless_somebody_asks(rabbit_url: str, declare: Declare) -> None:
    queue = await declare()
    read: list[bool] = []

    async def note(message: Message[Order]) -> None:
        table = message.delivery.headers
        assert isinstance(table, Table)
        read.append(table._entries is not None or message._envelope is not None)
        assert message.payload.id == 7
        if message.envelope.id and message.headers == {"tenant": "t"}:
            read.append(table._entries is not None and message._envelope is not None)

    async with acemq.connect(rabbit_url) as mq, mq.consume(queue, Order, note) as consumer:
        await mq.send(queue, Order(7), headers={"tenant": "t"})
        await all_accepted(consumer, 1)
    assert read == [False, True]


async def test_encoders_and_decoders_are_built_once(
    rabbit_url: str, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare()
    built: list[object] = []

    async def note(message: Message[Order]) -> None: ...

    async with acemq.connect(rabbit_url) as mq, mq.consume(queue, Order, note) as consumer:
        await mq.send(queue, Order(0))
        await all_accepted(consumer, 1)
        for kind in (msgspec.json.Encoder, msgspec.json.Decoder):

            def build(*given: Any, kind: Any = kind, **options: Any) -> Any:
                built.append(kind)
                return kind(*given, **options)

            monkeypatch.setattr(msgspec.json, kind.__name__, build)
        await mq.send_many(queue, map(Order, range(100)))
        await all_accepted(consumer, 101)
    assert built == []
