"""Group K: cancellation and disposal."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from datetime import timedelta

import msgspec

from acemq.testing.conformance.bench import SOON, Bench, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.transport import Delivery, Published

ROUNDS = 200
GROWTH = 5


async def cancelled(bench: Bench, call: Awaitable[object]) -> bool:
    """Start it, and cancel it at a random moment. Whether that came in time."""
    task = asyncio.ensure_future(call)
    await bench.turns(4)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


class Cancelling(Hooks):
    @scenario("C-109", "200 pulls are cancelled")
    async def test_c109_pulls_are_cancelled(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(200))
        seen: list[Delivery] = []
        for _ in range(200):
            pulling = asyncio.ensure_future(bench.t.pull(queue, most=1, wait=timedelta(seconds=1)))
            await bench.turns(4)
            pulling.cancel()
            await asyncio.wait({pulling})
            if not pulling.cancelled():
                seen += pulling.result()
        lease = bench.can.lease.default if bench.can.lease is not None else timedelta()
        left = await bench.take(queue, 200 - len(seen), within=lease + bench.settling) if len(seen) < 200 else []
        assert sorted(got.body for got in (*seen, *left)) == sorted(numbered(200))

    @scenario("C-110", "every verb is cancelled")
    async def test_c110_every_verb_is_cancelled(self, bench: Bench) -> None:
        queue, topology = await bench.queue(), bench.described(bench.name("beside"))
        await bench.send(queue, *numbered(50))
        for got in await bench.take(queue, 50):
            await cancelled(bench, bench.accept([got]))
        lease = bench.can.lease
        for _ in range(50):
            await cancelled(bench, bench.t.depth(queue) if bench.can.depth != "none" else bench.t.exists(queue))
            await cancelled(bench, bench.apply(topology))
            await cancelled(bench, bench.t.renew([], lease.default if lease else SOON))
            await cancelled(bench, bench.t.subscribe(queue, bench.sink(), prefetch=3))
        await bench.quiet()
        assert await bench.t.exists(queue)
        await bench.t.close(timedelta(seconds=1))
        await bench.t.open(within=SOON)
        await bench.apply(topology)
        # A ghost of a consumer would keep some of these.
        await bench.quiet()
        await bench.drain(queue)
        await bench.send(queue, *numbered(20))
        assert sorted(got.body for got in await bench.drain(queue, 20)) == sorted(numbered(20))

    @scenario("C-111", "200 times subscribed, 200 times opened")
    async def test_c111_nothing_is_left_behind(self, bench: Bench) -> None:
        queue = await bench.queue()
        counts: list[tuple[int, int]] = []
        for number in range(1, ROUNDS + 1):
            await bench.send(queue, b"x")
            sink, subscription = await bench.consume(queue, prefetch=1)
            await bench.has(sink, 1)
            await bench.accept(sink.got)
            await subscription.close()
            bench.sinks.clear()
            if number % 4 == 0:
                fresh = await bench.open()
                assert (await bench.result(out(queue, b"y"), t=fresh)).outcome is Published.ROUTED
                await fresh.close(timedelta(seconds=1))
                bench.made.remove(fresh)
                await bench.drain(queue)
                del fresh
            del sink, subscription
            if number in (50, ROUNDS):
                await bench.quiet()
                gc.collect()
                counts.append((len(asyncio.all_tasks()), ours()))
        (tasks, objects), (tasks_after, objects_after) = counts
        assert tasks_after - tasks <= GROWTH
        assert objects_after - objects <= GROWTH
        await bench.send(queue, b"z")
        await bench.drain(queue, 1)


def ours() -> int:
    """Living objects of transports. Values do not count: a broker in the process may keep some until their time."""
    return sum(
        str(type(each).__module__).startswith(("acemq.transports", "aiormq")) and not isinstance(each, msgspec.Struct)
        for each in gc.get_objects()
    )
