"""Describing, declaring, planning, and who makes what the library needs by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    ApplyMode,
    CapabilityError,
    ConfigurationError,
    DriftError,
    Message,
    Plan,
    Topology,
    TopologyError,
    TopologyMode,
)
from acemq.topology import Queue
from tests.waiting import until

CLASSIC: dict[str, Any] = {"type": "classic"}
BESIDE = ("", ".dlq", ".parked")


@pytest.fixture
async def named(mq: AceMQ, name: str) -> AsyncIterator[str]:
    """A prefix; the queues `-a`, `-b` and those of the steps `.a`, `.b` are removed with what stands beside them."""
    yield name
    for queue in ("", "-a", "-b", ".a", ".b"):
        for suffix in BESIDE:
            await mq.delete(f"{name}{queue}{suffix}")
    await mq.delete(name, "exchange")


def told(plan: Plan) -> set[tuple[str, ...]]:
    """Verdict, kind and name; of a drift its argument, wanted and found instead of the kind."""
    out: set[tuple[str, ...]] = set()
    for finding in plan.findings:
        if finding.argument is None:
            out.add((finding.verdict, finding.kind, finding.name))
        else:
            argument = {"x-max-length": "max_length"}.get(finding.argument, finding.argument)
            out.add((finding.verdict, finding.name, argument, str(finding.wanted), str(finding.found)))
    return out


async def test_m053_a_plan_names_what_drifts_and_what_is_missing_and_changes_nothing(mq: AceMQ, named: str) -> None:
    a, b = f"{named}-a", f"{named}-b"
    await mq.declare(Topology().queue(a, max_length=10, **CLASSIC))
    wanted = Topology().queue(a, max_length=20, **CLASSIC).queue(b, **CLASSIC)
    plan = await mq.plan(wanted)
    assert told(plan) == {("drift", a, "max_length", "20", "10"), ("missing", "queue", b)}
    assert (plan.drifted, plan.missing) == (True, True)
    for mode in (ApplyMode.CREATE, ApplyMode.VERIFY):
        with pytest.raises(DriftError, match=f"{a}.*max.length.*10.*20") as refused:
            await mq.declare(wanted, mode=mode)
        assert refused.value.plan == plan
        assert not await mq.exists(b)


async def test_a_plan_prints_one_line_for_each_object(mq: AceMQ, named: str) -> None:
    a, b = f"{named}-a", f"{named}-b"
    await mq.declare(Topology().queue(a, max_length=10, **CLASSIC))
    drift, missing = str(await mq.plan(Topology().queue(a, max_length=20, **CLASSIC).queue(b, **CLASSIC))).splitlines()
    assert drift.startswith(f"drift    queue     {a}: ")
    assert drift.endswith("wanted 20, found 10")
    assert missing == f"missing  queue     {b}"


async def test_what_was_made_comes_back_created_and_then_present(mq: AceMQ, named: str) -> None:
    wanted = Topology().exchange(named, "topic").queue(f"{named}-a", **CLASSIC).bind(f"{named}-a", named, "order.*")
    plan = await mq.plan(wanted)
    assert {finding.verdict for finding in plan.findings} == {"missing"}
    assert plan.missing
    made = await mq.declare(wanted)
    assert {finding.verdict for finding in made.findings} == {"created"}
    assert (made.drifted, made.missing) == (False, False)
    for mode in ApplyMode:
        found = await mq.declare(wanted, mode=mode)
        assert {finding.verdict for finding in found.findings} == {"present"}
        assert [finding.name for finding in found.findings][-1] == f"{named}-a <- {named} on 'order.*'"


async def test_a_queue_that_exists_with_other_arguments_names_itself_the_argument_and_both_values(
    mq: AceMQ, named: str
) -> None:
    await mq.declare(Topology().queue(f"{named}-a", max_length=10, **CLASSIC))
    with pytest.raises(DriftError) as refused:
        await mq.declare(Topology().queue(f"{named}-a", max_length=20, **CLASSIC))
    (text,) = refused.value.problems
    assert f"queue '{named}-a'" in text
    assert text.replace("x-max-length", "max_length").split(";")[0].endswith("has max_length=10, and 20 is wanted")


@pytest.mark.parametrize(
    ("queue", "capability"),
    [
        (Queue("q", priorities=5), "quorum"),
        (Queue("q", type="stream"), "streams"),
        (Queue("q", lease=timedelta(seconds=30)), "leases"),
    ],
)
async def test_an_option_that_the_transport_lacks_is_refused_by_name_and_nothing_is_made(
    mq: AceMQ, named: str, queue: Queue, capability: str
) -> None:
    described = Topology().queue(f"{named}-a", **CLASSIC) | Topology(queues=(queue,))
    for mode in ApplyMode:
        with pytest.raises(CapabilityError, match=capability) as refused:
            await mq.declare(described, mode=mode)
        assert "'q'" in str(refused.value)
    assert not await mq.exists(f"{named}-a")


async def test_arguments_for_another_transport_are_skipped(mq: AceMQ, named: str) -> None:
    await mq.declare(Topology().queue(f"{named}-a", native={"aws": {"DelaySeconds": 1}}, **CLASSIC))
    assert not (await mq.plan(Topology().queue(f"{named}-a", **CLASSIC))).drifted


async def test_a_mode_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"topology='check'.*create, verify, none"):
        acemq.connect("memory://", topology="check")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# What the library declares by itself


async def nothing(payload: int) -> int:
    return payload


def handle(message: Message[int]) -> None:
    pass


async def run(mq: AceMQ, name: str) -> None:
    """A program with a consumer and a pipeline, which handles one message in each."""
    async with mq.consume(f"{name}-a", int, handle) as consumer:
        async with mq.pipeline(name, int).step("a", nothing).step("b", nothing).start() as running:
            await mq.send(f"{name}-a", 1)
            await running.send(1)
            await until(lambda: consumer.counters.acked == running.counters.completed == 1)


async def test_declared_is_everything_by_itself_and_when_told(mq: AceMQ, url: str, named: str) -> None:
    assert mq.declared() == Topology()
    await mq.declare(Topology().queue(f"{named}-a", **CLASSIC))
    await run(mq, named)
    names = {queue.name for queue in mq.declared().queues}
    assert names == {f"{named}{queue}{suffix}" for queue in ("-a", ".a", ".b") for suffix in BESIDE}
    assert named in {exchange.name for exchange in mq.declared().exchanges}
    mq.declared().validate()
    async with acemq.connect(url) as other:
        plan = await other.plan(mq.declared())
        assert {finding.verdict for finding in plan.findings} == {"present"}
        assert other.declared() == Topology()


async def test_a_queue_declared_anew_is_in_declared_as_it_is_now(mq: AceMQ, named: str) -> None:
    await mq.declare(Topology().queue(f"{named}-a", max_length=10, **CLASSIC))
    await mq.delete(f"{named}-a")
    await mq.declare(Topology().queue(f"{named}-a", max_length=20, **CLASSIC))
    assert [queue.max_length for queue in mq.declared().queues] == [20]
    mq.declared().validate()


async def test_verify_starts_on_what_declared_has_prepared(mq: AceMQ, url: str, named: str) -> None:
    await mq.declare(Topology().queue(f"{named}-a", **CLASSIC))
    await run(mq, named)
    async with acemq.connect(url, topology=TopologyMode.VERIFY) as careful:
        await run(careful, named)
        assert careful.declared() == Topology()


async def test_verify_names_what_is_missing_beside_a_queue_and_makes_nothing(mq: AceMQ, url: str, named: str) -> None:
    queue = f"{named}-a"
    await mq.declare(Topology().queue(queue, **CLASSIC))
    async with acemq.connect(url, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(TopologyError, match="topology=VERIFY") as refused:
            await careful.consume(queue, int, handle)
        for suffix in (".dlq", ".parked"):
            assert f"queue '{queue}{suffix}' is missing" in refused.value.problems
            assert not await mq.exists(f"{queue}{suffix}")


async def test_verify_makes_nothing_for_batches_and_groups_either(mq: AceMQ, url: str, named: str) -> None:
    queue = f"{named}-a"
    await mq.declare(Topology().queue(queue, **CLASSIC))
    async with acemq.connect(url, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(TopologyError, match="topology=VERIFY"):
            await careful.consume_batches(queue, int, lambda batch: None)
        with pytest.raises(TopologyError, match="topology=VERIFY"):
            await careful.consume_group(queue, int, handle, size=2)
        async with careful.receive(queue, int):
            pass  # it needs nothing
        assert not await mq.exists(f"{queue}.dlq")


@pytest.mark.parametrize("mode", TopologyMode)
async def test_an_exclusive_consumer_is_one_in_each_mode_and_its_lock_is_not_described(
    mq: AceMQ, url: str, named: str, mode: TopologyMode
) -> None:
    queue = f"{named}-a"
    await mq.declare(Topology().queue(queue, **CLASSIC))
    await mq.provide(mq.beside(queue))
    async with (
        acemq.connect(url, topology=mode) as connection,
        connection.consume(queue, int, handle, exclusive=True) as owner,
        connection.consume(queue, int, handle, exclusive=True) as standby,
    ):
        await mq.send(queue, 1)
        await until(lambda: owner.counters.acked == 1)
        assert standby.counters.acked == 0
        assert f"acemq.owner.{queue}" not in {each.name for each in connection.declared().queues}


async def test_verify_names_everything_that_a_pipeline_lacks_before_a_step_is_consumed(
    mq: AceMQ, url: str, named: str
) -> None:
    await mq.declare(mq.pipeline(named, int).step("a", nothing).topology())
    await mq.provide(mq.beside(f"{named}.a"))
    await mq.send(f"{named}.a", 1)
    async with acemq.connect(url, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(TopologyError) as refused:
            await careful.pipeline(named, int).step("a", nothing).step("b", nothing).start()
        assert {f"queue '{named}.b{suffix}' is missing" for suffix in BESIDE} <= set(refused.value.problems)
        assert not await mq.exists(f"{named}.b")
    assert await mq.pull(f"{named}.a", int, wait=timedelta(seconds=5)) is not None


async def test_verify_refuses_what_is_there_otherwise(mq: AceMQ, url: str, named: str) -> None:
    await mq.declare(Topology().queue(f"{named}-a", **CLASSIC).queue(f"{named}-a.dlq", max_length=5, **CLASSIC))
    await mq.declare(Topology().queue(f"{named}-a.parked", **CLASSIC))
    async with acemq.connect(url, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(DriftError, match=f"{named}-a.dlq") as refused:
            await careful.consume(f"{named}-a", int, handle)
        assert refused.value.plan.drifted


async def test_none_neither_makes_nor_looks(mq: AceMQ, url: str, named: str) -> None:
    queue = f"{named}-a"
    await mq.declare(Topology().queue(queue, **CLASSIC))
    async with acemq.connect(url, topology=TopologyMode.NONE) as trusting:
        async with trusting.consume(queue, int, handle) as consumer:
            await trusting.send(queue, 1)
            await until(lambda: consumer.counters.acked == 1)
        assert not await trusting.exists(f"{queue}.dlq")
        with pytest.raises(TopologyError, match=f"{named}-b"):
            await trusting.consume(f"{named}-b", int, handle)
        assert trusting.declared() == Topology()


async def test_what_declare_is_told_follows_its_own_mode(mq: AceMQ, url: str, named: str) -> None:
    for mode in (TopologyMode.VERIFY, TopologyMode.NONE):
        async with acemq.connect(url, topology=mode) as careful:
            await careful.declare(Topology().queue(f"{named}-a", **CLASSIC))
            assert await mq.exists(f"{named}-a")
            await mq.delete(f"{named}-a")


async def test_a_topology_of_the_libraries_own_names_is_theirs(mq: AceMQ) -> None:
    for described in (Topology().exchange("acemq.dlx", "topic"), Topology().queue("acemq.schedule.due")):
        with pytest.raises(TopologyError, match="belong to the library"):
            await mq.plan(described)
