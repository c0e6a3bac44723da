from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import acemq
from acemq import AceMQ, Diagnostic, Topology
from tests.crash.process import Workers
from tests.leftovers import nothing_left_behind as nothing_left_behind


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Workers(tmp_path) as workers:
        yield workers


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
