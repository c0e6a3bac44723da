from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest

from acemq.errors import CapabilityError, ConfigurationError, DriftError, TopologyError
from acemq.plan import Finding
from acemq.retry import RetryPolicy
from acemq.topology import Queue, Topology
from acemq.transport import AccessDenied, ApplyMode, ExchangeMissing, QueueMissing
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, SECOND, Client

CREATE, VERIFY, REPORT = ApplyMode.CREATE, ApplyMode.VERIFY, ApplyMode.REPORT

NEWS = Topology().exchange("news", "topic").queue("a").queue("b").bind("a", "news", "a.*").bind("b", "news", "#")
BINDINGS = ("a <- news on 'a.*'", "b <- news on '#'")


def verdicts(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.verdict, finding.name) for finding in findings]


async def test_create_makes_what_is_missing_and_is_idempotent(client: Client) -> None:
    made = verdicts([*await client.port.apply(NEWS, CREATE)])
    there = verdicts([*await client.port.apply(NEWS, CREATE)])
    assert made == [("created", name) for name in ("news", "a", "b", *BINDINGS)]
    assert there == [("present", name) for name in ("news", "a", "b", *BINDINGS)]
    assert [await client.port.exists("a"), await client.port.exists("news", "exchange")] == [True, True]


async def test_report_and_verify_create_nothing_and_verify_raises(client: Client, broker: MemoryBroker) -> None:
    assert verdicts([*await client.port.apply(NEWS, REPORT)])[0] == ("missing", "news")
    with pytest.raises(TopologyError, match="'news' is missing") as raised:
        await client.port.apply(NEWS, VERIFY)
    assert len(raised.value.problems) == 5
    assert not isinstance(raised.value, DriftError)
    assert (list(broker.queues), list(broker.exchanges)) == (["orders"], [])


async def test_drift_names_argument_wanted_and_found_and_nothing_is_made(client: Client) -> None:
    await client.declare("a", ttl=SECOND)
    topology = Topology().queue("new").queue("a", ttl=MINUTE, max_length=5)
    with pytest.raises(DriftError, match="max_length=None, and 5 is wanted") as raised:
        await client.port.apply(topology, CREATE)
    drifts = [finding for finding in raised.value.plan.findings if finding.verdict == "drift"]
    assert [(drift.name, drift.argument, drift.wanted, drift.found) for drift in drifts] == [
        ("a", "ttl", MINUTE, SECOND),
        ("a", "max_length", 5, None),
    ]
    assert not await client.port.exists("new")


async def test_an_exchange_of_another_kind_is_drift(client: Client) -> None:
    await client.apply(NEWS)
    (drift,) = await client.port.apply(Topology().exchange("news", "fanout"), REPORT)
    assert (drift.argument, drift.wanted, drift.found) == ("kind", "fanout", "topic")
    with pytest.raises(DriftError):
        await client.port.apply(Topology().exchange("news", "fanout"), VERIFY)


async def test_the_rungs_of_a_queue_are_no_drift_where_there_are_none(client: Client) -> None:
    await client.declare("letters", dead_letter=True)
    policy = RetryPolicy.fixed(3, timedelta(minutes=1))
    await client.declare("letters", retry=policy)
    assert not await client.port.exists("letters.retry.1m")


async def test_dead_letters_are_two_queues_and_no_exchange(client: Client) -> None:
    findings = await client.port.apply(Topology().queue("letters", dead_letter=True), CREATE)
    assert verdicts([*findings]) == [("created", name) for name in ("letters", "letters.dlq", "letters.parked")]
    await client.send(b"x", to="letters.dlq")
    await client.send(b"x", to="letters.parked")
    assert not await client.port.exists("acemq.dlx", "exchange")


async def test_a_binding_may_end_at_what_is_there_already_but_not_at_nothing(client: Client) -> None:
    await client.apply(Topology().exchange("news", "topic"))
    await client.apply(Topology().bind("orders", "news", "#"))
    with pytest.raises(QueueMissing, match="nobody"):
        await client.apply(Topology().queue("new").bind("nobody", "news", "#"))
    with pytest.raises(ExchangeMissing, match="nothing"):
        await client.apply(Topology().queue("new").bind("new", "nothing", "#"))
    assert not await client.port.exists("new")


@pytest.mark.parametrize(
    ("queue", "named"),
    [
        (Queue("new", type="stream"), "stream"),
        (Queue("new", lease=SECOND), "lease"),
        (Queue("new", priorities=257, type="classic"), "priorities"),
        (Queue("new", native={"memory": {"size": 1}}), "native"),
    ],
)
async def test_an_argument_it_cannot_honour_is_refused_by_name_and_nothing_is_made(
    client: Client, queue: Queue, named: str
) -> None:
    with pytest.raises(CapabilityError, match=named):
        await client.port.apply(Topology(queues=(Queue("good"), queue)), CREATE)
    assert not await client.port.exists("good")


async def test_arguments_for_another_transport_are_skipped(client: Client) -> None:
    await client.declare("new", native={"rabbitmq": {"x-delivery-limit": 5}, "aws": {"x": 1}})
    await client.declare("new")


async def test_a_mode_by_text_is_refused(client: Client) -> None:
    with pytest.raises(ConfigurationError, match="mode"):
        await client.port.apply(NEWS, cast(Any, "create"))


async def test_delete_knows_the_kind_and_says_what_was_there(client: Client) -> None:
    await client.apply(Topology().exchange("orders"))
    assert [await client.port.delete("orders", "exchange"), await client.port.delete("orders", "exchange")] == [
        True,
        False,
    ]
    assert await client.port.exists("orders")
    assert [await client.port.delete("orders"), await client.port.delete("orders")] == [True, False]


async def test_a_filled_queue_is_not_deleted_only_if_empty(client: Client) -> None:
    await client.send(b"x")
    assert not await client.port.delete("orders", only_if_empty=True)
    held = await client.take()
    assert not await client.port.delete("orders", only_if_empty=True)
    await client.accept(*held)
    assert await client.port.delete("orders", only_if_empty=True)


async def test_purge_removes_what_is_ready_and_nothing_else(client: Client) -> None:
    await client.send(b"1", b"2", b"3", expires_in=MINUTE)
    await client.take(most=1)
    await client.send(b"4", delay=SECOND)
    assert await client.port.purge("orders") == 2
    assert await client.depth() == (0, 1, 1)
    with pytest.raises(QueueMissing):
        await client.port.purge("nobody")


async def test_depth_is_exact_and_dated(client: Client) -> None:
    await client.advance(MINUTE)
    depth = await client.port.depth("orders")
    assert (depth.exact, depth.at) == (True, client.clock.now())
    with pytest.raises(QueueMissing):
        await client.port.depth("nobody")


async def test_an_exclusive_queue_is_its_clients_own_and_goes_with_it(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    await client.declare("mine", exclusive=True)
    other = await connect(broker)
    for refused in (
        other.take("mine"),
        other.consume("mine"),
        other.port.delete("mine"),
        other.declare("mine", exclusive=True),
    ):
        with pytest.raises(AccessDenied, match="mine"):
            await refused
    await other.send(b"answer", to="mine")
    assert await client.bodies("mine") == [b"answer"]
    await client.port.close()
    assert not await other.port.exists("mine")


async def test_capabilities_of_a_queue_are_exact(client: Client) -> None:
    await client.declare("urgent", priorities=3, type="classic")
    assert client.port.capabilities_of("queue", "urgent").priorities == 3
    assert client.port.capabilities_of("queue", "orders").priorities == 0
    assert client.port.capabilities_of("queue", "nobody") == client.port.capabilities
    assert client.port.capabilities_of("exchange", "urgent").priorities == 256
