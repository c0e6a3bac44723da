"""Group I: delay, expiry, priority."""

from __future__ import annotations

from datetime import timedelta

import pytest

from acemq.errors import CapabilityError
from acemq.testing.conformance.bench import Bench, out
from acemq.testing.conformance.hooks import NOW, Hooks
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.topology import dead_letters_of
from acemq.transport import FOREVER, Published

ROUNDING = 1e-5
"""Seconds that a clock of floats may be early."""


class Timed(Hooks):
    @scenario("C-089", "a delayed message", "publish_delay")
    async def test_c089_delayed(self, bench: Bench) -> None:
        delay, queue = 2 * bench.step, await bench.queue()
        exchange, (bound,) = await bench.fan_out("bound")
        delayed = [(queue, out(queue, delay=delay))]
        if bench.t.capabilities_of("exchange", exchange).publish_delay:
            delayed.append((bound, out("key", exchange=exchange, delay=delay)))
        for where, message in delayed:
            sink, _ = await bench.consume(where, accept=True)
            began = bench.now()
            assert (await bench.result(message)).outcome is Published.ROUTED
            await bench.has(sink, 1, within=delay + bench.late)
            took = sink.at[0] - began
            assert delay.total_seconds() - ROUNDING <= took <= (delay + bench.late).total_seconds()
        longest = bench.can.publish_delay or NOW
        bench.measured["longest delayed send"] = "any" if longest == FOREVER else str(longest)

    @scenario("C-090", "each in its own time", "publish_delay")
    async def test_c090_each_in_its_own_time(self, bench: Bench) -> None:
        queue, steps = await bench.queue(), (8, 4, 2, 1)
        sink, _ = await bench.consume(queue, accept=True)
        began = bench.now()
        for count in steps:
            await bench.send(queue, b"%d" % count, delay=count * bench.step)
        await bench.has(sink, 4, within=8 * bench.step + bench.late)
        assert sink.bodies == [b"1", b"2", b"4", b"8"]
        for count, at in zip(sorted(steps), sink.at, strict=True):
            due = count * bench.step
            assert due.total_seconds() - ROUNDING <= at - began <= (due + bench.late).total_seconds()

    @scenario("C-091", "a delay that the port cannot do")
    async def test_c091_a_delay_it_cannot_do(self, bench: Bench) -> None:
        longest = bench.can.publish_delay
        if longest == FOREVER:
            bench.measured["longest delayed send"] = "any"
            return
        queue = await bench.queue()
        result = await bench.result(out(queue, delay=(longest or NOW) + bench.step))
        assert result.outcome is Published.REFUSED
        assert isinstance(result.error, CapabilityError)
        await bench.quiet()
        assert await bench.drain(queue) == []

    @scenario("C-092", "a delay that outlives the server", "publish_delay", "durable")
    async def test_c092_outlives_the_server(self, bench: Bench) -> None:
        queue, delay = await bench.queue(), bench.timing.recovery
        sink, _ = await bench.consume(queue, accept=True)
        began = bench.now()
        await bench.send(queue, b"later", delay=delay)
        await bench.faults.restart()
        assert bench.now() - began < delay.total_seconds(), "the restart took so long that nothing is shown"
        await bench.has(sink, 1, within=delay + 3 * bench.timing.recovery)
        assert sink.at[0] - began >= delay.total_seconds() - ROUNDING
        await bench.quiet()
        assert sink.bodies == [b"later"]

    @scenario("C-093", "what is delayed is not ready", "publish_delay")
    async def test_c093_not_ready(self, bench: Bench) -> None:
        queue, longest = await bench.queue(), bench.can.publish_delay or NOW
        await bench.send(queue, *numbered(3), delay=min(timedelta(minutes=5), longest))
        await bench.send(queue, b"ready", b"ready")
        if bench.can.depth != "none":
            depth = await bench.t.depth(queue)
            assert depth.ready == 2
            assert depth.delayed in (3, None)
        assert [got.body for got in await bench.drain(queue, 2)] == [b"ready", b"ready"]

    @scenario("C-094", "no delay, and one of zero", "publish_delay")
    async def test_c094_no_delay(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, _ = await bench.consume(queue, accept=True)
        began = bench.now()
        await bench.send(queue, b"zero", delay=NOW)
        await bench.has(sink, 1, within=bench.late)
        assert sink.at[0] - began <= bench.late.total_seconds()

    @scenario("C-095", "a message that expires", "expiry")
    async def test_c095_expires(self, bench: Bench) -> None:
        plain, lettered = await bench.queue("plain"), await bench.queue("lettered", dead_letter=True)
        for queue in (plain, lettered):
            await bench.send(queue, b"old", expires_in=bench.step)
        await bench.sleep(3 * bench.step)
        assert await bench.drain(plain) == []
        assert await bench.drain(lettered) == []
        assert [got.body for got in await bench.drain(dead_letters_of(lettered), 1)] == [b"old"]

    @scenario("C-096", "a message that does not expire yet", "expiry")
    async def test_c096_does_not_expire_yet(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"x", expires_in=timedelta(seconds=60))
        await bench.requeue(await bench.take_one(queue))
        (again,) = await bench.drain(queue, 1)
        assert again.body == b"x"

    @scenario("C-097", "the higher priority first", "priorities")
    async def test_c097_the_higher_first(self, bench: Bench) -> None:
        queue = await bench.queue(priorities=10)
        for level, name in ((1, b"low"), (8, b"high")):
            await bench.send(queue, *(b"%s %d" % (name, number) for number in range(10)), priority=level)
        await bench.ready(queue, 20)
        sink, _ = await bench.consume(queue, prefetch=1, accept=True)
        await bench.has(sink, 20)
        early = [body for body in sink.bodies[:10] if body.startswith(b"low")]
        assert len(early) <= 1
        for name in (b"low", b"high"):
            assert [body for body in sink.bodies if body.startswith(name)] == [b"%s %d" % (name, n) for n in range(10)]
        bench.measured["priority levels"] = bench.can.priorities

    @scenario("C-098", "a priority that the queue does not have", "priorities")
    async def test_c098_a_priority_it_does_not_have(self, bench: Bench) -> None:
        async with bench.connection() as mq:
            levels, plain = bench.described(bench.name("levels"), priorities=5), bench.described(bench.name("plain"))
            await bench.apply(levels | plain, t=mq.transport)
            for queue, priority in ((levels.queues[0].name, 5), (plain.queues[0].name, 1)):
                with pytest.raises(CapabilityError, match=queue):
                    await mq.send(queue, b"x", priority=priority)
                assert await bench.drain(queue) == []
