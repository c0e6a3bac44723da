"""Group L: depth and purge."""

from __future__ import annotations

from datetime import timedelta

import pytest

from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.transport import Depth, QueueMissing, Settled


class Counting(Hooks):
    @scenario("C-112", "the depth of a queue", "depth")
    async def test_c112_depth(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(7))
        held = await bench.take(queue, 2)
        depth: Depth | None = None

        async def right() -> bool:
            nonlocal depth
            depth = await bench.t.depth(queue)
            return depth.ready == 5

        await bench.eventually(right, "five are ready", seen=lambda: depth)
        assert depth is not None
        assert depth.held in ((2,) if bench.can.depth == "exact" else (2, None))
        assert depth.exact is (bench.can.depth == "exact")
        assert abs(depth.at - bench.pace.clock.now()) <= bench.late + timedelta(seconds=1)
        bench.measured["depth"] = bench.can.depth
        await bench.accept(held)

    @scenario("C-113", "the depth of no queue", "depth")
    async def test_c113_no_such_queue(self, bench: Bench) -> None:
        missing = bench.name("missing")
        with pytest.raises(QueueMissing, match=missing):
            await bench.t.depth(missing)
        assert not await bench.t.exists(missing)

    @scenario("C-114", "purging takes what is ready", small=True)
    async def test_c114_purge(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(12))
        held = await bench.take(queue, 2)
        await bench.ready(queue, 10)
        assert await bench.t.purge(queue) in (10, None)
        assert await bench.accept(held) == [Settled.DONE] * 2
        await bench.ready(queue, 0)
        assert await bench.drain(queue) == []
