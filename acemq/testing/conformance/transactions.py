"""Group M: publishing inside a transaction of the caller's."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta

from acemq.testing.conformance.bench import SOON, Bench, out
from acemq.testing.conformance.hooks import Hooks, Impossible, Transaction
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.topology import Topology
from acemq.transport import Outgoing, Published

OPEN_FOR = timedelta(seconds=5)


async def publish(bench: Bench, within: Transaction, *batch: Outgoing) -> None:
    results = await bench.t.publish(batch, within=SOON, transaction=within.handle)
    assert [result.outcome for result in results] == [Published.ROUTED] * len(batch), results


class Transactions(Hooks):
    @scenario("C-115", "sent in a transaction, seen after its commit", "transactions")
    async def test_c115_seen_after_the_commit(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, _ = await bench.consume(queue, accept=True)
        async with bench.suite.transaction() as mine:
            await publish(bench, mine, *(out(queue, body) for body in numbered(3)))
            await bench.quiet()
            assert sink.got == []
            await mine.commit()
        await bench.has(sink, 3, within=bench.late)
        assert sink.bodies == numbered(3)

    @scenario("C-116", "a transaction that does not commit", "transactions")
    async def test_c116_no_commit(self, bench: Bench) -> None:
        queue = await bench.queue()
        async with bench.suite.transaction() as mine:
            await publish(bench, mine, *(out(queue, body) for body in numbered(3)))
            await mine.rollback()
        async with bench.suite.transaction() as mine:
            await publish(bench, mine, *(out(queue, body) for body in numbered(3)))
        await bench.quiet()
        assert await bench.drain(queue) == []

    @scenario("C-117", "a savepoint that is rolled back", "transactions")
    async def test_c117_a_savepoint(self, bench: Bench) -> None:
        queue = await bench.queue()
        async with bench.suite.transaction() as mine:
            await publish(bench, mine, out(queue, b"outside"))
            async with mine.rolled_back():
                await publish(bench, mine, out(queue, b"inside"))
            await mine.commit()
        (got,) = await bench.drain(queue, 1)
        assert got.body == b"outside"

    @scenario("C-118", "a fan-out in a transaction", "transactions")
    async def test_c118_a_fan_out(self, bench: Bench) -> None:
        exchange, queues = await bench.fan_out("a", "b", "c")
        async with bench.suite.transaction() as mine:
            await publish(bench, mine, out("", b"lost", exchange=exchange))
            await mine.rollback()
            await publish(bench, mine, out("", b"kept", exchange=exchange))
            await mine.commit()
        for queue in queues:
            assert [got.body for got in await bench.drain(queue, 1)] == [b"kept"]

    @scenario("C-119", "a transaction that is left open", "transactions")
    async def test_c119_left_open(self, bench: Bench) -> None:
        if bench.suite.one_writer:
            raise Impossible("one writes at a time: whoever writes while a transaction is open waits for its end")
        queue, other = await bench.queue(), await bench.open()

        async def in_time(call: Awaitable[object], what: str) -> None:
            began = bench.now()
            await call
            assert bench.now() - began <= bench.late.total_seconds(), what

        async with bench.suite.transaction() as mine:
            await publish(bench, mine, out(queue, b"open"))
            end = bench.now() + OPEN_FOR.total_seconds()
            while bench.now() < end:
                await in_time(bench.send(queue, b"x", t=other), "publish")
                (held,) = await other.pull(queue, most=1, wait=bench.settling)
                await in_time(bench.accept([held], t=other), "settle")
                await in_time(bench.apply(Topology() | bench.described(bench.name("more")), t=other), "apply")
            await mine.commit()
        (got,) = await bench.drain(queue, 1)
        assert got.body == b"open"
