"""Group F: receiving and back-pressure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from datetime import timedelta
from statistics import median

import pytest

from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.hooks import NOW, Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.transport import Delivery, QueueMissing, Settled, Settlement, Subscription, SubscriptionPhase, Verb

SECOND = timedelta(seconds=1)


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def phase_of(subscription: Subscription) -> SubscriptionPhase:
    """Asked anew each time; a type checker would take it for the same."""
    return subscription.state.phase


class Receiving(Hooks):
    @scenario("C-052", "pulling from an empty queue", small=True)
    async def test_c052_an_empty_queue(self, bench: Bench) -> None:
        queue, wait = await bench.queue(), 2 * bench.step
        began = bench.now()
        assert list(await bench.t.pull(queue, most=10, wait=wait)) == []
        took = bench.now() - began
        assert wait.total_seconds() - bench.step.total_seconds() <= took
        assert took <= (wait + bench.late).total_seconds()
        began = bench.now()
        assert list(await bench.t.pull(queue, most=10, wait=NOW)) == []
        assert bench.now() - began <= bench.late.total_seconds()

    @scenario("C-053", "never more than asked for", small=True)
    async def test_c053_never_more_than_asked_for(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(10))
        pulled: list[Delivery] = []
        for _ in range(4):
            some = await bench.t.pull(queue, most=3, wait=bench.settling)
            assert len(some) <= 3
            pulled += some
        pulled += await bench.take(queue, 10 - len(pulled)) if len(pulled) < 10 else []
        assert sorted(got.body for got in pulled) == sorted(numbered(10))

    @scenario("C-054", "no such queue", small=True)
    async def test_c054_no_such_queue(self, bench: Bench) -> None:
        missing = bench.name("missing")
        for ask in (
            bench.t.pull(missing, most=1, wait=NOW),
            bench.t.subscribe(missing, bench.sink(), prefetch=1),
            bench.t.purge(missing),
        ):
            with pytest.raises(QueueMissing, match=missing):
                await ask
        assert not await bench.t.exists(missing)

    @scenario("C-055", "a message comes while a pull waits", small=True)
    async def test_c055_a_waiting_pull(self, bench: Bench) -> None:
        queue = await bench.queue()
        waiting = asyncio.create_task(bench.t.pull(queue, most=1, wait=timedelta(seconds=20)))
        await bench.quiet()
        began = bench.now()
        await bench.send(queue, b"x")
        assert [got.body for got in await waiting] == [b"x"]
        assert bench.now() - began <= bench.late.total_seconds()

    @scenario("C-056", "an idle subscription is woken")
    async def test_c056_idle_pick_up(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, _ = await bench.consume(queue, accept=True)
        waits: list[float] = []
        for number in range(30):
            await bench.sleep(timedelta(milliseconds=random.randrange(5, 60)))
            began, really = bench.now(), time.perf_counter()
            await bench.send(queue, b"%d" % number)
            await bench.has(sink, number + 1)
            assert sink.at[-1] - began <= bench.late.total_seconds()
            waits.append(sink.really_at[-1] - really)
        bench.measured["pick-up p50, ms"] = round(median(waits) * 1000, 3)

    @scenario("C-057", "never more out than the prefetch", small=True)
    async def test_c057_prefetch(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(100))
        sink, _ = await bench.consume(queue, prefetch=5)
        await bench.has(sink, 5)
        await bench.quiet()
        assert len(sink.got) == 5
        assert await bench.accept(sink.got[:2]) == [Settled.DONE] * 2
        await bench.has(sink, 7)
        await bench.quiet()
        assert len(sink.got) == 7

    @scenario("C-058", "500 messages settled in random order")
    async def test_c058_settled_in_random_order(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(500))
        sink, subscription = await bench.consume(queue, prefetch=7)
        held: list[Delivery] = []
        seen = 0
        while seen < 500 or held:
            if len(sink.got) == seen and not held:
                await bench.has(sink, seen + 1)
            held += sink.got[seen:]
            seen = len(sink.got)
            assert len(held) <= 7
            assert subscription.state.held == len(held)
            random.shuffle(held)
            most = random.randint(1, 7)
            done, held = held[:most], held[most:]
            assert set(await bench.accept(done)) <= {Settled.DONE}
            for _ in range(random.randrange(3)):
                await asyncio.sleep(0)
        await bench.quiet()
        assert sorted(sink.bodies) == sorted(numbered(500))

    @scenario("C-059", "two subscriptions share a queue")
    async def test_c059_two_share_a_queue(self, bench: Bench) -> None:
        queue = await bench.queue()
        sinks = [(await bench.consume(queue, prefetch=5, accept=True))[0] for _ in range(2)]
        for start in range(0, 200, 20):
            await bench.send(queue, *numbered(200)[start : start + 20])
        await bench.eventually(
            lambda: sum(len(sink.got) for sink in sinks) >= 200, "all are delivered", seen=lambda: len(sinks[0].got)
        )
        await bench.quiet()
        assert sorted(sinks[0].bodies + sinks[1].bodies) == sorted(numbered(200))
        assert min(len(sink.got) for sink in sinks) >= 10

    @scenario("C-060", "what one holds nobody else sees", small=True)
    async def test_c060_what_one_holds(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        await bench.send(queue, *numbered(10))
        held = await bench.take(queue, 5)
        sink, _ = await bench.consume(queue, prefetch=20, t=other, accept=True)
        await bench.has(sink, 5)
        await bench.quiet()
        assert sorted([*sink.bodies, *(got.body for got in held)]) == sorted(numbered(10))

    @scenario("C-061", "pausing and going on")
    async def test_c061_pausing(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, subscription = await bench.consume(queue, prefetch=10)
        await bench.send(queue, *numbered(5))
        await bench.has(sink, 5)
        subscription.pause()
        assert phase_of(subscription) is SubscriptionPhase.PAUSED
        await bench.send(queue, *numbered(20))
        assert await bench.accept(sink.got) == [Settled.DONE] * 5
        await bench.quiet()
        assert len(sink.got) == 5
        sink.each = lambda delivery: bench.soon(bench.t.settle([Settlement(delivery, Verb.ACCEPT)]))
        subscription.resume()
        await bench.has(sink, 25)
        assert sorted(sink.bodies[5:]) == sorted(numbered(20))
        assert phase_of(subscription) is SubscriptionPhase.ACTIVE

    @scenario("C-062", "stopping", small=True)
    async def test_c062_stopping(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(50))
        sink, subscription = await bench.consume(queue, prefetch=10)
        await bench.has(sink, 10)
        await subscription.stop()
        assert subscription.state.phase is SubscriptionPhase.STOPPED
        assert await bench.accept(sink.got) == [Settled.DONE] * 10
        await bench.quiet()
        assert len(sink.got) == 10
        await subscription.close()
        await bench.drain(queue, 40)

    @scenario("C-063", "closing a subscription gives back what it holds", small=True)
    async def test_c063_closing_gives_back(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        await bench.send(queue, *numbered(10))
        sink, subscription = await bench.consume(queue, prefetch=10)
        await bench.has(sink, 10)
        await subscription.close()
        sink.over = True
        got = await bench.take(queue, 10, t=other, within=bench.late)
        assert sorted(each.body for each in got) == sorted(numbered(10))
        assert await bench.accept(sink.got) == [Settled.STALE] * 10
        assert await bench.accept(got, t=other) == [Settled.DONE] * 10

    @scenario("C-064", "closing a transport gives back what it has pulled", small=True)
    async def test_c064_closing_gives_back_what_was_pulled(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        await bench.send(queue, *numbered(5))
        await bench.take(queue, 5, t=other)
        await other.close(SECOND)
        got = await bench.take(queue, 5, within=bench.late)
        assert sorted(each.body for each in got) == sorted(numbered(5))

    @scenario("C-065", "of two exclusive subscribers one waits", "exclusive")
    async def test_c065_exclusive(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        first, one = await bench.consume(queue, prefetch=3, accept=True, exclusive=True)
        second, two = await bench.consume(queue, prefetch=3, t=other, accept=True, exclusive=True)
        assert two.state.phase is SubscriptionPhase.WAITING
        await bench.send(queue, *numbered(100))
        await bench.has(first, 100)
        assert second.got == []
        await one.close()
        # Where the broker does not tell, a standby looks for itself, and is there at its next look.
        await bench.eventually(
            lambda: two.state.phase is SubscriptionPhase.ACTIVE, "the second is active", within=bench.timing.settle
        )
        await bench.send(queue, *numbered(50))
        await bench.has(second, 50)
        if bench.can.ordering == "fifo":
            assert (first.bodies, second.bodies) == (numbered(100), numbered(50))

    @scenario("C-066", "an exclusive holder disappears", "exclusive")
    async def test_c066_an_exclusive_holder_disappears(self, bench: Bench) -> None:
        queue, holder, other = await bench.queue(), await bench.open(), await bench.open()
        await bench.send(queue, *numbered(20))
        first, _ = await bench.consume(queue, prefetch=5, t=holder, exclusive=True)
        await bench.has(first, 5)
        second, _ = await bench.consume(queue, prefetch=5, t=other, accept=True, exclusive=True)
        await bench.faults.abandon(holder)
        await bench.has(second, 20, within=bench.timing.takeover)
        assert set(second.bodies) == set(numbered(20))

    @scenario("C-067", "a sink that raises")
    async def test_c067_a_sink_that_raises(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, subscription = await bench.consume(queue, prefetch=20)

        def refuse(delivery: Delivery) -> None:
            if delivery.body == b"2":
                raise ValueError("a sink that raises")

        sink.each = refuse
        for number, body in enumerate(numbered(10)):
            await bench.send(queue, body)
            await bench.has(sink, number + 1)
        assert len(bench.logs.of(logging.ERROR, "a sink that raises")) == 1
        assert sink.bodies == numbered(10)
        assert subscription.state.held == 10
        assert await bench.accept(sink.got) == [Settled.DONE] * 10
