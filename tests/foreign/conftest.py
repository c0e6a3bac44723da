from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import acemq
from acemq import AceMQ, Topology
from tests.foreign.client import Foreign, Wire


@pytest.fixture
def wire(rabbit_url: str) -> Iterator[Wire]:
    with Wire(rabbit_url) as wire:
        yield wire


@pytest.fixture
async def mq(rabbit_url: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(rabbit_url, name="shop") as mq:
        yield mq


@pytest.fixture
async def queue(mq: AceMQ, foreign: Foreign, name: str) -> AsyncIterator[str]:
    """A classic queue of the test's own, removed with everything that is declared beside it."""
    await mq.declare(Topology().queue(name, type="classic"))
    yield name
    foreign.delete(name, f"{name}.dlq", f"{name}.parked", f"{name}.retry.1s", f"{name}.retry.40s")
