"""What is kept in memory: never more than was asked for, and nothing of what is over."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, Consumer, Message
from acemq.transport import Published
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import out, send, until, until_depth

MESSAGES = int(os.environ.get("ACEMQ_MESSAGES", "100000"))
MIB = 1024 * 1024


@contextmanager
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_a_slow_handler_holds_at_most_its_prefetch_of_bodies(
    rabbit_url: str, declare: Declare, dial: Dial, kind: str
) -> None:
    prefetch, count = 4, 60
    queue, filling = await declare(type=kind), await dial()
    for _ in range(count):
        assert (await send(filling, out(queue, bytes(MIB))))[0].outcome is Published.ROUTED
    turn = asyncio.Semaphore(0)

    async def slow(message: Message[bytes]) -> None:
        await turn.acquire()
        assert len(message.payload) == MIB

    async with acemq.connect(rabbit_url) as mq:
        with traced():
            async with mq.consume(queue, bytes, slow, concurrency=2, prefetch=prefetch) as consumer:
                await until(lambda: consumer.in_flight + consumer.held == prefetch, "the prefetch is here")
                held, _ = tracemalloc.get_traced_memory()
                assert prefetch * MIB < held < (prefetch + 0.5) * MIB
                for number in range(count):
                    turn.release()
                    await _acked(consumer, number + 1)
                left, peak = tracemalloc.get_traced_memory()
                # One is put together from its frames while the others wait.
                assert peak < (prefetch + 2.5) * MIB
                assert left < 0.5 * MIB, "no body is kept once it is handled"


async def test_a_peer_that_does_not_read_is_sent_no_more_than_the_sockets_buffer(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await send(broker, out(queue))
    body = bytes(100_000)
    proxy.swallow("to_server")
    with traced():
        batches = [send(broker, *[out(queue, body)] * 10, within=timedelta(seconds=2)) for _ in range(200)]
        outcomes = Counter([result.outcome for each in await asyncio.gather(*batches) for result in each])
        _, peak = tracemalloc.get_traced_memory()
    # 200 MB were to be written. What the proxy holds is of this process, too.
    assert peak - (proxy.taken["to_server"] - proxy.passed["to_server"]) < 4 * MIB
    assert outcomes.keys() == {Published.FAILED, Published.REFUSED}
    proxy.release()
    await until_depth(broker, queue, 1 + outcomes[Published.FAILED])


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_memory_is_flat_over_many_messages(rabbit_url: str, declare: Declare) -> None:
    """A tenth of a million, or `ACEMQ_MESSAGES`: less than one block of memory in a hundred messages stays."""
    queue, gone = await declare(), f"{await declare('other')}-nowhere"
    blocks: list[int] = []
    sent = 0

    async def note(message: Message[dict[str, int]]) -> None:
        assert message.envelope.attempt == 1

    async with acemq.connect(rabbit_url) as mq, mq.consume(queue, dict[str, int], note) as consumer:
        for part in range(11):
            for _ in range(MESSAGES // 10 // 500):
                sent += len(await mq.publish_many("", queue, ({"n": number} for number in range(499))))
                await _unroutable(mq, gone)
            await _acked(consumer, sent)
            gc.collect()
            if part in (0, 10):
                blocks.append(sys.getallocatedblocks())
    grown = blocks[1] - blocks[0]
    print(f"{consumer.counters.acked} messages, {grown} blocks more than after the first eleventh")
    assert grown < MESSAGES / 100


async def _acked(consumer: Consumer, count: int) -> None:
    await until(lambda: consumer.counters.acked == count, f"{count} are accepted", within=300)


async def _unroutable(mq: AceMQ, queue: str) -> None:
    with pytest.raises(acemq.UnroutableError):
        await mq.send(queue, {"n": 0})
