"""Group D: topology."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from acemq.errors import CapabilityError, DriftError, TopologyError
from acemq.testing.conformance.bench import Bench, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.topology import Queue, Topology, dead_letters_of, parked_of
from acemq.transport import ApplyMode, Capabilities, Finding, Published

ODD_NAMES = ("a.b", "a-b", "a_b", "Orders", "orders", "x", "x ", "a/b", "a:b", "a b", "Ж", "#", "*", "%41", "A")


def small_map(bench: Bench) -> Topology:
    """An exchange, two queues, two bindings."""
    exchange, first, second = bench.name("x"), bench.name("a"), bench.name("b")
    queues = bench.described(first) | bench.described(second)
    return queues.exchange(exchange, "direct").bind(first, exchange, "one").bind(second, exchange, "two")


def verdicts(findings: list[Finding]) -> dict[str, set[str]]:
    """By kind."""
    found: dict[str, set[str]] = {}
    for finding in findings:
        found.setdefault(finding.kind, set()).add(finding.verdict)
    return found


async def is_there(bench: Bench, topology: Topology) -> set[bool]:
    queues = [await bench.t.exists(queue.name) for queue in topology.queues]
    return {*queues, *[await bench.t.exists(exchange.name, "exchange") for exchange in topology.exchanges]}


class TopologyScenarios(Hooks):
    @scenario("C-037", "created, then present", small=True)
    async def test_c037_created_then_present(self, bench: Bench) -> None:
        topology = small_map(bench)
        first = verdicts(await bench.apply(topology))
        assert first == {"exchange": {"created"}, "queue": {"created"}, "binding": {"created"}}
        assert set().union(*verdicts(await bench.apply(topology)).values()) == {"present"}
        assert await is_there(bench, topology) == {True}

    @scenario("C-038", "looking creates nothing", small=True)
    async def test_c038_looking_creates_nothing(self, bench: Bench) -> None:
        topology = small_map(bench)
        assert set().union(*verdicts(await bench.apply(topology, ApplyMode.REPORT)).values()) == {"missing"}
        with pytest.raises(TopologyError, match=topology.queues[0].name):
            await bench.apply(topology, ApplyMode.VERIFY)
        assert await is_there(bench, topology) == {False}

    @scenario("C-039", "a queue that is there otherwise")
    async def test_c039_drift(self, bench: Bench) -> None:
        expires = bench.can.expiry
        queue, other = bench.name("q"), bench.name("r")
        one, two = timedelta(minutes=1), timedelta(minutes=2)
        await bench.apply(bench.described(queue, ttl=one) if expires else bench.described(queue))
        wanted = bench.described(queue, ttl=two) if expires else bench.described(queue, dead_letter=True)
        with pytest.raises(DriftError, match=queue) as drift:
            await bench.apply(wanted | bench.described(other))
        told = [
            finding
            for finding in drift.value.plan.findings
            if isinstance(finding, Finding) and finding.verdict == "drift"
        ]
        assert {finding.name for finding in told} == {queue}
        assert all(finding.argument and finding.wanted != finding.found for finding in told)
        assert not await bench.t.exists(other)

    @scenario("C-040", "four at once make one topology")
    async def test_c040_four_at_once(self, bench: Bench) -> None:
        four = [bench.t, *[await bench.open() for _ in range(3)]]
        for _ in range(10):
            topology = small_map(bench)
            await asyncio.gather(*(bench.apply(topology, t=t) for t in four))
            assert set().union(*verdicts(await bench.apply(topology)).values()) == {"present"}

    @scenario("C-041", "deleting knows queues from exchanges", small=True)
    async def test_c041_deleting(self, bench: Bench) -> None:
        name = await bench.queue()
        await bench.apply(Topology().exchange(name, "fanout"))
        await bench.send(name, b"x")
        await bench.ready(name, 1)
        generation = bench.t.state.generation
        assert not await bench.t.delete(name, only_if_empty=True)
        assert await bench.t.exists(name)
        assert await bench.t.delete(name)
        assert (await bench.t.exists(name), await bench.t.exists(name, "exchange")) == (False, True)
        assert await bench.t.delete(name, "exchange")
        assert not await bench.t.delete(name, "exchange")
        assert not await bench.t.delete(name)
        assert bench.t.state.generation == generation

    @scenario("C-042", "names of every kind")
    async def test_c042_names(self, bench: Bench) -> None:
        stem = bench.name("n")
        names = [f"{stem} {odd}" for odd in ODD_NAMES] + [f"{stem}{'long' * 50}"[:200]]
        for name in names:
            await bench.apply(bench.described(name))
        await bench.publish(*(out(name, name.encode()) for name in names))
        for name in names:
            assert [got.body for got in await bench.drain(name, 1)] == [name.encode()]

    @scenario("C-043", "an argument that the transport cannot honour")
    async def test_c043_an_argument_it_cannot_honour(self, bench: Bench) -> None:
        bad, good = bench.name("bad"), bench.name("good")
        with pytest.raises(CapabilityError) as refusal:
            await bench.apply(bench.described(good) | Topology(queues=(unfit(bad, bench.can),)))
        assert refusal.value.option
        assert bad in str(refusal.value)
        assert not await bench.t.exists(good)
        assert not await bench.t.exists(bad)

    @scenario("C-044", "dead letters beside a queue")
    async def test_c044_dead_letters(self, bench: Bench) -> None:
        queue = await bench.queue(dead_letter=True)
        for beside in (dead_letters_of(queue), parked_of(queue)):
            assert await bench.t.exists(beside)
            assert (await bench.result(out(beside, beside.encode()))).outcome is Published.ROUTED
            assert [got.body for got in await bench.drain(beside, 1)] == [beside.encode()]


def unfit(name: str, can: Capabilities) -> Queue:
    """A queue that asks for something that is not declared."""
    if not can.streams:
        return Queue(name, type="stream")
    if not can.max_length:
        return Queue(name, max_length=5)
    return Queue(name, type="classic", priorities=can.priorities + 1)
