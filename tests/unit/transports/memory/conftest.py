from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from acemq.clock import MovableClock
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.playing import SECOND, Client

Connect = Callable[..., Awaitable[Client]]


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def broker(clock: MovableClock) -> MemoryBroker:
    return MemoryBroker(clock=clock)


@pytest.fixture
async def connect(clock: MovableClock) -> AsyncIterator[Connect]:
    """Another open client of a broker; all are closed at the end."""
    clients: list[Client] = []

    async def connect(broker: MemoryBroker, **options: Any) -> Client:
        client = Client(broker, clock, **options)
        await client.port.open(within=SECOND)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        await client.port.close()


@pytest.fixture
async def client(connect: Connect, broker: MemoryBroker) -> Client:
    """With a queue `orders`."""
    client = await connect(broker)
    await client.declare("orders")
    return client
