"""Group G: settling."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from acemq.testing.conformance.bench import SOON, Bench
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.topology import dead_letters_of
from acemq.transport import FOREVER, Phase, Settled, Settlement, Verb

DONE, STALE, FAILED = Settled.DONE, Settled.STALE, Settled.FAILED


class Settling(Hooks):
    @scenario("C-068", "what was accepted never comes again", small=True)
    async def test_c068_accepted(self, bench: Bench) -> None:
        queue, t = await bench.queue(), await bench.open()
        await bench.send(queue, b"x")
        assert await bench.accept(await bench.take(queue, 1, t=t), t=t) == [DONE]
        await t.close(timedelta(seconds=1))
        await t.open(within=SOON)
        await bench.quiet()
        assert await bench.drain(queue, t=t) == []
        await bench.ready(queue, 0, t=t)

    @scenario("C-069", "what is requeued returns to its declared place", small=True)
    async def test_c069_requeued(self, bench: Bench) -> None:
        queue = await bench.queue()
        for body in numbered(7)[1:]:
            await bench.send(queue, body)
        held = await bench.take(queue, 3)
        second = next(got for got in held if got.body == held[1].body)
        assert await bench.requeue(second) == [DONE]
        await bench.ready(queue, 4)
        rest = await bench.take(queue, 4)
        (again,) = [got for got in rest if got.body == second.body]
        assert again.redelivered
        assert again.message_id == second.message_id
        can = bench.can_of(queue)
        bench.measured["deliveries counted"] = "yes" if can.counts_deliveries else "no"
        if can.counts_deliveries:
            assert (second.deliveries, again.deliveries) == (1, 2)
        place = rest.index(again)
        bench.measured["place"] = can.requeue_place
        assert place in {"head": (0,), "tail": (3,), "any": (0, 1, 2, 3)}[can.requeue_place]

    @scenario("C-070", "requeued with a delay", "requeue_delay")
    async def test_c070_requeued_with_a_delay(self, bench: Bench) -> None:
        queue, delay = await bench.queue(), 2 * bench.step
        await bench.send(queue, b"x")
        sink, _ = await bench.consume(queue, prefetch=1)
        await bench.has(sink, 1)
        began = bench.now()
        assert await bench.requeue(sink.got[0], delay=delay) == [DONE]
        await bench.has(sink, 2)
        took = sink.at[1] - began
        assert delay.total_seconds() - bench.step.total_seconds() * 0.01 <= took <= (delay + bench.late).total_seconds()
        assert sink.got[1].redelivered

    @scenario("C-071", "requeued with other headers", "requeue_rewrites")
    async def test_c071_requeued_with_other_headers(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"x", headers={"attempt": 1})
        first = await bench.take_one(queue)
        assert await bench.requeue(first, headers={"attempt": 2}) == [DONE]
        second = await bench.take_one(queue)
        assert await bench.requeue(second, headers={"attempt": 3}, delay=2 * bench.step) == [DONE]
        assert await bench.t.pull(queue, most=2, wait=timedelta()) == []
        third = await bench.take_one(queue)
        assert [dict(got.headers) for got in (first, second, third)] == [{"attempt": n} for n in (1, 2, 3)]
        assert {(got.body, got.message_id) for got in (first, second, third)} == {(b"x", first.message_id)}
        await bench.accept([third])
        await bench.drain(queue, 0)

    @scenario("C-072", "a delay that the port cannot do")
    async def test_c072_a_delay_it_cannot_do(self, bench: Bench) -> None:
        longest = bench.can.requeue_delay
        if longest == FOREVER:
            bench.measured["longest requeue delay"] = "any"
            return
        queue = await bench.queue()
        await bench.send(queue, b"x")
        got = await bench.take_one(queue)
        assert await bench.requeue(got, delay=(longest or timedelta()) + bench.step) == [FAILED]
        assert bench.logs.of(logging.WARNING, "delay")
        await bench.quiet()
        assert await bench.t.pull(queue, most=1, wait=timedelta()) == []
        assert await bench.accept([got]) == [DONE]

    @scenario("C-073", "a drop is no dead letter")
    async def test_c073_dropped(self, bench: Bench) -> None:
        queue = await bench.queue(dead_letter=True)
        await bench.send(queue, b"x")
        assert await bench.settle(await bench.take(queue, 1), Verb.DROP) == [DONE]
        await bench.quiet()
        assert await bench.drain(queue) == []
        assert await bench.drain(dead_letters_of(queue)) == []

    @scenario("C-074", "settled twice", small=True)
    async def test_c074_settled_twice(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"one", b"two")
        one, two = await bench.take(queue, 2)
        assert await bench.accept([one]) == [DONE]
        assert await bench.requeue(one) == [STALE]
        assert await bench.settle([one], Verb.DROP) == [STALE]
        assert await bench.accept([two, two]) == [DONE, STALE]
        for message_id in (one.message_id, two.message_id):
            assert len(bench.logs.of(logging.WARNING, str(message_id))) == 1
        await bench.quiet()
        assert await bench.drain(queue) == []

    @scenario("C-075", "a hundred settled in one batch", small=True)
    async def test_c075_one_batch(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(100))
        held = await bench.take(queue, 100)
        verbs = (Verb.ACCEPT, Verb.REQUEUE, Verb.DROP)
        again = {got.body for got in held[1::3]}
        batch = [Settlement(got, verbs[place % 3]) for place, got in enumerate(held)]
        batch.insert(50, batch[0])  # once more, and so stale
        assert list(await bench.t.settle(batch)) == [DONE] * 50 + [STALE] + [DONE] * 50
        assert {got.body for got in await bench.drain(queue, len(again))} == again

    @scenario("C-076", "held over the loss of a link")
    async def test_c076_held_over_a_loss(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(10))
        sink, subscription = await bench.consume(queue, prefetch=10)
        await bench.has(sink, 10)
        held, generation = list(sink.got), bench.t.state.generation
        await bench.faults.cut()
        await bench.eventually(
            lambda: bench.t.state.generation > generation and bench.t.state.phase is Phase.CONNECTED,
            "the link is back",
            within=bench.timing.recovery,
        )
        await bench.active(subscription, generation=2)
        answers = await bench.accept(held)
        assert set(answers) <= {DONE, STALE}
        stale = {got.body for got, answer in zip(held, answers, strict=True) if answer is STALE}
        await bench.eventually(lambda: stale <= {got.body for got in sink.got[10:]}, "what was stale comes again")
        await bench.accept(sink.got[10:])

    @scenario("C-077", "fifty settle at once")
    async def test_c077_fifty_at_once(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, *numbered(200))
        held = await bench.take(queue, 200)
        answers = await asyncio.gather(*(bench.accept(held[start : start + 4]) for start in range(0, 200, 4)))
        assert [answer for batch in answers for answer in batch] == [DONE] * 200
        await bench.quiet()
        assert await bench.drain(queue) == []

    @scenario("C-078", "what a dead client held comes again")
    async def test_c078_a_dead_client(self, bench: Bench) -> None:
        queue, dead = await bench.queue(), await bench.open()
        await bench.send(queue, *numbered(20))
        await bench.take(queue, 20, t=dead)
        await bench.faults.abandon(dead)
        sink, _ = await bench.consume(queue, prefetch=20, accept=True)
        await bench.has(sink, 20, within=bench.timing.takeover)
        assert set(sink.bodies) == set(numbered(20))
