"""Group C: bodies, headers, sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, cast

from msgspec.structs import replace

from acemq.headers import Headers
from acemq.testing.conformance.bench import Bench, carried, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.transport import BadHeader, Delivery, MessageTooLarge, Outgoing, Published, Settled

BODIES = (b"", b"\0", bytes(range(256)), random.Random(28).randbytes(64 * 1024))
TEXTS = ("a\0b", "\ufffe", "\N{CLINKING BEER MUGS}", "one\rtwo", "  blanks  ", "\n", "ä\r\nö")
MANY = (0, *(sign * (2**power - 1) for power in (7, 8, 15, 16, 31, 32, 53, 63) for sign in (1, -1)), -(2**63))
VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "tenth": 0.1,
    "one": 1.0,
    "huge": 1e300,
    "text": "text äöü",
    "empty": "",
    "bytes": b"\0\xff",
    "moment": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
    "nested": [1, "two", [3.0, None], {"$key": b"four", "inner": {"deep": True}}],
    "table": {"$t": 5, "list": [], "nothing": {}},
    **{f"int {number}": number for number in MANY},
}
NO_NUMBERS: dict[str, Any] = {"nan": math.nan, "inf": math.inf, "minus inf": -math.inf}
"""What some brokers cannot hold: equal at the other end, or refused by name."""
REFUSED_VALUES: dict[str, Any] = {
    "too-large": 2**63,
    "naive": datetime(2026, 2, 3),
    "fraction": datetime(2026, 2, 3, microsecond=1, tzinfo=UTC),
    "a-set": {1},
    "half-a-pair": "\ud800",
    "n" * 256: "a name too long",
}
SIZES = (0, 1, 4_095, 4_096, 131_072, 262_143, 1 << 20)


def same(found: Any, sent: Any) -> bool:
    """Equal in value and type, and so all the way down."""
    if isinstance(sent, float) and math.isnan(sent):
        return isinstance(found, float) and math.isnan(found)
    if type(found) is not type(sent):
        return False
    if isinstance(sent, dict):
        wanted, got = cast("dict[str, Any]", sent), cast("dict[str, Any]", found)
        return got.keys() == wanted.keys() and all(same(got[name], wanted[name]) for name in wanted)
    if isinstance(sent, list):
        items, others = cast("Sequence[Any]", sent), cast("Sequence[Any]", found)
        return len(others) == len(items) and all(map(same, others, items))
    return bool(found == sent)


def differing(found: Headers, sent: Headers) -> dict[str, object]:
    return {name: found.get(name, "missing") for name in {*sent, *found} if not same(found.get(name), sent.get(name))}


async def both_ways(bench: Bench, messages: Sequence[Outgoing]) -> list[list[Delivery]]:
    """The same messages through a queue and through an exchange, in order."""
    direct = await bench.queue()
    exchange, (bound,) = await bench.fan_out("bound")
    for to in ({"routing_key": direct}, {"exchange": exchange, "routing_key": "key"}):
        for result in await bench.publish(*(replace(message, **to) for message in messages)):
            assert result.outcome is Published.ROUTED, result
    return [await bench.drain(queue, len(messages)) for queue in (direct, bound)]


class Bodies(Hooks):
    @scenario("C-026", "bodies of every kind", small=True)
    async def test_c026_bodies(self, bench: Bench) -> None:
        for delivered in await both_ways(bench, [out("", body) for body in BODIES]):
            assert {got.body for got in delivered} == set(BODIES)

    @scenario("C-027", "text of every kind", small=True)
    async def test_c027_text(self, bench: Bench) -> None:
        bodies = [text.encode() for text in TEXTS]
        for delivered in await both_ways(bench, [out("", body, content_type="text/plain") for body in bodies]):
            assert {got.body for got in delivered} == set(bodies)

    @scenario("C-028", "a header value comes back equal and of the same type", small=True)
    async def test_c028_header_values(self, bench: Bench) -> None:
        for (got,) in await both_ways(bench, [out("", headers=VALUES)]):
            assert differing(carried(got), VALUES) == {}

        queue = await bench.queue("numbers")
        for name, value in NO_NUMBERS.items():
            result = await bench.result(out(queue, headers={name: value}))
            if result.outcome is Published.REFUSED:
                assert isinstance(result.error, BadHeader)
                assert name in str(result.error)
                bench.measured["numbers that are not finite"] = "refused by name"
            else:
                (got,) = await bench.drain(queue, 1)
                assert differing(carried(got), {name: value}) == {}
        assert bench.t.state.generation == 1

    @scenario("C-029", "many headers, with odd names")
    async def test_c029_odd_names(self, bench: Bench) -> None:
        odd = ("a:b", "a.b", "with blank", "ключ", "n" * 128, "X-A", "x-a", " x", "$t")
        headers = {name: f"value of {name}" for name in odd} | {f"h-{number}": number for number in range(30)}
        headers["long"] = "x" * 10_000
        assert len(headers) == 40
        for (got,) in await both_ways(bench, [out("", headers=headers)]):
            assert differing(carried(got), headers) == {}

    @scenario("C-030", "a header that cannot be carried is refused by name")
    async def test_c030_refused_headers(self, bench: Bench) -> None:
        queue = await bench.queue()
        bad = [out(queue, b"bad", headers={name: value}) for name, value in REFUSED_VALUES.items()]
        results = await bench.publish(out(queue, b"good"), *bad, out(queue, b"good"))
        assert [result.outcome for result in results] == ["routed", *["refused"] * len(bad), "routed"]
        # Between 129 and 255 bytes a name that others wrote may have to leave on a copy: whole, and never cut.
        odd = await bench.result(out(queue, b"odd", headers={"o" * 129: 1}))
        if odd.outcome is Published.ROUTED:
            (got, *_) = [each for each in await bench.drain(queue, 3) if each.body == b"odd"]
            assert carried(got) == {"o" * 129: 1}
            await bench.send(queue, b"good", b"good")
        else:
            assert isinstance(odd.error, BadHeader)
        for result, name in zip(results[1:-1], REFUSED_VALUES, strict=True):
            assert isinstance(result.error, BadHeader)
            assert name[:40] in str(result.error)
        await bench.drain(queue, 2)

    @scenario("C-031", "a message of exactly the largest size", "max_message")
    async def test_c031_the_largest_size(self, bench: Bench) -> None:
        queue, limit = await bench.queue(), bench.can.max_message or 0
        refused = await bench.result(out(queue, bytes(limit + 1)))
        assert isinstance(refused.error, MessageTooLarge)
        beside = refused.error.size - limit - 1  # what it counts besides the body
        for size, outcome in ((limit - beside, Published.ROUTED), (limit - beside + 1, Published.REFUSED)):
            result = await bench.result(out(queue, bytes(size)))
            # A message id of another length counts, too.
            assert result.outcome is outcome, (size, result)
            if isinstance(result.error, MessageTooLarge):
                assert (result.error.size, result.error.limit) == (limit + 1, limit)
        bench.measured["largest"] = limit
        (got,) = await bench.drain(queue, 1)
        assert len(got.body) == limit - beside

    @scenario("C-032", "sizes up to a mebibyte, requeued once")
    async def test_c032_sizes(self, bench: Bench) -> None:
        queue = await bench.queue()
        chance = random.Random(32)
        for size in SIZES:
            if bench.can.max_message is not None and size + 1024 > bench.can.max_message:
                continue
            body = chance.randbytes(size)
            await bench.send(queue, body)
            first = await bench.take_one(queue)
            assert await bench.requeue(first) == [Settled.DONE]
            second = await bench.take_one(queue)
            assert await bench.accept([second]) == [Settled.DONE]
            assert {sha256(got.body).digest() for got in (first, second)} == {sha256(body).digest()}

    @scenario("C-033", "what a foreign client has put there")
    async def test_c033_a_foreign_message(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.suite.put_raw(queue, b"\0raw\xff")
        got = await bench.take_one(queue)
        assert (got.body, got.fault) == (b"\0raw\xff", None)
        assert [name for name in got.headers if name.startswith("x-acemq-")] == []
        assert await bench.accept([got]) == [Settled.DONE]

    @scenario("C-034", "a broken message between two good ones")
    async def test_c034_a_broken_message(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"before")
        raw = await bench.suite.put_malformed(queue)
        await bench.send(queue, b"after")
        sink, _ = await bench.consume(queue)
        await bench.has(sink, 3)
        assert sink.bodies == [b"before", raw, b"after"]
        assert [got.fault is None for got in sink.got] == [True, False, True]
        assert await bench.accept(sink.got) == [Settled.DONE] * 3

    @scenario("C-035", "trace headers go everywhere")
    async def test_c035_trace_headers(self, bench: Bench) -> None:
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1,other=2"}
        waits = bench.can.publish_delay and bench.t.capabilities_of("exchange", "").publish_delay
        delay: dict[str, Any] = {"delay": 2 * bench.step} if waits else {}
        for (got,) in await both_ways(bench, [out("", headers=trace, **delay)]):
            assert differing(carried(got), trace) == {}
        queue = await bench.queue("again")
        await bench.send(queue, b"x", headers=trace)
        await bench.requeue(await bench.take_one(queue))
        (again,) = await bench.drain(queue, 1)
        assert {name: again.headers.get(name) for name in trace} == trace

    @scenario("C-036", "a reserved header of another version is kept", small=True)
    async def test_c036_a_header_of_the_future(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"x", headers={"x-acemq-future": "kept"})
        (got,) = await bench.drain(queue, 1)
        assert got.headers["x-acemq-future"] == "kept"
