"""Opening, losing, finding again and closing the link to a real broker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import quote

import pytest

from acemq.errors import ClosedError
from acemq.retry import Backoff
from acemq.topology import Topology
from acemq.transport import (
    AccessDenied,
    ApplyMode,
    Delivery,
    NotConnected,
    Phase,
    Published,
    Settled,
    SubscriptionPhase,
    Transport,
    TransportState,
    WrongLoop,
)
from acemq.transports.rabbitmq import transport
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import SOON, Recorder, fill, out, send, settle, until
from tests.services import RabbitMQ, free_ports

SECRET = "s3cret/@:#?%"


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


async def is_refused(one: Transport) -> None:
    for verb in (
        one.publish([], within=SOON),
        one.pull("q", most=1, wait=seconds(0)),
        one.subscribe("q", Recorder(), prefetch=1),
        one.apply(Topology(), ApplyMode.REPORT),
        one.depth("q"),
        one.exists("q"),
        one.delete("q"),
        one.purge("q"),
        one.renew([], SOON),
    ):
        with pytest.raises(ClosedError):
            await verb


async def test_open_gives_up_at_its_limit_naming_every_endpoint() -> None:
    ports = free_ports(2)
    one = transport(f"amqp://me:{quote(SECRET, safe='')}@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/orders")
    began = time.monotonic()
    with pytest.raises(NotConnected) as refused:
        await one.open(within=seconds(0.6))
    assert 0.5 < time.monotonic() - began < 2
    for port in ports:
        assert f"127.0.0.1:{port}/orders" in str(refused.value)
    assert "refused" in str(refused.value) or "Connect call failed" in str(refused.value)
    assert one.state.phase is Phase.NEW


async def test_a_server_that_says_nothing_is_given_up_at_the_limit(proxy: Proxy, proxied: str) -> None:
    proxy.swallow("to_client")
    one = transport(proxied)
    with pytest.raises(NotConnected):
        await one.open(within=seconds(0.5))


async def test_wrong_credentials_end_the_opening_at_once_and_are_shown_nowhere(
    rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    one = transport(f"amqp://guest:{quote(SECRET, safe='')}@127.0.0.1:{rabbitmq.port}/")
    began = time.monotonic()
    with pytest.raises(AccessDenied) as refused:
        await one.open(within=seconds(10))
    assert time.monotonic() - began < 3
    seen = [str(refused.value), repr(refused.value), repr(one), str(one.state), caplog.text]
    assert not any(SECRET in text or quote(SECRET, safe="") in text for text in seen)


async def test_a_missing_virtual_host_ends_the_opening_at_once(rabbit_url: str) -> None:
    one = transport(f"{rabbit_url}/no%2Fsuch")
    began = time.monotonic()
    with pytest.raises(NotConnected, match="no/such") as refused:
        await one.open(within=seconds(10))
    assert time.monotonic() - began < 3
    assert not refused.value.retryable


async def test_a_virtual_host_with_a_slash_and_a_password_of_special_signs_work(rabbitmq: RabbitMQ, dial: Dial) -> None:
    def prepare() -> None:
        rabbitmq.ctl("add_vhost", "a/b %2F")
        rabbitmq.ctl("add_user", "me@home", SECRET)
        rabbitmq.ctl("set_permissions", "-p", "a/b %2F", "me@home", ".*", ".*", ".*")

    await asyncio.to_thread(prepare)
    who = f"{quote('me@home', safe='')}:{quote(SECRET, safe='')}"
    one = await dial(f"amqp://{who}@127.0.0.1:{rabbitmq.port}/{quote('a/b %2F', safe='')}")
    assert one.state.endpoint == f"127.0.0.1:{rabbitmq.port}/a/b %2F"
    await asyncio.to_thread(rabbitmq.ctl, "delete_vhost", "a/b %2F")
    await asyncio.to_thread(rabbitmq.ctl, "delete_user", "me@home")


async def test_of_several_hosts_the_one_that_answers_is_found_within_one_round(rabbitmq: RabbitMQ, dial: Dial) -> None:
    url = rabbitmq.url_through(*free_ports(2), rabbitmq.port)
    began = time.monotonic()
    one = await dial(url)
    assert time.monotonic() - began < 2
    assert one.state.endpoint == f"127.0.0.1:{rabbitmq.port}/"
    assert one.state.dials == 0


async def test_both_connections_carry_the_name_of_the_application(dial: Dial, rabbitmq: RabbitMQ) -> None:
    await dial(name="billing@here")
    properties = await asyncio.to_thread(rabbitmq.ctl, "list_connections", "client_properties")
    assert '"billing@here publish"' in properties
    assert '"billing@here consume"' in properties


async def test_one_connection_does_it_all_where_that_is_asked_for(dial: Dial, declare: Declare) -> None:
    one, queue, sink = await dial(connections=1), await declare(), Recorder()
    assert any("One connection" in note for note in one.capabilities.notes)
    await one.subscribe(queue, sink, prefetch=5)
    await fill(one, queue, 20)
    for already in range(20):
        await sink.has(already + 1)
        assert await settle(one, [sink.got[already]]) == [Settled.DONE]
    assert one.state.generation == 1


async def test_changes_of_state_are_told_in_order(rabbitmq: RabbitMQ, dial: Dial) -> None:
    told: list[TransportState] = []
    one = await dial(on_change=told.append)
    await asyncio.to_thread(rabbitmq.close_all_connections)
    await until(lambda: one.state.generation == 2, "it is connected again")
    await one.close(seconds(1))
    phases = [state.phase for state in told]
    kinds = [phase for at, phase in enumerate(phases) if at == 0 or phases[at - 1] is not phase]
    wanted = [Phase.CONNECTING, Phase.CONNECTED, Phase.RECONNECTING, Phase.CONNECTED, Phase.CLOSING, Phase.CLOSED]
    assert kinds == wanted
    assert all(state.since.tzinfo is not None for state in told)


async def test_after_close_every_verb_is_refused_and_settling_is_stale(dial: Dial, declare: Declare) -> None:
    one, queue, sink = await dial(), await declare(), Recorder()
    await fill(one, queue, 5)
    await one.subscribe(queue, sink, prefetch=5)
    await sink.has(5)
    await asyncio.gather(one.close(seconds(1)), one.close(seconds(1)))
    await one.close(seconds(1))
    await is_refused(one)
    assert await settle(one, sink.got) == [Settled.STALE] * 5
    assert sink.phases[-1] is SubscriptionPhase.CLOSED
    assert sink.lost_by == []
    other = await dial()
    assert len(await other.pull(queue, most=10, wait=seconds(2))) == 5


async def test_a_transport_that_was_never_opened_is_refused_and_closes(rabbit_url: str) -> None:
    one = transport(rabbit_url)
    await is_refused(one)
    await one.close()
    assert one.state.phase is Phase.CLOSED


def test_it_may_be_opened_again_on_another_loop_and_used_on_no_other(rabbit_url: str, name: str) -> None:
    one = transport(rabbit_url)

    async def use() -> None:
        await one.open(within=SOON)
        await one.apply(Topology().queue(name, type="classic"), ApplyMode.CREATE)
        assert (await send(one, out(name)))[0].outcome is Published.ROUTED
        await one.delete(name)
        with pytest.raises(ClosedError):
            await one.open(within=SOON)

        def from_another_loop() -> None:
            async def publish() -> None:
                with pytest.raises(WrongLoop):
                    await send(one, out(name))

            asyncio.run(publish())

        await asyncio.to_thread(from_another_loop)
        await one.close(seconds(1))

    async def twice() -> None:
        await use()
        await use()

    asyncio.run(twice())
    asyncio.run(use())


async def test_close_while_opening_ends_both_at_once(proxy: Proxy, proxied: str) -> None:
    proxy.swallow("to_client")
    one = transport(proxied)
    opening = asyncio.create_task(one.open(within=seconds(30)))
    await until(lambda: proxy.accepted == 2, "both links are dialled")
    began = time.monotonic()
    await one.close(seconds(1))
    assert time.monotonic() - began < 2
    with pytest.raises(ClosedError):
        await opening
    assert one.state.phase is Phase.CLOSED


async def test_cancelling_open_leaves_nothing(proxy: Proxy, proxied: str) -> None:
    proxy.swallow("to_client")
    one = transport(proxied)
    opening = asyncio.create_task(one.open(within=seconds(30)))
    await until(lambda: proxy.accepted == 2, "both links are dialled")
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: proxy.taken["to_server"] and one.state.phase is Phase.NEW, "it is as before")


async def test_close_while_reconnecting_is_bounded_and_dials_no_more(dial: Dial, proxy: Proxy, proxied: str) -> None:
    one = await dial(proxied)
    proxy.refuse()
    proxy.cut()
    pending = asyncio.create_task(send(one, out("anywhere"), within=seconds(30)))
    await until(lambda: one.state.dials >= 2, "it dials")
    began = time.monotonic()
    await one.close(seconds(0.5))
    assert time.monotonic() - began < 1.5
    ((refused,),) = await asyncio.gather(pending)
    assert refused.outcome is Published.REFUSED
    proxy.refuse(False)
    before = proxy.accepted
    await asyncio.sleep(1)  # this is how long nothing happens
    assert proxy.accepted == before


async def test_close_of_a_silent_link_is_bounded_and_answers_what_is_pending(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    one, queue = await dial(proxied), await declare()
    await send(one, out(queue))
    proxy.swallow("to_client")
    proxy.swallow("to_server")
    pending = asyncio.create_task(send(one, out(queue), within=seconds(30)))
    await until(lambda: one.state.outstanding == 1, "a publish is unanswered")
    began = time.monotonic()
    await one.close(seconds(0.5))
    assert 0.5 <= time.monotonic() - began < 1.6
    ((failed,),) = await asyncio.gather(pending)
    assert failed.outcome is Published.FAILED


async def test_close_waits_for_what_is_unconfirmed(dial: Dial, declare: Declare, proxy: Proxy, proxied: str) -> None:
    one, queue = await dial(proxied), await declare()
    await send(one, out(queue))
    proxy.delay(0.2)
    pending = asyncio.create_task(send(one, out(queue)))
    await until(lambda: one.state.outstanding == 1, "a publish is unanswered")
    await one.close(seconds(5))
    assert (await pending)[0].outcome is Published.ROUTED


async def test_close_while_the_broker_is_blocked_is_bounded(dial: Dial, declare: Declare, rabbitmq: RabbitMQ) -> None:
    one, queue = await dial(), await declare()
    try:
        await asyncio.to_thread(rabbitmq.set_memory_alarm, True)
        pending = asyncio.create_task(send(one, out(queue), within=seconds(30)))
        await until(lambda: one.state.blocked, "the broker has blocked the connection")
        began = time.monotonic()
        await one.close(seconds(0.3))
        assert time.monotonic() - began < 1.3
        assert (await pending)[0].outcome is Published.FAILED
    finally:
        await asyncio.to_thread(rabbitmq.set_memory_alarm, False)


async def test_a_silent_link_is_noticed_after_two_heartbeats_and_found_again(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue, sink = await declare(), Recorder()
    one = await dial(f"{proxied}?heartbeat=2")
    await one.subscribe(queue, sink, prefetch=5)
    proxy.swallow("to_client")
    began = time.monotonic()
    await until(lambda: one.state.phase is Phase.RECONNECTING, "the silence is noticed", within=8)
    assert time.monotonic() - began > 2
    assert "two heartbeats" in (one.state.last_error or "")
    proxy.release()
    await until(lambda: sink.phases[-1] is SubscriptionPhase.ACTIVE, "it is subscribed again")
    await fill(one, queue, 1)
    await until(lambda: sink.got, "messages flow")


@pytest.mark.slow
async def test_traffic_that_only_the_tap_sees_keeps_the_link_alive(
    dial: Dial, declare: Declare, rabbit_url: str
) -> None:
    """Under load the broker sends no heartbeats, and aiormq would take the link for dead after (2 + 1) × 3 s."""
    queue, sink = await declare(), Recorder()
    one = await dial(f"{rabbit_url}?heartbeat=2")
    await one.subscribe(queue, sink, prefetch=100)
    until_then = time.monotonic() + 14
    sent = 0
    while time.monotonic() < until_then:
        await send(one, out(queue))
        sent += 1
        await sink.has(sent)
        await settle(one, sink.got[-1:])
    assert one.state.generation == 1


class Flood:
    """Publishes and accepts as fast as it goes, large bodies among small ones."""

    def __init__(self, one: Transport, queue: str) -> None:
        self.one, self.queue, self.accepted = one, queue, 0
        self._tasks = [asyncio.create_task(self._publish()) for _ in range(4)]
        self._settling: set[asyncio.Task[object]] = set()

    async def _publish(self) -> None:
        batch = [out(self.queue, bytes(size)) for size in [100] * 100 + [300_000]]
        while True:
            await send(self.one, *batch, within=seconds(20))

    def accept(self, batch: Sequence[Delivery]) -> None:
        self.accepted += len(batch)
        settling = asyncio.create_task(settle(self.one, batch))
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait({*self._tasks, *self._settling})


class Accepting(Recorder):
    """Keeps no delivery."""

    flood: Flood

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.flood.accept(batch)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_lane_saturated_for_two_minutes_keeps_its_heartbeat_of_five_seconds(
    dial: Dial, declare: Declare, rabbit_url: str
) -> None:
    queue, sink = await declare(), Accepting()
    one = await dial(f"{rabbit_url}?heartbeat=5")
    sink.flood = Flood(one, queue)
    await one.subscribe(queue, sink, prefetch=1_000)
    end = time.monotonic() + 120
    silences = [0.0]
    while time.monotonic() < end:
        accepted = sink.flood.accepted
        began = time.monotonic()
        await until(lambda: sink.flood.accepted > accepted, "it flows", within=15)  # noqa: B023  # awaited at once
        silences.append(time.monotonic() - began)
        assert one.state.phase is Phase.CONNECTED
    await sink.flood.end()
    print(f"{sink.flood.accepted} accepted, {max(silences):.1f} s without one at most")
    assert one.state.generation == 1
    assert sink.phases == [] or set(sink.phases) == {SubscriptionPhase.ACTIVE}


async def test_a_dead_peer_is_noticed_within_three_heartbeats_under_load(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue, sink = await declare(), Accepting()
    one = await dial(f"{proxied}?heartbeat=2")
    sink.flood = Flood(one, queue)
    await one.subscribe(queue, sink, prefetch=1_000)
    await until(lambda: sink.flood.accepted > 1_000, "it flows")
    proxy.swallow("to_client")
    proxy.swallow("to_server")
    began = time.monotonic()
    await until(lambda: one.state.phase is Phase.RECONNECTING, "the silence is noticed", within=8)
    assert time.monotonic() - began < 3 * 2
    assert "two heartbeats" in (one.state.last_error or "")
    proxy.cut()
    proxy.release()
    await sink.flood.end()


@pytest.mark.slow
async def test_200_forced_reconnects_leave_nothing_behind(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue, sink = await declare(), Recorder()
    one = await dial(proxied, reconnect=Backoff(first=seconds(0.01), ceiling=seconds(0.05)))
    await one.subscribe(queue, sink, prefetch=5)
    counts: list[int] = []
    for turn in range(200):
        generation = one.state.generation
        proxy.cut()
        while one.state.generation == generation:
            await asyncio.sleep(0.001)
        await until(lambda: sink.phases[-1] is SubscriptionPhase.ACTIVE, "subscribed again")
        if turn in (20, 199):
            counts.append(len(asyncio.all_tasks()))
    assert abs(counts[0] - counts[1]) <= 5
    assert (await send(one, out(queue)))[0].outcome is Published.ROUTED


async def test_last_contact_moves_while_idle(dial: Dial, declare: Declare, rabbit_url: str) -> None:
    one, queue = await dial(f"{rabbit_url}?heartbeat=2"), await declare()
    subscription = await one.subscribe(queue, Recorder(), prefetch=1)
    first = subscription.state.last_contact
    assert first is not None
    await until(lambda: (subscription.state.last_contact or 0) > first, "a heartbeat arrives", within=5)
