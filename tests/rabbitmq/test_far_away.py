"""What distance costs, and what a caller is spared: counted in round trips and in bytes, not in seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, CapabilityError, Message, Topology
from tests.proxy import Proxy
from tests.waiting import until

WAY = 0.05
ROUND_TRIP = 2 * WAY


@pytest.fixture
async def mq(rabbit_url: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(rabbit_url) as mq:
        yield mq


@pytest.fixture
async def queue(mq: AceMQ, name: str) -> AsyncIterator[str]:
    await mq.declare(Topology().queue(name, type="classic"))
    yield name
    for each in (name, f"{name}.dlq", f"{name}.parked"):
        await mq.delete(each)


async def round_trips(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return (time.perf_counter() - began) / ROUND_TRIP


async def test_t038_many_messages_share_their_round_trips(queue: str, proxy: Proxy, proxied: str) -> None:
    handled = 0

    def handle(message: Message[int]) -> None:
        nonlocal handled
        handled += 1

    async with acemq.connect(proxied) as far:
        await far.send(queue, -1)
        proxy.delay(WAY)
        assert await round_trips(far.send(queue, -1)) < 2.5
        assert await round_trips(far.send_many(queue, range(200))) < 50, "a quarter of 200"
        assert await round_trips(far.send_many(queue, range(1_000))) < 25
        assert await round_trips(asyncio.gather(*(far.send(queue, n) for n in range(1_000)))) < 37

        async def consume() -> None:
            async with far.consume(queue, int, handle, prefetch=100):
                await until(lambda: handled == 2_202, within=30)

        assert await round_trips(consume()) < 110, "22 buffers, and the start and the end of a consumer"


async def test_acknowledgements_of_what_ends_in_order_go_by_the_handful(
    mq: AceMQ, queue: str, proxy: Proxy, proxied: str
) -> None:
    one_by_one = 21
    """Bytes of a frame that acknowledges one message."""
    count = 10_000

    async def handle(message: Message[int]) -> None: ...

    await mq.send_many(queue, range(count))
    async with acemq.connect(proxied) as far:
        async with far.consume(queue, int, handle, prefetch=200) as consumer:
            before = proxy.taken["to_server"]
            await until(lambda: consumer.counters.acked == count, within=40)
        assert (proxy.taken["to_server"] - before) / one_by_one < 0.4 * count
    assert (await mq.depth(queue)).ready == 0


Ask = Callable[[AceMQ, str], Awaitable[object]]
LACKING: dict[str, tuple[str, Ask]] = {
    "a priority on a queue without levels": ("priority=5", lambda mq, queue: mq.send(queue, 1, priority=5)),
    "levels of a quorum queue": ("priorities=5", lambda mq, queue: mq.declare(Topology().queue("q", priorities=5))),
    "a lease": ("lease=", lambda mq, queue: mq.declare(Topology().queue("q", lease=timedelta(seconds=9)))),
    "a longer hold": (
        "handler_timeout=",
        lambda mq, queue: asyncio.sleep(0, mq.consume(queue, int, lambda m: None, handler_timeout=timedelta(hours=1))),
    ),
}


@pytest.mark.parametrize("lacking", LACKING)
async def test_t003_what_rabbitmq_lacks_is_refused_by_name_before_the_first_byte(
    queue: str, proxy: Proxy, proxied: str, lacking: str
) -> None:
    option, ask = LACKING[lacking]
    async with acemq.connect(proxied) as far:
        await far.declare(Topology().queue(queue, type="classic"))
        before = dict(proxy.taken)
        with pytest.raises(CapabilityError, match=option) as refused:
            await ask(far, queue)
        assert refused.value.transport.endswith("rabbitmq")
        await asyncio.sleep(0.05)  # this is how long nothing happens
        assert proxy.taken == before
