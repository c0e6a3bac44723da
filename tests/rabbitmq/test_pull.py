"""Pulling on a real broker."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta

import pytest

from acemq.topology import Topology
from acemq.transport import ApplyMode, Delivery, NotConnected, Phase, QueueMissing, Settled, Verb
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import drain, fill, out, send, settle, until, until_depth
from tests.services import RabbitMQ


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


async def test_nothing_is_an_empty_list_after_the_wait_and_at_once_without_one(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    began = time.monotonic()
    assert await broker.pull(queue, most=5, wait=seconds(0.3)) == []
    assert 0.3 <= time.monotonic() - began < 1
    began = time.monotonic()
    assert await broker.pull(queue, most=5, wait=seconds(0)) == []
    assert time.monotonic() - began < 0.2


async def test_never_more_than_asked_for_and_in_order(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    await fill(broker, queue, 700)
    found = [await broker.pull(queue, most=most, wait=seconds(0)) for most in (3, 1, 250, 1000)]
    assert [len(batch) for batch in found] == [3, 1, 250, 446]
    assert [int(one.body) for batch in found for one in batch] == list(range(700))
    for batch in found:
        assert set(await settle(broker, batch)) == {Settled.DONE}
    await until_depth(broker, queue, 0)


async def test_a_waiting_pull_returns_soon_after_a_message_came(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    waiting = asyncio.create_task(broker.pull(queue, most=5, wait=seconds(20)))
    await fill(broker, queue, 1)
    (found,) = await asyncio.wait_for(waiting, 1)
    assert found.body == b"0"


async def test_a_missing_queue_is_told_each_time_and_not_made(dial: Dial, name: str) -> None:
    broker = await dial()
    for _ in range(2):
        with pytest.raises(QueueMissing, match=name):
            await broker.pull(name, most=1, wait=seconds(5))
    assert not await broker.exists(name)
    await broker.apply(Topology().queue(name, type="classic"), ApplyMode.CREATE)
    assert await broker.pull(name, most=1, wait=seconds(0)) == []
    await broker.delete(name)


async def test_what_cancelled_pulls_were_handed_is_given_back(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    await fill(broker, queue, 200)
    order, kept = random.Random(5), list[Delivery]()
    for _ in range(200):
        task = asyncio.create_task(broker.pull(queue, most=5, wait=seconds(0)))
        await asyncio.sleep(order.random() * 0.002)
        task.cancel()
        try:
            kept += await task
        except asyncio.CancelledError:
            continue
    assert set(await settle(broker, kept, Verb.ACCEPT)) <= {Settled.DONE}
    await until_depth(broker, queue, 200 - len(kept))
    rest = await drain(broker, queue)
    assert sorted(int(found.body) for found in [*kept, *rest]) == list(range(200))


async def test_two_pulls_of_one_queue_at_once_share_its_messages(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    await fill(broker, queue, 60)
    batches = await asyncio.gather(*(broker.pull(queue, most=10, wait=seconds(1)) for _ in range(6)))
    assert sorted(int(found.body) for batch in batches for found in batch) == list(range(60))


async def test_pulled_and_unsettled_goes_back_when_the_transport_closes(dial: Dial, declare: Declare) -> None:
    broker, other, queue = await dial(), await dial(), await declare()
    await fill(broker, queue, 5)
    held = await broker.pull(queue, most=5, wait=seconds(1))
    await settle(broker, held[:1])
    await broker.close(seconds(1))
    assert await settle(broker, held[1:]) == [Settled.STALE] * 4
    assert [found.body for found in await other.pull(queue, most=10, wait=seconds(2))] == [b"1", b"2", b"3", b"4"]


async def test_an_outage_is_an_error_and_pulling_goes_on_after_it(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await fill(broker, queue, 2)
    (held, _) = await broker.pull(queue, most=2, wait=seconds(1))
    proxy.refuse()
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(NotConnected):
        await broker.pull(queue, most=5, wait=seconds(0.3))
    assert 0.25 < time.monotonic() - began < 1
    proxy.refuse(False)
    again = await broker.pull(queue, most=5, wait=seconds(20))
    assert [found.redelivered for found in again] == [True] * len(again)
    assert await settle(broker, [held]) == [Settled.STALE]


async def test_a_private_queue_is_made_again_for_a_pull_after_its_connection_was_lost(
    dial: Dial, name: str, rabbitmq: RabbitMQ
) -> None:
    broker = await dial()
    await broker.apply(Topology().queue(name, exclusive=True), ApplyMode.CREATE)
    assert await broker.pull(name, most=1, wait=seconds(0)) == []
    await asyncio.to_thread(rabbitmq.close_all_connections)
    await until(lambda: broker.state.generation == 2, "it is connected again")
    assert broker.state.phase is Phase.CONNECTED
    assert await broker.pull(name, most=1, wait=seconds(0)) == []
    await send(broker, out(name))
    assert len(await broker.pull(name, most=1, wait=seconds(2))) == 1


async def test_many_pulled_queues_do_not_keep_a_channel_each_for_ever(
    dial: Dial, name: str, rabbitmq: RabbitMQ
) -> None:
    broker = await dial()
    queues = [f"{name}-{number}" for number in range(80)]
    for queue in queues:
        await broker.apply(Topology().queue(queue, exclusive=True), ApplyMode.CREATE)
        assert await broker.pull(queue, most=1, wait=seconds(0)) == []
    channels = await asyncio.to_thread(rabbitmq.ctl, "list_channels", "name")
    assert len(channels.splitlines()) < 80
