"""A scheduler that dies, or loses its link, while it moves messages on: late, perhaps twice, never lost."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ
from acemq.topology import SCHEDULE
from tests.crash.process import Workers
from tests.crash.worker import Job
from tests.foreign.client import Foreign
from tests.proxy import Proxy
from tests.waiting import until

DUE = "acemq.schedule.due"


@pytest.fixture(autouse=True)
async def ladder(mq: AceMQ) -> AsyncIterator[None]:
    async with mq.scheduler():
        pass
    yield
    for queue in SCHEDULE.queues:
        await mq.delete(queue.name)


def put_due(foreign: Foreign, queue: str, count: int) -> set[bytes]:
    """Messages in the control queue, whose time has come."""
    headers = {
        "x-schedule-exchange": "",
        "x-schedule-routing-key": queue,
        "x-schedule-due-at": int(time.time() * 1000),
        "x-schedule-content-type": "application/json",
    }
    bodies = {b'{"n":%d}' % number for number in range(count)}
    for body in bodies:
        foreign.put(DUE, body, headers, exchange="acemq.schedule", delivery_mode=2)
    return bodies


def arrived(foreign: Foreign, queue: str) -> Counter[bytes]:
    return Counter(letter.body for letter in foreign.look(queue))


async def test_a_scheduler_killed_between_delivery_and_acknowledgement_delivers_that_one_twice_and_loses_none(
    rabbit_url: str, foreign: Foreign, queue: str, workers: Workers
) -> None:
    every = put_due(foreign, queue, 40)
    dying = workers.start(rabbit_url, schedules=True, dies_at_settlement=15)
    assert await dying.ended() == 9, dying.last_words()
    left = foreign.depth(DUE)
    assert left > 0

    workers.start(rabbit_url, schedules=True)
    await until(lambda: foreign.depth(queue) >= 40 and foreign.depth(DUE) == 0)
    await until(lambda: arrived(foreign, queue).keys() == every)
    assert max(arrived(foreign, queue).values()) <= 2


@pytest.mark.parametrize("moved", [1, 100])
async def test_a_scheduler_killed_at_any_moment_leaves_the_rest_to_the_next(
    rabbit_url: str, foreign: Foreign, queue: str, workers: Workers, moved: int
) -> None:
    every = put_due(foreign, queue, 300)
    first = workers.start(rabbit_url, schedules=True)
    await until(lambda: foreign.depth(queue) >= moved, within=30)
    first.kill()

    workers.start(rabbit_url, schedules=True)
    await until(lambda: arrived(foreign, queue).keys() == every, within=30)
    assert max(arrived(foreign, queue).values()) <= 2
    await until(lambda: foreign.depth(DUE) == 0)


async def test_a_link_that_is_lost_while_messages_are_moved_on_loses_none(
    proxied: str, proxy: Proxy, foreign: Foreign, queue: str
) -> None:
    told = list[acemq.Diagnostic]()
    async with acemq.connect(proxied, on_diagnostic=told.append) as mq, mq.scheduler() as later:
        every = put_due(foreign, queue, 200)
        while later.counters.delivered < 200 and foreign.depth(queue) < 200:
            proxy.cut()
            await until(lambda before=later.counters.delivered: later.counters.delivered > before, within=20)  # type: ignore[misc]
            await asyncio.sleep(0)
        await until(lambda: arrived(foreign, queue).keys() == every, within=20)
        await until(lambda: foreign.depth(DUE) == 0, within=20)


async def test_what_was_scheduled_before_a_kill_comes_after_it(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers
) -> None:
    first = workers.start(rabbit_url, schedules=True)
    await first.ready()
    receipt = await mq.send(queue, Job(), delay=timedelta(seconds=2))
    assert receipt.routed
    first.kill()
    await until(lambda: foreign.depth(DUE) == 1)
    assert foreign.depth(queue) == 0

    workers.start(rabbit_url, schedules=True)
    await until(lambda: foreign.depth(queue) == 1, within=20)
