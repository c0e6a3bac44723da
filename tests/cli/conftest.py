"""Commands run in this process, against the shared broker; `tests/cli/test_terminal.py` runs them in a terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

import acemq
from acemq import AceMQ, Topology
from acemq.cli.commands import app


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(self.out)
        return read


Run = Callable[..., Awaitable[Ended]]


@pytest.fixture
def run(rabbit_url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`acemq` with these words; `ACEMQ_URL` names the broker. Nobody sits at the keyboard."""
    monkeypatch.setenv("ACEMQ_URL", rabbit_url)
    monkeypatch.delenv("ACEMQ_TOPOLOGY", raising=False)

    async def run(*words: str) -> Ended:
        # In a thread, as a command brings its own event loop.
        result = await asyncio.to_thread(CliRunner().invoke, app, words, prog_name="acemq")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return Ended(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
async def mq(rabbit_url: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(rabbit_url) as mq:
        yield mq


@pytest.fixture
async def queue(mq: AceMQ, name: str) -> AsyncIterator[str]:
    """A queue of the test's own, with its dead letters and its parked messages."""
    name = f"q-{name[-24:].strip('-')}"
    await mq.declare(Topology().queue(name, type="classic", dead_letter=True))
    yield name
    for each in (name, f"{name}.dlq", f"{name}.parked"):
        await mq.delete(each)


@pytest.fixture
async def dead(mq: AceMQ, queue: str) -> str:
    """Its dead letters: three rejected orders, of acme, other and acme."""
    for number, tenant in enumerate(("acme", "other", "acme"), 1):
        await mq.send(
            queue, {"order": number}, message_id=f"o-{number}", type="order.placed", headers={"x-tenant": tenant}
        )
        pulled = await mq.pull(queue, bytes)
        assert pulled is not None
        await pulled.reject(f"no street {number}")
    return f"{queue}.dlq"
