"""Planning and declaring through the public door, on a virtual host of the test's own."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    ApplyMode,
    DriftError,
    Message,
    PartitionFailure,
    RetryPolicy,
    Topology,
    TopologyError,
    TopologyMode,
)
from acemq.patterns.ordered.keys import queues_of
from acemq.topology import Queue
from tests.rabbitmq.declarer import POLICY, topology
from tests.services import RabbitMQ
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def host(rabbitmq: RabbitMQ, name: str) -> AsyncIterator[str]:
    """An empty virtual host."""

    def make() -> None:
        rabbitmq.ctl("add_vhost", name)
        rabbitmq.ctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")

    await asyncio.to_thread(make)
    yield name
    await asyncio.to_thread(rabbitmq.ctl, "delete_vhost", name)


@pytest.fixture
async def mq(rabbitmq: RabbitMQ, host: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"{rabbitmq.url}/{host}") as mq:
        yield mq


async def listed(server: RabbitMQ, host: str, what: str, *columns: str) -> list[dict[str, Any]]:
    """What `rabbitmqctl` lists, without what every virtual host has."""
    text = await asyncio.to_thread(server.ctl, "-p", host, f"list_{what}", "--formatter", "json", *columns)
    rows: list[dict[str, Any]] = json.loads(text)
    return [row for row in rows if not str(row.get("name", row.get("source_name"))).startswith("amq.") and any(row)]


# What is there


async def test_m055_a_queue_with_two_rungs_is_five_queues_two_exchanges_and_three_bindings(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ
) -> None:
    await mq.declare(Topology().queue("in", dead_letter=True, retry=POLICY))
    home = {"x-dead-letter-exchange": "acemq.retry", "x-dead-letter-routing-key": "in"}
    dead = {"x-dead-letter-exchange": "acemq.dlx", "x-dead-letter-routing-key": "in.dlq"}
    queues = await listed(rabbitmq, host, "queues", "name", "durable", "type", "arguments")
    found = {row["name"]: {name: value for name, _, value in map(_argument, row["arguments"])} for row in queues}
    assert found == {
        "in": {"x-queue-type": "quorum", **dead},
        "in.dlq": {},
        "in.parked": {},
        "in.retry.40s": {"x-message-ttl": 40_000, **home},
        "in.retry.1m": {"x-message-ttl": 60_000, **home},
    }
    assert all(row["durable"] for row in queues)
    exchanges = await listed(rabbitmq, host, "exchanges", "name", "type", "durable")
    assert {(row["name"], row["type"], row["durable"]) for row in exchanges if row["name"]} == {
        ("acemq.dlx", "direct", True),
        ("acemq.retry", "direct", True),
    }
    bindings = await listed(rabbitmq, host, "bindings", "source_name", "destination_name", "routing_key")
    assert {tuple(row.values()) for row in bindings if row["source_name"]} == {
        ("acemq.dlx", "in.dlq", "in.dlq"),
        ("acemq.dlx", "in.parked", "in.parked"),
        ("acemq.retry", "in", "in"),
    }


def _argument(row: Any) -> tuple[str, str, object]:
    name, kind, value = row
    return name, kind, value


def rung(name: str, ttl: timedelta) -> Topology:
    home = {"rabbitmq": {"x-dead-letter-exchange": "acemq.retry", "x-dead-letter-routing-key": name}}
    return Topology(queues=(Queue(f"{name}.retry.40s", type="classic", ttl=ttl, native=home),))


async def test_a_rung_made_elsewhere_with_another_time_is_named_and_nothing_is_made_not_even_what_stands_before_it(
    mq: AceMQ,
) -> None:
    await mq.declare(rung("in", timedelta(seconds=41)))
    wanted = topology("in")
    plan = await mq.plan(wanted)
    (drift,) = (finding for finding in plan.findings if finding.verdict == "drift")
    assert (drift.name, drift.argument, drift.wanted, drift.found) == ("in.retry.40s", "x-message-ttl", 40_000, 41_000)
    assert "drift    queue     in.retry.40s: x-message-ttl wanted 40000, found 41000" in str(plan).splitlines()
    with pytest.raises(DriftError, match=r"in\.retry\.40s.*x-message-ttl=41000.*40000") as refused:
        await mq.declare(wanted)
    assert refused.value.plan == plan
    assert not await mq.exists("in-x", "exchange")
    assert not await mq.exists("acemq.retry", "exchange")
    assert not await mq.exists("in")


async def test_the_plan_of_a_consumers_own_queues_is_in_its_error(mq: AceMQ) -> None:
    await mq.declare(Topology().queue("in").queue("in.dlq", type="classic", max_length=5))
    with pytest.raises(DriftError, match=r"in\.dlq.*x-max-length") as refused:
        await mq.consume("in", int, lambda message: None)
    assert "drift    queue     in.dlq: x-max-length wanted None, found 5" in str(refused.value.plan)
    assert not await mq.exists("in.parked")


# Advice


async def test_a_quorum_queue_without_dead_letters_is_told_what_rabbitmq_does_to_a_poison_message(mq: AceMQ) -> None:
    plan = await mq.plan(
        Topology().queue("bare").queue("kept", dead_letter=True).queue("small", type="classic").exchange("ex")
    )
    (sentence,) = (sentence for sentence in plan.advice if "delivery limit" in sentence)
    assert sentence.startswith("queue 'bare': RabbitMQ 4 drops a message")
    assert "limit of 20" in sentence
    assert "dead_letter=True" in sentence
    assert f"advice   {sentence}" in str(plan).splitlines()


@pytest.mark.parametrize(("limit", "told"), [(5, True), (-1, False)])
async def test_a_delivery_limit_of_ones_own_is_the_one_told(mq: AceMQ, limit: int, told: bool) -> None:
    plan = await mq.plan(Topology().queue("bare", native={"rabbitmq": {"x-delivery-limit": limit}}))
    assert any("limit of 5" in sentence for sentence in plan.advice) is told


async def test_an_ordered_queue_is_told_once_of_a_policy_that_is_one_of_its_partitions(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ
) -> None:
    described = mq.ordered("my-ledger", int).partitions(4)
    plan = await mq.plan(described.topology())
    (sentence,) = plan.advice
    assert sentence.startswith("ordered queue 'my-ledger': RabbitMQ drops a message after its delivery limit")
    assert "dead_letter=True" not in sentence, "its queues have no arguments"
    said = re.search(r"rabbitmqctl (set_policy .* --apply-to queues)", sentence)
    assert said is not None
    policy = shlex.split(said[1])
    assert policy[-3:] == ['{"delivery-limit": -1}', "--apply-to", "queues"]

    # Version 3 has no -1: that the rest does what it says is shown with a number.
    policy[-3] = '{"delivery-limit": 7}'
    await asyncio.to_thread(rabbitmq.ctl, "-p", host, *policy)
    await described.declare()
    await mq.declare(Topology().queue("my-ledger.0.dlq", type="classic").queue("my-ledger.north.0"))
    queues = await listed(rabbitmq, host, "queues", "name", "policy")
    assert {row["name"] for row in queues if row["policy"] == "my-ledger"} == set(queues_of("my-ledger", 4))


async def halted_at(url: str, name: str) -> str:
    """The message at which the next owner of this ordered queue halts."""

    def fail(message: Message[int]) -> None:
        raise LookupError("no such account")

    async with acemq.connect(url) as mq:
        described = mq.ordered(name, int).partitions(1).on_failure(PartitionFailure.STOP, attempts=1)
        ledger = await described.declare()
        async with ledger.consume(fail):
            await until(lambda: bool(ledger.halted_partitions), within=20)
            return ledger.halted_partitions[0].message_id


async def test_a_limit_below_its_consumers_drops_a_halted_message_and_lets_the_next_one_pass(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ
) -> None:
    """What that advice is for."""
    low = ("set_policy", "low", r"^low\.[0-9]+$", '{"delivery-limit": 1}', "--apply-to", "queues")
    await asyncio.to_thread(rabbitmq.ctl, "-p", host, *low)
    for name, ends_at in (("kept", 0), ("low", 1)):
        ledger = await mq.ordered(name, int).partitions(1).declare()
        sent = [(await ledger.send(number, key="a")).message_id for number in range(2)]
        at = [await halted_at(f"{rabbitmq.url}/{host}", name) for _ in range(3)]
        assert (at[0], at[-1]) == (sent[0], sent[ends_at])


async def test_rungs_before_a_quorum_queue_are_told_what_a_restart_may_cost_and_those_of_a_classic_one_are_not(
    mq: AceMQ,
) -> None:
    described = Topology().queue("in", retry=POLICY)
    (sentence,) = (sentence for sentence in (await mq.plan(described)).advice if "restarts" in sentence)
    assert sentence.startswith("queue 'in'")
    for word in ("in.retry.40s, in.retry.1m", "type='classic'", "wait_in_broker_from(timedelta(0))"):
        assert word in sentence
    made = await mq.declare(described)
    assert sentence in made.advice
    assert sentence in (await mq.plan(mq.declared())).advice
    classic = Topology().queue("other", type="classic", retry=POLICY)
    short = Topology().queue("third", retry=POLICY.wait_in_broker_from(timedelta(0)))
    assert not any("restarts" in sentence for sentence in (await mq.plan(classic | short)).advice)


async def test_bindings_that_cannot_be_seen_are_told(mq: AceMQ) -> None:
    bound = await mq.plan(Topology().exchange("ex").queue("in", type="classic").bind("in", "ex"))
    assert any("bindings are not compared" in sentence for sentence in bound.advice)
    assert not (await mq.plan(Topology().queue("in", type="classic"))).advice


# Many at once


@asynccontextmanager
async def declarers(count: int, url: str, name: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    command = [sys.executable, "-W", "error", "-m", "tests.rabbitmq.declarer", url, name]
    pipe = asyncio.subprocess.PIPE
    async with AsyncExitStack() as ended:
        processes: list[asyncio.subprocess.Process] = []
        for _ in range(count):
            process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
            ended.push_async_callback(end, process)
            processes.append(process)
        assert await answers(processes) == ["ready"] * count
        yield processes


async def end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()  # the end of its input ends it
    await process.wait()


async def answers(processes: list[asyncio.subprocess.Process]) -> list[str]:
    streams = [process.stdout for process in processes if process.stdout is not None]
    lines = await asyncio.gather(*(stream.readline() for stream in streams))
    return [line.decode().strip() for line in lines]


async def all_at_once(processes: list[asyncio.subprocess.Process]) -> list[str]:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"now\n")
    return await answers(processes)


@pytest.mark.timeout(150)
async def test_two_processes_that_declare_one_topology_at_the_same_instant_both_succeed_in_20_rounds(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ
) -> None:
    async with declarers(2, f"{rabbitmq.url}/{host}", "in") as processes:
        for _ in range(20):
            for said in await all_at_once(processes):
                assert set(said.split()) <= {"created", "present"}
            for suffix in ("", ".dlq", ".parked", ".retry.40s", ".retry.1m"):
                assert await mq.delete(f"in{suffix}")
            for exchange in ("in-x", "acemq.dlx", "acemq.retry"):
                assert await mq.delete(exchange, "exchange")


@pytest.mark.timeout(150)
async def test_m054_what_is_applied_is_applied_again_by_8_processes_at_once_and_all_is_present(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ
) -> None:
    await mq.declare(topology("in"))
    async with declarers(8, f"{rabbitmq.url}/{host}", "in") as processes:
        assert await all_at_once(processes) == ["present"] * 8


# Whose rights are small


@pytest.fixture
async def powerless(rabbitmq: RabbitMQ, host: str) -> AsyncIterator[str]:
    """The URL of a user who may read everything, write to the default exchange and configure nothing."""
    user = host[-8:]

    def make() -> None:
        rabbitmq.ctl("add_user", user, "pw")
        rabbitmq.ctl("set_permissions", "-p", host, user, "^$", r"^amq\.default$", ".*")

    await asyncio.to_thread(make)
    yield f"{rabbitmq.url_as(user, 'pw')}/{host}"
    await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)


async def validated(payload: int) -> int:
    return payload


async def program(mq: AceMQ) -> None:
    """A consumer whose messages wait on rungs, and a pipeline; each handles one message."""
    handled: list[int] = []

    def handle(message: Message[int]) -> None:
        handled.append(message.payload)

    async with mq.consume("in", int, handle, retry=POLICY):
        async with mq.pipeline("orders", int).step("validate", validated).step("store", validated).start() as running:
            await mq.send("in", 7)
            await running.send(1)
            await until(lambda: handled == [7] and running.counters.completed == 1)


async def test_without_the_right_to_configure_a_program_runs_on_what_declared_has_prepared(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ, powerless: str, name: str
) -> None:
    # An unrestricted run somewhere else; what it has declared is applied here.
    async with acemq.connect(f"{rabbitmq.url}") as free:
        await free.declare(Topology().queue("in", retry=POLICY))
        await program(free)
        prepared = free.declared()
        for queue in prepared.queues:
            await free.delete(queue.name)
        await free.delete("orders", "exchange")
    await mq.declare(prepared)
    async with acemq.connect(powerless, topology=TopologyMode.VERIFY) as careful:
        await program(careful)
        plan = await careful.plan(prepared)
        assert not plan.missing
        assert "no right to declare it" in str(plan)


async def test_without_the_right_to_configure_an_empty_broker_is_refused_by_name_and_nothing_is_made(
    rabbitmq: RabbitMQ, host: str, mq: AceMQ, powerless: str
) -> None:
    async with acemq.connect(powerless, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(TopologyError, match="'in'"):
            await careful.consume("in", int, lambda message: None, retry=POLICY)
        with pytest.raises(TopologyError) as refused:
            await careful.pipeline("orders", int).step("validate", validated).start()
        for missing in ("orders.validate", "orders.validate.dlq", "orders.validate.parked"):
            assert f"queue '{missing}' is missing" in refused.value.problems
        assert "exchange 'orders' is missing" in refused.value.problems
    assert await listed(rabbitmq, host, "queues", "name") == []
    assert not [row for row in await listed(rabbitmq, host, "exchanges", "name") if row["name"]]


async def test_without_the_right_to_configure_the_missing_rungs_of_a_consumer_are_named(
    mq: AceMQ, powerless: str
) -> None:
    await mq.declare(Topology().queue("in", dead_letter=True))
    async with acemq.connect(powerless, topology=TopologyMode.VERIFY) as careful:
        with pytest.raises(TopologyError, match="topology=VERIFY") as refused:
            await careful.consume("in", int, lambda message: None, retry=POLICY)
    assert [problem for problem in refused.value.problems if problem.startswith("queue")] == [
        "queue 'in.retry.40s' is missing",
        "queue 'in.retry.1m' is missing",
    ]


async def test_a_policy_of_the_connection_has_its_rungs_looked_for_too(
    mq: AceMQ, rabbitmq: RabbitMQ, host: str
) -> None:
    await mq.declare(Topology().queue("in", dead_letter=True))
    policy = RetryPolicy.fixed(2, timedelta(minutes=1))
    async with acemq.connect(f"{rabbitmq.url}/{host}", topology=TopologyMode.VERIFY, retry=policy) as careful:
        with pytest.raises(TopologyError, match=r"in\.retry\.1m"):
            await careful.consume("in", int, lambda message: None)
        await careful.declare(careful.beside("in"), mode=ApplyMode.CREATE)
        await (await careful.consume("in", int, lambda message: None)).drain()
