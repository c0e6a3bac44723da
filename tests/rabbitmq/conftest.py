from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from acemq.topology import Topology
from acemq.transport import ApplyMode, Phase, Transport
from acemq.transports.rabbitmq import transport
from tests.proxy import Proxy
from tests.rabbitmq.kit import SOON, port_of
from tests.services import RabbitMQ

Dial = Callable[..., Awaitable[Transport]]
Declare = Callable[..., Awaitable[str]]


@pytest.fixture(autouse=True)
async def nothing_left_behind(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No task outlives a test, no exception goes unread, aiormq says nothing of our connections."""
    yield
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left: {left}"
    gc.collect()
    for record in [*caplog.get_records("setup"), *caplog.get_records("call"), *caplog.get_records("teardown")]:
        is_foreign = record.name == "asyncio" or record.name.startswith("aiormq")
        assert not (is_foreign and record.levelno >= logging.WARNING), record.getMessage()


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


@pytest.fixture
async def proxy(rabbitmq: RabbitMQ) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", port_of(rabbitmq.url)) as between:
        yield between


@pytest.fixture
def proxied(proxy: Proxy) -> str:
    return f"amqp://guest:guest@127.0.0.1:{proxy.port}"
