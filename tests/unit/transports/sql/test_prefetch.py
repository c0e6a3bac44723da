"""The prefetch is all that is out, to whoever looks into the table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq.topology import Topology
from tests.waiting import until


async def test_what_is_on_its_way_to_be_settled_counts_until_the_database_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with acemq.connect(f"sqlite:///{tmp_path / 'mq.db'}") as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send_many("q", range(40))
        transport: Any = mq.transport
        settling = transport._running.settling
        act = settling._act

        async def slow(orders: list[Any]) -> Any:
            await asyncio.sleep(0.02)
            return await act(orders)

        monkeypatch.setattr(settling, "_act", slow)
        most = list[int]()
        async with mq.consume("q", int, lambda _: None, prefetch=4, concurrency=2) as consumer:
            while consumer.counters.acked < 40:
                most.append((await mq.depth("q")).held or 0)
                await asyncio.sleep(0.003)
            await until(lambda: consumer.held == 0)
        assert (await mq.depth("q")).ready == 0
    assert max(most) == 4
