"""Group J: losing the link."""

from __future__ import annotations

import asyncio
import gc
import time
from datetime import timedelta

from acemq.testing.conformance.bench import Bench, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.publishing import FAILED, REFUSED, ROUTED, outcomes
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.transport import Phase, PublishResult, Settled, SubscriptionPhase

SECOND = timedelta(seconds=1)
RESTORED_WITHIN = timedelta(seconds=15)


class Recovery(Hooks):
    @scenario("C-099", "subscriptions that nobody holds come back")
    async def test_c099_subscriptions_come_back(self, bench: Bench) -> None:
        queues = [await bench.queue(word) for word in "ab"]
        sinks = [(await bench.consume(queue, accept=True))[0] for queue in queues]
        gc.collect()
        generation = bench.t.state.generation
        await bench.faults.cut()
        await bench.eventually(
            lambda: bench.t.state.generation == generation + 1 and bench.t.state.phase is Phase.CONNECTED,
            "the link is back",
            within=bench.timing.recovery,
            seen=lambda: bench.t.state,
        )
        for queue, sink in zip(queues, sinks, strict=True):
            await bench.send(queue, b"after")
            await bench.has(sink, 1, within=bench.timing.recovery)
            assert sink.states[-1].phase is SubscriptionPhase.ACTIVE

    @scenario("C-100", "cut in the middle of a hundred publishes")
    async def test_c100_cut_in_the_middle(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"first")
        calls = [asyncio.create_task(bench.result(out(queue, body))) for body in numbered(100)]
        await asyncio.sleep(0)
        await bench.faults.cut()
        results = await asyncio.gather(*calls)
        assert {result.outcome for result in results} <= {ROUTED, REFUSED, FAILED}
        await bench.phase(Phase.CONNECTED, within=bench.timing.recovery)
        found = {got.body for got in await bench.drain(queue)}
        routed = {body for body, result in zip(numbered(100), results, strict=True) if result.outcome is ROUTED}
        refused = {body for body, result in zip(numbered(100), results, strict=True) if result.outcome is REFUSED}
        assert routed <= found
        assert not refused & found

    @scenario("C-101", "refused for six seconds")
    async def test_c101_refused_for_a_while(self, bench: Bench) -> None:
        queue, dials = await bench.queue(), list[int]()
        async with bench.refused():
            await bench.faults.cut()
            await bench.eventually(lambda: bench.t.state.phase is Phase.RECONNECTING, "the loss is noticed")
            end = bench.now() + 6
            while bench.now() < end:
                began = bench.now()
                result = await bench.result(out(queue), within=SECOND)
                assert result.outcome is REFUSED
                assert bench.now() - began <= 1 + bench.late.total_seconds()
                dials.append(bench.t.state.dials)
        assert dials == sorted(dials)
        assert 1 <= dials[-1] <= 40  # 20 for each connection of a transport that has two
        result = await bench.result(out(queue), within=2 * bench.timing.recovery)
        assert result.outcome is ROUTED

    @scenario("C-102", "closing while it dials")
    async def test_c102_closing_while_it_dials(self, bench: Bench) -> None:
        queue, t = await bench.queue(), await bench.open()
        async with bench.refused():
            await bench.faults.cut()
            await bench.phase(Phase.RECONNECTING, t=t)
            pending = asyncio.create_task(bench.result(out(queue), t=t, within=timedelta(seconds=30)))
            await bench.quiet()
            began = bench.now()
            await t.close(SECOND)
            assert bench.now() - began <= 2 + bench.late.total_seconds()
            assert (await pending).outcome is REFUSED
        await bench.sleep(timedelta(seconds=2))
        assert t.state.phase is Phase.CLOSED
        await bench.phase(Phase.CONNECTED, within=2 * bench.timing.recovery)

    @scenario("C-103", "a link that goes silent")
    async def test_c103_a_silent_link(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, subscription = await bench.consume(queue, accept=True)
        if not bench.pace.is_moved:
            async with bench.swallowed():
                await bench.phase(Phase.RECONNECTING, within=bench.timing.silence)
        else:
            async with bench.swallowed():
                await bench.quiet()
        await bench.active(subscription, within=2 * bench.timing.recovery)
        await bench.phase(Phase.CONNECTED, within=2 * bench.timing.recovery)
        await bench.send(queue, b"after")
        await bench.has(sink, 1, within=bench.timing.recovery)

    @scenario("C-104", "the server is restarted", "durable")
    async def test_c104_restarted(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(50))
        sink, subscription = await bench.consume(queue, prefetch=5)
        await bench.has(sink, 5)
        await bench.faults.restart()
        await bench.phase(Phase.CONNECTED, within=3 * bench.timing.recovery)
        await bench.active(subscription, generation=2, within=3 * bench.timing.recovery)
        # What was held is held still where the broker keeps leases, and comes again where the link held it.
        handled, seen = set[bytes](), 0
        while len(handled) < 50:
            await bench.has(sink, seen + 1)
            fresh = sink.got[seen:]
            seen = len(sink.got)
            answers = await bench.accept(fresh)
            handled |= {got.body for got, answer in zip(fresh, answers, strict=True) if answer is Settled.DONE}
        assert handled == set(numbered(50))

    @scenario("C-105", "everything on the server is gone")
    async def test_c105_wiped(self, bench: Bench) -> None:
        exchange, (queue,) = await bench.fan_out("q")
        sink, subscription = await bench.consume(queue, accept=True)
        await bench.faults.wipe()
        await bench.eventually(
            lambda: subscription.state.gap and subscription.state.phase is SubscriptionPhase.ACTIVE,
            "the topology is back, with a gap",
            within=RESTORED_WITHIN + 2 * bench.timing.recovery,
            seen=lambda: subscription.state,
        )
        result = await bench.result(out("key", b"new", exchange=exchange), within=bench.timing.recovery)
        assert result.outcome is ROUTED
        await bench.has(sink, 1)
        assert sink.bodies == [b"new"]

    @scenario("C-106", "the queue of a subscription is deleted")
    async def test_c106_its_queue_is_deleted(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        sink, subscription = await bench.consume(queue, accept=True)
        assert await other.delete(queue)
        await bench.eventually(
            lambda: subscription.state.phase is SubscriptionPhase.RECOVERING and subscription.state.error,
            "it says what is wrong",
            seen=lambda: subscription.state,
        )
        assert queue in (subscription.state.error or "")
        began = time.monotonic()
        await asyncio.sleep(0)
        assert time.monotonic() - began < 0.5
        assert not await bench.t.exists(queue)
        await bench.apply(bench.described(queue))
        await bench.active(subscription)
        await bench.send(queue, b"after")
        await bench.has(sink, 1)

    @scenario("C-107", "three cuts in three seconds")
    async def test_c107_three_cuts(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(50))
        sink, subscription = await bench.consume(queue, prefetch=5, accept=True)
        for _ in range(3):
            await bench.faults.cut()
            await bench.sleep(SECOND)
        await bench.active(subscription, within=2 * bench.timing.recovery)
        await bench.eventually(lambda: set(sink.bodies) == set(numbered(50)), "every message was handled")
        await bench.quiet()
        before = len(sink.got)
        await bench.send(queue, *numbered(50))
        await bench.has(sink, before + 50)
        await bench.quiet()
        assert len(sink.got) == before + 50  # one consumer, and not four

    @scenario("C-108", "a broker that takes no publishes")
    async def test_c108_blocked(self, bench: Bench) -> None:
        queue, other = await bench.queue(), await bench.open()
        await bench.send(queue, *numbered(50))
        async with bench.blocked():
            # Some brokers say that they are blocked only to who publishes.
            results: list[PublishResult] = []
            for _ in range(20):
                began = bench.now()
                results.append(await bench.result(out(queue, b"blocked"), within=SECOND / 2))
                assert bench.now() - began <= 0.5 + bench.late.total_seconds()
            assert set(outcomes(results)) <= {REFUSED, FAILED}
            assert bench.t.state.blocked
            assert any(bench.t.state.blocked in str(result.error) for result in results)
            sink, _ = await bench.consume(queue, prefetch=10, accept=True)
            await bench.has(sink, 50)
            began = bench.now()
            await other.close(SECOND)
            assert bench.now() - began <= 2 + bench.late.total_seconds()
        await bench.eventually(lambda: not bench.t.state.blocked, "it is free", within=bench.timing.recovery)
        assert (await bench.result(out(queue, b"after"))).outcome is ROUTED
