from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from acemq.clock import MovableClock
from acemq.errors import ClosedError
from acemq.retry import Backoff
from acemq.topology import Topology
from acemq.transport import LostBy, NotConnected, Phase, Published, SubscriptionPhase, WrongLoop
from acemq.transports.memory import MemoryBroker, Profile
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, SECOND, Client, Remembering, outgoing

RECOVERED = [SubscriptionPhase.RECOVERING, SubscriptionPhase.ACTIVE]


def phases(client: Client) -> list[Phase]:
    return [state.phase for state in client.states]


async def test_opening_connects_and_says_so(client: Client) -> None:
    state = client.port.state
    assert (state.phase, state.generation, state.endpoint, state.dials) == (Phase.CONNECTED, 1, "memory://", 0)
    assert state.since.utcoffset() == timedelta()
    assert phases(client) == [Phase.CONNECTING, Phase.CONNECTED]
    hash(client.port.capabilities)


async def test_opening_twice_is_refused(client: Client) -> None:
    with pytest.raises(ClosedError):
        await client.port.open(within=SECOND)


async def test_opening_gives_up_at_its_limit_naming_the_endpoint(broker: MemoryBroker, clock: MovableClock) -> None:
    broker.refuse_dials()
    client = Client(broker, clock)
    opening = asyncio.ensure_future(client.port.open(within=10 * SECOND))
    await clock.advance(10 * SECOND - timedelta(milliseconds=1))
    assert not opening.done()
    await clock.advance(timedelta(milliseconds=1))
    with pytest.raises(NotConnected, match="memory://"):
        await opening
    assert broker.links == []


async def test_opening_succeeds_as_soon_as_dials_are_taken(broker: MemoryBroker, clock: MovableClock) -> None:
    broker.refuse_dials()
    client = Client(broker, clock)
    opening = asyncio.ensure_future(client.port.open(within=MINUTE))
    await clock.advance(SECOND)
    broker.refuse_dials(False)
    await clock.advance(30 * SECOND)
    await opening
    await client.port.close()


async def test_closing_ends_a_dial_at_once(broker: MemoryBroker, clock: MovableClock) -> None:
    broker.refuse_dials()
    client = Client(broker, clock)
    opening = asyncio.ensure_future(client.port.open(within=MINUTE))
    await client.turn()
    await client.port.close()
    with pytest.raises(ClosedError):
        await opening


async def test_after_close_every_verb_says_so_and_close_is_idempotent(client: Client) -> None:
    port = client.port
    await asyncio.gather(port.close(), port.close())
    await port.close()
    verbs = [
        client.publish(outgoing()),
        client.consume(),
        client.take(),
        client.declare("x"),
        port.renew([], SECOND),
        port.depth("orders"),
        port.exists("orders"),
        port.delete("orders"),
        port.purge("orders"),
    ]
    for verb in verbs:
        with pytest.raises(ClosedError):
            await verb
    assert phases(client)[-2:] == [Phase.CLOSING, Phase.CLOSED]


async def test_a_verb_before_open_says_so(broker: MemoryBroker, clock: MovableClock) -> None:
    client = Client(broker, clock)
    with pytest.raises(ClosedError, match="not open yet"):
        await client.take()


async def test_another_client_is_not_disturbed_by_a_close(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    other = await connect(broker)
    sink, _ = await other.consume()
    await client.port.close()
    await other.send(b"x")
    await other.turn()
    assert sink.bodies == [b"x"]


def test_a_transport_may_be_opened_again_on_another_loop(broker: MemoryBroker, clock: MovableClock) -> None:
    client = Client(broker, clock)

    async def use() -> list[bytes]:
        await client.port.open(within=SECOND)
        await client.declare("orders")
        await client.send(b"x", delay=SECOND)
        await client.advance(SECOND)
        bodies = await client.bodies()
        await client.port.close()
        return bodies

    assert [asyncio.run(use()) for _ in range(3)] == [[b"x"]] * 3
    assert client.port.state.generation == 3


def test_a_verb_from_another_loop_is_refused_and_disturbs_nothing(broker: MemoryBroker, clock: MovableClock) -> None:
    client = Client(broker, clock)

    async def first() -> None:
        await client.port.open(within=SECOND)
        await client.declare("orders")
        await asyncio.to_thread(asyncio.run, second())
        await client.send(b"x")
        assert await client.bodies() == [b"x"]
        await client.port.close()

    async def second() -> None:
        for verb in (client.publish(outgoing()), client.take(), client.port.settle([]), client.port.close()):
            with pytest.raises(WrongLoop):
                await verb

    asyncio.run(first())


async def test_a_lost_link_is_told_and_made_again_with_its_subscriptions(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"1", b"2", b"3")
    sink, subscription = await client.consume(prefetch=2)
    broker.disconnect("power cut")
    assert client.port.state.phase is Phase.RECONNECTING
    await client.turn()
    assert sink.losses == [([b"1", b"2"], LostBy.CONNECTION)]
    assert sink.bodies == [b"1", b"2", b"1", b"2"]
    assert [delivery.redelivered for delivery in sink.deliveries] == [False, False, True, True]
    assert [str(done) for done in await client.accept(*sink.deliveries)] == ["stale", "stale", "done", "done"]
    assert sink.phases == RECOVERED
    assert (subscription.state.generation, subscription.state.gap) == (2, False)
    state = client.port.state
    assert (state.phase, state.generation, state.last_error) == (Phase.CONNECTED, 2, "power cut")
    assert phases(client)[-2:] == [Phase.RECONNECTING, Phase.CONNECTED]


async def test_what_one_lost_link_gives_back_goes_to_another_client(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    await client.send(b"1", b"2")
    await client.consume()
    await client.consume()
    other = await connect(broker)
    sink, _ = await other.consume()
    broker.refuse_dials()
    broker.unlink(broker.links[0], LostBy.CONNECTION)
    await client.turn()
    assert sorted(sink.bodies) == [b"1", b"2"]


async def test_dials_are_spread_and_go_on_for_ever(connect: Connect, broker: MemoryBroker) -> None:
    client = await connect(broker, reconnect=Backoff(first=SECOND, ceiling=4 * SECOND))
    broker.refuse_dials()
    broker.disconnect("power cut")
    await client.advance(timedelta(minutes=10))
    dials = client.port.state.dials
    assert 600 / 4 < dials < 1200
    broker.refuse_dials(False)
    await client.advance(4 * SECOND)
    state = client.port.state
    assert (state.phase, state.generation, state.dials) == (Phase.CONNECTED, 2, 0)


async def test_a_link_that_keeps_breaking_is_not_dialled_in_a_circle(client: Client, broker: MemoryBroker) -> None:
    for _ in range(2):
        broker.disconnect("again")
        await client.turn()
    assert phases(client)[-1] is Phase.RECONNECTING
    await client.advance(MINUTE)
    assert phases(client)[-1] is Phase.CONNECTED
    broker.disconnect("after it had worked")
    await client.turn()
    assert phases(client)[-1] is Phase.CONNECTED


async def test_publishes_wait_for_the_link_up_to_their_limit(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_dials()
    broker.disconnect("power cut")
    publishing = asyncio.ensure_future(client.port.publish([outgoing()], within=SECOND))
    await client.turn()
    assert client.port.state.outstanding == 1
    await client.advance(SECOND)
    (result,) = await publishing
    assert (result.outcome, type(result.error)) == (Published.REFUSED, NotConnected)
    publishing = asyncio.ensure_future(client.port.publish([outgoing()], within=MINUTE))
    broker.refuse_dials(False)
    await client.advance(MINUTE)
    (result,) = await publishing
    assert result.outcome is Published.ROUTED
    assert client.port.state.outstanding == 0


async def test_close_while_reconnecting_gives_every_publish_its_outcome_and_never_dials_again(
    client: Client, broker: MemoryBroker
) -> None:
    broker.refuse_dials()
    broker.disconnect("power cut")
    publishing = asyncio.ensure_future(client.port.publish([outgoing()], within=MINUTE))
    await client.turn()
    await client.port.close(SECOND)
    (result,) = await publishing
    assert result.outcome is Published.REFUSED
    broker.refuse_dials(False)
    await client.advance(MINUTE)
    assert broker.links == []


async def test_an_exclusive_holder_that_dies_hands_over_to_the_standby(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    first, _ = await client.consume(exclusive=True)
    other = await connect(broker)
    second, standby = await other.consume(exclusive=True)
    await client.send(b"1")
    await client.turn()
    broker.unlink(broker.links[0], LostBy.CONNECTION)
    await client.turn()
    assert (first.bodies, second.bodies) == ([b"1"], [b"1"])
    assert standby.state.phase is SubscriptionPhase.ACTIVE


async def test_private_queues_are_made_again_after_a_reconnect_with_a_gap(client: Client, broker: MemoryBroker) -> None:
    await client.apply(
        Topology().exchange("news", "fanout").queue("mine", exclusive=True, auto_delete=True).bind("mine", "news")
    )
    sink, subscription = await client.consume("mine")
    broker.disconnect("power cut")
    await client.turn()
    assert subscription.state.phase is SubscriptionPhase.ACTIVE
    assert subscription.state.gap
    await client.send(b"x", exchange="news")
    await client.turn()
    assert sink.bodies == [b"x"]


async def test_subscriptions_live_on_without_anybody_holding_their_handles(
    client: Client, broker: MemoryBroker
) -> None:
    sink = Remembering()
    await client.port.subscribe("orders", sink, prefetch=1)
    broker.disconnect("power cut")
    await client.turn()
    await client.send(b"x")
    await client.turn()
    assert sink.bodies == [b"x"]


async def test_after_close_depth_says_so_where_depths_are_not_told_either(clock: MovableClock) -> None:
    client = Client(MemoryBroker(clock=clock, profile=Profile.BARE), clock)
    await client.port.open(within=SECOND)
    await client.port.close()
    with pytest.raises(ClosedError):
        await client.port.depth("orders")
