from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from acemq.clock import MovableClock
from acemq.errors import CapabilityError, ConfigurationError, DriftError
from acemq.retry import RetryPolicy
from acemq.topology import Topology, aside_of, rungs
from acemq.transport import ApplyMode, LostBy, Nacked, Published, Settled
from acemq.transports.memory import MemoryBroker, Profile
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, SECOND, Client, outgoing


@pytest.fixture
async def rabbit(connect: Connect, clock: MovableClock) -> Client:
    client = await connect(MemoryBroker(clock=clock, profile=Profile.RABBITMQ))
    await client.declare("orders")
    await client.declare("classic", type="classic")
    return client


@pytest.fixture
async def bare(connect: Connect, clock: MovableClock) -> Client:
    client = await connect(MemoryBroker(clock=clock, profile=Profile.BARE))
    await client.declare("orders")
    return client


async def refused(client: Client, **options: Any) -> str:
    outcome, error = await client.outcome(outgoing(**options))
    assert outcome is Published.REFUSED
    assert isinstance(error, CapabilityError)
    return error.option


def test_full_says_what_it_can_do() -> None:
    can = Profile.FULL.capabilities
    assert (can.transport, can.durable, can.ordering, can.requeue_place, can.unroutable) == (
        "memory",
        False,
        "fifo",
        "head",
        "told",
    )
    assert (can.lease, can.hold_limit, can.priorities, can.depth) == (None, None, 256, "exact")
    assert can.publish_delay == can.requeue_delay == timedelta.max
    has = (can.requeue_rewrites, can.expiry, can.fenced, can.counts_deliveries, can.exclusive, can.max_length)
    lacks = (can.transactions, can.streams, can.dead_letter_routes, can.consumer_priority)
    assert all(has)
    assert not any(lacks)


def test_a_broker_made_with_a_lease_says_so() -> None:
    terms = MemoryBroker(lease=timedelta(seconds=30)).capabilities.lease
    assert terms is not None
    assert (terms.default, terms.step, terms.renewable) == (timedelta(seconds=30), timedelta(milliseconds=1), True)


# As RabbitMQ


async def test_rabbitmq_has_no_delay_and_no_rewrite(rabbit: Client, caplog: pytest.LogCaptureFixture) -> None:
    assert "delay" in await refused(rabbit, delay=SECOND)
    await rabbit.send(b"x", headers={"n": 1})
    held = await rabbit.take()
    assert await rabbit.requeue(*held, delay=SECOND) == [Settled.FAILED]
    assert await rabbit.requeue(*held, headers={}) == [Settled.FAILED]
    assert "RABBITMQ" in caplog.text
    assert await rabbit.accept(*held) == [Settled.DONE]


async def test_a_rung_brings_a_copy_home_after_its_wait(rabbit: Client) -> None:
    await rabbit.declare("letters", retry=RetryPolicy.fixed(3, MINUTE))
    await rabbit.send(b"again", to="letters.retry.1m", headers={"x-acemq-attempt": 2})
    await rabbit.advance(MINUTE - timedelta(milliseconds=1))
    assert await rabbit.depth_ready("letters") == 0
    await rabbit.advance(timedelta(milliseconds=1))
    (delivery,) = await rabbit.take("letters")
    assert (delivery.exchange, delivery.routing_key) == ("acemq.retry", "letters")
    assert (delivery.body, delivery.headers, delivery.expires_in) == (b"again", {"x-acemq-attempt": 2}, None)


async def test_the_librarys_queues_exist_as_the_contract_has_them(rabbit: Client) -> None:
    await rabbit.declare("letters", retry=RetryPolicy.fixed(2, MINUTE))
    for queue in ("letters.dlq", "letters.parked", "letters.retry.1m"):
        assert await rabbit.port.exists(queue)
    for exchange in ("acemq.dlx", "acemq.retry"):
        assert await rabbit.port.exists(exchange, "exchange")
    found = await rabbit.port.apply(aside_of("letters") | rungs("letters", [MINUTE]), ApplyMode.VERIFY)
    assert {finding.verdict for finding in found} == {"present"}


async def test_what_expires_goes_through_the_dead_letter_exchange(rabbit: Client) -> None:
    await rabbit.declare("letters", dead_letter=True)
    await rabbit.send(b"x", to="letters", expires_in=SECOND)
    await rabbit.advance(SECOND)
    (letter,) = await rabbit.take("letters.dlq")
    assert (letter.exchange, letter.routing_key) == ("acemq.dlx", "letters.dlq")


async def test_a_native_dead_letter_exchange_keeps_the_key_unless_it_is_given(rabbit: Client) -> None:
    native = {"rabbitmq": {"x-dead-letter-exchange": "morgue"}}
    await rabbit.apply(
        Topology()
        .exchange("morgue", "topic")
        .queue("dead")
        .queue("brief", ttl=SECOND, native=native)
        .bind("dead", "morgue", "brief")
    )
    await rabbit.send(b"x", to="brief")
    await rabbit.advance(SECOND)
    assert await rabbit.bodies("dead") == [b"x"]


async def test_what_expires_to_nowhere_is_dropped(rabbit: Client) -> None:
    native = {"rabbitmq": {"x-dead-letter-exchange": "nothing"}}
    await rabbit.declare("brief", ttl=SECOND, native=native)
    await rabbit.send(b"x", to="brief")
    await rabbit.advance(SECOND)
    assert rabbit.broker.snapshot() == []


async def test_a_requeue_goes_to_the_tail_of_a_quorum_queue_and_keeps_its_place_in_a_classic_one(
    rabbit: Client,
) -> None:
    for queue, expected in (("orders", [b"2", b"3", b"1"]), ("classic", [b"1", b"2", b"3"])):
        await rabbit.send(b"1", b"2", b"3", to=queue)
        await rabbit.requeue(*await rabbit.take(queue, 1))
        assert await rabbit.bodies(queue) == expected
    assert rabbit.port.capabilities_of("queue", "orders").requeue_place == "tail"
    assert rabbit.port.capabilities_of("queue", "classic").requeue_place == "head"


async def test_giving_back_keeps_the_place_on_a_quorum_queue_too(rabbit: Client) -> None:
    await rabbit.send(b"1", b"2", b"3")
    _, subscription = await rabbit.consume(prefetch=2)
    await subscription.close()
    assert await rabbit.bodies() == [b"1", b"2", b"3"]


async def test_only_quorum_queues_count_deliveries(rabbit: Client) -> None:
    await rabbit.send(b"x")
    await rabbit.send(b"x", to="classic")
    (counted,), (uncounted,) = await rabbit.take(), await rabbit.take("classic")
    assert (counted.deliveries, uncounted.deliveries) == (1, None)
    assert (counted.fence, counted.lease_until) == (None, None)


async def test_a_delivery_held_for_too_long_kills_its_channel(rabbit: Client) -> None:
    await rabbit.send(b"1", b"2")
    sink, subscription = await rabbit.consume(prefetch=2)
    subscription.pause()
    await rabbit.advance(timedelta(minutes=30))
    assert sink.losses == [([b"1", b"2"], LostBy.CHANNEL)]
    assert await rabbit.depth_ready("orders") == 2


async def test_depth_tells_what_is_ready_and_nothing_else(rabbit: Client) -> None:
    await rabbit.send(b"1", b"2")
    await rabbit.take(most=1)
    assert await rabbit.depth() == (1, None, None)


async def test_a_full_queue_nacks_and_other_queues_of_the_fan_out_have_it(rabbit: Client) -> None:
    await rabbit.apply(
        Topology().exchange("all", "fanout").queue("small", max_length=1).bind("small", "all").bind("orders", "all")
    )
    await rabbit.send(b"1", exchange="all")
    outcome, error = await rabbit.outcome(outgoing(b"2", exchange="all"))
    assert (outcome, type(error)) == (Published.FAILED, Nacked)
    assert await rabbit.bodies() == [b"1", b"2"]


async def test_drift_is_told_in_rabbitmqs_words(rabbit: Client) -> None:
    with pytest.raises(DriftError, match="x-message-ttl=None, and 1000 is wanted"):
        await rabbit.declare("orders", ttl=SECOND)


def test_leases_are_refused_where_links_hold() -> None:
    with pytest.raises(ConfigurationError, match="lease"):
        MemoryBroker(profile=Profile.RABBITMQ, lease=SECOND)


# Bare


async def test_bare_refuses_every_option_by_name(bare: Client) -> None:
    assert "delay" in await refused(bare, delay=SECOND)
    assert "expires_in" in await refused(bare, expires_in=SECOND)
    assert "priority" in await refused(bare, priority=0)
    with pytest.raises(CapabilityError, match="exclusive"):
        await bare.consume(exclusive=True)
    for option, value in (("ttl", SECOND), ("max_length", 1), ("ordered", True), ("priorities", 2)):
        with pytest.raises(CapabilityError, match=option):
            await bare.declare("new", **{option: value, "type": "classic"})
    with pytest.raises(CapabilityError, match=r"a\.\*"):
        await bare.apply(Topology().exchange("news", "topic").bind("orders", "news", "a.*"))
    with pytest.raises(CapabilityError, match="depth"):
        await bare.depth()


async def test_bare_does_not_know_what_is_unroutable_and_counts_nothing(bare: Client) -> None:
    assert await bare.outcome(outgoing(to="nobody")) == (Published.ROUTED, None)
    await bare.send(b"x")
    (delivery,) = await bare.take()
    assert (delivery.deliveries, delivery.fence) == (None, None)
    assert await bare.port.purge("orders") is None


async def test_bare_sends_receives_and_settles(bare: Client) -> None:
    await bare.send(b"1", b"2")
    sink, _ = await bare.consume()
    await bare.requeue(sink.deliveries[0])
    await bare.turn()
    assert await bare.accept(*sink.deliveries[1:]) == [Settled.DONE, Settled.DONE]


async def test_a_profile_of_ones_own_is_narrowed_by_replacing(connect: Connect, clock: MovableClock) -> None:
    short = replace(Profile.FULL, name="SHORT", capabilities=replace(Profile.FULL.capabilities, publish_delay=MINUTE))
    client = await connect(MemoryBroker(clock=clock, profile=short))
    await client.declare("orders")
    await client.send(b"x", delay=MINUTE)
    assert "delay" in await refused(client, delay=MINUTE + SECOND)
