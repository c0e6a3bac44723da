"""Group O: what the engine adds must hold on this transport, whatever that lacks."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise

import pytest

from acemq import headers as h
from acemq.ack import Ack
from acemq.consuming.consumer import Consumer
from acemq.errors import AcemqError, CapabilityError
from acemq.headers import HeaderValue
from acemq.message import Message
from acemq.patterns.replay import Replay
from acemq.patterns.scheduler import Scheduler
from acemq.retry import RetryPolicy
from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.hooks import Hooks, Impossible
from acemq.testing.conformance.scenario import scenario
from acemq.topology import dead_letters_of, lanes_of, parked_of
from acemq.transport import FOREVER

CHANGED_BY_THE_WAY = frozenset(
    {
        *(h.ATTEMPT, h.ERROR, h.EXPIRES_AT, h.DELIVERY_COUNT, h.REPLAYED_FROM, h.REPLAYED_AT, h.REPLAY_COUNT),
        *h.FORENSICS,
    }
)
"""What a retry, a dead letter and a replay write or take off (CONTRACT.md sections 2 and 7)."""


SCHEDULED = timedelta(seconds=1)
"""The shortest rung of the ladder."""

PATIENCE = timedelta(seconds=5)
"""A delay of a broker that is waited for by a real clock."""


_PATIENCE = timedelta(seconds=60)
"""For many messages, one at a time: how quickly they go is not what is shown."""


async def _census(bench: Bench, queue: str) -> None:
    """Count what is there, wherever it is, again and again. Never is there nothing."""
    if bench.can.depth != "exact" or (await bench.t.depth(queue)).held is None:
        bench.measured["census"] = "not taken: the broker does not tell what is held"
        return
    while True:
        # In this order: what moves on between the two is counted twice, and not left out.
        counted = [await bench.t.depth(each) for each in (queue, dead_letters_of(queue))]
        assert sum(depth.ready + (depth.held or 0) + (depth.delayed or 0) for depth in counted) >= 1, counted
        await bench.sleep(bench.step / 2)


class Engine(Hooks):
    @scenario("C-122", "three attempts, then the dead letters", small=True)
    async def test_c122_three_attempts(self, bench: Bench) -> None:
        queue, wait = await bench.queue(dead_letter=True), 2 * bench.step
        attempts: list[tuple[int, float]] = []

        async def fail(message: Message[bytes]) -> Ack | None:
            attempts.append((message.envelope.attempt, bench.now()))
            raise ValueError("always")

        async with bench.connection() as mq:
            async with mq.consume(queue, bytes, fail, retry=RetryPolicy.fixed(3, wait)):
                await mq.send(queue, b"x")
                census = asyncio.create_task(_census(bench, queue), name="takes a census")
                await bench.eventually(lambda: len(attempts) == 3, "three attempts", seen=lambda: attempts)
                await bench.ready(dead_letters_of(queue), 1)
                census.cancel()
                await asyncio.wait({census})
                assert census.cancelled() or census.result() is None
                letter = await bench.take_one(dead_letters_of(queue))
        assert [attempt for attempt, _ in attempts] == [1, 2, 3]
        for (_, earlier), (_, later) in pairwise(attempts):
            assert later - earlier >= (wait - bench.step / 100).total_seconds()
        assert "always" in str(letter.headers[h.ERROR])
        assert {h.FAILED_QUEUE: queue, h.FAILED_AS: "exhausted"}.items() <= dict(letter.headers).items()
        assert letter.headers[h.FAILED_WITH]
        await bench.accept([letter])
        assert await bench.drain(queue) == []

    @scenario("C-123", "a body that does not decode between two good ones")
    async def test_c123_undecodable(self, bench: Bench) -> None:
        queue, handled = await bench.queue(dead_letter=True), list[dict[str, int]]()

        async def handle(message: Message[dict[str, int]]) -> Ack | None:
            handled.append(message.payload)
            return None

        async with bench.connection() as mq:
            await mq.send(queue, {"n": 1})
            await bench.suite.put_raw(queue, b"\0 not json")
            await mq.send(queue, {"n": 2})
            async with mq.consume(queue, dict[str, int], handle):
                parked = await bench.take_one(parked_of(queue))
                await bench.eventually(lambda: len(handled) == 2, "both good ones are handled", seen=lambda: handled)
        assert sorted(each["n"] for each in handled) == [1, 2]
        assert parked.body == b"\0 not json"
        assert await bench.drain(dead_letters_of(queue)) == []

    @scenario("C-124", "a send delayed by more than the broker can")
    async def test_c124_a_long_delay(self, bench: Bench) -> None:
        queue, can = await bench.queue(), bench.can_of("")
        longest, delay = can.publish_delay, 4 * bench.step
        if longest is None:
            delay = SCHEDULED  # over the ladder, whose shortest rung is a second
        elif longest != FOREVER:
            if longest > PATIENCE and not bench.pace.is_moved:
                raise Impossible(f"the broker delays for {longest} by itself, too long to be waited for")
            delay += 2 * longest
        handled: list[tuple[float, Message[bytes]]] = []

        async def handle(message: Message[bytes]) -> Ack | None:
            handled.append((bench.now(), message))
            return None

        async with bench.connection() as mq:
            if not longest and not can.dead_letter_routes:
                with pytest.raises(CapabilityError, match="delay"):
                    await mq.send(queue, b"x", delay=delay)
                assert await bench.drain(queue) == []
                return
            exchange, (bound,) = await bench.fan_out("bound")
            async with (
                Scheduler(mq).opening(),
                mq.consume(queue, bytes, handle),
                mq.consume(bound, bytes, handle),
            ):
                began = bench.now()
                ids = {(await mq.send(queue, b"x", delay=delay)).message_id}
                ids.add((await mq.publish(exchange, "key", b"x", delay=delay)).message_id)
                await bench.sleep(delay)
                await bench.eventually(lambda: len(handled) == 2, "both are handled", within=2 * bench.late)
                await bench.quiet()
            assert len(handled) == 2
            for at, message in handled:
                assert at - began >= (delay - bench.step / 100).total_seconds()
                assert not [name for name in message.wire_headers if name.startswith("x-schedule-")]
                assert message.attempt == 1
            if longest:
                assert {message.id for _, message in handled} == ids, "with its envelope"

    @scenario("C-125", "three lanes: the urgent first, and nobody starved")
    async def test_c125_lanes(self, bench: Bench) -> None:
        queue = await bench.queue(priorities="lanes")
        low, _, high = lanes_of(queue)
        shares, waiting = {low: 1, high: 3}, {low: 60, high: 0}
        starts: list[tuple[str, int]] = []
        consumers: list[Consumer] = []
        urgent_are_sent, unsettled = asyncio.Event(), 0

        def is_full(running: str) -> bool:
            nonlocal unsettled
            if not consumers:
                return False  # the first may be handled before its consumer has all three
            (consumer,) = consumers
            assert consumer.subscription is not None
            unsettled = max(unsettled, consumer.subscription.held)
            return consumer.held >= sum(min(shares[lane] - (lane == running), waiting[lane]) for lane in shares)

        async def handle(message: Message[int]) -> None:
            starts.append((message.queue, message.payload))
            waiting[message.queue] -= 1
            if len(starts) == 5:
                await urgent_are_sent.wait()
            # What is shown is the choice among lanes that have something, and not how quickly they are fetched.
            await bench.eventually(lambda: is_full(message.queue), "the buffer holds what it may")

        async with bench.connection() as mq:
            await mq.send_many(queue, range(60), priority=0)
            async with mq.consume(queue, int, handle, prefetch=6, concurrency=1) as consumer:
                consumers.append(consumer)
                await bench.eventually(lambda: len(starts) == 5, "low ones are handled", seen=lambda: len(starts))
                waiting[high] += 20
                await mq.send_many(queue, range(20), priority=2)
                urgent_are_sent.set()
                await bench.eventually(
                    lambda: len(starts) >= 35, "30 more starts", within=_PATIENCE, seen=lambda: len(starts)
                )
        # Of the six places two are kept for normal ones: a lane with a backlog does not take another's.
        assert 0 < unsettled <= sum(shares.values())
        lanes = [lane for lane, _ in starts[5:35]]
        assert lanes.count(high) == 20, lanes
        urgent = lanes[: len(lanes) - lanes[::-1].index(high)]
        assert all(low in urgent[at : at + 10] for at in range(len(urgent) - 9)), urgent
        if bench.can.ordering == "fifo":
            for lane in (low, high):
                numbers = [number for each, number in starts if each == lane]
                assert numbers == sorted(numbers)

    @scenario("C-126", "what has expired is never handled")
    async def test_c126_expired(self, bench: Bench) -> None:
        queue, handled = await bench.queue(dead_letter=True), list[bytes]()

        async def handle(message: Message[bytes]) -> Ack | None:
            handled.append(message.payload)
            return None

        async with bench.connection() as mq:
            await mq.send(queue, b"old", expires_in=max(2 * bench.step, timedelta(milliseconds=2)))
            await mq.send(queue, b"fresh", expires_in=timedelta(seconds=60))
            await bench.sleep(max(4 * bench.step, timedelta(milliseconds=4)))
            async with mq.consume(queue, bytes, handle):
                await bench.eventually(lambda: handled, "the fresh one is handled")
                letter = await bench.take_one(dead_letters_of(queue))
                await bench.quiet()
        assert handled == [b"fresh"]
        assert letter.body == b"old"

    @scenario("C-127", "the envelope through a retry, a dead letter and a replay")
    async def test_c127_the_envelope(self, bench: Bench) -> None:
        queue = await bench.queue(dead_letter=True)
        application: dict[str, HeaderValue] = {f"app-{number}": f"value {number}" for number in range(12)}
        trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
        seen: list[Message[bytes]] = []

        async def fail_first(message: Message[bytes]) -> Ack | None:
            seen.append(message)
            return Ack.accept() if len(seen) == 3 else Ack.retry("not yet")

        async with bench.connection() as mq:
            policy = RetryPolicy.fixed(2, bench.step)
            async with mq.consume(queue, bytes, fail_first, retry=policy):
                await mq.send(
                    queue,
                    b"x",
                    headers={**application, **trace},
                    type="order.placed",
                    version=3,
                    correlation_id="correlation",
                    causation_id="cause",
                    claim="claim",
                    reply_to="answers",
                )
                await bench.eventually(lambda: len(seen) == 2, "two attempts")
                letters = dead_letters_of(queue)

                async def replayed() -> bool:
                    try:
                        return (await Replay(mq, letters).run()).replayed > 0
                    except AcemqError as error:
                        if isinstance(error, CapabilityError):  # it does not tell how many there are
                            (letter,) = await mq.pull_many(letters, bytes, most=1)
                            await mq.send(queue, letter.body, envelope=letter.envelope.replace(attempt=1, error=None))
                            await letter.accept()
                            return True
                        raise

                await bench.eventually(replayed, "it is replayed")
                await bench.eventually(lambda: len(seen) == 3, "and handled")
        first, second, third = seen
        assert [message.envelope.attempt for message in seen] == [1, 2, 1]
        for later in (second, third):
            kept = {name: value for name, value in first.delivery.headers.items() if name not in CHANGED_BY_THE_WAY}
            found = {name: value for name, value in later.delivery.headers.items() if name not in CHANGED_BY_THE_WAY}
            assert found == kept
            assert (later.body, later.content_type) == (first.body, first.content_type)
            assert later.envelope.first_seen == first.envelope.first_seen
        assert application.items() <= dict(third.headers).items()
