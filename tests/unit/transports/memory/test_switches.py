from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from acemq.errors import ClosedError, ConfigurationError
from acemq.topology import Topology
from acemq.transport import (
    Blocked,
    LostBy,
    NotConnected,
    Published,
    PublishResult,
    SubscriptionPhase,
    TimedOut,
    TransportError,
)
from acemq.transports.memory import MemoryBroker, delay, raises
from acemq.transports.memory.faults import Effect, Stallable
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, SECOND, Client, outgoing


async def test_a_blocked_broker_refuses_publishes_with_its_reason_and_lets_consuming_go_on(
    client: Client, broker: MemoryBroker
) -> None:
    await client.send(b"1")
    broker.block("disk full")
    await client.turn()
    outcome, error = await client.outcome(outgoing())
    assert (outcome, type(error), str(error)) == (Published.REFUSED, Blocked, "disk full")
    assert client.port.state.blocked == "disk full"
    assert await client.bodies() == [b"1"]
    broker.unblock()
    await client.turn()
    assert [state.blocked for state in client.states[-2:]] == ["disk full", None]
    await client.send(b"2")


async def test_each_change_of_phase_or_block_is_reported_once(client: Client, broker: MemoryBroker) -> None:
    before = len(client.states)
    broker.stall("publish")
    broker.release("publish")
    broker.block("disk full")
    broker.block("disk full")
    await client.turn()
    assert [state.blocked for state in client.states[before:]] == ["disk full"]


async def stalled(client: Client, broker: MemoryBroker) -> asyncio.Future[list[PublishResult]]:
    broker.stall("publish")
    publishing = asyncio.ensure_future(client.publish(outgoing(b"x")))
    await client.turn()
    assert client.port.state.outstanding == 1
    return publishing


async def test_a_stalled_publish_fails_at_its_limit_and_is_not_written_later(
    client: Client, broker: MemoryBroker
) -> None:
    publishing = await stalled(client, broker)
    await client.advance(SECOND)
    (result,) = await publishing
    assert (result.outcome, type(result.error)) == (Published.FAILED, TimedOut)
    broker.release("publish")
    await client.turn()
    assert await client.depth() == (0, 0, 0)


async def test_a_stalled_publish_goes_on_when_released(client: Client, broker: MemoryBroker) -> None:
    publishing = await stalled(client, broker)
    broker.release("publish")
    (result,) = await publishing
    assert result.outcome is Published.ROUTED


async def test_a_pending_publish_ends_with_its_link(client: Client, broker: MemoryBroker) -> None:
    publishing = await stalled(client, broker)
    broker.disconnect("power cut")
    (result,) = await publishing
    assert (result.outcome, type(result.error)) == (Published.FAILED, NotConnected)


async def test_close_waits_for_a_pending_publish_up_to_its_grace(client: Client, broker: MemoryBroker) -> None:
    publishing = await stalled(client, broker)
    closing = asyncio.ensure_future(client.port.close(SECOND / 2))
    await client.turn()
    assert not closing.done()
    await client.advance(SECOND / 2)
    await closing
    (result,) = await publishing
    assert result.outcome is Published.FAILED


async def test_close_ends_what_is_stalled_and_takes_nothing_new(client: Client, broker: MemoryBroker) -> None:
    publishing = await stalled(client, broker)
    broker.stall("pull")
    pulling = asyncio.ensure_future(client.take())
    await client.turn()
    closing = asyncio.ensure_future(client.port.close(SECOND / 2))
    await client.turn()
    with pytest.raises(ClosedError):
        await client.publish(outgoing())
    with pytest.raises(ClosedError):
        await pulling
    await client.advance(SECOND / 2)
    await asyncio.gather(closing, publishing)


async def test_a_cancelled_publish_leaves_nothing_outstanding(client: Client, broker: MemoryBroker) -> None:
    publishing = await stalled(client, broker)
    publishing.cancel()
    await asyncio.wait([publishing])
    assert client.port.state.outstanding == 0


async def test_stalled_deliveries_wait_for_their_release(client: Client, broker: MemoryBroker) -> None:
    sink, _ = await client.consume()
    broker.stall("deliver")
    await client.send(b"x")
    await client.turn()
    assert sink.bodies == []
    broker.release("deliver")
    await client.turn()
    assert sink.bodies == [b"x"]


async def test_a_stalled_settlement_fails_after_ten_seconds_and_the_delivery_stays_held(
    client: Client, broker: MemoryBroker
) -> None:
    await client.send(b"x")
    held = await client.take()
    broker.stall("settle")
    settling = asyncio.ensure_future(client.accept(*held))
    await client.advance(10 * SECOND)
    assert [str(done) for done in await settling] == ["failed"]
    assert await client.depth() == (0, 1, 0)


@pytest.mark.parametrize(
    ("effect", "outcome", "stored"),
    [("refuse", Published.REFUSED, 0), ("fail", Published.FAILED, 0), ("lose_answer", Published.FAILED, 1)],
)
async def test_a_fault_of_a_publish_concerns_the_items_that_match(
    client: Client, broker: MemoryBroker, effect: Effect, outcome: Published, stored: int
) -> None:
    broker.faults.next("publish", effect, match=lambda message: message.body == b"bad")
    results = await client.publish(outgoing(b"good"), outgoing(b"bad"), outgoing(b"bad"))
    assert [result.outcome for result in results] == [Published.ROUTED, outcome, Published.ROUTED]
    assert (await client.depth())[0] == 2 + stored


async def test_a_fault_happens_as_often_as_it_was_ordered(client: Client, broker: MemoryBroker) -> None:
    broker.faults.next("publish", "refuse", times=2)
    results = await client.publish(*[outgoing()] * 3)
    assert [result.outcome for result in results] == ["refused", "refused", "routed"]


async def test_a_fault_may_delay_or_raise(client: Client, broker: MemoryBroker) -> None:
    broker.faults.next("publish", delay(SECOND / 2))
    publishing = asyncio.ensure_future(client.publish(outgoing()))
    await client.advance(SECOND / 4)
    assert not publishing.done()
    await client.advance(SECOND / 4)
    assert [result.outcome for result in await publishing] == ["routed"]
    broker.faults.next("publish", delay(MINUTE))
    publishing = asyncio.ensure_future(client.publish(outgoing()))
    await client.advance(SECOND)
    assert [type(result.error) for result in await publishing] == [TimedOut]
    broker.faults.next("publish", raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        await client.publish(outgoing())


async def test_a_lost_answer_to_a_settlement_was_done_all_the_same(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"1", b"2")
    one, two = await client.take()
    broker.faults.next("settle", "lose_answer", match=lambda item: item.delivery is one)
    broker.faults.next("settle", "fail", match=lambda item: item.delivery is two)
    assert [str(done) for done in await client.accept(one, two)] == ["failed", "failed"]
    assert await client.depth() == (0, 1, 0)
    assert [str(done) for done in await client.accept(two)] == ["done"]


async def test_any_verb_can_fail_or_lose_its_answer(client: Client, broker: MemoryBroker) -> None:
    def verbs() -> dict[Stallable, Awaitable[object]]:
        return {
            "subscribe": client.consume(),
            "pull": client.take(),
            "apply": client.apply(Topology().queue("new")),
            "depth": client.depth(),
            "exists": client.port.exists("orders"),
            "purge": client.port.purge("orders"),
            "delete": client.port.delete("orders"),
        }

    for verb, call in verbs().items():
        broker.faults.next(verb, "fail")
        with pytest.raises(TransportError, match=verb):
            await call
    for verb, call in verbs().items():
        broker.faults.next(verb, "lose_answer")
        with pytest.raises(TimedOut, match=verb):
            await call
    assert list(broker.queues) == ["new"]


def test_what_cannot_be_ordered_is_refused(broker: MemoryBroker) -> None:
    unknown: Any = "sing"
    with pytest.raises(ConfigurationError, match="verb"):
        broker.faults.next(unknown, "fail")
    with pytest.raises(ConfigurationError, match="times"):
        broker.faults.next("publish", "fail", times=0)
    with pytest.raises(ConfigurationError, match="verb"):
        broker.stall(unknown)


async def test_lapse_ends_all_leases_of_a_queue_now(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"1", b"2")
    sink, subscription = await client.consume()
    subscription.pause()
    broker.lapse("orders")
    await client.turn()
    assert sink.losses == [([b"1", b"2"], LostBy.LEASE)]
    assert await client.depth() == (2, 0, 0)


async def test_what_was_taken_away_while_held_is_lost_and_its_settlement_stale(
    client: Client, broker: MemoryBroker
) -> None:
    await client.send(b"1", b"2", b"3")
    sink, _ = await client.consume(prefetch=2)
    assert broker.remove("orders", 1) == 1
    await client.turn()
    assert sink.losses == [([b"1"], LostBy.QUEUE)]
    assert [str(done) for done in await client.accept(*sink.deliveries)] == ["stale", "done", "done"]
    assert broker.snapshot() == []


async def test_after_a_wipe_each_client_makes_again_what_it_had_applied(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    await client.apply(Topology().exchange("news", "fanout").bind("orders", "news"))
    other = await connect(broker)
    await other.declare("others", "deleted")
    await other.port.delete("deleted")
    sink, subscription = await client.consume()
    await client.send(b"lost")
    await client.turn()
    broker.wipe()
    assert broker.queues == {}
    await client.turn()
    assert sorted(broker.queues) == ["orders", "others"]
    assert sink.losses == [([b"lost"], LostBy.QUEUE)]
    assert sink.phases == [SubscriptionPhase.RECOVERING, SubscriptionPhase.ACTIVE]
    assert subscription.state.gap
    await client.send(b"new", exchange="news")
    await client.turn()
    assert sink.bodies == [b"lost", b"new"]


async def test_a_wipe_during_an_outage_is_noticed_on_return(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_dials()
    broker.disconnect("power cut")
    broker.wipe()
    broker.refuse_dials(False)
    await client.advance(MINUTE)
    assert await client.port.exists("orders")


async def test_a_snapshot_lists_every_message_with_its_state(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"held", headers={"a": 1})
    await client.take()
    await client.send(b"ready")
    await client.send(b"delayed", delay=MINUTE)
    seen = broker.snapshot()
    assert [(line.queue, line.state, line.body, line.deliveries, line.until) for line in seen] == [
        ("orders", "ready", b"ready", 0, None),
        ("orders", "held", b"held", 1, None),
        ("orders", "delayed", b"delayed", 0, 60.0),
    ]
    assert (seen[1].headers, seen[1].message_id, seen[1].routing_key) == ({"a": 1}, "held", "orders")
