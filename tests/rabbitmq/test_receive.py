"""Subscriptions and settling on a real broker."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from contextlib import suppress
from datetime import timedelta

import pytest

from acemq.errors import CapabilityError, ConfigurationError
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Delivery,
    LostBy,
    NotConnected,
    Phase,
    Published,
    QueueMissing,
    Settled,
    Settlement,
    SubscriptionPhase,
    TransportError,
    Verb,
)
from acemq.transports.rabbitmq import receive
from tests.conftest import StartRabbitMQ
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import Recorder, drain, fill, out, send, settle, until, until_depth
from tests.services import RIPE, RabbitMQ

ACTIVE, RECOVERING = SubscriptionPhase.ACTIVE, SubscriptionPhase.RECOVERING


async def test_no_more_than_the_prefetch_is_out_and_settling_brings_as_many_more(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 100)
    subscription = await broker.subscribe(queue, sink, prefetch=5)
    await sink.has(5)
    await until_depth(broker, queue, 95)
    assert await settle(broker, sink.got[:2]) == [Settled.DONE] * 2
    await sink.has(7)
    await until_depth(broker, queue, 93)
    assert len(sink.got) == 7
    assert subscription.state.held == 5
    assert sink.bodies() == [b"%d" % number for number in range(7)]


async def test_settling_in_any_order_handles_each_message_once(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 500)
    held: list[Delivery] = []
    order = random.Random(7)

    def hold(batch: object) -> None:
        held.extend(sink.got[len(sink.got) - sink.batches[-1] :])
        assert len(held) <= 7

    sink.on_deliver = hold
    subscription = await broker.subscribe(queue, sink, prefetch=7)
    for _ in range(500):
        await until(lambda: held, "something to settle")
        delivery = held.pop(order.randrange(len(held)))
        assert await settle(broker, [delivery]) == [Settled.DONE]
        assert subscription.state.held == len(held)
        if order.random() < 0.3:
            await asyncio.sleep(0)
    assert sorted(map(int, sink.bodies())) == list(range(500))
    await subscription.close()
    await until_depth(broker, queue, 0)


async def test_no_delivery_comes_before_subscribe_has_returned(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 50)
    await broker.subscribe(queue, sink, prefetch=50)
    assert sink.got == []
    await sink.has(50)


async def test_every_verb_does_what_it_says(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare(dead_letter=True)
    await fill(broker, queue, 3)
    first, second, third = await broker.pull(queue, most=3, wait=timedelta(seconds=1))
    verbs = [Settlement(first, Verb.ACCEPT), Settlement(second, Verb.REQUEUE), Settlement(third, Verb.DROP)]
    assert await broker.settle(verbs) == [Settled.DONE] * 3
    (again,) = await broker.pull(queue, most=3, wait=timedelta(seconds=1))
    assert again.body == second.body
    assert again.redelivered
    await settle(broker, [again])
    await until_depth(broker, f"{queue}.dlq", 0)
    for made in (f"{queue}.dlq", f"{queue}.parked"):
        await broker.delete(made)


async def test_a_quorum_queue_counts_its_deliveries_and_a_classic_one_does_not(dial: Dial, declare: Declare) -> None:
    broker = await dial()
    quorum, classic = await declare("quorum", type="quorum"), await declare("classic")
    await broker.apply(Topology().queue(quorum).queue(classic, type="classic"), ApplyMode.CREATE)
    counts: dict[str, list[int | None]] = {quorum: [], classic: []}
    for queue, seen in counts.items():
        await fill(broker, queue, 1)
        sink = Recorder()
        subscription = await broker.subscribe(queue, sink, prefetch=1)
        for turn in range(3):
            await sink.has(turn + 1)
            seen.append(sink.got[-1].deliveries)
            await settle(broker, sink.got[-1:], Verb.REQUEUE if turn < 2 else Verb.ACCEPT)
        await subscription.close()
    assert counts == {quorum: [1, 2, 3], classic: [None] * 3}


async def test_settled_twice_is_stale_and_said_once(
    dial: Dial, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    broker, queue = await dial(), await declare()
    await fill(broker, queue, 1)
    (one,) = await broker.pull(queue, most=1, wait=timedelta(seconds=1))
    assert await settle(broker, [one, one]) == [Settled.DONE, Settled.STALE]
    assert await settle(broker, [one]) == [Settled.STALE]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert queue in warnings[0].getMessage()


async def test_a_delayed_requeue_is_refused_and_the_delivery_stays_held(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    await fill(broker, queue, 1)
    (one,) = await broker.pull(queue, most=1, wait=timedelta(seconds=1))
    for impossible in (
        Settlement(one, Verb.REQUEUE, delay=timedelta(seconds=1)),
        Settlement(one, Verb.REQUEUE, headers={"a": 1}),
    ):
        assert await broker.settle([impossible]) == [Settled.FAILED]
    assert await settle(broker, [one]) == [Settled.DONE]


async def test_stop_delivers_nothing_more_and_settling_goes_on(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 50)
    subscription = await broker.subscribe(queue, sink, prefetch=10)
    await sink.has(10)
    await subscription.stop()
    assert await settle(broker, sink.got) == [Settled.DONE] * 10
    await until_depth(broker, queue, 40)
    assert len(sink.got) == 10
    await subscription.close()
    assert sink.phases == [ACTIVE, SubscriptionPhase.STOPPED, SubscriptionPhase.CLOSED]
    assert (await broker.depth(queue)).ready == 40


@pytest.mark.parametrize("kind", ["classic", "quorum"])
async def test_close_gives_back_what_is_held_in_place(dial: Dial, declare: Declare, kind: str) -> None:
    broker, queue, sink = await dial(), await declare(type=kind), Recorder()
    await fill(broker, queue, 20)
    subscription = await broker.subscribe(queue, sink, prefetch=10)
    await sink.has(10)
    assert await settle(broker, sink.got[3:5]) == [Settled.DONE] * 2
    await subscription.close()
    assert await settle(broker, sink.got[:1]) == [Settled.STALE]
    await until_depth(broker, queue, 18)
    wanted = [0, 1, 2, *range(5, 20)]
    assert [int(found.body) for found in await drain(broker, queue)] == wanted


async def test_pause_takes_nothing_and_hoards_nothing(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 20)
    subscription = await broker.subscribe(queue, sink, prefetch=10)
    await sink.has(10)
    subscription.pause()
    assert await settle(broker, sink.got[:8], Verb.REQUEUE) == [Settled.DONE] * 8
    await until_depth(broker, queue, 18)
    assert len(sink.got) == 10
    subscription.resume()
    await sink.has(18)
    await until_depth(broker, queue, 8)
    assert subscription.state.held == 10
    await settle(broker, sink.got[8:])
    await sink.has(28)
    assert sink.phases == [ACTIVE, SubscriptionPhase.PAUSED, RECOVERING, ACTIVE]


async def test_pausing_from_within_deliver_is_allowed(dial: Dial, declare: Declare) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    subscription = await broker.subscribe(queue, sink, prefetch=2)
    sink.on_deliver = lambda _: subscription.pause()
    await fill(broker, queue, 6)
    for turn in range(1, 7):
        await until(lambda: sink.phases[-1] is SubscriptionPhase.PAUSED, "it is paused")
        await settle(broker, sink.got)
        if len(sink.got) >= 6:
            break
        subscription.resume()
        await sink.has(turn + 1)
    assert sorted(set(sink.bodies())) == [b"%d" % number for number in range(6)]
    await until_depth(broker, queue, 0)


async def test_a_sink_that_raises_is_logged_and_its_deliveries_stay_held(
    dial: Dial, declare: Declare, caplog: pytest.LogCaptureFixture
) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()

    def fail(batch: object) -> None:
        raise ValueError("no place")

    sink.on_deliver = fail
    subscription = await broker.subscribe(queue, sink, prefetch=5)
    await fill(broker, queue, 1)
    await until(lambda: sink.got, "the delivery")
    sink.on_deliver = None
    await fill(broker, queue, 1)
    await sink.has(2)
    assert subscription.state.held == 2
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert await settle(broker, sink.got) == [Settled.DONE] * 2


async def test_a_missing_queue_is_told_and_costs_no_other(dial: Dial, declare: Declare, name: str) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await broker.subscribe(queue, sink, prefetch=5)
    with pytest.raises(QueueMissing, match=f"{name}-missing"):
        await broker.subscribe(f"{name}-missing", Recorder(), prefetch=5)
    await fill(broker, queue, 1)
    await until(lambda: sink.got, "a delivery on the other")
    assert broker.state.generation == 1


async def test_options_that_are_not_known_or_cannot_be_had_are_refused(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    with pytest.raises(ConfigurationError, match="nmae"):
        await broker.subscribe(queue, Recorder(), prefetch=1, options={"nmae": "x"})
    with pytest.raises(ConfigurationError, match="prefetch"):
        await broker.subscribe(queue, Recorder(), prefetch=0)
    with pytest.raises(CapabilityError, match="offset"):
        await broker.subscribe(queue, Recorder(), prefetch=1, options={"offset": "first"})
    with pytest.raises(CapabilityError, match="lease"):
        await broker.subscribe(queue, Recorder(), prefetch=1, lease=timedelta(seconds=30))


async def test_the_consumer_with_the_higher_priority_is_served_first(dial: Dial, declare: Declare) -> None:
    broker, queue, low, high = await dial(), await declare(), Recorder(), Recorder()
    await broker.subscribe(queue, low, prefetch=100, options={"priority": 1, "name": "low"})
    await broker.subscribe(queue, high, prefetch=100, options={"priority": 9, "name": "high"})
    await fill(broker, queue, 20)
    await high.has(20)
    assert low.got == []


async def test_deliveries_held_when_the_server_closes_the_link_are_lost_and_come_again(
    dial: Dial, declare: Declare, rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    broker, queue, sink = await dial(), await declare(), Recorder()
    await fill(broker, queue, 10)
    await broker.subscribe(queue, sink, prefetch=20, options={"name": "stable"})
    await sink.has(10)
    old = list(sink.got)
    await asyncio.to_thread(rabbitmq.close_all_connections, "a test wants it")
    await sink.has(20)
    assert sink.lost_by == [(LostBy.CONNECTION, 10)]
    assert sink.phases == [ACTIVE, RECOVERING, ACTIVE]
    caplog.clear()
    assert await settle(broker, old) == [Settled.STALE] * 10
    assert len(caplog.records) == 10
    assert all(delivery.redelivered for delivery in sink.got[10:])
    assert await settle(broker, sink.got[10:]) == [Settled.DONE] * 10
    assert sink.state is not None
    assert (sink.state.generation, sink.state.gap) == (2, False)
    assert "a test wants it" in (broker.state.last_error or "")
    await until(lambda: broker.state.phase is Phase.CONNECTED, "both links are back")
    await fill(broker, queue, 20)
    await sink.has(40)


async def test_a_queue_deleted_under_a_subscription_is_waited_for(dial: Dial, declare: Declare) -> None:
    broker, other, queue, sink = await dial(), await dial(), await declare(), Recorder()
    subscription = await broker.subscribe(queue, sink, prefetch=5)
    await fill(broker, queue, 2)
    await sink.has(2)
    await other.delete(queue)
    await until(lambda: subscription.state.phase is RECOVERING, "it is noticed")
    assert sink.lost_by == [(LostBy.QUEUE, 2)]
    assert queue in (subscription.state.error or "")
    assert await settle(broker, sink.got) == [Settled.STALE] * 2
    assert not await broker.exists(queue), "it was not made again"
    # Declared by this transport, it is tried at once; by another, within 5 to 30 s.
    await broker.apply(Topology().queue(queue, type="classic"), ApplyMode.CREATE)
    await until(lambda: subscription.state.phase is ACTIVE, "it is subscribed again", within=3)
    await fill(broker, queue, 1)
    await sink.has(3)


async def test_a_channel_closed_for_holding_too_long_is_replaced_and_others_are_untouched(
    start_rabbitmq: StartRabbitMQ, dial: Dial, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = await asyncio.to_thread(
        start_rabbitmq, consumer_timeout=timedelta(seconds=1), channel_tick_interval=timedelta(milliseconds=300)
    )
    broker, slow, quick = await dial(server.url), Recorder(), Recorder()
    await broker.apply(
        Topology().queue(f"{name}-slow", type="classic").queue(f"{name}-quick", type="classic"), ApplyMode.CREATE
    )
    await broker.subscribe(f"{name}-slow", slow, prefetch=5)
    await broker.subscribe(f"{name}-quick", quick, prefetch=5)
    await fill(broker, f"{name}-slow", 3)
    await slow.has(3)
    await until(lambda: len(slow.got) == 6, "the same three on a new channel", within=15)
    assert slow.lost_by == [(LostBy.CHANNEL, 3)]
    assert await settle(broker, slow.got[:3]) == [Settled.STALE] * 3
    assert await settle(broker, slow.got[3:]) == [Settled.DONE] * 3
    assert quick.phases == [ACTIVE]
    assert broker.state.generation == 1
    said = [record.getMessage() for record in caplog.records if "the channel of" in record.getMessage()]
    assert len(said) == 1
    assert "406" in said[0]


@pytest.mark.slow
async def test_a_subscription_that_loses_its_channel_again_and_again_is_made_again_after_pauses(
    start_rabbitmq: StartRabbitMQ, dial: Dial, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert receive._SPACED == (1.0, 5.0)
    monkeypatch.setattr(receive, "_SPACED", (3.0, 3.0))
    server = await asyncio.to_thread(
        start_rabbitmq, consumer_timeout=timedelta(seconds=1), channel_tick_interval=timedelta(milliseconds=300)
    )
    broker, sink = await dial(server.url), Recorder()
    await broker.apply(Topology().queue(name, type="classic"), ApplyMode.CREATE)
    await fill(broker, name, 1)
    subscription = await broker.subscribe(name, sink, prefetch=5)
    await until(lambda: subscription.state.generation == 2, "it is made again, at once", within=15)
    made_at = time.monotonic()
    await until(lambda: subscription.state.generation == 3, "it is made again, after a pause", within=15)
    assert time.monotonic() - made_at > 2.9


async def test_a_queue_that_dies_with_its_connection_is_made_again_with_a_gap(
    dial: Dial, name: str, rabbitmq: RabbitMQ
) -> None:
    broker, other, sink, queue = await dial(), await dial(), Recorder(), f"{name}-private"
    await broker.apply(
        Topology().exchange(f"{name}-x", "fanout").queue(queue, exclusive=True).bind(queue, f"{name}-x"),
        ApplyMode.CREATE,
    )
    await broker.subscribe(queue, sink, prefetch=5)
    await asyncio.to_thread(rabbitmq.close_all_connections)
    await until(lambda: sink.phases == [ACTIVE, RECOVERING, ACTIVE], "it is subscribed again")
    assert sink.state is not None
    assert sink.state.gap
    assert (await send(other, out("", exchange=f"{name}-x"), within=timedelta(seconds=10)))[
        0
    ].outcome is Published.ROUTED
    await until(lambda: sink.got, "a message through the binding that was made again")
    await broker.delete(f"{name}-x", "exchange")


@pytest.mark.slow
async def test_three_subscriptions_that_nobody_holds_return_after_the_server_was_killed(
    start_rabbitmq: StartRabbitMQ, dial: Dial, name: str
) -> None:
    server = await asyncio.to_thread(start_rabbitmq)
    broker, sinks = await dial(server.url), [Recorder() for _ in range(3)]
    queues = [f"{name}-{letter}" for letter in "abc"]
    for queue, sink in zip(queues, sinks, strict=True):
        await broker.apply(Topology().queue(queue, type="classic"), ApplyMode.CREATE)
        await broker.subscribe(queue, sink, prefetch=20, options={"name": f"tag of {queue}"})
    gc.collect()
    await asyncio.sleep(RIPE)
    await asyncio.to_thread(server.kill)
    await until(lambda: broker.state.phase is Phase.RECONNECTING, "the loss is noticed")
    await asyncio.to_thread(server.start)
    await until(
        lambda: all(sink.phases == [ACTIVE, RECOVERING, ACTIVE] for sink in sinks), "all three return", within=20
    )
    for queue in queues:
        await fill(broker, queue, 10)
    for sink in sinks:
        await sink.has(10)
        await settle(broker, sink.got)
    rows = await asyncio.to_thread(server.list_queues)
    assert [(row["messages"], row["consumers"]) for row in rows] == [(0, 1)] * 3
    assert broker.state.generation == 2


async def test_a_refused_link_does_not_hold_up_the_loop_and_dials_are_spaced(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue, sink = await declare(), Recorder()
    broker = await dial(proxied)
    await broker.subscribe(queue, sink, prefetch=5)
    proxy.refuse()
    proxy.cut()
    await asyncio.sleep(1.5)  # nothing is waited for: this is how long the dials are counted
    assert 1 <= broker.state.dials <= 10
    with pytest.raises(NotConnected):
        await broker.pull(queue, most=1, wait=timedelta(seconds=0.1))
    proxy.refuse(False)
    await until(lambda: sink.phases[-1] is ACTIVE, "it is subscribed again")


async def test_cancelled_calls_leave_no_consumer_and_no_channel(
    dial: Dial, declare: Declare, rabbitmq: RabbitMQ
) -> None:
    broker, queue = await dial(), await declare()
    order = random.Random(3)
    for _ in range(40):
        task = asyncio.create_task(broker.subscribe(queue, Recorder(), prefetch=1))
        await asyncio.sleep(order.random() * 0.004)
        task.cancel()
        with suppress(asyncio.CancelledError, TransportError):
            await (await task).close()
    for verb in (lambda: broker.depth(queue), lambda: broker.exists(queue)):
        for _ in range(20):
            asking: asyncio.Task[object] = asyncio.create_task(verb())
            await asyncio.sleep(order.random() * 0.003)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await asking
    assert await broker.exists(queue)

    async def consumers() -> int:
        rows = await asyncio.to_thread(rabbitmq.list_queues)
        return next(int(row["consumers"]) for row in rows if row["name"] == queue)

    async with asyncio.timeout(10):
        while await consumers():
            pass
    assert broker.state.generation == 1


@pytest.mark.slow
async def test_what_a_wiped_server_has_forgotten_is_declared_again_once(
    start_rabbitmq: StartRabbitMQ, dial: Dial, name: str
) -> None:
    server = await asyncio.to_thread(start_rabbitmq)
    broker, sink = await dial(server.url), Recorder()
    exchange, queue = f"{name}-x", f"{name}-q"
    topology = Topology().exchange(exchange, "topic").queue(queue, type="classic", dead_letter=True)
    await broker.apply(topology.bind(queue, exchange, "order.*"), ApplyMode.CREATE)
    subscription = await broker.subscribe(queue, sink, prefetch=5)

    def wipe() -> None:
        for command in ("stop_app", "reset", "start_app"):
            server.ctl(command)

    await asyncio.to_thread(wipe)
    await until(
        lambda: subscription.state.phase is ACTIVE and subscription.state.generation == 2, "it is back", within=15
    )
    assert subscription.state.gap
    assert await broker.exists(f"{queue}.dlq")
    (sent,) = await send(broker, out("order.placed", exchange=exchange), within=timedelta(seconds=10))
    assert sent.outcome is Published.ROUTED
    await sink.has(1)


@pytest.mark.slow
async def test_an_orderly_restart_loses_nothing_and_everything_is_handled(
    start_rabbitmq: StartRabbitMQ, dial: Dial, name: str
) -> None:
    server = await asyncio.to_thread(start_rabbitmq)
    broker, sink = await dial(server.url), Recorder()
    await broker.apply(Topology().queue(name), ApplyMode.CREATE)
    await fill(broker, name, 50)
    await broker.subscribe(name, sink, prefetch=5)
    await sink.has(5)
    await asyncio.to_thread(server.stop)
    await asyncio.to_thread(server.start)
    await sink.has(10, within=30)
    settled = 5
    while len({delivery.message_id for delivery in sink.got[5:settled]}) < 50:
        await sink.has(settled + 1)
        assert await settle(broker, sink.got[settled : settled + 1]) == [Settled.DONE]
        settled += 1
    assert sink.lost_by == [(LostBy.CONNECTION, 5)]
    assert all(delivery.deliveries for delivery in sink.got)


@pytest.mark.slow
async def test_a_private_queue_held_by_our_own_ghost_is_waited_for_and_made_again(
    dial: Dial, rabbitmq: RabbitMQ, name: str
) -> None:
    """The broker takes as long as we do to notice that a line is dead, and until then keeps the queue for it."""
    upstream = rabbitmq.port
    async with Proxy("127.0.0.1", upstream) as one, Proxy("127.0.0.1", upstream) as two:
        url = rabbitmq.url_through(one.port, two.port)
        broker, sink = await dial(f"{url}?heartbeat=2", connections=1), Recorder()
        await broker.apply(Topology().queue(name, exclusive=True), ApplyMode.CREATE)
        await broker.subscribe(name, sink, prefetch=5)
        used = one if str(one.port) in broker.state.endpoint else two
        used.swallow("to_client")
        used.swallow("to_server")
        await until(lambda: sink.phases[1:] == [RECOVERING, ACTIVE], "it is subscribed again", within=30)
        assert sink.state is not None
        assert sink.state.gap
        await fill(broker, name, 1)
        await sink.has(1)
        await broker.close(timedelta(seconds=1))
