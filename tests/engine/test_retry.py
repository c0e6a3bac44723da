"""Where a failed message waits, and what it counts: cases M-041 … M-045, O-13, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

import acemq
from acemq import (
    AceMQ,
    Ack,
    CapabilityError,
    ConfigurationError,
    Diagnostic,
    Envelope,
    Message,
    MovableClock,
    RetryPolicy,
    Topology,
)
from acemq.transport import Outgoing
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until, until_async

SECOND = timedelta(seconds=1)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture(params=[Profile.FULL, Profile.RABBITMQ], ids=["in place", "by copies and rungs"])
def broker(request: pytest.FixtureRequest, clock: MovableClock, name: str) -> MemoryBroker:
    return MemoryBroker.named(name, clock=clock, profile=request.param)


@pytest.fixture
async def mq(
    broker: MemoryBroker, clock: MovableClock, name: str, diagnostics: list[Diagnostic]
) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}", clock=clock, on_diagnostic=diagnostics.append) as mq:
        await mq.declare(Topology().queue("q", type="classic"))
        yield mq


class Failing:
    """Fails every time, and notes when, and on which attempt."""

    def __init__(self, clock: MovableClock) -> None:
        self.clock, self.at, self.attempts = clock, list[float](), list[int]()

    async def __call__(self, message: Message[int]) -> Ack | None:
        self.at.append(self.clock.monotonic())
        self.attempts.append(message.attempt)
        raise ValueError("boom")

    @property
    def waits(self) -> list[float]:
        return [round(after - before, 6) for before, after in zip(self.at, self.at[1:], strict=False)]


async def test_m041_short_waits_are_spread_and_long_ones_exact_then_it_is_dead(
    mq: AceMQ, clock: MovableClock, broker: MemoryBroker
) -> None:
    failing = Failing(clock)
    policy = RetryPolicy.exponential(6, first=10 * SECOND, ceiling=timedelta(minutes=5))
    async with mq.consume("q", int, failing, retry=policy) as consumer:
        await mq.send("q", 1)
        await clock.advance(timedelta(minutes=10))
        assert consumer.counters.dead_lettered == 1
    assert failing.attempts == [1, 2, 3, 4, 5, 6]
    for wait, wanted in zip(failing.waits[:2], (10, 20), strict=True):
        assert wanted * 0.8 <= wait <= wanted * 1.2
    if mq.capabilities.dead_letter_routes:
        assert failing.waits[2:] == [40, 80, 160]
        assert [await mq.exists(f"q.retry.{rung}") for rung in ("40s", "80s", "160s", "10s", "20s")] == [
            True,
            True,
            True,
            False,
            False,
        ]
    letter = await mq.pull("q.dlq", int)
    assert letter is not None
    assert letter.attempt == 6
    assert letter.failure is not None
    assert letter.failure.text == "exhausted 6 attempts: boom"


async def test_m042_a_wait_with_a_fraction_of_a_second_has_no_rung(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    async with mq.consume("q", int, failing, retry=RetryPolicy.fixed(2, timedelta(seconds=45.5))) as consumer:
        assert not await mq.exists("q.retry.45500ms")
        await mq.send("q", 1)
        await clock.advance(45 * SECOND)
        if mq.capabilities.dead_letter_routes:
            assert consumer.held == 1  # in its prefetch slot, and in no handler slot
            assert consumer.in_flight == 0
        await clock.advance(SECOND)
        assert failing.waits == [45.5]


@pytest.mark.parametrize("broker", [Profile.RABBITMQ], indirect=True)
async def test_m043_a_missing_rung_is_reported_and_the_wait_spent_in_the_consumer(
    mq: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic]
) -> None:
    failing = Failing(clock)
    async with mq.consume("q", int, failing, retry=RetryPolicy.fixed(2, timedelta(minutes=1))):
        assert await mq.delete("q.retry.1m")
        await mq.send("q", 1)
        await clock.advance(61 * SECOND)
    assert failing.waits == [60]
    assert failing.attempts == [1, 2]
    missing = [each for each in diagnostics if each.name == "acemq.retry.rung.missing"]
    assert [each.destination for each in missing] == ["q.retry.1m"]


@pytest.mark.parametrize("broker", [Profile.RABBITMQ], indirect=True)
async def test_a_wait_whose_rung_is_missing_takes_a_place_for_15_minutes_at_most(
    mq: AceMQ, clock: MovableClock
) -> None:
    failing = Failing(clock)
    async with mq.consume("q", int, failing, retry=RetryPolicy.fixed(2, timedelta(minutes=20))):
        assert await mq.delete("q.retry.20m")
        await mq.send("q", 1)
        await clock.advance(timedelta(minutes=21))
    assert failing.waits == [15 * 60]


async def test_m044_age_ends_retries_at_its_limit_and_an_unknown_age_never_does(mq: AceMQ, clock: MovableClock) -> None:
    async def fail(message: Message[str]) -> None:
        if message.attempt == 1:
            raise ValueError("boom")

    limit = timedelta(minutes=2)
    policy = RetryPolicy.fixed(5, SECOND).give_up_after(limit)
    young = Envelope.of("t", now=clock.now() - limit + timedelta(milliseconds=1))
    old = Envelope.of("t", now=clock.now() - limit)
    async with mq.consume("q", str, fail, retry=policy) as consumer:
        await mq.send("q", "young", envelope=young)
        await mq.send("q", "old", envelope=old)
        await mq.outbound.move(
            Outgoing(exchange="", routing_key="q", body=b'"?"', headers={}, message_id="m", content_type=None)
        )
        await clock.advance(10 * SECOND)
        assert (consumer.counters.retried, consumer.counters.acked, consumer.counters.dead_lettered) == (2, 2, 1)
    letter = await mq.pull("q.dlq", str)
    assert letter is not None
    assert letter.payload == "old"
    assert str(letter.wire_headers["x-acemq-error"]).startswith("exceeded the maximum message age of ")


async def test_m045_a_delay_that_the_handler_asks_for_replaces_the_wait_and_never_the_limit(
    mq: AceMQ, clock: MovableClock
) -> None:
    at: list[float] = []

    async def later(message: Message[int]) -> Ack:
        at.append(clock.monotonic())
        return Ack.retry(delay=7 * SECOND)

    async with mq.consume("q", int, later, retry=RetryPolicy.fixed(3, SECOND)) as consumer:
        await mq.send("q", 1)
        await clock.advance(60 * SECOND)
        assert consumer.counters.dead_lettered == 1
    assert at == [0, 7, 14]


async def test_waits_hold_no_handler_slot(mq: AceMQ, clock: MovableClock) -> None:
    seen: list[int] = []

    async def handle(message: Message[int]) -> None:
        seen.append(message.payload)
        if message.payload == 0 and message.attempt == 1:
            raise ValueError("boom")

    async with mq.consume("q", int, handle, concurrency=1, retry=RetryPolicy.fixed(2, 20 * SECOND)):
        await mq.send_many("q", [0, 1, 2])
        await clock.rest()
        assert seen == [0, 1, 2]
        await clock.advance(20 * SECOND)
        assert seen == [0, 1, 2, 0]


async def test_o14_attempts_go_on_counting_in_the_next_consumer(mq: AceMQ, clock: MovableClock) -> None:
    attempts: list[int] = []
    for _ in range(2):
        failing = Failing(clock)
        async with mq.consume("q", int, failing, retry=RetryPolicy.fixed(4, SECOND)):
            if not attempts:
                await mq.send("q", 1)
            await clock.advance(SECOND * 1.5)
        attempts += failing.attempts
        await clock.advance(2 * SECOND)
    # The third wait was cut short by the stop: it is handled again with the attempt it had.
    assert sorted(set(attempts)) == list(range(1, max(attempts) + 1))
    assert max(attempts) in (3, 4)


async def test_attempt_sixty_waits_no_longer_than_the_ceiling(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    policy = RetryPolicy(max_attempts=None, first=SECOND, ceiling=timedelta(hours=1), broker_from=timedelta())
    old = Envelope.of("t", now=datetime(2026, 1, 1, tzinfo=UTC), attempt=60)
    if mq.capabilities.hold_limit is not None:
        with pytest.raises(CapabilityError, match="0:30:00"):
            mq.consume("q", int, failing, retry=policy)
        policy = replace(policy, broker_from=30 * SECOND)
    async with mq.consume("q", int, failing, retry=policy):
        await mq.send("q", 1, envelope=old)
        await clock.advance(timedelta(hours=1))
    assert failing.attempts == [60, 61]
    assert failing.waits == [3600]


async def test_broker_from_zero_never_waits_in_the_broker(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    policy = RetryPolicy.fixed(2, timedelta(minutes=1)).wait_in_broker_from(timedelta())
    async with mq.consume("q", int, failing, retry=policy):
        assert not await mq.exists("q.retry.1m")
        await mq.send("q", 1)
        await clock.advance(timedelta(minutes=2))
    assert failing.waits == [60]


async def test_twenty_messages_on_rungs_leave_the_consumer_free(mq: AceMQ, clock: MovableClock) -> None:
    policy = RetryPolicy.fixed(2, 20 * SECOND).wait_in_broker_from(10 * SECOND)
    seen: list[int] = []

    async def handle(message: Message[int]) -> None:
        seen.append(message.payload)
        if message.payload < 20 and message.attempt == 1:
            raise ValueError("boom")

    async with mq.consume("q", int, handle, prefetch=20, retry=policy) as consumer:
        await mq.send_many("q", range(20))
        await clock.rest()
        assert consumer.held == 0
        await mq.send("q", 20)
        await clock.rest()
        assert seen[-1] == 20
        await clock.advance(21 * SECOND)
        await until(lambda: len(seen) == 41)


async def test_m025_default_options_are_five_attempts_and_then_the_dead_letters(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    async with mq.consume("q", int, failing) as consumer:
        await mq.send("q", 1)
        await clock.advance(30 * SECOND)
        assert consumer.counters.dead_lettered == 1
    assert failing.attempts == [1, 2, 3, 4, 5]
    for wait, wanted in zip(failing.waits, (1, 2, 4, 8), strict=True):
        assert wanted * 0.8 <= wait <= wanted * 1.2
    letter = await mq.pull("q.dlq", int)
    assert letter is not None
    assert (letter.attempt, letter.body) == (5, b"1")
    assert letter.wire_headers["x-acemq-error"] == "exhausted 5 attempts: boom"


async def test_an_expired_message_is_never_handled_and_lies_in_the_dead_letters(mq: AceMQ, clock: MovableClock) -> None:
    await mq.declare(Topology().queue("short", type="classic", dead_letter=True))
    handled: list[int] = []
    await mq.send("short", 1, expires_in=2 * SECOND)
    await clock.advance(3 * SECOND)
    async with mq.consume("short", int, lambda message: handled.append(message.payload)):
        await clock.advance(SECOND)
    assert handled == []
    assert (await mq.depth("short.dlq")).ready == 1


async def test_an_expiry_outlives_a_retry(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    await mq.declare(Topology().queue("short", type="classic", dead_letter=True))
    async with mq.consume("short", int, failing, retry=RetryPolicy.fixed(5, 10 * SECOND)):
        await mq.send("short", 1, expires_in=15 * SECOND)
        await clock.advance(60 * SECOND)
    assert failing.attempts == [1, 2]
    assert (await mq.depth("short.dlq")).ready == 1


async def test_retry_for_decides_for_one_failure_and_all_failures_share_one_count(
    mq: AceMQ, clock: MovableClock
) -> None:
    asked: list[tuple[int, int, str]] = []
    ended: dict[int, list[int]] = {1: [], 2: [], 3: []}

    def soon_for_time_outs(message: Message[Any], error: BaseException) -> RetryPolicy | None:
        asked.append((message.payload, message.attempt, type(error).__name__))
        return RetryPolicy.fixed(2, SECOND) if isinstance(error, TimeoutError) else None

    async def fail(message: Message[int]) -> Ack | None:
        ended[message.payload].append(message.attempt)
        if message.payload == 1 or (message.payload == 3 and message.attempt == 3):
            raise TimeoutError("too slow")
        if message.attempt == 2:
            return Ack.retry(ValueError("boom"))
        raise ValueError("boom")

    policy = RetryPolicy.exponential(5, first=SECOND)
    async with mq.consume("q", int, fail, retry=policy, retry_for=soon_for_time_outs) as consumer:
        await mq.send_many("q", [1, 2, 3])
        await clock.advance(timedelta(minutes=2))
        assert consumer.counters.dead_lettered == 3
    assert ended == {1: [1, 2], 2: [1, 2, 3, 4, 5], 3: [1, 2, 3]}
    assert (2, 2, "ValueError") in asked
    reasons = {letter.payload: letter.failure for letter in await mq.pull_many("q.dlq", int)}
    assert {payload: failure.text for payload, failure in reasons.items() if failure} == {
        1: "exhausted 2 attempts: too slow",
        2: "exhausted 5 attempts: boom",
        3: "exhausted 3 attempts: too slow",
    }


async def test_the_wait_of_retry_for_is_the_one_that_is_waited(mq: AceMQ, clock: MovableClock) -> None:
    failing = Failing(clock)
    hasty = RetryPolicy.fixed(3, 7 * SECOND).with_jitter(0)
    policy = RetryPolicy.exponential(3, first=SECOND, jitter=0.5)
    async with mq.consume("q", int, failing, retry=policy, retry_for=lambda message, error: hasty):
        await mq.send("q", 1)
        await clock.advance(timedelta(minutes=1))
    assert failing.waits == [7, 7]


@pytest.mark.parametrize("answer", ["raises", "a number"])
async def test_a_retry_for_that_fails_is_reported_and_leaves_it_to_the_consumer(
    mq: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic], answer: str
) -> None:
    def broken(message: Message[Any], error: BaseException) -> Any:
        if answer == "raises":
            raise KeyError("no such tenant")
        return 3

    failing = Failing(clock)
    async with mq.consume("q", int, failing, retry=RetryPolicy.fixed(2, SECOND), retry_for=broken) as consumer:
        await mq.send("q", 1)
        await clock.advance(timedelta(minutes=1))
        assert consumer.counters.dead_lettered == 1
    assert failing.attempts == [1, 2]
    said = [each for each in diagnostics if each.name == "acemq.interceptor.failed"]
    assert [(each.level, each.queue, each.attempt) for each in said] == [("warning", "q", 1), ("warning", "q", 2)]
    assert ("KeyError" if answer == "raises" else "gave a int") in said[0].message


async def test_a_retry_for_that_must_be_awaited_is_refused_at_the_call(mq: AceMQ) -> None:
    async def later(message: Message[Any], error: BaseException) -> None: ...

    with pytest.raises(ConfigurationError, match="retry_for"):
        mq.consume("q", int, Failing(MovableClock()), retry_for=later)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_m030_a_copy_that_never_lands_is_tried_again_after_pauses_that_double_to_thirty_seconds(
    mq: AceMQ, clock: MovableClock, diagnostics: list[Diagnostic]
) -> None:
    at: list[float] = []

    async def reject(message: Message[int]) -> Ack:
        at.append(clock.monotonic())
        return Ack.reject("bad")

    async with mq.consume("q", int, reject) as consumer:
        await mq.delete("q.dlq")
        await mq.send("q", 1)
        await clock.advance(92 * SECOND)
        assert [round(after - before, 6) for before, after in pairwise(at)] == [1, 2, 4, 8, 16, 30, 30]
        assert (consumer.counters.move_failed, consumer.counters.rejected) == (7, 7)
        assert [told.name for told in diagnostics] == ["acemq.move.failed"] * 8
        await mq.declare(Topology().queue("q.dlq", type="classic"))
        await clock.advance(32 * SECOND)
    letter = await mq.pull("q.dlq", int)
    assert letter is not None
    assert (letter.payload, letter.attempt) == (1, 1)


async def test_twenty_copies_that_meet_one_blip_are_all_tried_again_after_a_second(
    mq: AceMQ, clock: MovableClock, broker: MemoryBroker
) -> None:
    broker.faults.next("publish", "refuse", times=20, match=lambda outgoing: outgoing.routing_key == "q.dlq")
    await mq.send_many("q", range(20))
    async with mq.consume("q", int, lambda message: Ack.reject("bad"), prefetch=20) as consumer:
        await until(lambda: consumer.mover.moves_failed_in_row == 20)
        await clock.advance(SECOND)
        await until(lambda: consumer.counters.rejected == 40)
        assert (await mq.depth("q.dlq")).ready == 20


async def test_a_copy_that_has_not_landed_for_days_is_still_tried_every_thirty_seconds(
    mq: AceMQ, clock: MovableClock, broker: MemoryBroker
) -> None:
    async with mq.consume("q", int, lambda message: Ack.reject("bad")) as consumer:
        consumer.mover.moves_failed_in_row = 5_000  # of others, for as long as the broker took nothing
        broker.faults.next("publish", "refuse", times=8, match=lambda outgoing: outgoing.routing_key == "q.dlq")
        await mq.send("q", 1)

        async def has_landed() -> bool:
            await clock.advance(5 * SECOND)
            return (await mq.depth("q.dlq")).ready == 1

        await until_async(has_landed)
        assert clock.monotonic() < 200  # 1 + 2 + 4 + 8 + 16 + 3 × 30, and what the looking adds


@pytest.mark.parametrize("broker", [Profile.FULL], indirect=True)
async def test_t001_a_retry_in_place_makes_no_copy(mq: AceMQ, clock: MovableClock, broker: MemoryBroker) -> None:
    seen: list[tuple[int, float, str]] = []

    async def fail_twice(message: Message[int]) -> None:
        seen.append((message.attempt, clock.monotonic() - began, message.id))
        if message.attempt < 3:
            raise ValueError("boom")

    tick, census = timedelta(milliseconds=20), list[int]()
    policy = RetryPolicy.exponential(3, first=timedelta(seconds=0.3)).with_jitter(0)
    async with mq.consume("q", int, fail_twice, retry=policy):
        began = clock.monotonic()
        await mq.send("q", 1, message_id="m-1")
        census.append(len(broker.snapshot()))
        for _ in range(50):
            await clock.advance(tick)
            census.append(len(broker.snapshot()))
    assert [(attempt, round(at, 2), id) for attempt, at, id in seen] == [
        (1, 0, "m-1"),
        (2, 0.3, "m-1"),
        (3, 0.9, "m-1"),
    ]
    assert census == [1] * 45 + [0] * 6, "there until the third attempt has ended, at 0.9 s"
