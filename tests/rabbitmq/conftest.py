from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from acemq.topology import Topology
from acemq.transport import ApplyMode, Phase, Transport
from acemq.transports.rabbitmq import transport
from tests.leftovers import nothing_left_behind as nothing_left_behind
from tests.rabbitmq.kit import SOON

Dial = Callable[..., Awaitable[Transport]]
Declare = Callable[..., Awaitable[str]]


@pytest.fixture
async def dial(rabbit_url: str) -> AsyncIterator[Dial]:
    """Open a transport; it is closed after the test."""
    opened: list[Transport] = []

    async def open_one(url: str = rabbit_url, **options: Any) -> Transport:
        one = transport(url, **options)
        opened.append(one)
        await one.open(within=SOON)
        return one

    yield open_one
    for one in opened:
        if one.state.phase not in (Phase.NEW, Phase.CLOSED):
            await one.close(timedelta(seconds=1))


@pytest.fixture
async def declare(dial: Dial, name: str) -> AsyncIterator[Declare]:
    """Declare a queue of this test, classic unless told otherwise; it is deleted after the test."""
    broker = await dial()
    made: list[str] = []

    async def declare_one(suffix: str = "q", **options: Any) -> str:
        queue = f"{name}-{suffix}"
        wanted: dict[str, Any] = {"type": "classic"} | options
        await broker.apply(Topology().queue(queue, **wanted), ApplyMode.CREATE)
        made.append(queue)
        return queue

    yield declare_one
    for queue in made:
        await broker.delete(queue)
