"""Declaring, comparing, counting and deleting on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, cast

import pytest

from acemq.errors import CapabilityError, ConfigurationError, DriftError, TopologyError
from acemq.topology import Queue, Topology
from acemq.transport import ApplyMode, Finding, Published, QueueMissing, Transport
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import drain, fill, out, send, until_depth

CREATE, VERIFY, REPORT = ApplyMode.CREATE, ApplyMode.VERIFY, ApplyMode.REPORT


@pytest.fixture
async def broker(dial: Dial, name: str) -> AsyncIterator[Transport]:
    one = await dial()
    yield one
    for suffix in ("", ".dlq", ".parked", "-r", "-other", ".retry.30s"):
        await one.delete(f"{name}{suffix}")
    for suffix in ("", "-x"):
        await one.delete(f"{name}{suffix}", "exchange")


def topology(name: str) -> Topology:
    return Topology().exchange(f"{name}-x", "topic").queue(name, dead_letter=True).bind(name, f"{name}-x", "order.*")


def verdicts(findings: list[Finding] | tuple[Finding, ...]) -> set[str]:
    return {finding.verdict for finding in findings}


async def test_what_is_missing_is_created_once(broker: Transport, name: str) -> None:
    first = await broker.apply(topology(name), CREATE)
    made = {finding.name for finding in first if finding.verdict == "created"}
    assert {f"{name}-x", name, f"{name}.dlq", f"{name}.parked", f"{name} <- {name}-x on 'order.*'"} <= made
    again = await broker.apply(topology(name), CREATE)
    assert verdicts(list(again)) == {"present"}
    assert all(finding.note for finding in again if finding.kind == "binding")
    for kept in (name, f"{name}.dlq", f"{name}.parked"):
        assert await broker.exists(kept)
    assert await broker.exists(f"{name}-x", "exchange")
    assert (await send(broker, out("order.placed", exchange=f"{name}-x")))[0].outcome is Published.ROUTED


async def test_report_and_verify_create_nothing(broker: Transport, name: str) -> None:
    found = await broker.apply(topology(name), REPORT)
    assert {finding.name for finding in found if finding.verdict == "missing"} >= {name, f"{name}-x", f"{name}.dlq"}
    with pytest.raises(TopologyError, match=name):
        await broker.apply(topology(name), VERIFY)
    assert not await broker.exists(name)
    assert not await broker.exists(f"{name}-x", "exchange")
    await broker.apply(topology(name), CREATE)
    assert verdicts(list(await broker.apply(topology(name), VERIFY))) == {"present"}


@pytest.mark.parametrize(
    ("made", "wanted", "argument", "values"),
    [
        ({"ttl": timedelta(seconds=1)}, {"ttl": timedelta(seconds=2)}, "x-message-ttl", (2000, 1000)),
        ({}, {"max_length": 5}, "x-max-length", (5, None)),
        ({"type": "classic"}, {"type": "quorum"}, "x-queue-type", ("quorum", "classic")),
        ({"type": "classic"}, {"type": "classic", "durable": False}, "durable", (False, True)),
    ],
)
async def test_drift_names_argument_wanted_and_found_and_nothing_is_created(
    broker: Transport,
    name: str,
    made: Any,
    wanted: Any,
    argument: str,
    values: tuple[object, object],
) -> None:
    await broker.apply(Topology().queue(name, **made), CREATE)
    other = Topology().queue(f"{name}-r").queue(name, **wanted)
    with pytest.raises(DriftError) as refused:
        await broker.apply(other, CREATE)
    (drift,) = [
        finding for finding in refused.value.plan if isinstance(finding, Finding) and finding.verdict == "drift"
    ]
    assert drift.name == name
    if drift.argument == argument:  # the broker tells the first difference that it comes upon
        assert (drift.wanted, drift.found) == values
    assert name in str(refused.value)
    assert not await broker.exists(f"{name}-r")
    with pytest.raises(DriftError):
        await broker.apply(other, VERIFY)
    assert verdicts(list(await broker.apply(other, REPORT))) == {"drift", "missing"}


async def test_the_kind_of_an_exchange_drifts_too(broker: Transport, name: str) -> None:
    await broker.apply(Topology().exchange(f"{name}-x", "topic"), CREATE)
    with pytest.raises(DriftError) as refused:
        await broker.apply(Topology().exchange(f"{name}-x", "fanout"), CREATE)
    (drift,) = refused.value.plan
    assert isinstance(drift, Finding)
    assert (drift.argument, drift.wanted, drift.found) == ("type", "fanout", "topic")


async def test_four_that_declare_the_same_at_once_all_succeed(dial: Dial, broker: Transport, name: str) -> None:
    all_of_them = [broker, *[await dial() for _ in range(3)]]
    for _ in range(5):
        await asyncio.gather(*(one.apply(topology(name), CREATE) for one in all_of_them))
        for suffix in ("", ".dlq", ".parked"):
            await broker.delete(f"{name}{suffix}")
        await broker.delete(f"{name}-x", "exchange")


async def test_a_queue_of_another_connection_alone_is_drift_and_exists(
    dial: Dial, broker: Transport, name: str
) -> None:
    other = await dial()
    await other.apply(Topology().queue(name, exclusive=True), CREATE)
    assert await broker.exists(name)
    with pytest.raises(DriftError, match="exclusive"):
        await broker.apply(Topology().queue(name, type="classic"), CREATE)
    await other.delete(name)


async def test_streams_are_refused_before_anything_is_made(broker: Transport, name: str) -> None:
    with pytest.raises(CapabilityError, match="stream"):
        await broker.apply(Topology().queue(f"{name}-r") | Topology(queues=(Queue(name, type="stream"),)), CREATE)
    assert not await broker.exists(f"{name}-r")


async def test_a_mode_by_text_is_refused(broker: Transport) -> None:
    with pytest.raises(ConfigurationError, match="mode"):
        await broker.apply(Topology(), cast("ApplyMode", "create"))


async def test_a_binding_to_an_exchange_that_nobody_described_is_an_error_that_names_it(
    broker: Transport, name: str
) -> None:
    with pytest.raises(TopologyError, match=f"{name}-nowhere"):
        await broker.apply(Topology().queue(name).bind(name, f"{name}-nowhere", "k"), CREATE)


async def test_depth_and_purge_are_the_brokers_own_answer(broker: Transport, name: str) -> None:
    with pytest.raises(QueueMissing):
        await broker.depth(name)
    with pytest.raises(QueueMissing):
        await broker.purge(name)
    assert not await broker.exists(name)
    await broker.apply(Topology().queue(name, type="classic"), CREATE)
    await fill(broker, name, 7)
    held = await broker.pull(name, most=2, wait=timedelta(seconds=1))
    await until_depth(broker, name, 5)
    depth = await broker.depth(name)
    assert (depth.held, depth.delayed, depth.exact) == (None, None, False)
    assert depth.at.tzinfo is not None
    assert await broker.purge(name) == 5
    await until_depth(broker, name, 0)
    assert len(held) == 2


async def test_delete_knows_queues_from_exchanges_and_spares_what_is_filled(broker: Transport, name: str) -> None:
    both = Topology().exchange(name).queue(name, type="classic")
    await broker.apply(both, CREATE)
    await fill(broker, name, 1)
    assert not await broker.delete(name, only_if_empty=True)
    assert len(await drain(broker, name)) == 1
    assert await broker.delete(name, only_if_empty=True)
    assert not await broker.delete(name)
    assert not await broker.exists(name)
    assert await broker.exists(name, "exchange")
    assert await broker.delete(name, "exchange")
    assert not await broker.delete(name, "exchange")


async def test_capabilities_are_exact_per_queue(broker: Transport, declare: Declare, name: str) -> None:
    await broker.apply(Topology().queue(name).queue(f"{name}-r", type="classic", priorities=5), CREATE)
    quorum, levels = broker.capabilities_of("queue", name), broker.capabilities_of("queue", f"{name}-r")
    assert (quorum.counts_deliveries, quorum.priorities) == (True, 0)
    assert (levels.counts_deliveries, levels.priorities, levels.requeue_place) == (False, 5, "head")
    assert broker.capabilities.exclusive
    hash(broker.capabilities)


async def test_high_priority_overtakes_and_expired_messages_are_gone(broker: Transport, name: str) -> None:
    await broker.apply(Topology().queue(name, type="classic", priorities=10), CREATE)
    await send(broker, *(out(name, b"%d" % level, priority=level) for level in (1, 9, 5)))
    assert [found.body for found in await drain(broker, name)] == [b"9", b"5", b"1"]
    await send(broker, out(name, b"old", expires_in=timedelta(milliseconds=1)))
    await until_depth(broker, name, 0)
