"""Group B: publishing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from acemq.testing.conformance.bench import SOON, Bench, carried, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.topology import Topology
from acemq.transport import ExchangeMissing, Outgoing, Published, PublishResult

ROUTED, UNROUTABLE, REFUSED, FAILED = Published.ROUTED, Published.UNROUTABLE, Published.REFUSED, Published.FAILED


def outcomes(results: list[PublishResult]) -> list[Published]:
    return [result.outcome for result in results]


def nowhere(name: str, **fields: Any) -> Outgoing:
    """A message to a queue that does not exist."""
    return out(f"{name}-nowhere", b"nowhere", **fields)


class Publishing(Hooks):
    @scenario("C-011", "one message, sent and pulled", small=True)
    async def test_c011_one_message(self, bench: Bench) -> None:
        queue = await bench.queue()
        sent = out(queue, b"body", headers={"kind": "a", "n": 7}, content_type="text/plain", reply_to="answers")
        result = await bench.result(sent)
        assert (result.outcome, result.error) == (ROUTED, None)
        got = await bench.take_one(queue)
        assert (got.body, carried(got), got.message_id) == (b"body", {"kind": "a", "n": 7}, sent.message_id)
        assert (got.content_type, got.reply_to, got.routing_key) == ("text/plain", "answers", queue)
        assert (got.queue, got.redelivered, got.fault) == (queue, False, None)
        await bench.accept([got])

    @scenario("C-012", "a batch of 250", small=True)
    async def test_c012_a_batch(self, bench: Bench) -> None:
        queue = await bench.queue()
        sent = [b"%d" % number for number in range(250)]
        assert outcomes(await bench.publish(*(out(queue, body) for body in sent))) == [ROUTED] * 250
        assert sorted(got.body for got in await bench.drain(queue, 250)) == sorted(sent)

    @scenario("C-013", "good and bad in one batch", "max_message", "unroutable")
    async def test_c013_good_and_bad_in_one_batch(self, bench: Bench) -> None:
        queue = await bench.queue()
        limit = bench.can.max_message or 0
        results = await bench.publish(
            out(queue, b"first"),
            nowhere(queue),
            out(queue, bytes(limit + 1)),
            out(queue, headers={"bad": 2**63}),
            out("key", exchange=f"{queue}-missing"),
            out(queue, b"last"),
        )
        assert outcomes(results) == [ROUTED, UNROUTABLE, REFUSED, REFUSED, REFUSED, ROUTED]
        assert [result.error is None for result in results] == [True, False, False, False, False, True]
        assert [got.body for got in await bench.drain(queue, 2)] == [b"first", b"last"]

    @scenario("C-014", "a queue that does not exist", "unroutable")
    async def test_c014_a_queue_that_does_not_exist(self, bench: Bench) -> None:
        missing = bench.name("missing")
        result = await bench.result(out(missing))
        assert result.outcome is UNROUTABLE
        assert missing in str(result.error) or bench.can.unroutable == "told"
        assert not await bench.t.exists(missing)

    @scenario("C-015", "a key that matches no binding", "unroutable", "topic_patterns")
    async def test_c015_a_key_that_matches_nothing(self, bench: Bench) -> None:
        exchange, queue = bench.name("x"), bench.name("q")
        await bench.apply(Topology().exchange(exchange, "topic").bind(queue, exchange, "a.*") | bench.described(queue))
        assert (await bench.result(out("b.x", exchange=exchange))).outcome is UNROUTABLE
        unasked = await bench.result(out("b.x", exchange=exchange, mandatory=False))
        assert (unasked.outcome, unasked.error) == (ROUTED, None)
        assert await bench.drain(queue) == []

    @scenario("C-016", "one publish to an exchange that does not exist")
    async def test_c016_an_exchange_that_does_not_exist(self, bench: Bench) -> None:
        queue, generation = await bench.queue(), bench.t.state.generation
        good = [asyncio.create_task(bench.result(out(queue))) for _ in range(50)]
        bad = await bench.result(out("key", exchange=bench.name("missing")))
        assert bad.outcome is REFUSED
        assert isinstance(bad.error, ExchangeMissing)
        assert outcomes(await asyncio.gather(*good)) == [ROUTED] * 50
        assert bench.t.state.generation == generation

    @scenario("C-017", "one message id four times in a batch", "unroutable")
    async def test_c017_one_message_id_four_times(self, bench: Bench) -> None:
        queue = await bench.queue()
        same: dict[str, Any] = {"message_id": bench.name("same")}
        results = await bench.publish(
            out(queue, **same), nowhere(queue, **same), out(queue, **same), nowhere(queue, **same)
        )
        assert outcomes(results) == [ROUTED, UNROUTABLE, ROUTED, UNROUTABLE]
        await bench.drain(queue, 2)

    @scenario("C-018", "an empty batch", small=True)
    async def test_c018_an_empty_batch(self, bench: Bench) -> None:
        assert list(await bench.t.publish([], within=SOON)) == []
        assert list(await bench.t.settle([])) == []
        assert list(await bench.t.renew([], timedelta(seconds=30))) == []

    @scenario("C-019", "200 calls at once, every tenth to nowhere", "unroutable")
    async def test_c019_calls_at_once(self, bench: Bench) -> None:
        queue = await bench.queue()
        calls = [nowhere(queue) if number % 10 == 0 else out(queue) for number in range(200)]
        results = await asyncio.gather(*map(bench.result, calls))
        assert outcomes(results) == [UNROUTABLE if number % 10 == 0 else ROUTED for number in range(200)]
        await bench.drain(queue, 180)

    @scenario("C-020", "every third publish is cancelled")
    async def test_c020_every_third_publish_is_cancelled(self, bench: Bench) -> None:
        queue = await bench.queue()
        calls = [asyncio.create_task(bench.result(out(queue))) for _ in range(100)]
        for call in calls[::3]:
            await bench.turns(3)
            call.cancel()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        for number, result in enumerate(ended):
            if isinstance(result, asyncio.CancelledError):
                assert number % 3 == 0
            else:
                assert isinstance(result, PublishResult)
                assert result.outcome is ROUTED
        await bench.eventually(lambda: bench.t.state.outstanding == 0, "nothing is outstanding", within=bench.late)
        assert (await bench.result(out(queue))).outcome is ROUTED

    @scenario("C-021", "publishes on a stalled link end in time")
    async def test_c021_a_stalled_link(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"before")
        async with bench.swallowed():
            began = bench.now()
            results = await asyncio.gather(*(bench.result(out(queue), within=timedelta(seconds=1)) for _ in range(20)))
            took = bench.now() - began
        assert took <= 1 + bench.late.total_seconds()
        assert {result.outcome for result in results} <= {REFUSED, FAILED}
        assert all(result.error is not None for result in results)

    @scenario("C-022", "what was refused never appears")
    async def test_c022_what_was_refused_never_appears(self, bench: Bench) -> None:
        queue = await bench.queue()
        stalled = [b"stalled %d" % number for number in range(20)]
        async with bench.swallowed():
            results = await asyncio.gather(
                *(bench.result(out(queue, body), within=timedelta(seconds=1)) for body in stalled)
            )
        healed = [b"healed %d" % number for number in range(10)]
        later = [await bench.result(out(queue, body), within=bench.timing.silence) for body in healed]
        assert outcomes(later) == [ROUTED] * 10
        await bench.quiet()
        found = [got.body for got in await bench.drain(queue)]
        refused = {body for body, result in zip(stalled, results, strict=True) if result.outcome is REFUSED}
        assert not refused & set(found)
        assert set(healed) <= set(found)
        assert len(found) == len(set(found))

    @scenario("C-023", "1,000 awaited sends arrive in order", "ordering")
    async def test_c023_awaited_sends_in_order(self, bench: Bench) -> None:
        queue = await bench.queue()
        sink, _ = await bench.consume(queue, prefetch=1, accept=True)
        sent = [b"%d" % number for number in range(1000)]
        for body in sent:
            await bench.send(queue, body)
        await bench.has(sink, 1000, within=timedelta(seconds=30))
        assert sink.bodies == sent

    @scenario("C-024", "20 awaited batches arrive in order in two queues", "ordering")
    async def test_c024_batches_in_order(self, bench: Bench) -> None:
        exchange, queues = await bench.fan_out("a", "b")
        sinks = [(await bench.consume(queue, prefetch=100, accept=True))[0] for queue in queues]
        sent = [b"%d" % number for number in range(1000)]
        for start in range(0, 1000, 50):
            results = await bench.publish(*(out("", body, exchange=exchange) for body in sent[start : start + 50]))
            assert outcomes(results) == [ROUTED] * 50
        for sink in sinks:
            await bench.has(sink, 1000, within=timedelta(seconds=30))
            assert sink.bodies == sent

    @scenario("C-025", "a length limit refuses and never drops", "max_length")
    async def test_c025_a_length_limit(self, bench: Bench) -> None:
        queue = await bench.queue(max_length=2)
        slack = bench.suite.length_slack
        results = [await bench.result(out(queue, b"%d" % number)) for number in range(4 + slack)]
        kept = [b"%d" % number for number, result in enumerate(results) if result.outcome is ROUTED]
        assert {result.outcome for result in results if result.outcome is not ROUTED} <= {REFUSED, FAILED}
        assert 2 <= len(kept) <= 2 + slack
        bench.measured["beyond max_length"] = len(kept) - 2
        gone = await bench.take(queue, len(kept) - 1)
        await bench.accept(gone)

        async def has_room() -> bool:
            return (await bench.result(out(queue, b"later"))).outcome is ROUTED

        await bench.eventually(has_room, "there is room again")
        left = await bench.drain(queue, 2)
        assert [got.body for got in (*gone, *left)] == [*kept, b"later"]  # an old one was never dropped
