"""A connection whose broker keeps leases, on a clock that stands still: fixtures for the modules that name them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, MovableClock
from acemq.transports.memory import MemoryBroker

LEASE = timedelta(seconds=30)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def broker(clock: MovableClock, name: str) -> MemoryBroker:
    return MemoryBroker.named(name, clock=clock, lease=LEASE)


@pytest.fixture
async def mq(broker: MemoryBroker, name: str, clock: MovableClock) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(acemq.Topology().queue("q", dead_letter=True))
        yield mq
