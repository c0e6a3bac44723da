"""Messages that come later: by the broker's own delay in memory, over the ladder on RabbitMQ."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest

import acemq
from acemq import (
    AceMQ,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    Diagnostic,
    Draft,
    DriftError,
    Envelope,
    Message,
    MovableClock,
    PublishInterceptor,
    Topology,
)
from acemq.topology import SCHEDULE, SCHEDULE_QUEUE
from acemq.transport import ApplyMode
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until

SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


@pytest.fixture
async def mq(url: str, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url, on_diagnostic=diagnostics.append) as mq:
        yield mq
        if mq.capabilities.transport == "rabbitmq":  # shared by every test of the session
            for queue in SCHEDULE.queues:
                await mq.delete(queue.name)
            await mq.delete("acemq.schedule", "exchange")


def is_rabbitmq(mq: AceMQ) -> bool:
    return mq.capabilities.transport == "rabbitmq"


class Arrivals:
    """A handler that notes what came, and when."""

    def __init__(self) -> None:
        self.messages: list[Message[Any]] = []
        self.at: dict[Any, float] = {}

    async def __call__(self, message: Message[Any]) -> None:
        self.messages.append(message)
        self.at[message.payload] = time.monotonic()

    def __len__(self) -> int:
        return len(self.messages)


async def test_o047_each_comes_within_a_second_of_its_time_whatever_was_sent_before(mq: AceMQ, queue: str) -> None:
    arrivals = Arrivals()
    async with mq.scheduler() as later, mq.consume(queue, int, arrivals):
        sent = dict[int, float]()
        for seconds in (60, 30, 2, 4, 1):
            sent[seconds] = time.monotonic()
            await later.after(timedelta(seconds=seconds), "", queue, seconds)
        await until(lambda: len(arrivals) == 3, within=8)
    assert sorted(arrivals.at) == [1, 2, 4]
    for seconds, at in arrivals.at.items():
        # The last second may not be waited for; late is only a machine that has other things to do.
        assert -1.0 < at - sent[seconds] - seconds < 2.0


async def test_a_moment_that_has_passed_and_a_delay_of_zero_are_now(mq: AceMQ, queue: str) -> None:
    arrivals = Arrivals()
    async with mq.scheduler() as later, mq.consume(queue, str, arrivals):
        scheduled = await later.at(datetime(2020, 1, 1, tzinfo=UTC), "", queue, "past")
        assert scheduled.hops == (0 if is_rabbitmq(mq) else None)
        await later.after(timedelta(), "", queue, "zero")
        await until(lambda: len(arrivals) == 2, within=3)
    assert later.counters.scheduled == 2


@pytest.mark.parametrize(
    "moment",
    [datetime(2027, 1, 1), datetime.now(UTC) + timedelta(days=400), "tomorrow", None],
    ids=["naive", "400 days ahead", "text", "nothing"],
)
async def test_m107_a_moment_without_a_zone_or_too_far_ahead_is_refused(mq: AceMQ, queue: str, moment: Any) -> None:
    async with mq.scheduler() as later:
        with pytest.raises(ConfigurationError, match=r"moment|days"):
            await later.at(moment, "", queue, 1)
        assert later.counters.scheduled == 0
    assert (await mq.depth(queue)).ready == 0


async def test_m107_headers_arrive_where_the_delay_is_native_and_are_refused_on_rabbitmq(mq: AceMQ, queue: str) -> None:
    async with mq.scheduler() as later:
        if is_rabbitmq(mq):
            given: list[dict[str, Any]] = [
                {"headers": {"a": "1"}},
                {"message_id": "m-1"},
                {"envelope": Envelope.of("t")},
            ]
            for options in given:
                with pytest.raises(CapabilityError, match=f"{next(iter(options))}=.*rabbitmq"):
                    await later.after(SECOND, "", queue, 1, **options)
            assert (await mq.depth("acemq.schedule.1s")).ready == 0
            return
        await later.after(timedelta(milliseconds=20), "", queue, 1, headers={"a": "1"}, message_id="m-1")
        pulled = await mq.pull(queue, int, wait=timedelta(seconds=2))
        assert pulled is not None
        assert (pulled.id, pulled.type, dict(pulled.headers)) == ("m-1", queue, {"a": "1"})
        await pulled.accept()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda later: later.after(timedelta(seconds=-1), "", "q", 1), ConfigurationError, "delay"),
        (lambda later: later.after(5, "", "q", 1), ConfigurationError, "timedelta"),
        (lambda later: later.after(timedelta.max, "", "q", 1), ConfigurationError, "days"),
        (lambda later: later.after(SECOND, "", "", 1), ConfigurationError, "queue name"),
        (lambda later: later.after(SECOND, "", "q", 1, priority=3), TypeError, "priority"),
        (lambda later: later.after(SECOND, "", "q", object()), acemq.EncodeError, "object"),
    ],
    ids=["negative", "no timedelta", "for ever", "nowhere", "unknown option", "no payload"],
)
async def test_bad_input_is_refused_at_the_call(mq: AceMQ, call: Any, error: type[Exception], match: str) -> None:
    async with mq.scheduler() as later:
        with pytest.raises(error, match=match):
            await call(later)
        assert later.counters.scheduled == 0
    with pytest.raises(ClosedError):
        await later.after(SECOND, "", "q", 1)


async def test_a_delayed_publish_takes_the_ladder_on_rabbitmq_and_comes_as_a_scheduled_message(
    mq: AceMQ, queue: str
) -> None:
    arrivals = Arrivals()
    async with mq.scheduler(), mq.consume(queue, str, arrivals):
        began = time.monotonic()
        await mq.send(queue, "one", delay=SECOND)
        await mq.send_many(queue, ["two", "three"], delay=SECOND)
        await mq.publish_batch([Draft("", queue, "four", delay=SECOND)])
        await until(lambda: len(arrivals) == 4)
        assert time.monotonic() - began > 0.9
    types = {message.type for message in arrivals.messages}
    assert types == ({"ScheduledMessage"} if is_rabbitmq(mq) else {queue})
    assert {message.content_type for message in arrivals.messages} == {"application/json"}


@pytest.mark.parametrize(
    "option", ["headers", "type", "version", "correlation_id", "causation_id", "claim", "expires_in", "reply_to"]
)
async def test_m023_what_the_ladder_would_lose_is_refused_by_name(mq: AceMQ, queue: str, option: str) -> None:
    if not is_rabbitmq(mq):
        pytest.skip("the delay is native")
    value = {"headers": {"a": 1}, "version": 2, "expires_in": MINUTE}.get(option, "x")
    with pytest.raises(CapabilityError, match=f"{option}= together with delay=") as refused:
        await mq.send(queue, 1, delay=SECOND, **{option: value})  # type: ignore[arg-type]
    assert refused.value.transport == "rabbitmq"
    assert not await mq.exists(SCHEDULE_QUEUE), "refused before any I/O"


class Stamps(PublishInterceptor):
    def before_publish(self, draft: Draft, /) -> None:
        draft.payload = f"{draft.payload}!"
        if draft.payload == "stamp me!":
            draft.envelope = draft.envelope.replace(headers={"tenant": "a"})


async def test_hooks_see_a_delayed_publish_and_a_header_of_theirs_is_not_lost_in_silence(mq: AceMQ, queue: str) -> None:
    mq.intercept(Stamps())
    async with mq.scheduler() as later:
        await later.after(timedelta(milliseconds=10), "", queue, "plain")
        pulled = await mq.pull(queue, str, wait=timedelta(seconds=2))
        assert pulled is not None
        assert pulled.payload == "plain!"
        await pulled.accept()
        if is_rabbitmq(mq):
            with pytest.raises(CapabilityError, match="headers="):
                await later.after(SECOND, "", queue, "stamp me")


async def test_a_start_and_a_close_leave_no_dead_letter_queues_and_delete_nothing(mq: AceMQ, queue: str) -> None:
    async with mq.scheduler() as later:
        assert (await mq.health()).status == "up"
        await later.close()
    names = [each.name for each in SCHEDULE.queues]
    assert [await mq.exists(name) for name in names] == [is_rabbitmq(mq)] * len(names)
    assert not await mq.exists(f"{SCHEDULE_QUEUE}.dlq")
    assert not await mq.exists(f"{SCHEDULE_QUEUE}.parked")
    assert (await later.close()).finished


async def test_a_foreign_message_is_dropped_and_reported_once(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    if not is_rabbitmq(mq):
        pytest.skip("there is no control queue")
    async with mq.scheduler() as later:
        await mq.send(SCHEDULE_QUEUE, "who am I", expires_in=timedelta(hours=1))
        await later.after(timedelta(seconds=1), "", queue, 1)
        await until(lambda: later.counters.delivered == 1)
    assert later.counters.foreign == 1
    assert [(each.name, each.level) for each in diagnostics] == [("acemq.schedule.foreign.message", "error")]
    assert (await mq.depth(SCHEDULE_QUEUE)).ready == 0


async def test_a_due_message_that_nobody_takes_is_kept_reported_once_and_delivered_when_it_is_bound(
    mq: AceMQ, queue: str, name: str, diagnostics: list[Diagnostic]
) -> None:
    if not is_rabbitmq(mq):
        pytest.skip("what is due is the broker's own affair")
    exchange = f"{name}-x"
    await mq.declare(Topology().exchange(exchange, "topic"))
    try:
        async with mq.scheduler() as later:
            await later.after(SECOND, exchange, "invoice.due", {"n": 1})
            await until(lambda: later.counters.kept == 1)
            assert later.counters.delivered == 0
            failed = [each for each in diagnostics if each.name == "acemq.move.failed"]
            assert [(each.level, each.destination) for each in failed] == [("error", exchange)]
            await mq.declare(
                Topology().exchange(exchange, "topic").queue(queue, type="classic").bind(queue, exchange, "#")
            )
            bound = time.monotonic()
            await until(lambda: later.counters.delivered == 1)
            assert time.monotonic() - bound < 6
        pulled = await mq.pull(queue, dict[str, int])
        assert pulled is not None
        assert pulled.payload == {"n": 1}
        await pulled.accept()
    finally:
        await mq.delete(exchange, "exchange")


# On a broker in memory that can do what RabbitMQ can, by a clock that is moved


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def broker(name: str, clock: MovableClock) -> MemoryBroker:
    return MemoryBroker.named(name, clock=clock, profile=Profile.RABBITMQ)


@pytest.fixture
async def climbing(
    broker: MemoryBroker, name: str, clock: MovableClock, diagnostics: list[Diagnostic]
) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}", clock=clock, on_diagnostic=diagnostics.append) as mq:
        await mq.declare(Topology().queue("due", type="classic"))
        yield mq


async def test_m105_four_hours_do_not_hold_up_a_minute(climbing: AceMQ, clock: MovableClock) -> None:
    came = dict[str, timedelta]()
    began = clock.now()

    async def note(message: Message[str]) -> None:
        came[message.payload] = clock.now() - began
        assert not [header for header in message.wire_headers if header.startswith("x-schedule-")]
        assert message.content_type == "application/json"

    async with climbing.scheduler() as later, climbing.consume("due", str, note):
        hops = [
            (await later.after(delay, "", "due", text)).hops
            for text, delay in (("4 h", 4 * HOUR), ("1 min", MINUTE), ("90 s", 1.5 * MINUTE))
        ]
        assert hops == [4, 1, 4]
        await clock.advance(5 * HOUR)
    assert list(came) == ["1 min", "90 s", "4 h"]
    for text, delay in (("4 h", 4 * HOUR), ("1 min", MINUTE), ("90 s", 1.5 * MINUTE)):
        assert abs(came[text] - delay) <= SECOND
    assert (later.counters.hops, later.counters.delivered) == (9, 3)


async def test_m106_an_exchange_that_is_deleted_meanwhile_keeps_the_message_until_it_is_back(
    climbing: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic]
) -> None:
    billing = Topology().exchange("billing").queue("due", type="classic").bind("due", "billing", "invoice")
    await climbing.declare(billing)
    async with climbing.scheduler() as later:
        await later.after(MINUTE, "billing", "invoice", 7)
        await climbing.delete("billing", "exchange")
        await clock.advance(MINUTE + 12 * SECOND)
        assert (later.counters.kept, later.counters.delivered) == (3, 0), "at once, after 5 s and after 10 s"
        await climbing.declare(billing)
        await clock.advance(5 * SECOND)
        await clock.advance(MINUTE)
    assert later.counters.delivered == 1
    assert (await climbing.depth("due")).ready == 1
    assert [each.name for each in diagnostics] == ["acemq.move.failed"]


async def test_every_step_is_counted_by_its_outcome(climbing: AceMQ, broker: MemoryBroker, clock: MovableClock) -> None:
    with patch.object(climbing.telemetry, "scheduled") as counted:
        async with climbing.scheduler() as later:
            await later.after(11 * SECOND, "", "due", 1)
            await climbing.send(SCHEDULE_QUEUE, "foreign")
            await later.after(SECOND, "", "gone", 1)
            await clock.advance(14 * SECOND)
    outcomes = [call.args[0] for call in counted.call_args_list]
    assert outcomes.count("scheduled") == later.counters.scheduled == 2
    assert outcomes.count("hopped") == later.counters.hops == 3
    assert outcomes.count("delivered") == later.counters.delivered == 1
    assert outcomes.count("foreign") == later.counters.foreign == 1
    assert outcomes.count("kept") == later.counters.kept == 3


async def test_each_change_of_state_is_reported_once(
    climbing: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic]
) -> None:
    async with climbing.scheduler() as later:
        for _ in range(2):
            for number in range(3):
                await later.after(SECOND, "", "gone", number)
            await clock.advance(30 * SECOND)
            assert later.counters.delivered % 3 == 0
            await climbing.declare(Topology().queue("gone", type="classic"))
            await clock.advance(6 * SECOND)
            assert (await climbing.depth("gone")).ready == 3
            await climbing.delete("gone")
    assert [each.name for each in diagnostics] == ["acemq.move.failed"] * 2
    assert later.counters.delivered == 6


async def test_a_rung_that_is_gone_keeps_the_message(
    climbing: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    async with climbing.scheduler() as later:
        await later.after(70 * SECOND, "", "due", 1)
        broker.drop_queue("acemq.schedule.10s")
        await clock.advance(90 * SECOND)
    # Kept until so little was left that a shorter rung, or none, would do.
    assert later.counters.kept >= 1
    assert later.counters.delivered == 1
    assert (await climbing.depth("due")).ready == 1


async def test_without_a_scheduler_a_message_is_late_and_not_lost(
    climbing: AceMQ, broker: MemoryBroker, clock: MovableClock
) -> None:
    async with climbing.scheduler() as later:
        await later.after(MINUTE, "", "due", 1)
    await clock.advance(HOUR)
    assert (await climbing.depth("due")).ready == 0
    assert (await climbing.depth(SCHEDULE_QUEUE)).ready == 1
    async with climbing.scheduler() as another:
        await clock.advance(timedelta())
        assert another.counters.delivered == 1
    assert (await climbing.depth("due")).ready == 1


async def test_a_ladder_with_other_arguments_is_refused_by_name(climbing: AceMQ) -> None:
    other = Topology().queue("acemq.schedule.1m", type="classic", ttl=2 * MINUTE)
    await climbing.transport.apply(other, ApplyMode.CREATE)
    with pytest.raises(DriftError, match=r"acemq\.schedule\.1m"):
        await climbing.scheduler()
    with pytest.raises(DriftError, match=r"acemq\.schedule\.1m"):
        await climbing.send("due", 1, delay=MINUTE)
    assert not await climbing.exists(SCHEDULE_QUEUE), "nothing was made"


async def test_a_connection_that_makes_nothing_names_what_is_missing_of_the_ladder(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    async with acemq.connect(f"memory://{name}", topology=acemq.TopologyMode.VERIFY) as mq:
        with pytest.raises(acemq.TopologyError, match=r"acemq\.schedule\.due"):
            await mq.scheduler()
    assert broker.snapshot() == []


async def test_a_broker_on_which_nothing_can_wait_is_refused_when_the_scheduler_is_made(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.BARE)
    async with acemq.connect(f"memory://{name}") as mq:
        with pytest.raises(CapabilityError, match=r"delay= needs delayed publishes"):
            mq.scheduler()
    assert broker.snapshot() == []


async def test_a_close_lets_moves_under_way_end(climbing: AceMQ, broker: MemoryBroker, clock: MovableClock) -> None:
    later = await climbing.scheduler()
    await later.after(SECOND, "", "due", 1)
    broker.stall("publish")
    await clock.advance(SECOND)
    closing = asyncio.ensure_future(later.close())
    await clock.rest()
    assert not closing.done()
    broker.release("publish")
    assert (await closing).finished
    assert (await climbing.depth("due")).ready == 1
    assert (await climbing.depth(SCHEDULE_QUEUE)).ready == 0


async def test_one_connection_lays_the_ladder_once(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("due", type="classic"))
        applied = 0
        apply = mq.transport.apply

        async def counted(*given: Any) -> Any:
            nonlocal applied
            applied += 1
            return await apply(*given)

        with patch.object(mq.transport, "apply", counted):
            await asyncio.gather(*(mq.send("due", n, delay=MINUTE) for n in range(20)))
        assert applied == 1
        assert "acemq.schedule.due" in str(mq.declared())
    assert {stored.queue for stored in broker.snapshot()} == {"acemq.schedule.1m"}
