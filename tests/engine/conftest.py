"""One connection per test, on the memory transport and on RabbitMQ: what the engine promises holds on both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

import acemq
from acemq import AceMQ, Diagnostic, Opening

Connect = Callable[..., Opening[AceMQ]]


@pytest.fixture(params=["memory", "rabbitmq"])
def url(request: pytest.FixtureRequest, name: str) -> str:
    """Where the test runs. A broker of the test's own in memory, the shared server otherwise."""
    if request.param == "memory":
        return f"memory://{name}"
    address: str = request.getfixturevalue("rabbit_url")
    return address


@pytest.fixture
async def mq(url: str, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url, on_diagnostic=diagnostics.append) as mq:
        yield mq


@pytest.fixture
async def queue(mq: AceMQ, name: str) -> AsyncIterator[str]:
    """A classic queue of the test's own, removed with what a consumer declares beside it."""
    await mq.declare(acemq.Topology().queue(name, type="classic"))
    yield name
    for each in (name, f"{name}.dlq", f"{name}.parked"):
        await mq.delete(each)
