from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest
from msgspec.structs import replace

from acemq.clock import MovableClock, sleep
from acemq.errors import CapabilityError, ConfigurationError
from acemq.testing.conformance.timing import time_factor
from acemq.topology import Topology
from acemq.transport import Delivery, LeaseTerms, LostBy
from acemq.transports.memory import MemoryBroker, Profile
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, NOW, SECOND, Calling, Client

TICK = timedelta(milliseconds=1)
LEASE = timedelta(seconds=30)


@pytest.fixture
async def leased(connect: Connect, clock: MovableClock) -> Client:
    client = await connect(MemoryBroker(clock=clock, lease=LEASE))
    await client.declare("orders")
    return client


# Delays


async def test_a_delayed_message_is_hidden_until_the_instant(client: Client) -> None:
    sink, _ = await client.consume()
    await client.send(b"later", delay=MINUTE)
    await client.send(b"now", delay=NOW)
    await client.send(b"past", delay=-SECOND)
    assert await client.depth() == (0, 2, 1)
    await client.advance(MINUTE - TICK)
    assert sink.bodies == [b"now", b"past"]
    await client.advance(TICK)
    assert sink.bodies == [b"now", b"past", b"later"]


async def test_delays_come_due_in_the_order_of_their_instants(client: Client) -> None:
    arrivals: list[tuple[bytes, float]] = []
    await client.port.subscribe(
        "orders", Calling(lambda d: arrivals.append((d.body, client.clock.monotonic()))), prefetch=9
    )
    for seconds in (8, 4, 2, 1):
        await client.send(b"%d" % seconds, delay=seconds * SECOND)
    await client.advance(MINUTE)
    assert arrivals == [(b"1", 1.0), (b"2", 2.0), (b"4", 4.0), (b"8", 8.0)]


async def test_a_delayed_message_comes_in_at_the_place_it_was_sent(client: Client) -> None:
    await client.send(b"first", delay=SECOND)
    await client.send(b"second")
    await client.advance(SECOND)
    assert await client.bodies() == [b"first", b"second"]


async def test_bindings_of_a_delayed_publish_are_those_of_its_acceptance(client: Client) -> None:
    news = Topology().exchange("news", "fanout").queue("a").queue("b")
    await client.apply(news.bind("a", "news"))
    await client.send(b"x", exchange="news", delay=MINUTE)
    await client.apply(news.bind("b", "news"))
    await client.advance(MINUTE)
    assert (await client.bodies("a"), await client.bodies("b")) == ([b"x"], [])


async def test_a_requeue_with_a_delay_returns_rewritten_at_its_instant_in_its_old_place(client: Client) -> None:
    await client.send(b"1", b"2", headers={"n": 1})
    (first,) = await client.take(most=1)
    await client.requeue(first, delay=MINUTE, headers={"n": 2})
    assert await client.depth() == (1, 0, 1)
    await client.advance(MINUTE - TICK)
    assert await client.depth() == (1, 0, 1)
    await client.advance(TICK)
    taken = await client.take()
    assert [(delivery.body, delivery.headers["n"]) for delivery in taken] == [(b"1", 2), (b"2", 1)]


# Expiry


async def test_a_message_expires_at_its_instant_also_when_nobody_consumes(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"short", expires_in=SECOND)
    await client.send(b"long", expires_in=MINUTE)
    await client.advance(SECOND - TICK)
    assert await client.depth() == (2, 0, 0)
    await client.advance(TICK)
    assert await client.depth() == (1, 0, 0)
    assert broker.expired == {"orders": 1}
    assert await client.bodies() == [b"long"]


async def test_what_expires_in_a_queue_with_dead_letters_goes_to_them_whole_and_stays(client: Client) -> None:
    await client.declare("letters", dead_letter=True)
    await client.send(b"x", to="letters", expires_in=SECOND, headers={"a": [1]}, message_id="m-1", reply_to="r")
    await client.advance(SECOND)
    (letter,) = await client.take("letters.dlq")
    assert (letter.body, letter.headers, letter.message_id, letter.reply_to) == (b"x", {"a": [1]}, "m-1", "r")
    assert (letter.routing_key, letter.redelivered, letter.deliveries) == ("letters.dlq", False, 1)
    await client.requeue(letter)
    await client.advance(MINUTE)
    assert await client.depth("letters.dlq") == (1, 0, 0)


async def test_the_ttl_of_a_queue_and_of_a_message_the_shorter_counts(client: Client) -> None:
    await client.declare("brief", ttl=10 * SECOND)
    await client.send(b"queue", to="brief", expires_in=MINUTE)
    await client.send(b"message", to="brief", expires_in=SECOND)
    await client.advance(SECOND)
    assert await client.depth("brief") == (1, 0, 0)
    await client.advance(9 * SECOND)
    assert await client.depth("brief") == (0, 0, 0)


async def test_the_ttl_of_a_queue_runs_from_when_a_delayed_message_is_there(client: Client) -> None:
    await client.declare("brief", ttl=SECOND)
    await client.send(b"x", to="brief", delay=MINUTE)
    await client.advance(MINUTE + SECOND - TICK)
    assert await client.depth("brief") == (1, 0, 0)
    await client.advance(TICK)
    assert await client.depth("brief") == (0, 0, 0)


async def test_a_held_message_does_not_expire_until_it_comes_back(client: Client) -> None:
    await client.send(b"1", b"2", expires_in=SECOND)
    one, two = await client.take()
    await client.advance(MINUTE)
    assert [str(done) for done in await client.accept(one)] == ["done"]
    await client.requeue(two)
    assert await client.depth() == (0, 0, 0)


async def test_a_message_that_lives_on_can_be_requeued_and_had_again(client: Client) -> None:
    await client.send(b"x", expires_in=MINUTE)
    (delivery,) = await client.take()
    await client.requeue(delivery)
    (again,) = await client.take()
    assert (again.body, again.expires_in) == (b"x", MINUTE)


# Leases


async def test_without_leases_a_delivery_is_held_for_ever(client: Client) -> None:
    await client.send(b"x")
    (delivery,) = await client.take()
    await client.advance(timedelta(days=30))
    assert delivery.lease_until is None
    assert [str(done) for done in await client.accept(delivery)] == ["done"]


async def test_a_lease_that_is_not_renewed_ends_at_its_instant(leased: Client) -> None:
    await leased.send(b"x")
    sink, subscription = await leased.consume(prefetch=1)
    assert sink.deliveries[0].lease_until == 30.0
    subscription.pause()
    await leased.advance(LEASE - TICK)
    assert await leased.depth() == (0, 1, 0)
    await leased.advance(TICK)
    assert sink.losses == [([b"x"], LostBy.LEASE)]
    assert await leased.depth() == (1, 0, 0)
    assert [str(done) for done in await leased.accept(sink.deliveries[0])] == ["stale"]
    (again,) = await leased.take()
    assert (again.redelivered, again.deliveries) == (True, 2)


async def test_a_renewed_lease_lasts_and_a_lost_one_says_so(leased: Client) -> None:
    await leased.send(b"1", b"2", b"3")
    kept, lost, _ = held = await leased.take()
    await leased.advance(LEASE / 2)
    renewals = await leased.port.renew(held[:1], LEASE)
    assert [(renewal.outcome, renewal.until) for renewal in renewals] == [("renewed", 45.0)]
    await leased.advance(LEASE / 2)
    assert await leased.depth() == (2, 1, 0)
    renewals = await leased.port.renew([kept, lost], LEASE)
    assert [renewal.outcome for renewal in renewals] == ["renewed", "lost"]
    assert [str(done) for done in await leased.accept(kept)] == ["done"]


async def test_each_lease_ends_in_its_own_time_and_is_rounded_up_to_the_step(leased: Client) -> None:
    await leased.declare("slow", lease=MINUTE)
    await leased.send(b"1")
    await leased.send(b"2")
    await leased.send(b"3", to="slow")
    (one,) = await leased.take(most=1, lease=2 * SECOND)
    (two,) = await leased.take(most=1, lease=timedelta(microseconds=6_000_001))
    (three,) = await leased.take("slow")
    assert (one.lease_until, two.lease_until, three.lease_until) == (2.0, 6.001, 60.0)
    await leased.advance(2 * SECOND)
    assert await leased.depth() == (1, 1, 0)
    await leased.advance(timedelta(seconds=4, milliseconds=1))
    assert await leased.depth() == (2, 0, 0)


async def test_a_lease_runs_from_the_arrival_and_not_from_the_start_of_a_wait(leased: Client) -> None:
    waiting = asyncio.ensure_future(leased.port.pull("orders", most=1, wait=10 * MINUTE))
    await leased.advance(MINUTE)
    await leased.send(b"x")
    (delivery,) = await waiting
    assert delivery.lease_until == 90.0


async def test_a_lease_out_of_bounds_is_refused_naming_the_bound(leased: Client) -> None:
    with pytest.raises(ConfigurationError, match=r"0:00:00\.001"):
        await leased.take(lease=timedelta(microseconds=1))
    with pytest.raises(ConfigurationError, match=r"0:00:00\.001"):
        await leased.consume(lease=timedelta(microseconds=1))


async def test_a_broker_without_leases_refuses_to_give_one(client: Client) -> None:
    with pytest.raises(CapabilityError, match="lease"):
        await client.take(lease=LEASE)
    await client.send(b"x")
    (renewal,) = await client.port.renew(await client.take(), LEASE)
    assert renewal.outcome == "failed"


async def test_a_lease_that_is_not_renewable_ends_at_its_instant_whatever_is_asked(
    connect: Connect, clock: MovableClock
) -> None:
    terms = LeaseTerms(default=LEASE, shortest=LEASE, longest=LEASE, step=SECOND, renewable=False)
    capabilities = replace(Profile.FULL.capabilities, lease=terms)
    client = await connect(MemoryBroker(clock=clock, profile=replace(Profile.FULL, capabilities=capabilities)))
    await client.declare("orders")
    await client.send(b"x")
    held = await client.take()
    await clock.advance(LEASE / 2)
    (renewal,) = await client.port.renew(held, LEASE)
    assert renewal.outcome == "failed"
    await clock.advance(LEASE / 2)
    assert [delivery.redelivered for delivery in await client.take()] == [True]


# The clock


async def test_of_what_is_due_at_one_instant_leases_end_first_then_messages_come_then_expire(leased: Client) -> None:
    await leased.declare("letters", dead_letter=True)
    await leased.send(b"leased", to="letters")
    await leased.take("letters", lease=LEASE)
    await leased.send(b"both", to="letters", delay=LEASE, expires_in=LEASE)
    await leased.send(b"due", to="letters", delay=LEASE)
    sink, _ = await leased.consume("letters")
    letters, _ = await leased.consume("letters.dlq")
    await leased.advance(LEASE)
    # Due before expiry: it is handed out in the same instant, and what is held does not expire.
    assert sink.bodies == [b"leased", b"both", b"due"]
    assert letters.bodies == []


async def test_t009_a_day_of_two_thousand_messages_is_exact_and_the_same_twice(connect: Connect) -> None:
    """Each is sent with a delay, worked on for longer than its lease, renewed meanwhile, and had again later."""
    count, apart, work = 2_000, 43, LEASE * 1.5

    async def day() -> list[tuple[float, bytes]]:
        clock = MovableClock()
        client = await connect(MemoryBroker(clock=clock, lease=LEASE))
        await client.declare("orders", dead_letter=True)
        await client.declare("perishable", dead_letter=True)
        record: list[tuple[float, bytes]] = []

        async def handle(delivery: Delivery) -> None:
            record.append((clock.monotonic(), delivery.body))
            await sleep(clock, work.total_seconds() / 2)
            (renewal,) = await client.port.renew([delivery], LEASE)
            assert renewal.outcome == "renewed"
            await sleep(clock, work.total_seconds() / 2)
            rest = 10 * MINUTE - work
            await (client.accept(delivery) if delivery.redelivered else client.requeue(delivery, delay=rest))

        async with asyncio.TaskGroup() as handling:
            sink = Calling(lambda delivery: handling.create_task(handle(delivery)))
            await client.port.subscribe("orders", sink, prefetch=count)
            for n in range(count):
                await client.send(b"%d" % n, delay=timedelta(seconds=1 + apart * n), expires_in=timedelta(days=2))
            for n in range(200):
                await client.send(b"%d" % n, to="perishable", expires_in=timedelta(hours=1), delay=n * MINUTE)
            await clock.advance(timedelta(hours=25))
        assert await client.depth() == await client.depth("perishable") == (0, 0, 0)
        assert (await client.depth("perishable.dlq"))[0] == 200
        return record

    began = time.process_time()  # what else goes on in the machine is not its affair
    one, two = await day(), await day()
    assert time.process_time() - began < 2 * 3 * time_factor(), "seconds, each"
    assert one == two
    assert [at for at, _ in one] == sorted(at for at, _ in one)
    found: dict[bytes, list[float]] = {}
    for at, body in one:
        found.setdefault(body, []).append(at)
    assert found == {b"%d" % n: [1 + apart * n, 601 + apart * n] for n in range(count)}


async def test_one_timer_serves_any_number_of_messages(client: Client) -> None:
    for n in range(1000, 0, -1):
        await client.send(b"x", delay=n * SECOND)
    live = [timer for timer in client.clock._timers if not timer.cancelled]
    assert len(live) == 1


async def test_what_was_settled_in_time_leaves_nothing_behind_in_the_agenda(leased: Client) -> None:
    for _ in range(50):
        await leased.send(*(b"%d" % n for n in range(100)))
        await leased.accept(*await leased.take(most=100))
    assert len(leased.broker._agenda._entries) < 2500


async def test_a_lease_may_be_shortened_and_renewed_to_the_same_instant_again(leased: Client) -> None:
    await leased.send(b"x")
    held = await leased.take()
    for lease in (SECOND, MINUTE, SECOND, MINUTE, SECOND):
        (renewal,) = await leased.port.renew(held, lease)
        assert renewal.outcome == "renewed"
    await leased.advance(SECOND)
    assert await leased.depth() == (1, 0, 0)
