"""Too late to matter (case T-068): what has expired reaches no handler, also where the broker knows no expiry."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import acemq
from acemq import AceMQ, Ack, CapabilityError, ConfigurationError, Message, MovableClock, RetryPolicy, Topology
from acemq import headers as h
from acemq.envelope import to_millis
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until, until_async

SECOND = timedelta(seconds=1)
AWS = replace(
    Profile.FULL,
    name="AWS",
    capabilities=replace(
        Profile.FULL.capabilities,
        expiry=False,
        requeue_rewrites=False,
        publish_delay=timedelta(minutes=15),
        requeue_delay=timedelta(hours=12),
    ),
)
"""Delays as SQS has them, and no expiry of one message."""


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture(params=[Profile.BARE, AWS], ids=lambda profile: profile.name)
def broker(request: pytest.FixtureRequest, name: str, clock: MovableClock) -> MemoryBroker:
    return MemoryBroker.named(name, clock=clock, profile=request.param)


@pytest.fixture
async def mq(broker: MemoryBroker, clock: MovableClock) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{broker.name}", clock=clock) as mq:
        await mq.declare(Topology().queue("q", dead_letter=True))
        yield mq


async def letters(mq: AceMQ, queue: str = "q.dlq") -> list[acemq.Pulled[str]]:
    return await mq.pull_many(queue, str, most=100)


@pytest.mark.parametrize("expired", ["dead_letter", "drop"])
async def test_t068_what_has_expired_is_set_aside_or_dropped_and_the_rest_is_handled(
    mq: AceMQ, clock: MovableClock, expired: Any
) -> None:
    await mq.send("q", "old", expires_in=2 * SECOND)
    await mq.send("q", "long", expires_in=60 * SECOND)
    await mq.send("q", "for ever")
    late = ["old"]
    if mq.capabilities.publish_delay is None:
        with pytest.raises(CapabilityError, match="delay"):
            await mq.send("q", "delayed", delay=3 * SECOND, expires_in=2 * SECOND)
    else:
        await mq.send("q", "delayed", delay=3 * SECOND, expires_in=2 * SECOND)
        late.append("delayed")
    await clock.advance(5 * SECOND)
    handled: list[Message[str]] = []

    async def handle(message: Message[str]) -> None:
        handled.append(message)

    async with mq.consume("q", str, handle, expired=expired) as consumer:
        await clock.advance(SECOND)
        assert sorted(message.payload for message in handled) == ["for ever", "long"]
        assert consumer.counters.expired == len(late)
        assert (consumer.counters.dead_lettered, consumer.counters.acked) == (
            (len(late), 2) if expired == "dead_letter" else (0, 2 + len(late))
        )
    assert all(h.EXPIRES_AT not in message.headers for message in handled)
    found = await letters(mq)
    assert sorted(letter.payload for letter in found) == (sorted(late) if expired == "dead_letter" else [])
    for letter in found:
        assert letter.failure is not None
        assert (letter.failure.how, letter.failure.text, letter.failure.queue) == ("expired", "expired", "q")
        assert h.EXPIRES_AT not in letter.wire_headers


async def test_t068_one_that_waits_for_its_retry_beyond_its_expiry_is_not_tried_again(
    mq: AceMQ, clock: MovableClock
) -> None:
    attempts: list[int] = []

    async def fail(message: Message[str]) -> None:
        attempts.append(message.attempt)
        raise ValueError("boom")

    async with mq.consume("q", str, fail, retry=RetryPolicy.fixed(5, 3 * SECOND)) as consumer:
        await mq.send("q", "retried", expires_in=2 * SECOND)
        await clock.advance(10 * SECOND)
        assert consumer.counters.expired == 1
    assert attempts == [1]
    (letter,) = await letters(mq)
    assert letter.failure is not None
    assert (letter.failure.how, letter.attempt) == ("expired", 2)


async def test_t068_a_replayed_dead_letter_is_handled(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("q", "old", expires_in=2 * SECOND)
    await clock.advance(5 * SECOND)
    handled: list[str] = []

    async def handle(message: Message[str]) -> None:
        handled.append(message.payload)

    async with mq.consume("q", str, handle):
        await clock.advance(SECOND)
        assert handled == []
        if mq.capabilities.depth == "none":  # replay wants to know where to stop
            (letter,) = await letters(mq)
            await mq.send("q", letter.payload, envelope=letter.envelope.replace(attempt=1, error=None))
            await letter.accept()
        else:
            assert (await mq.replay("q.dlq").run()).replayed == 1
        await clock.advance(60 * SECOND)
    assert handled == ["old"]


@pytest.mark.parametrize("outcome", ["retry", "park", "reject"])
async def test_a_retry_keeps_the_expiry_and_what_is_set_aside_has_none(
    mq: AceMQ, clock: MovableClock, outcome: str
) -> None:
    sent_at, seen = to_millis(clock.now()), list[Message[str]]()

    async def decide(message: Message[str]) -> Ack:
        seen.append(message)
        if len(seen) == 2:
            return Ack.accept()
        return {"retry": Ack.retry("again"), "park": Ack.park("look"), "reject": Ack.reject("no")}[outcome]

    async with mq.consume("q", str, decide, retry=RetryPolicy.fixed(2, SECOND)):
        await mq.send("q", "x", expires_in=60 * SECOND)
        await clock.advance(2 * SECOND)
    assert [message.wire_headers[h.EXPIRES_AT] for message in seen] == [sent_at + 60_000] * len(seen)
    if outcome == "retry":
        assert [message.attempt for message in seen] == [1, 2]
        return
    (aside,) = await letters(mq, "q.parked" if outcome == "park" else "q.dlq")
    assert h.EXPIRES_AT not in aside.wire_headers


async def test_it_has_expired_at_its_instant_and_not_a_millisecond_before(mq: AceMQ, clock: MovableClock) -> None:
    for short_of, answer in ((timedelta(milliseconds=1), "x"), (timedelta(), None)):
        await mq.send("q", "x", expires_in=SECOND)
        await clock.advance(SECOND - short_of)
        pulled = await mq.pull("q", str)
        assert (pulled.payload if pulled is not None else None) == answer
        if pulled is not None:
            await pulled.accept()


async def test_t068_a_pull_passes_over_what_has_expired(mq: AceMQ, clock: MovableClock) -> None:
    for number in range(5):
        await mq.send("q", f"old {number}", expires_in=2 * SECOND)
    await mq.send("q", "fresh")
    await clock.advance(2 * SECOND)
    pulled = await mq.pull("q", str)
    assert pulled is not None
    assert pulled.payload == "fresh"
    assert await pulled.accept()
    assert await mq.pull("q", str) is None
    found = await letters(mq)
    assert sorted(letter.payload for letter in found) == [f"old {number}" for number in range(5)]
    assert all(letter.failure is not None and letter.failure.how == "expired" for letter in found)


async def test_a_pull_that_waits_waits_on_behind_what_has_expired(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("q", "old", expires_in=SECOND)
    await clock.advance(SECOND)
    pulling = asyncio.create_task(mq.pull("q", str, wait=10 * SECOND))
    await clock.advance(5 * SECOND)
    assert not pulling.done()
    await mq.send("q", "fresh")
    pulled = await pulling
    assert pulled is not None
    assert pulled.payload == "fresh"


async def test_a_pull_without_dead_letters_hands_out_nothing_that_has_expired_and_loses_nothing(
    mq: AceMQ, clock: MovableClock
) -> None:
    if mq.capabilities.unroutable == "unknown":
        pytest.skip("what is copied to a queue that is not there is gone on such a broker, whoever copies it")
    await mq.declare(Topology().queue("bare"))
    await mq.send("bare", "old", expires_in=SECOND)
    await clock.advance(SECOND)
    pulling = asyncio.create_task(mq.pull("bare", str))
    await clock.advance(5 * SECOND)
    assert await pulling is None
    await mq.declare(Topology().queue("bare.dlq", type="classic"))
    assert await mq.pull("bare", str) is None
    (letter,) = await letters(mq, "bare.dlq")
    assert letter.payload == "old"


async def test_a_cancelled_pull_leaves_what_expired_to_its_end(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("q", "old", expires_in=SECOND)
    await clock.advance(SECOND)
    pulling = asyncio.create_task(mq.pull("q", str, wait=10 * SECOND))
    await asyncio.sleep(0)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await clock.rest()
    assert [letter.payload for letter in await letters(mq)] + [
        letter.payload for letter in await mq.pull_many("q", str, most=10)
    ] == ["old"]


async def test_receiving_passes_over_what_has_expired(mq: AceMQ, clock: MovableClock) -> None:
    await mq.send("q", "old", expires_in=SECOND)
    await mq.send("q", "fresh")
    await clock.advance(SECOND)
    async with mq.receive("q", str) as receiving:
        pulled = await anext(receiving)
        assert pulled.payload == "fresh"
        assert await pulled.accept()
        await clock.rest()
        assert (receiving.counters.expired, receiving.counters.dead_lettered) == (1, 1)
    assert [letter.payload for letter in await letters(mq)] == ["old"]


async def test_nobody_sets_the_instant_by_hand(mq: AceMQ) -> None:
    with pytest.raises(ConfigurationError, match=h.EXPIRES_AT):
        await mq.send("q", "x", headers={h.EXPIRES_AT: 1})


# Where the broker has an expiry, and its rungs may carry none


@pytest.fixture(params=["memory", "rabbitmq"])
async def with_rungs(request: pytest.FixtureRequest, name: str) -> AsyncIterator[tuple[AceMQ, str]]:
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    url = f"memory://{broker.name}" if request.param == "memory" else request.getfixturevalue("rabbit_url")
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue(name, type="classic", dead_letter=True))
        yield mq, name
        for each in (name, f"{name}.dlq", f"{name}.parked", f"{name}.retry.2s", f"{name}.retry.1m"):
            await mq.delete(each)


async def test_t068_one_that_expires_on_its_rung_is_not_tried_again(with_rungs: tuple[AceMQ, str]) -> None:
    mq, queue = with_rungs
    attempts: list[int] = []

    async def fail(message: Message[str]) -> None:
        attempts.append(message.attempt)
        raise ValueError("boom")

    policy = RetryPolicy.fixed(5, 2 * SECOND).wait_in_broker_from(SECOND)
    async with mq.consume(queue, str, fail, retry=policy) as consumer:
        await mq.send(queue, "retried", expires_in=timedelta(seconds=1.5))
        await until(lambda: consumer.counters.retried == 1)
        await until(lambda: consumer.counters.expired == 1)
    assert attempts == [1]
    (letter,) = await letters(mq, f"{queue}.dlq")
    assert letter.failure is not None
    assert (letter.failure.how, letter.attempt) == ("expired", 2)


async def test_on_a_rung_the_expiry_is_first_seen_and_the_time_that_was_given(with_rungs: tuple[AceMQ, str]) -> None:
    mq, queue = with_rungs
    policy = RetryPolicy.fixed(5, timedelta(minutes=1))

    async def fail(message: Message[str]) -> None:
        raise ValueError("boom")

    async with mq.consume(queue, str, fail, retry=policy):
        await mq.send(queue, "x", expires_in=timedelta(hours=1))

        async def waits() -> bool:
            return (await mq.depth(f"{queue}.retry.1m")).ready == 1

        await until_async(waits)
    (waiting,) = await letters(mq, f"{queue}.retry.1m")
    assert waiting.wire_headers[h.EXPIRES_AT] == to_millis(waiting.envelope.first_seen) + 3_600_000
    assert waiting.delivery.expires_in is None, "a copy on its way through a rung carries no expiration"
