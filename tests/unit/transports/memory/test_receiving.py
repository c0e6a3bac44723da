from __future__ import annotations

import asyncio
import logging
import random
from datetime import timedelta

import pytest

from acemq.errors import CapabilityError, ConfigurationError
from acemq.transport import (
    Delivery,
    LostBy,
    NotConnected,
    QueueMissing,
    SubscriptionPhase,
    Verb,
)
from acemq.transport import Settlement as Item
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import MINUTE, NOW, SECOND, Calling, Client, outgoing


def numbered(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


# Subscriptions


async def test_a_subscription_gets_what_waits_and_what_comes_in_order(client: Client) -> None:
    await client.send(*numbered(3))
    sink, _ = await client.consume()
    await client.send(b"3", b"4")
    await client.turn()
    assert sink.bodies == numbered(5)


async def test_there_is_one_deliver_in_a_turn_of_the_loop_with_all_that_fits(client: Client) -> None:
    sink, _ = await client.consume(prefetch=50)
    for body in numbered(20):
        await client.send(body)
    assert sink.batches == []
    await client.turn()
    assert [len(batch) for batch in sink.batches] == [20]


async def test_at_most_prefetch_are_out_and_credit_comes_back_by_settling(client: Client) -> None:
    await client.send(*numbered(20))
    sink, subscription = await client.consume(prefetch=5)
    assert len(sink.deliveries) == subscription.state.held == 5
    await client.accept(*sink.deliveries[:2])
    await client.turn()
    assert len(sink.deliveries) == 7
    assert subscription.state.held == 5


async def test_settling_in_any_order_hands_out_every_message_once(client: Client) -> None:
    await client.send(*numbered(300))
    sink, subscription = await client.consume(prefetch=7)
    dice, held = random.Random(7), list[Delivery]()
    seen = 0
    while len(sink.deliveries) < 300 or held:
        held += sink.deliveries[seen:]
        seen = len(sink.deliveries)
        assert subscription.state.held == len(held) <= 7
        await client.accept(held.pop(dice.randrange(len(held))))
        await client.turn()
    assert sink.bodies == numbered(300)


async def test_subscriptions_of_one_queue_take_turns_by_free_credit(client: Client) -> None:
    one, _ = await client.consume(prefetch=2)
    two, _ = await client.consume(prefetch=10)
    await client.send(*numbered(8))
    await client.turn()
    assert one.bodies == [b"0", b"2"]
    assert two.bodies == [b"1", b"3", b"4", b"5", b"6", b"7"]


async def test_what_one_client_holds_another_never_sees(client: Client, connect: Connect, broker: MemoryBroker) -> None:
    await client.send(*numbered(6))
    await client.take(most=5)
    sink, _ = await (await connect(broker)).consume()
    assert sink.bodies == [b"5"]


async def test_a_paused_subscription_takes_nothing_new(client: Client) -> None:
    sink, subscription = await client.consume()
    await client.send(b"0")
    await client.turn()
    subscription.pause()
    await client.send(*numbered(20)[1:])
    await client.turn()
    assert (sink.bodies, subscription.state.phase) == ([b"0"], SubscriptionPhase.PAUSED)
    subscription.resume()
    await client.turn()
    assert sink.bodies == numbered(10)


async def test_what_was_on_its_way_when_it_paused_goes_back_untouched(client: Client) -> None:
    _, subscription = await client.consume()
    await client.send(b"0")
    subscription.pause()
    (delivery,) = await client.take()
    assert (delivery.redelivered, delivery.deliveries) == (False, 1)


async def test_a_sink_may_pause_while_it_is_called(client: Client) -> None:
    sink = Calling(lambda delivery: subscription.pause())
    subscription = await client.port.subscribe("orders", sink, prefetch=5)
    for body in numbered(3):
        await client.send(body)
        await client.turn()
    assert sink.bodies == [b"0"]


async def test_after_stop_nothing_is_delivered_and_settling_still_works(client: Client) -> None:
    await client.send(*numbered(20))
    sink, subscription = await client.consume(prefetch=5)
    await client.accept(*sink.deliveries)
    await subscription.stop()
    await client.turn()
    assert sink.bodies == numbered(5)
    assert await client.depth() == (15, 0, 0)
    assert subscription.state.phase is SubscriptionPhase.STOPPED


async def test_stop_lets_go_only_of_what_was_not_delivered(client: Client) -> None:
    await client.send(*numbered(3))
    sink, subscription = await client.consume(prefetch=2)
    await subscription.stop()
    assert await client.depth() == (1, 2, 0)
    assert [str(done) for done in await client.accept(*sink.deliveries)] == ["done", "done"]


async def test_close_gives_back_at_once_in_the_old_places(client: Client) -> None:
    await client.send(*numbered(5))
    sink, subscription = await client.consume(prefetch=3)
    await subscription.close()
    again = await client.take()
    assert [delivery.body for delivery in again] == numbered(5)
    assert [delivery.redelivered for delivery in again] == [True, True, True, False, False]
    assert (subscription.state.phase, sink.losses) == (SubscriptionPhase.CLOSED, [])


async def test_a_sink_that_raises_is_logged_and_its_deliveries_stay_held(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Calling(lambda delivery: 1 / 0)
    await client.port.subscribe("orders", sink, prefetch=5)
    for body in numbered(2):
        await client.send(body)
        await client.turn()
    assert sink.bodies == numbered(2)
    assert await client.depth() == (0, 2, 0)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


async def test_an_exclusive_subscription_gets_all_and_the_standby_takes_over_in_order(client: Client) -> None:
    first, holder = await client.consume(prefetch=2, exclusive=True)
    second, standby = await client.consume(prefetch=10, exclusive=True)
    assert standby.state.phase is SubscriptionPhase.WAITING
    await client.send(*numbered(4))
    await client.turn()
    assert (first.bodies, second.bodies) == ([b"0", b"1"], [])
    await holder.close()
    await client.turn()
    assert second.bodies == numbered(4)
    assert second.phases == [SubscriptionPhase.ACTIVE]


async def test_an_exclusive_subscription_waits_for_those_before_it_and_holds_back_those_after(client: Client) -> None:
    _, plain = await client.consume()
    _, exclusive = await client.consume(exclusive=True)
    _, late = await client.consume()
    phases = [held.state.phase for held in (plain, exclusive, late)]
    assert phases == ["active", "waiting", "waiting"]
    await plain.close()
    assert [held.state.phase for held in (exclusive, late)] == ["active", "waiting"]


async def test_subscribing_to_no_queue_raises_and_creates_none(client: Client) -> None:
    with pytest.raises(QueueMissing, match="nobody"):
        await client.consume("nobody")
    assert not await client.port.exists("nobody")


async def test_options_of_a_subscription_are_known_or_refused_by_name(client: Client) -> None:
    await client.consume(options={"name": "worker-1"})
    with pytest.raises(ConfigurationError, match="colour"):
        await client.consume(options={"colour": "red"})
    with pytest.raises(CapabilityError, match="priority"):
        await client.consume(options={"priority": 3})
    with pytest.raises(ConfigurationError, match="prefetch"):
        await client.consume(prefetch=0)


async def test_contact_moves_on_while_it_is_healthy(client: Client) -> None:
    _, subscription = await client.consume()
    await client.advance(MINUTE)
    assert subscription.state.last_contact == client.clock.monotonic()


# Priorities


async def test_higher_levels_come_first_and_each_in_order(client: Client) -> None:
    await client.declare("urgent", priorities=3, type="classic")
    for body, priority in ((b"a", 0), (b"b", 2), (b"c", None), (b"d", 1), (b"e", 2)):
        await client.send(body, to="urgent", priority=priority)
    first = await client.take("urgent", 1)
    await client.requeue(*first)
    assert await client.bodies("urgent") == [b"b", b"e", b"d", b"a", b"c"]


# Pulling


async def test_pull_takes_at_most_what_was_asked_and_is_never_an_error(client: Client) -> None:
    await client.send(*numbered(5))
    taken = [len(await client.take(most=3)) for _ in range(3)]
    assert taken == [3, 2, 0]


async def test_pull_waits_for_the_first_message(client: Client) -> None:
    waiting = asyncio.ensure_future(client.port.pull("orders", most=5, wait=MINUTE))
    await client.turn()
    await client.send(b"0", b"1")
    assert [delivery.body for delivery in await waiting] in ([b"0"], [b"0", b"1"])


async def test_pull_waits_exactly_as_long_as_it_may(client: Client) -> None:
    waiting = asyncio.ensure_future(client.port.pull("orders", most=1, wait=MINUTE))
    await client.advance(MINUTE - timedelta(milliseconds=1))
    assert not waiting.done()
    await client.advance(timedelta(milliseconds=1))
    assert waiting.result() == []


async def test_those_who_pull_are_served_in_turn(client: Client) -> None:
    waiting = []
    for _ in range(3):
        waiting.append(asyncio.ensure_future(client.port.pull("orders", most=1, wait=MINUTE)))
        await client.turn()
    await client.send(*numbered(3))
    assert [delivery.body for (delivery,) in await asyncio.gather(*waiting)] == numbered(3)


async def test_a_cancelled_pull_loses_nothing_and_holds_up_nobody(client: Client) -> None:
    gone = asyncio.ensure_future(client.port.pull("orders", most=1, wait=MINUTE))
    await client.turn()
    stays = asyncio.ensure_future(client.port.pull("orders", most=1, wait=MINUTE))
    await client.turn()
    await client.send(b"0")
    gone.cancel()
    assert [delivery.body for delivery in await stays] == [b"0"]
    assert await client.depth() == (0, 1, 0)


async def test_pulling_from_no_queue_raises_also_when_it_goes_away_meanwhile(client: Client) -> None:
    with pytest.raises(QueueMissing):
        await client.take("nobody")
    waiting = asyncio.ensure_future(client.port.pull("orders", most=1, wait=MINUTE))
    await client.turn()
    await client.port.delete("orders")
    with pytest.raises(QueueMissing):
        await waiting


async def test_an_outage_does_not_look_like_an_empty_queue(client: Client, broker: MemoryBroker) -> None:
    broker.refuse_dials()
    broker.disconnect("power cut")
    waiting = asyncio.ensure_future(client.port.pull("orders", most=1, wait=SECOND))
    await client.advance(SECOND)
    with pytest.raises(NotConnected, match="refuses dials"):
        await waiting


async def test_what_was_pulled_comes_back_when_the_transport_closes(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    await client.send(*numbered(3))
    await client.take()
    await client.port.close()
    other = await connect(broker)
    assert [delivery.redelivered for delivery in await other.take()] == [True, True, True]


# Queues that go away


async def test_a_subscription_waits_for_its_deleted_queue_and_goes_on_when_it_is_declared_again(client: Client) -> None:
    sink, subscription = await client.consume()
    await client.send(b"lost")
    await client.turn()
    await client.port.delete("orders")
    await client.turn()
    assert sink.losses == [([b"lost"], LostBy.QUEUE)]
    assert subscription.state.phase is SubscriptionPhase.RECOVERING
    assert "orders" in (subscription.state.error or "")
    assert [str(done) for done in await client.port.settle([Item(sink.deliveries[0], Verb.ACCEPT)])] == ["stale"]
    await client.declare("orders")
    await client.send(b"new")
    await client.turn()
    assert sink.bodies == [b"lost", b"new"]
    assert sink.phases == [SubscriptionPhase.RECOVERING, SubscriptionPhase.ACTIVE]
    assert (subscription.state.gap, subscription.state.generation) == (True, 2)


async def test_an_auto_delete_queue_goes_with_its_last_subscription(client: Client) -> None:
    await client.declare("mine", auto_delete=True)
    _, one = await client.consume("mine")
    _, two = await client.consume("mine")
    await one.close()
    assert await client.port.exists("mine")
    await two.close()
    assert not await client.port.exists("mine")


async def test_nothing_is_said_to_a_sink_after_its_subscription_is_closed(client: Client) -> None:
    sink, subscription = await client.consume()
    await client.send(b"0")
    await subscription.close()
    await client.port.delete("orders")
    await client.turn()
    assert (sink.batches, sink.losses, sink.phases) == ([], [], [])


async def test_waiting_zero_answers_at_once(client: Client) -> None:
    assert await client.port.pull("orders", most=1, wait=NOW) == []
    await client.publish(outgoing())
    assert len(await client.port.pull("orders", most=1, wait=NOW)) == 1
