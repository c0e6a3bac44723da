"""One consumer in the world, the others stand by. Case M-040."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import cast

import pytest

import acemq
from acemq import AceMQ, CapabilityError, Message, TopologyError
from acemq.transport import (
    Claims,
    Delivery,
    GivesBack,
    LostBy,
    QueueMissing,
    Settled,
    Settlement,
    SubscriptionState,
    Verb,
)
from acemq.transports.memory import MemoryBroker, Profile
from tests.proxy import WAYS, Proxy
from tests.services import RabbitMQ
from tests.waiting import QUICK, until, until_async


class Watched:
    """Who handles, and whether two ever did at once."""

    def __init__(self) -> None:
        self.at_once = self.most = 0
        self.by: list[tuple[str, int]] = []

    def of(self, who: str) -> acemq.Handler[int]:
        async def handle(message: Message[int]) -> None:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.001)
            self.at_once -= 1
            self.by.append((who, message.payload))

        return handle

    def handled(self, who: str) -> int:
        return sum(each == who for each, _ in self.by)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture(params=["classic", "quorum"])
async def queue(request: pytest.FixtureRequest, mq: AceMQ, name: str) -> AsyncIterator[str]:
    await mq.declare(acemq.Topology().queue(name, type=request.param))
    yield name
    for each in (name, f"{name}.dlq", f"{name}.parked"):
        await mq.delete(each)


async def test_of_two_exclusive_consumers_one_delivers_and_the_other_takes_over_when_it_closes(
    url: str, mq: AceMQ, queue: str, watched: Watched
) -> None:
    async with acemq.connect(url) as other:
        first = await mq.consume(queue, int, watched.of("first"), exclusive=True, concurrency=1)
        second = await other.consume(queue, int, watched.of("second"), exclusive=True, concurrency=1)
        await mq.send_many(queue, range(30))
        await until(lambda: watched.handled("first") == 30)
        assert second.in_flight == second.held == 0
        await first.close()
        await mq.send_many(queue, range(30))
        await until(lambda: watched.handled("second") == 30, within=5)
        assert first.counters.acked == second.counters.acked == 30
    assert watched.most == 1


async def test_two_of_one_connection_exclude_each_other_as_well(mq: AceMQ, queue: str, watched: Watched) -> None:
    first = await mq.consume(queue, int, watched.of("first"), exclusive=True, concurrency=1)
    async with mq.consume(queue, int, watched.of("second"), exclusive=True, concurrency=1):
        await mq.send_many(queue, range(30))
        await until(lambda: watched.handled("first") == 30)
        await first.close()
        await mq.send_many(queue, range(30))
        await until(lambda: watched.handled("second") == 30, within=5)
    assert watched.most == 1


async def test_a_paused_owner_keeps_its_queue(url: str, mq: AceMQ, queue: str, watched: Watched) -> None:
    async with (
        acemq.connect(url) as other,
        mq.consume(queue, int, watched.of("first"), exclusive=True) as first,
        other.consume(queue, int, watched.of("second"), exclusive=True),
    ):
        first.pause()
        await mq.send_many(queue, range(5))
        first.resume()
        await until(lambda: watched.handled("first") == 5)
    assert watched.handled("second") == 0


async def test_one_that_stands_by_opens_pauses_and_closes_at_once(url: str, mq: AceMQ, queue: str) -> None:
    async with acemq.connect(url) as other, mq.consume(queue, int, lambda m: None, exclusive=True) as owner:
        standby = await other.consume(queue, int, lambda m: None, exclusive=True)
        standby.pause()
        standby.resume()
        drained = await asyncio.wait_for(standby.close(), 2)
        assert drained.finished
        await mq.send(queue, 1)
        await until(lambda: owner.counters.acked == 1)


class Collecting:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.got: list[Delivery] = []

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.got += batch

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None: ...
    def changed(self, state: SubscriptionState, /) -> None: ...


async def test_giving_back_keeps_the_places_and_the_queue(url: str, mq: AceMQ, queue: str, watched: Watched) -> None:
    sink = Collecting()
    subscription = await mq.transport.subscribe(queue, sink, prefetch=2, exclusive=True)
    async with acemq.connect(url) as other:
        async with other.consume(queue, int, watched.of("other"), exclusive=True):
            await mq.send_many(queue, range(4))
            await until(lambda: [delivery.body for delivery in sink.got] == [b"0", b"1"])
            assert isinstance(subscription, GivesBack)
            await subscription.give_back()
            await subscription.give_back()  # there is nothing any more

            async def are_back() -> bool:
                return (await mq.depth(queue)).ready == 4

            await until_async(are_back)
            late = [Settlement(delivery, Verb.ACCEPT) for delivery in sink.got]
            assert await mq.transport.settle(late) == [Settled.STALE] * 2
            sink.got.clear()
            subscription.resume()
            await until(lambda: [delivery.body for delivery in sink.got] == [b"0", b"1"])
            assert watched.by == []
            await subscription.close()
            await until(lambda: [number for _, number in watched.by] == [0, 1, 2, 3])


async def test_whether_a_queue_is_claimed_is_seen_without_taking_it(url: str, mq: AceMQ, queue: str) -> None:
    looks = mq.transport
    assert isinstance(looks, Claims)
    assert not await looks.is_claimed(queue)
    async with acemq.connect(url) as other:
        async with other.consume(queue, int, lambda m: None, exclusive=True) as owner:
            assert await looks.is_claimed(queue)
            assert await cast("Claims", other.transport).is_claimed(queue)
            await mq.send(queue, 1)
            await until(lambda: owner.counters.acked == 1)

        async def is_free() -> bool:
            return not await looks.is_claimed(queue)

        await until_async(is_free)
        async with other.consume(queue, int, lambda m: None):
            assert await looks.is_claimed(queue)
    with pytest.raises(QueueMissing):
        await looks.is_claimed(f"{queue}-missing")


async def test_a_missing_queue_is_named_whoever_owns_it(mq: AceMQ, name: str) -> None:
    with pytest.raises(TopologyError, match=name):
        await mq.consume(name, int, lambda m: None, exclusive=True)


async def test_a_transport_without_exclusive_consumers_refuses_at_the_call(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.BARE)
    async with acemq.connect(f"memory://{broker.name}") as mq:
        with pytest.raises(CapabilityError, match="exclusive=True"):
            mq.consume("q", int, lambda m: None, exclusive=True)


class TestOnRabbitMQ:
    @pytest.fixture
    def url(self, rabbit_url: str) -> str:
        return rabbit_url

    async def test_m040_the_first_closed_by_force_the_second_delivers_within_five_seconds_and_never_both(
        self, url: str, mq: AceMQ, queue: str, proxy: Proxy, proxied: str, watched: Watched
    ) -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(acemq.connect(proxied))
            second = await stack.enter_async_context(acemq.connect(url))
            await first.consume(queue, int, watched.of("first"), exclusive=True, concurrency=1)
            standby = await second.consume(queue, int, watched.of("second"), exclusive=True, concurrency=1)
            await mq.send_many(queue, range(20))
            await until(lambda: watched.handled("first") == 20)
            proxy.cut()  # the first may dial again at once, and does
            await mq.send_many(queue, range(20, 40))
            # What the first accepted last may come again: the cut took the acceptance with it.
            await until(lambda: {n for who, n in watched.by if who == "second"} >= set(range(20, 40)), within=5)
            assert watched.handled("first") == 20
            await standby.close()
            await mq.send_many(queue, range(40, 60))
            await until(lambda: watched.handled("first") == 40, within=5)
        assert watched.most == 1

    async def test_an_owner_that_lost_its_link_and_has_no_rival_goes_on(
        self, mq: AceMQ, queue: str, proxy: Proxy, proxied: str, watched: Watched
    ) -> None:
        async with acemq.connect(proxied) as alone:
            await alone.consume(queue, int, watched.of("alone"), exclusive=True)
            proxy.cut()
            await mq.send_many(queue, range(10))
            await until(lambda: watched.handled("alone") == 10, within=8)

    @pytest.mark.slow
    async def test_t042_while_the_broker_takes_a_dead_line_for_the_owner_one_alone_is_active_and_soon_one_is(
        self, rabbitmq: RabbitMQ, mq: AceMQ, queue: str, watched: Watched
    ) -> None:
        heartbeat = 2
        async with Proxy("127.0.0.1", rabbitmq.port) as one, Proxy("127.0.0.1", rabbitmq.port) as two:
            hosts = f"{rabbitmq.url_through(one.port, two.port)}?heartbeat={heartbeat}"
            two.refuse()
            async with (
                acemq.connect(hosts, reconnect=QUICK) as first,
                acemq.connect(f"{rabbitmq.url}?heartbeat={heartbeat}") as second,
            ):
                owner = await first.consume(queue, int, watched.of("first"), exclusive=True, concurrency=1)
                await second.consume(queue, int, watched.of("second"), exclusive=True, concurrency=1)
                await mq.send_many(queue, range(10))
                await until(lambda: watched.handled("first") == 10)
                for way in WAYS:
                    one.swallow(way)
                one.refuse()  # old lines hang, new ones pass
                two.refuse(False)
                await mq.send_many(queue, range(10, 20))
                await until(lambda: first.state.generation == 2, within=5 * heartbeat)
                assert owner.subscription is not None
                assert owner.subscription.phase != "closed", "it waits, and has not failed"
                await until(lambda: {n for _, n in watched.by} == set(range(20)), within=5 * heartbeat)
        assert watched.most == 1

    async def test_others_that_consume_are_waited_for(self, url: str, mq: AceMQ, queue: str, watched: Watched) -> None:
        plain = await mq.consume(queue, int, watched.of("plain"), concurrency=1)
        async with acemq.connect(url) as other:
            await other.consume(queue, int, watched.of("exclusive"), exclusive=True, concurrency=1)
            await mq.send_many(queue, range(20))
            await until(lambda: watched.handled("plain") == 20)
            await plain.close()
            await mq.send_many(queue, range(20))
            await until(lambda: watched.handled("exclusive") == 20, within=3)
        assert watched.most == 1

    async def test_others_that_go_on_consuming_are_reported(
        self, url: str, mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from acemq.transports.rabbitmq import receive

        monkeypatch.setattr(receive, "REPORT_AFTER", 0.5)
        said: list[acemq.Diagnostic] = []
        async with (
            mq.consume(queue, int, lambda m: None),
            acemq.connect(url, on_diagnostic=said.append) as other,
            other.consume(queue, int, lambda m: None, exclusive=True) as consumer,
        ):
            await until(lambda: bool(said))
            assert (said[0].name, said[0].queue) == ("acemq.consumer.lost", queue)
            assert "other consumers" in said[0].message
            assert consumer.last_error is not None
            await asyncio.sleep(0.5)
            assert len(said) == 1

    async def test_the_owner_s_queue_is_exclusive_transient_and_gone_when_it_closes(
        self, mq: AceMQ, queue: str
    ) -> None:
        async with mq.consume(queue, int, lambda m: None, exclusive=True):
            assert await mq.exists(f"acemq.owner.{queue}")

        async def is_gone() -> bool:
            return not await mq.exists(f"acemq.owner.{queue}")

        await until_async(is_gone)

    async def test_a_queue_deleted_and_made_again_is_consumed_again_by_its_owner(
        self, mq: AceMQ, name: str, watched: Watched
    ) -> None:
        topology = acemq.Topology().queue(name, type="classic")
        await mq.declare(topology)
        async with mq.consume(name, int, watched.of("owner"), exclusive=True):
            await mq.delete(name)
            await mq.declare(topology)
            await mq.send(name, 1)
            await until(lambda: watched.handled("owner") == 1, within=timedelta(seconds=15).total_seconds())
        for each in (name, f"{name}.dlq", f"{name}.parked"):
            await mq.delete(each)
