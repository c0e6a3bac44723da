"""Waits longer than a broker can delay: put back until they are due, or hops through the scheduler's control queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import acemq
from acemq import (
    AceMQ,
    Batch,
    CapabilityError,
    Diagnostic,
    Draft,
    Envelope,
    Message,
    MovableClock,
    PublishInterceptor,
    RetryPolicy,
    Topology,
)
from acemq.topology import SCHEDULE_QUEUE
from acemq.transport import Outgoing, Settlement
from acemq.transports.memory import MemoryBroker, Profile

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


def profile(publish: timedelta, requeue: timedelta | None, **more: Any) -> Profile:
    """Delays of a queue service: short ones, none of an exchange, and no other headers at a requeue."""
    can = replace(
        Profile.FULL.capabilities, publish_delay=publish, requeue_delay=requeue, requeue_rewrites=False, **more
    )
    return replace(Profile.FULL, name="SHORT", capabilities=can, of_exchanges={"publish_delay": None})


PATIENT = profile(15 * MINUTE, 12 * HOUR)
"""As SQS is: 15 minutes for a send, 12 hours for what is put back."""


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def broker(request: pytest.FixtureRequest, name: str, clock: MovableClock) -> MemoryBroker:
    return MemoryBroker.named(name, clock=clock, profile=getattr(request, "param", PATIENT))


@pytest.fixture
async def mq(
    broker: MemoryBroker, name: str, clock: MovableClock, diagnostics: list[Diagnostic]
) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}", clock=clock, on_diagnostic=diagnostics.append) as mq:
        await mq.declare(Topology().queue("due").exchange("news", "topic").bind("due", "news", "#"))
        yield mq


class Seen:
    """A handler that notes what came, and how long after the start."""

    def __init__(self, clock: MovableClock) -> None:
        self._clock, self._began = clock, clock.now()
        self.messages: list[Message[Any]] = []
        self.at: list[timedelta] = []

    async def __call__(self, message: Message[Any]) -> None:
        self.messages.append(message)
        self.at.append(self._clock.now() - self._began)


def calls_of(broker: MemoryBroker) -> list[tuple[str, timedelta | None]]:
    """Everything that is published and settled from now on: where to or how, and with which delay."""
    calls: list[tuple[str, timedelta | None]] = []

    def note(subject: Any) -> bool:
        match subject:
            case Outgoing():
                calls.append((subject.routing_key, subject.delay))
            case Settlement():
                calls.append((subject.verb.value, subject.delay))
            case _:
                pass
        return False

    broker.faults.next("publish", "fail", match=note)  # faults that are asked and never take effect
    broker.faults.next("settle", "fail", match=note)
    return calls


# To a queue that puts back for a while


async def test_what_comes_early_is_put_back_until_it_is_due_and_no_handler_sees_it(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    seen, calls = Seen(clock), calls_of(broker)
    async with mq.consume("due", str, seen, max_deliveries=2) as consumer:
        await mq.send("due", "x", delay=40 * HOUR, headers={"tenant": "a"}, message_id="m-1", reply_to="back")
        await clock.advance(50 * HOUR)
    (message,), (at,) = seen.messages, seen.at
    assert at == 40 * HOUR
    assert (message.id, message.type, message.attempt, message.reply_to) == ("m-1", "due", 1, "back")
    assert dict(message.headers) == {"tenant": "a"}
    quarter = 15 * MINUTE
    assert calls == [
        ("due", quarter),
        *[("requeue", 12 * HOUR)] * 3,
        ("requeue", 4 * HOUR - quarter),
        ("accept", timedelta()),
    ]
    assert consumer.counters.acked == 1
    assert consumer.counters.dead_lettered == 0, "what came early does not count as delivered"
    assert not await mq.exists(SCHEDULE_QUEUE)


async def test_one_that_kills_its_process_once_it_is_due_is_given_up_all_the_same(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    tries = 0

    async def dies(message: Message[str]) -> None:
        nonlocal tries
        tries += 1
        broker.disconnect("the process is gone")

    async with mq.consume("due", str, dies, max_deliveries=3):
        await mq.send("due", "x", delay=25 * HOUR)
        await clock.advance(26 * HOUR)
    assert 3 <= tries <= 4, "once for each delivery that the wait cannot have cost, and at most one more"
    assert (await mq.depth("due.dlq")).ready == 1


async def test_what_is_due_does_not_wait_behind_what_is_early(mq: AceMQ, clock: MovableClock) -> None:
    seen = Seen(clock)
    async with mq.consume("due", int, seen, concurrency=1, prefetch=1):
        await mq.send_many("due", range(5), delay=HOUR)
        await clock.advance(15 * MINUTE)
        await mq.send("due", 9)
        await clock.advance(SECOND)
        assert [message.payload for message in seen.messages] == [9]
        await clock.advance(HOUR)
    assert sorted(message.payload for message in seen.messages) == [0, 1, 2, 3, 4, 9]


async def test_a_pull_a_receiver_and_a_batch_get_nothing_early(mq: AceMQ, clock: MovableClock) -> None:
    batches: list[list[str]] = []

    async def note(batch: Batch[str]) -> None:
        batches.append([message.payload for message in batch])

    await mq.send("due", "early", delay=HOUR)
    await mq.send("due", "due", delay=10 * MINUTE)
    await clock.advance(20 * MINUTE)
    pulled = await mq.pull_many("due", str)
    assert [each.payload for each in pulled] == ["due"]
    assert await mq.pull("due", str) is None
    await clock.advance(10 * MINUTE)
    async with mq.receive("due", str) as receiving:
        await clock.advance(MINUTE)
        assert receiving.held == 0
    async with mq.consume_batches("due", str, note, within=SECOND):
        await clock.advance(MINUTE)
        assert not batches
        await clock.advance(HOUR)
    assert batches == [["early"]]
    assert await pulled[0].accept()


async def test_a_pull_waits_on_after_it_got_something_early(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("due", "early", delay=HOUR)
    await clock.advance(15 * MINUTE)
    pulling = asyncio.ensure_future(mq.pull("due", str, wait=MINUTE))
    await clock.advance(30 * SECOND)
    assert not pulling.done()
    await mq.send("due", "now")
    await clock.advance(SECOND)
    pulled = await pulling
    assert pulled is not None
    assert pulled.payload == "now"
    await pulled.accept()
    pulling = asyncio.ensure_future(mq.pull("due", str, wait=MINUTE))
    await clock.advance(MINUTE)
    assert await pulling is None


@pytest.mark.parametrize("broker", [profile(3 * SECOND, 20 * SECOND, hold_limit=20 * SECOND)], indirect=True)
async def test_t002_a_retry_longer_than_the_broker_can_delay(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    attempts: list[tuple[int, timedelta]] = []
    began = clock.now()

    async def fail_once(message: Message[str]) -> None:
        attempts.append((message.attempt, clock.now() - began))
        if message.attempt == 1:
            raise ValueError("not yet")

    async with mq.consume("due", str, fail_once, retry=RetryPolicy.delays(11 * SECOND)):
        calls = calls_of(broker)
        await mq.send("due", "x")
        await clock.advance(5 * SECOND)
        assert calls[1:] == [
            ("due", 3 * SECOND),
            ("accept", timedelta()),
            ("requeue", 8 * SECOND),
        ], "the copy is confirmed before the original is settled, and comes early"
        broker.disconnect("killed at 5 s")
        await clock.advance(10 * SECOND)
    assert [attempt for attempt, _ in attempts] == [1, 2]
    assert 11 * SECOND <= attempts[1][1] <= 12 * SECOND


async def test_a_retry_without_a_copy_may_be_longer_than_one_requeue(name: str, clock: MovableClock) -> None:
    rewriting = replace(Profile.FULL.capabilities, requeue_delay=4 * SECOND)
    broker = MemoryBroker.named(name, clock=clock, profile=replace(Profile.FULL, capabilities=rewriting))
    attempts: list[tuple[int, timedelta]] = []
    began = clock.now()

    async def fail_once(message: Message[str]) -> None:
        attempts.append((message.attempt, clock.now() - began))
        if message.attempt == 1:
            raise ValueError("not yet")

    async with acemq.connect(f"memory://{broker.name}", clock=clock) as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", str, fail_once, retry=RetryPolicy.delays(11 * SECOND)):
            calls = calls_of(broker)
            await mq.send("q", "x")
            await clock.advance(12 * SECOND)
    requeues = [delay for verb, delay in calls if verb == "requeue"]
    assert requeues == [4 * SECOND, 4 * SECOND, 3 * SECOND]
    assert attempts == [(1, timedelta()), (2, 11 * SECOND)]


@pytest.mark.parametrize(
    ("requeue", "refused"), [(None, True), (20 * SECOND, False)], ids=["nothing is put back", "it is put back"]
)
async def test_a_wait_that_could_only_be_spent_holding_the_delivery_is_refused_beyond_the_limit(
    name: str, requeue: timedelta | None, refused: bool
) -> None:
    broker = MemoryBroker.named(name, profile=profile(3 * SECOND, requeue, hold_limit=20 * SECOND))
    async with acemq.connect(f"memory://{broker.name}") as mq:
        for wait in (11 * SECOND, MINUTE):
            if refused and wait == MINUTE:
                with pytest.raises(CapabilityError, match="retry="):
                    mq.consume("due", str, lambda message: None, retry=RetryPolicy.delays(wait))
            else:
                mq.consume("due", str, lambda message: None, retry=RetryPolicy.delays(wait))


# Otherwise: through the control queue


async def test_a_delayed_publish_to_an_exchange_hops_and_keeps_its_envelope(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    seen, envelope = Seen(clock), Envelope.of("invoice.due", headers={"tenant": "a"}, correlation_id="c-1")
    async with mq.scheduler() as later, mq.consume("due", dict[str, int], seen):
        calls = calls_of(broker)
        scheduled = await later.after(HOUR + MINUTE, "news", "invoice", {"n": 1}, envelope=envelope)
        assert scheduled.hops == 5
        assert [stored.content_type for stored in broker.snapshot()] == ["application/octet-stream"]
        await clock.advance(2 * HOUR)
    (message,), (at,) = seen.messages, seen.at
    assert at == HOUR + MINUTE
    assert (message.id, message.type, message.correlation_id) == (envelope.id, "invoice.due", "c-1")
    assert (message.attempt, message.content_type, message.payload) == (1, "application/json", {"n": 1})
    assert dict(message.headers) == {"tenant": "a"}, "no header of the way"
    assert message.routing_key == "invoice"
    hops = [(key, delay) for key, delay in calls if key == SCHEDULE_QUEUE]
    assert hops == [*[(SCHEDULE_QUEUE, 15 * MINUTE)] * 4, (SCHEDULE_QUEUE, MINUTE)]
    assert (later.counters.scheduled, later.counters.hops, later.counters.delivered) == (1, 5, 1)


@pytest.mark.parametrize("broker", [profile(15 * MINUTE, None)], indirect=True)
async def test_a_queue_that_puts_nothing_back_is_reached_by_hops_however_it_is_sent_to(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    class Stamps(PublishInterceptor):
        def before_publish(self, draft: Draft, /) -> None:
            draft.envelope = draft.envelope.replace(headers={"stamped": True})

    seen = Seen(clock)
    async with mq.scheduler(), mq.consume("due", str, seen):
        await mq.send("due", "one", delay=HOUR)
        await mq.send_many("due", ["two", "three"], delay=HOUR)
        await mq.publish_batch([Draft("", "due", "four", delay=HOUR)])
        mq.intercept(Stamps())
        await mq.send("due", "five", delay=HOUR)
        assert {stored.queue for stored in broker.snapshot()} == {SCHEDULE_QUEUE}
        await clock.advance(2 * HOUR)
    assert sorted(message.payload for message in seen.messages) == ["five", "four", "one", "three", "two"]
    assert set(seen.at) == {HOUR}
    assert [message.payload for message in seen.messages if "stamped" in message.headers] == ["five"]


async def test_a_delay_that_the_queue_can_do_stays_the_brokers_own(
    mq: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    async with mq.scheduler() as later:
        calls = calls_of(broker)
        scheduled = await later.after(15 * MINUTE, "", "due", 1)
        assert scheduled.hops is None
        assert calls == [("due", 15 * MINUTE)]
        assert (later.counters.scheduled, later.counters.hops) == (1, 0)


@pytest.mark.parametrize(
    "option", [{"priority": 1}, {"ordering_key": "k"}, {"mandatory": False}, {"persistent": False}], ids=str
)
async def test_what_a_hop_would_lose_is_refused_by_name(mq: AceMQ, option: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError, match=f"{next(iter(option))}= together with delay="):
        await mq.publish("news", "k", 1, delay=HOUR, **option)
    assert not await mq.exists(SCHEDULE_QUEUE), "refused before any I/O"


async def test_what_has_expired_on_its_way_is_never_handled(mq: AceMQ, clock: MovableClock) -> None:
    seen = Seen(clock)
    async with mq.scheduler(), mq.consume("due", int, seen):
        await mq.publish("news", "k", 1, delay=HOUR, expires_in=30 * MINUTE)
        await mq.publish("news", "k", 2, delay=HOUR, expires_in=2 * HOUR)
        await clock.advance(HOUR + MINUTE)
    assert [message.payload for message in seen.messages] == [2]
    assert (await mq.depth("due.dlq")).ready == 1


async def test_a_due_message_that_nobody_takes_is_kept_with_its_attempt_and_reported_once(
    mq: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic]
) -> None:
    seen = Seen(clock)
    await mq.declare(Topology().exchange("billing"))
    async with mq.scheduler() as later:
        await later.after(HOUR, "billing", "invoice", 7)
        await clock.advance(HOUR + 12 * SECOND)
        assert (later.counters.kept, later.counters.delivered) == (3, 0), "at once, after 5 s and after 10 s"
        await mq.declare(Topology().exchange("billing").queue("bills").bind("bills", "billing", "invoice"))
        async with mq.consume("bills", int, seen):
            await clock.advance(6 * SECOND)
    assert [(message.payload, message.attempt) for message in seen.messages] == [(7, 1)]
    assert later.counters.delivered == 1
    assert [each.name for each in diagnostics] == ["acemq.move.failed"]


async def test_without_a_scheduler_it_is_late_and_one_that_dies_loses_nothing(
    mq: AceMQ, name: str, broker: MemoryBroker, clock: MovableClock
) -> None:
    await mq.publish("news", "k", 1, delay=20 * MINUTE)
    await clock.advance(HOUR)
    assert (await mq.depth(SCHEDULE_QUEUE)).ready == 1
    async with acemq.connect(f"memory://{name}", clock=clock) as another:
        await another.scheduler()
        broker.stall("publish")
        await clock.advance(SECOND)  # it has it in hand
        broker.disconnect("killed")
        broker.refuse_dials(True)  # so that it is the next one that goes on
        broker.release("publish")
    broker.refuse_dials(False)
    await clock.advance(MINUTE)
    async with mq.scheduler() as later:
        await clock.advance(MINUTE)
        assert later.counters.delivered >= 1
    assert (await mq.depth(SCHEDULE_QUEUE)).ready == 0
    assert (await mq.depth("due")).ready >= 1


async def test_a_connection_that_makes_nothing_names_the_control_queue(name: str, broker: MemoryBroker) -> None:
    async with acemq.connect(f"memory://{name}", topology=acemq.TopologyMode.VERIFY) as mq:
        with pytest.raises(acemq.TopologyError, match=r"acemq\.schedule\.due"):
            await mq.scheduler()
