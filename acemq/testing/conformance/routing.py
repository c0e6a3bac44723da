"""Group E: routing."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from acemq.testing.conformance.bench import Bench, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.topology import ExchangeKind, Topology
from acemq.transport import Delivery, Published, Settlement, Verb

PATTERNS: tuple[tuple[str, str, bool], ...] = (
    ("order.placed", "order.placed", True),
    ("order.placed", "order.placed.late", False),
    ("order.*", "order.placed", True),
    ("order.*", "order", False),
    ("order.*", "order.", True),
    ("order.*", "order.placed.late", False),
    ("*.placed", ".placed", True),
    ("*.placed", "order.placed", True),
    ("*", "order", True),
    ("*", "", False),
    ("*", ".", False),
    ("*.*", ".", True),
    ("#", "", True),
    ("#", "order.placed.late", True),
    ("order.#", "order", True),
    ("order.#", "order.placed.late", True),
    ("#.late", "late", True),
    ("#.late", "order.placed.late", True),
    ("a.#.z", "a.z", True),
    ("a.#.z", "a.b.c.z", True),
    ("a.#.z", "a.b.c", False),
    ("or*", "order", False),
)
"""Pattern, key, whether they match: 22, as RabbitMQ does it."""


class Routing(Hooks):
    @scenario("C-045", "a direct exchange", small=True)
    async def test_c045_direct(self, bench: Bench) -> None:
        exchange, a, b = bench.name("x"), bench.name("a"), bench.name("b")
        await bench.apply(
            (bench.described(a) | bench.described(b)).exchange(exchange).bind(a, exchange, "a").bind(b, exchange, "b")
        )
        assert (await bench.result(out("a", exchange=exchange))).outcome is Published.ROUTED
        (got,) = await bench.drain(a, 1)
        assert (got.exchange, got.routing_key) == (exchange, "a")
        assert await bench.drain(b) == []

    @scenario("C-046", "a fanout exchange", small=True)
    async def test_c046_fanout(self, bench: Bench) -> None:
        exchange, queues = await bench.fan_out("a", "b", "c")
        assert (await bench.result(out("any", exchange=exchange))).outcome is Published.ROUTED
        for queue in queues:
            await bench.drain(queue, 1)

    @scenario("C-047", "22 pairs of pattern and key", "topic_patterns")
    async def test_c047_patterns(self, bench: Bench) -> None:
        exchange = bench.name("x")
        queues = {pattern: bench.name(f"q{number}") for number, pattern in enumerate({p for p, _, _ in PATTERNS})}
        topology = Topology().exchange(exchange, "topic")
        for pattern, queue in queues.items():
            topology = (topology | bench.described(queue)).bind(queue, exchange, pattern)
        await bench.apply(topology)
        keys = list(dict.fromkeys(key for _, key, _ in PATTERNS))
        results = await bench.publish(*(out(key, b"<%s>" % key.encode(), exchange=exchange) for key in keys))
        assert {result.outcome for result in results} == {Published.ROUTED}  # '#' takes them all
        await bench.quiet()
        found = {pattern: {got.body for got in await bench.drain(queue)} for pattern, queue in queues.items()}
        wrong = [
            (pattern, key)
            for pattern, key, matches in PATTERNS
            if (b"<%s>" % key.encode() in found[pattern]) is not matches
        ]
        assert wrong == []

    @scenario("C-048", "two bindings that both match make one copy")
    async def test_c048_one_copy(self, bench: Bench) -> None:
        exchange, queue = bench.name("x"), bench.name("q")
        kind: ExchangeKind = "topic" if bench.can.topic_patterns != "none" else "fanout"
        topology = bench.described(queue).exchange(exchange, kind)
        for key in ("a.*", "*.b") if kind == "topic" else ("one", "two"):
            topology = topology.bind(queue, exchange, key)
        await bench.apply(topology)
        await bench.result(out("a.b", exchange=exchange))
        await bench.drain(queue, 1)

    @scenario("C-049", "three queues of one exchange are independent")
    async def test_c049_independent(self, bench: Bench) -> None:
        exchange, (accepts, requeues, waits) = await bench.fan_out("accepts", "requeues", "waits")
        sent = [b"%d" % number for number in range(100)]
        again: set[bytes] = set()
        taking, _ = await bench.consume(accepts, prefetch=10, accept=True)
        giving, _ = await bench.consume(requeues, prefetch=10)
        waiting, _ = await bench.consume(waits, prefetch=100)

        def once_more(delivery: Delivery) -> None:
            verb = Verb.ACCEPT if delivery.body in again else Verb.REQUEUE
            again.add(delivery.body)
            bench.soon(bench.t.settle([Settlement(delivery, verb)]))

        giving.each = once_more
        results = await bench.publish(*(out("", body, exchange=exchange) for body in sent))
        assert {result.outcome for result in results} == {Published.ROUTED}
        await bench.has(taking, 100)
        await bench.has(giving, 200)
        await bench.has(waiting, 100)
        await bench.quiet()
        assert sorted(taking.bodies) == sorted(waiting.bodies) == sorted(sent)
        assert sorted(giving.bodies) == sorted(sent * 2)

    @scenario("C-050", "a new binding reaches every publish that starts after it")
    async def test_c050_a_new_binding(self, bench: Bench) -> None:
        other, exchange, old, new = await bench.open(), bench.name("x"), bench.name("old"), bench.name("new")
        await bench.apply(bench.described(old).exchange(exchange, "fanout").bind(old, exchange))
        sent: list[tuple[bytes, float]] = []

        async def publish_on() -> None:
            while True:
                body = b"%d" % len(sent)
                sent.append((body, bench.now()))
                await bench.result(out("key", body, exchange=exchange))
                await bench.sleep(timedelta(milliseconds=1))

        publishing = asyncio.create_task(publish_on())
        try:
            await bench.eventually(lambda: len(sent) > 10, "some were sent")
            await bench.apply(bench.described(new).exchange(exchange, "fanout").bind(new, exchange), t=other)
            from_then = bench.now() + bench.timing.binding.total_seconds()
            await bench.eventually(
                lambda: sent[-1][1] > from_then, "some were sent after it", within=2 * bench.settling
            )
            await bench.sleep(timedelta(milliseconds=20))
        finally:
            publishing.cancel()
            await asyncio.wait({publishing})
        due = {body for body, at in sent[:-1] if at > from_then}
        found: set[bytes] = set()

        async def all_there() -> bool:
            found.update(got.body for got in await bench.drain(new))
            return due <= found

        await bench.eventually(all_there, "everything that was published after it")

    @scenario("C-051", "a queue and an exchange of one name", small=True)
    async def test_c051_one_name(self, bench: Bench) -> None:
        name, other = await bench.queue(), bench.name("other")
        await bench.apply(bench.described(other).exchange(name, "fanout").bind(other, name))
        await bench.send(name, b"sent")
        await bench.result(out("key", b"published", exchange=name))
        assert [got.body for got in await bench.drain(name, 1)] == [b"sent"]
        assert [got.body for got in await bench.drain(other, 1)] == [b"published"]
