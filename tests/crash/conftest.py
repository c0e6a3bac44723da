from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import acemq
from acemq import AceMQ, Diagnostic, Topology
from tests.crash.process import Workers
from tests.foreign.client import Foreign
from tests.proxy import Proxy
from tests.services import RabbitMQ


@pytest.fixture(autouse=True)
async def nothing_left_behind(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No task outlives a test, no exception goes unread, the driver says nothing of our connections."""
    yield
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left: {left}"
    gc.collect()
    for record in [*caplog.get_records("setup"), *caplog.get_records("call")]:
        foreign = record.name == "asyncio" or record.name.startswith("aiormq")
        assert not (foreign and record.levelno >= logging.WARNING), record.getMessage()
        assert "failed inside the library" not in record.getMessage(), record.exc_text


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Workers(tmp_path) as workers:
        yield workers


@pytest.fixture
def diagnostics() -> list[Diagnostic]:
    return []


@pytest.fixture
async def mq(rabbit_url: str, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    async with acemq.connect(rabbit_url, on_diagnostic=diagnostics.append) as mq:
        yield mq


@pytest.fixture
async def queue(mq: AceMQ, name: str) -> AsyncIterator[str]:
    """A classic queue of the test's own, removed with what a consumer declares beside it."""
    await mq.declare(Topology().queue(name, type="classic"))
    yield name
    await remove(mq, name)


async def remove(mq: AceMQ, *queues: str) -> None:
    for queue in queues:
        for suffix in ("", ".dlq", ".parked", ".retry.2s", ".retry.40s"):
            await mq.delete(f"{queue}{suffix}")


@pytest.fixture
def foreign(rabbit_url: str) -> Iterator[Foreign]:
    with Foreign(rabbit_url) as foreign:
        yield foreign


@pytest.fixture
async def proxy(rabbitmq: RabbitMQ) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", port_of(rabbitmq.url)) as between:
        yield between


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def proxied(proxy: Proxy) -> str:
    return f"amqp://guest:guest@127.0.0.1:{proxy.port}"
