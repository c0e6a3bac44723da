"""A transport of seven verbs, whose broker fails, is slow, and is asked by callers who do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ
from acemq.errors import CapabilityError, ClosedError, DriftError, FatalError
from acemq.polling import PollingTransport
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Capabilities,
    Delivery,
    LostBy,
    NotConnected,
    Outgoing,
    Published,
    QueueMissing,
    Settled,
    Settlement,
    SubscriptionPhase,
    SubscriptionState,
    TimedOut,
    Verb,
    WrongLoop,
)
from tests.waiting import until

CAN = Capabilities(transport="shelf", durable=False, unroutable="told", topic_patterns="none", depth="exact")
SOON = timedelta(seconds=5)
NOW = timedelta()


class Kept:
    """A message on the shelf, and the queue it is of."""

    def __init__(self, queue: str, out: Outgoing) -> None:
        self.queue, self.out = queue, out


class Shelf(PollingTransport):
    """Queues in a process. Verbs that are in `fails` do, and those in `hangs` wait until it is set aside."""

    poll = timedelta(milliseconds=10)

    def __init__(self) -> None:
        super().__init__(CAN, endpoint="shelf")
        self.topology, self.rows = Topology(), dict[str, list[Kept]]()
        self.out: set[Kept] = set()
        self.fails: set[str] = set()
        self.hangs: set[str] = set()
        self.hung_up = 0

    async def asked(self, verb: str) -> None:
        while verb in self.hangs:
            await asyncio.sleep(0)
        if verb in self.fails:
            raise OSError(f"{verb}: the shelf is locked")

    async def connect(self) -> None:
        await self.asked("connect")

    async def disconnect(self) -> None:
        self.hung_up += 1

    async def declared(self, change: Callable[[Topology], Topology]) -> Topology:
        await self.asked("declared")
        self.topology = change(self.topology)
        self.rows = {queue.name: self.rows.get(queue.name, []) for queue in self.topology.queues}
        return self.topology

    async def put(self, copies: Sequence[tuple[str, Outgoing]]) -> None:
        await self.asked("put")
        for queue, out in copies:
            self.rows[queue].append(Kept(queue, out))

    async def take(self, queue: str, most: int) -> Sequence[Delivery]:
        row = self.rows.get(queue, [])
        taken, row[:] = row[:most], row[most:]
        self.out.update(taken)
        try:
            await self.asked("take")
        except OSError:
            self.out.difference_update(taken)
            row[:0] = taken
            raise
        return [_delivery(each) for each in taken]

    async def remove(self, deliveries: Sequence[Delivery]) -> None:
        await self.asked("remove")
        self.out.difference_update(_of(each) for each in deliveries)

    async def put_back(self, deliveries: Sequence[Delivery]) -> None:
        await self.asked("put_back")
        for each in deliveries:
            self.out.remove(_of(each))
            self.rows[each.queue].insert(0, _of(each))

    async def count(self, queue: str) -> tuple[int, int]:
        return len(self.rows[queue]), sum(each.queue == queue for each in self.out)

    async def clear(self, queue: str) -> int:
        gone, self.rows[queue] = len(self.rows[queue]), []
        return gone


def _of(delivery: Delivery) -> Kept:
    assert isinstance(delivery.receipt, Kept)
    return delivery.receipt


def _delivery(kept: Kept) -> Delivery:
    out = kept.out
    return Delivery(
        queue=kept.queue,
        body=out.body,
        headers=out.headers,
        message_id=out.message_id,
        content_type=out.content_type,
        exchange=out.exchange,
        routing_key=out.routing_key,
        receipt=kept,
    )


def message(number: int = 0, **options: Any) -> Outgoing:
    given: dict[str, Any] = {"exchange": "", "routing_key": "q", "body": b"x", "headers": {}, "content_type": None}
    return Outgoing(**{**given, "message_id": str(number), **options})


class Seen:
    """A sink that notes what it is told, and raises at so many of its first calls."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.deliveries: list[Delivery] = []
        self.phases: list[SubscriptionPhase] = []

    def _note(self) -> None:
        self.fails -= 1
        if self.fails >= 0:
            raise RuntimeError("a sink")

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.deliveries.extend(batch)
        self._note()

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        raise AssertionError

    def changed(self, state: SubscriptionState, /) -> None:
        self.phases.append(state.phase)
        self._note()


@pytest.fixture
async def shelf() -> AsyncIterator[Shelf]:
    shelf = Shelf()
    await shelf.open(within=SOON)
    await shelf.apply(Topology().queue("q"), ApplyMode.CREATE)
    yield shelf
    await shelf.close(SOON)


class OnShelf(AceMQ):
    """A connection over a shelf, in place of what its URL names."""

    def make_transport(self, url: str, **options: object) -> Shelf:
        return Shelf()


async def test_an_engine_runs_on_it_with_dead_letters_and_a_replay() -> None:
    seen: list[int] = []

    def handle(message: acemq.Message[int]) -> None:
        seen.append(message.payload)
        if len(seen) == 1:
            raise FatalError("not today")

    async with OnShelf("shelf://").opening() as mq:
        await mq.declare(Topology().queue("q", dead_letter=True))
        async with mq.consume("q", int, handle, concurrency=1) as consumer:
            await mq.send_many("q", range(3))
            await until(lambda: consumer.counters.dead_lettered == 1 and len(seen) == 3)
            assert (await mq.replay("q.dlq").run()).replayed == 1
            await until(lambda: consumer.counters.acked == 3)
        assert (await mq.depth("q")).ready == 0
    assert seen == [0, 1, 2, 0]


async def test_what_cannot_be_reached_says_why_and_may_be_opened_later() -> None:
    shelf = Shelf()
    shelf.fails.add("connect")
    with pytest.raises(NotConnected, match=r"^shelf: connect: the shelf is locked$"):
        await shelf.open(within=SOON)
    shelf.fails.clear()
    shelf.hangs.add("connect")
    with pytest.raises(TimedOut, match="shelf"):
        await shelf.open(within=timedelta(milliseconds=10))
    with pytest.raises(ClosedError, match="not open"):
        await shelf.exists("q")
    shelf.hangs.clear()
    await shelf.open(within=SOON)
    assert not await shelf.exists("q")
    with pytest.raises(ClosedError, match="connected"):
        await shelf.open(within=SOON)
    await asyncio.gather(shelf.close(), shelf.close())
    await shelf.close()
    assert shelf.hung_up == 1


async def test_what_could_not_be_put_is_not_known_to_be_there(shelf: Shelf) -> None:
    shelf.fails.add("put")
    first, second = await shelf.publish([message(1), message(2, routing_key="nowhere")], within=SOON)
    assert (first.outcome, second.outcome) == (Published.FAILED, Published.FAILED)
    assert isinstance(first.error, NotConnected)
    shelf.fails.clear()
    shelf.hangs.add("put")
    (slow,) = await shelf.publish([message(3)], within=timedelta(milliseconds=10))
    assert slow.outcome is Published.FAILED
    assert isinstance(slow.error, TimedOut)
    shelf.hangs.clear()
    await until(lambda: len(shelf.rows["q"]) == 1)  # it was not cut off, and is there


async def test_who_stops_waiting_for_a_pull_leaves_nothing_taken(shelf: Shelf) -> None:
    await shelf.publish([message()], within=SOON)
    shelf.hangs.add("take")
    pulling = asyncio.create_task(shelf.pull("q", most=1, wait=NOW))
    await until(lambda: len(shelf.out) == 1)
    pulling.cancel()
    await asyncio.wait({pulling})
    assert pulling.cancelled()
    assert len(shelf.out) == 1
    shelf.hangs.clear()
    await until(lambda: len(shelf.rows["q"]) == 1)
    assert not shelf.out


async def test_a_settlement_that_fails_comes_again_and_a_late_one_changes_nothing(shelf: Shelf) -> None:
    await shelf.publish([message()], within=SOON)
    (delivery,) = await shelf.pull("q", most=5, wait=NOW)
    shelf.fails |= {"remove", "put_back"}
    assert await shelf.settle([Settlement(delivery, Verb.ACCEPT)]) == [Settled.FAILED]
    assert await shelf.settle([Settlement(delivery, Verb.ACCEPT)]) == [Settled.STALE]
    shelf.fails.clear()
    (again,) = await shelf.pull("q", most=5, wait=SOON)
    assert await shelf.settle([Settlement(again, Verb.REQUEUE, delay=SOON)]) == [Settled.FAILED]
    assert await shelf.settle([Settlement(again, Verb.ACCEPT)]) == [Settled.DONE]
    assert await shelf.count("q") == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_settlements_whose_caller_is_cancelled_are_carried_out_or_come_again(shelf: Shelf, fails: bool) -> None:
    await shelf.publish([message(1), message(2)], within=SOON)
    first, second = await shelf.pull("q", most=2, wait=NOW)
    shelf.hangs |= {"remove", "put_back"}
    settling = asyncio.create_task(shelf.settle([Settlement(first, Verb.REQUEUE), Settlement(second, Verb.ACCEPT)]))
    await asyncio.sleep(0)
    settling.cancel()
    await asyncio.wait({settling})
    assert await shelf.count("q") == (0, 2)
    if fails:
        shelf.fails.add("remove")
    shelf.hangs.clear()
    await until(lambda: not shelf.out)
    assert len(shelf.rows["q"]) == (2 if fails else 1)


async def test_a_subscription_outlives_a_broker_that_fails_and_a_sink_that_does(shelf: Shelf) -> None:
    sink = Seen(fails=1)
    shelf.fails.add("take")
    subscription = await shelf.subscribe("q", sink, prefetch=2)
    await until(lambda: subscription.state.phase is SubscriptionPhase.RECOVERING)
    assert "the shelf is locked" in (subscription.state.error or "")
    shelf.fails.clear()
    await shelf.publish([message(number) for number in range(5)], within=SOON)
    await until(lambda: len(sink.deliveries) == 2)
    assert sink.phases == [SubscriptionPhase.RECOVERING, SubscriptionPhase.ACTIVE]
    assert subscription.state.error is None
    asked = subscription.state.last_contact
    for _ in range(10):
        subscription.look()
        await asyncio.sleep(0)
    assert subscription.state.held == len(sink.deliveries) == 2, "no more than its prefetch"
    assert subscription.state.last_contact == asked
    await shelf.settle([Settlement(sink.deliveries[0], Verb.ACCEPT)])
    await until(lambda: len(sink.deliveries) == 3)
    await subscription.close()
    assert await shelf.count("q") == (4, 0)


@pytest.mark.parametrize("end", ["pause", "stop", "close"])
async def test_what_is_taken_while_it_ends_is_given_back_and_not_delivered(shelf: Shelf, end: str) -> None:
    sink = Seen()
    await shelf.publish([message()], within=SOON)
    shelf.hangs.add("take")
    subscription = await shelf.subscribe("q", sink, prefetch=2)
    await until(lambda: len(shelf.out) == 1)
    ending = asyncio.create_task(_end(subscription, end))
    await asyncio.sleep(0)
    shelf.hangs.clear()
    await ending
    await until(lambda: len(shelf.rows["q"]) == 1)
    assert not sink.deliveries
    if end == "pause":
        shelf.fails.add("take")  # of a paused one nobody asks, so that it cannot fail either
        assert subscription.state.phase is SubscriptionPhase.PAUSED
        shelf.fails.clear()
        subscription.resume()
        await until(lambda: len(sink.deliveries) == 1)


async def _end(subscription: Any, how: str) -> None:
    if how == "pause":
        subscription.pause()
    else:
        await getattr(subscription, how)()


async def test_a_close_of_a_subscription_that_is_cut_short_gives_back_all_the_same(shelf: Shelf) -> None:
    sink = Seen()
    await shelf.publish([message()], within=SOON)
    subscription = await shelf.subscribe("q", sink, prefetch=2)
    await until(lambda: len(sink.deliveries) == 1)
    shelf.hangs.add("put_back")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await subscription.close()
    shelf.hangs.clear()
    await until(lambda: len(shelf.rows["q"]) == 1)


@pytest.mark.parametrize("verb", ["put_back", "take"])
async def test_a_close_is_bounded_and_leaves_nothing_that_runs_on(shelf: Shelf, verb: str) -> None:
    await shelf.publish([message(1), message(2)], within=SOON)
    await shelf.pull("q", most=1, wait=NOW)
    shelf.hangs.add(verb)
    await shelf.subscribe("q", Seen(), prefetch=2)
    await until(lambda: len(shelf.out) == 2)
    before = asyncio.all_tasks()
    async with asyncio.timeout(3):
        await shelf.close(timedelta(milliseconds=50))
    assert shelf.hung_up == 1
    await until(lambda: not [task for task in before if task is not asyncio.current_task() and not task.done()])
    with pytest.raises(ClosedError):
        await shelf.publish([message()], within=SOON)
    shelf.hangs.clear()
    await shelf.open(within=SOON)
    sink = Seen()
    await shelf.subscribe("q", sink, prefetch=1)
    await shelf.publish([message(3)], within=SOON)
    await until(lambda: len(sink.deliveries) == 1)


async def test_what_it_cannot_do_is_refused_by_name(shelf: Shelf) -> None:
    for asking in (message(delay=SOON), message(expires_in=SOON), message(priority=1)):
        (refused,) = await shelf.publish([asking], within=SOON)
        assert refused.outcome is Published.REFUSED
        assert isinstance(refused.error, CapabilityError)
    with pytest.raises(CapabilityError, match="exclusive"):
        await shelf.subscribe("q", Seen(), prefetch=1, exclusive=True)
    beyond = {
        "ttl": Topology().queue("r", ttl=SOON),
        "ordered": Topology().queue("r", ordered=True),
        "lease": Topology().queue("r", lease=SOON),
        "exclusive": Topology().queue("r", exclusive=True),
        "auto_delete": Topology().queue("r", auto_delete=True),
    }
    for option, topology in beyond.items():
        with pytest.raises(CapabilityError, match=f"{option}=.* of queue 'r'"):
            await shelf.apply(topology, ApplyMode.CREATE)
    with pytest.raises(QueueMissing, match="'r'"):
        await shelf.pull("r", most=1, wait=NOW)
    await shelf.apply(Topology().exchange("x", "fanout"), ApplyMode.CREATE)
    with pytest.raises(DriftError, match="kind='fanout'"):
        await shelf.apply(Topology().exchange("x"), ApplyMode.CREATE)
    with pytest.raises(QueueMissing, match="'r'"):
        await shelf.apply(Topology().exchange("x", "fanout").bind("r", "x"), ApplyMode.CREATE)
    with pytest.raises(WrongLoop):
        await asyncio.to_thread(lambda: asyncio.run(shelf.exists("q")))
