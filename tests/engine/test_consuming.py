"""How many at once, which handlers, and what a consumer refuses: cases M-024, M-033 … M-037, O-08, O-10."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

import acemq
from acemq import (
    AceMQ,
    Ack,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    Diagnostic,
    HandlerTypeError,
    Message,
    RetryPolicy,
    TopologyError,
    current_message,
)
from acemq.transport import LeaseTerms
from acemq.transports.memory import MemoryBroker, Profile
from tests.waiting import until

if TYPE_CHECKING:
    from fractions import Fraction


@dataclass
class Order:
    id: str


@dataclass
class Refund:
    id: str


@dataclass
class Hidden:
    share: Fraction


async def test_m024_no_more_handlers_than_concurrency_and_no_more_held_than_prefetch(mq: AceMQ, queue: str) -> None:
    gate, running, most = asyncio.Event(), 0, 0

    async def wait(message: Message[int]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1

    await mq.send_many(queue, range(30))
    async with mq.consume(queue, int, wait, concurrency=10, prefetch=20) as consumer:
        await until(lambda: consumer.in_flight == 10 and consumer.held == 10)
        assert (await mq.depth(queue)).ready == 10
        gate.set()
        await until(lambda: consumer.counters.acked == 30)
    assert most == 10


async def test_concurrency_of_one_handles_in_the_order_of_the_queue(mq: AceMQ, queue: str) -> None:
    seen: list[int] = []
    await mq.send_many(queue, range(200))
    async with mq.consume(queue, int, lambda m: seen.append(m.payload), concurrency=1) as consumer:
        await until(lambda: consumer.counters.acked == 200)
    assert seen == list(range(200))


async def test_o08_a_backlog_makes_no_task_per_message_and_leaves_some_for_others(
    url: str, mq: AceMQ, queue: str
) -> None:
    await mq.send_many(queue, (b"x" * 1024 for _ in range(10_000)))
    before, most = len(asyncio.all_tasks()), 0

    async def slow(message: Message[bytes]) -> None:
        nonlocal most
        most = max(most, len(asyncio.all_tasks()))
        await asyncio.sleep(0.001)

    async with mq.consume(queue, bytes, slow, concurrency=5) as consumer:
        await until(lambda: consumer.counters.acked > 500)
        assert consumer.held <= 20
        async with acemq.connect(url) as second, second.consume(queue, bytes, slow, concurrency=5) as other:
            await until(lambda: other.counters.acked > 100, within=2)
    assert most - before < 50


class Shipping:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def note(self, kind: str, message: Message[Order]) -> None:
        current = current_message()
        assert current is message
        self.seen.append((kind, message.payload.id))

    async def method(self, message: Message[Order]) -> None:
        self.note("method", message)

    def plain(self, message: Message[Order]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        self.note("plain", message)

    async def __call__(self, message: Message[Order]) -> None:
        self.note("object", message)


async def with_carrier(carrier: str, shipping: Shipping, message: Message[Order]) -> None:
    shipping.note(carrier, message)


async def test_m034_functions_methods_objects_partials_and_plain_functions_all_handle(mq: AceMQ, queue: str) -> None:
    shipping = Shipping()
    handlers: list[Any] = [
        shipping.method,
        shipping.plain,
        shipping,
        functools.partial(with_carrier, "partial", shipping),
    ]
    for number, handler in enumerate(handlers):
        await mq.send(queue, Order(str(number)))
        async with mq.consume(queue, Order, handler) as consumer:
            await until(lambda consumer=consumer: consumer.counters.acked == 1)  # type: ignore[misc]
    assert shipping.seen == [("method", "0"), ("plain", "1"), ("object", "2"), ("partial", "3")]
    assert current_message() is None


async def test_m034_two_plain_handlers_at_once_see_each_its_own_message(mq: AceMQ, queue: str) -> None:
    both = threading.Barrier(2, timeout=5)

    def handle(message: Message[int]) -> None:
        both.wait()
        assert current_message() is message

    await mq.send_many(queue, [1, 2])
    async with mq.consume(queue, int, handle, concurrency=2) as consumer:
        await until(lambda: consumer.counters.acked == 2)


async def test_a_plain_handler_does_not_block_the_loop(mq: AceMQ, queue: str) -> None:
    release = threading.Event()
    await mq.send(queue, 1)
    async with mq.consume(queue, int, lambda m: None if release.wait(5) else Ack.reject()) as consumer:
        await until(lambda: consumer.in_flight == 1)
        assert (await mq.send(f"{queue}.dlq", "meanwhile")).routed
        release.set()
        await until(lambda: consumer.counters.acked == 1)


def takes_nothing() -> None: ...
def takes_two(message: Message[Order], more: int) -> None: ...
def takes_refund(message: Message[Refund]) -> None: ...
def takes_payload(order: Order) -> None: ...


@pytest.mark.parametrize(
    ("payload", "handler", "match"),
    [
        (Order, takes_nothing, "one argument"),
        (Order, takes_two, "one argument"),
        (Order, takes_refund, r"Message\[Refund\].*Order"),
        (Order, takes_payload, "is given a Message"),
        (Order, "ship", "no handler"),
        (Hidden, lambda m: None, "'share' of Hidden.*Fraction"),
        (acemq.one_of(Order, Refund), lambda m: None, "names="),
    ],
)
async def test_m035_a_handler_or_class_of_the_wrong_shape_is_refused_at_the_call(
    mq: AceMQ, queue: str, payload: Any, handler: Any, match: str
) -> None:
    with pytest.raises(HandlerTypeError, match=match):
        mq.consume(queue, payload, handler)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"prefetch": 0}, "prefetch"),
        ({"concurrency": 10, "prefetch": 5}, "prefetch=5"),
        ({"handler_timeout": timedelta()}, "handler_timeout"),
        ({"handler_timeout": 5}, "timedelta"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"expired": "keep"}, "expired"),
    ],
)
async def test_bad_options_are_refused_at_the_call(mq: AceMQ, queue: str, options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        mq.consume(queue, Order, lambda m: None, **options)


LEASE = LeaseTerms(
    default=timedelta(seconds=10),
    shortest=timedelta(seconds=1),
    longest=timedelta(seconds=60),
    step=timedelta(seconds=1),
    renewable=False,
)


@pytest.mark.parametrize(
    ("can", "allowed", "refused", "match"),
    [
        ({"lease": LEASE}, 9.9, 10, "handler_timeout=0:00:10 needs a lease longer than 0:00:10"),
        ({"lease": replace(LEASE, renewable=True)}, 3600, None, ""),
        (
            {"hold_limit": timedelta(seconds=20)},
            18,
            19,
            "handler_timeout=0:00:19 needs holding a delivery for longer than 0:00:20",
        ),
    ],
    ids=["a lease that is not renewed", "a lease that is", "a limit on holding"],
)
@pytest.mark.parametrize("how", ["consume", "consume_batches", "consume_group"])
async def test_a_time_limit_that_outlasts_what_the_broker_lets_be_held_is_refused_at_the_call(
    name: str, how: str, can: dict[str, Any], allowed: float, refused: float | None, match: str
) -> None:
    profile = replace(Profile.FULL, capabilities=replace(Profile.FULL.capabilities, **can))
    broker = MemoryBroker.named(name, profile=profile)
    more = {"size": 2} if how == "consume_group" else {}
    async with acemq.connect(f"memory://{broker.name}") as mq:
        await mq.declare(acemq.Topology().queue("q"))
        consume = functools.partial(getattr(mq, how), "q", int, lambda m: None, **more)
        async with consume(handler_timeout=timedelta(seconds=allowed)):
            pass
        if refused is not None:
            with pytest.raises(CapabilityError, match=match):
                consume(handler_timeout=timedelta(seconds=refused))


async def test_m036_a_missing_queue_is_named_and_ends_nothing_else(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda m: None) as consumer:
        with pytest.raises(TopologyError, match="missing-" + queue):
            await mq.consume("missing-" + queue, int, lambda m: None)
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
    for suffix in (".dlq", ".parked"):
        await mq.delete("missing-" + queue + suffix)


async def test_an_opening_is_opened_once(mq: AceMQ, queue: str) -> None:
    opening = mq.consume(queue, int, lambda m: None)
    consumer = await opening
    with pytest.raises(ClosedError, match="opened already"):
        await opening
    await consumer.close()


async def test_a_handler_that_raises_cancelled_itself_is_retried(mq: AceMQ, queue: str) -> None:
    attempts: list[int] = []

    async def handle(message: Message[int]) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            raise asyncio.CancelledError

    async with mq.consume(queue, int, handle, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
    assert attempts == [1, 2]


async def test_a_handler_over_its_time_is_cancelled_and_its_message_retried(mq: AceMQ, queue: str) -> None:
    async def sleepy(message: Message[int]) -> None:
        if message.payload == 0:
            await asyncio.sleep(30)

    limit = timedelta(milliseconds=100)
    async with mq.consume(
        queue, int, sleepy, handler_timeout=limit, retry=RetryPolicy.fixed(2, timedelta())
    ) as consumer:
        await mq.send_many(queue, [0, 1, 2])
        await until(lambda: consumer.counters.dead_lettered == 1 and consumer.counters.acked == 2)
        assert consumer.counters.retried == 1
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert letter.failure.text == "exhausted 2 attempts: timed out after 0.1 s"
    await letter.accept()


async def test_m032_a_handler_that_swallows_its_cancellation_keeps_its_slot_and_is_reported(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    release = asyncio.Event()

    async def stubborn(message: Message[int]) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with mq.consume(
        queue,
        int,
        stubborn,
        concurrency=1,
        handler_timeout=timedelta(milliseconds=50),
        retry=RetryPolicy.none(),
    ) as consumer:
        await mq.send(queue, 1)
        await until(lambda: bool(diagnostics))
        assert diagnostics[0].name == "acemq.handler.stuck"
        assert consumer.in_flight == 1
        release.set()
        await until(lambda: consumer.counters.dead_lettered == 1)
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.wire_headers["x-acemq-error"] == "exhausted 1 attempt: timed out after 0.05 s"
    await letter.accept()


async def test_m032_the_others_are_handled_meanwhile_and_it_is_reported_once(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    release = asyncio.Event()

    async def stubborn(message: Message[int]) -> None:
        while message.payload == 0 and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    limit = timedelta(milliseconds=50)
    async with mq.consume(
        queue, int, stubborn, concurrency=2, handler_timeout=limit, retry=RetryPolicy.none()
    ) as consumer:
        await mq.send_many(queue, range(10))
        await until(lambda: consumer.counters.acked == 9 and bool(diagnostics))
        assert [(each.name, each.level, each.attempt) for each in diagnostics] == [("acemq.handler.stuck", "error", 1)]
        assert consumer.in_flight == 1
        release.set()
        await until(lambda: consumer.counters.dead_lettered == 1)


async def test_m037_pull_answers_none_after_its_wait_and_never_an_error(mq: AceMQ, queue: str) -> None:
    began = time.monotonic()
    assert await mq.pull(queue, int, wait=timedelta(milliseconds=200)) is None
    assert 0.18 < time.monotonic() - began < 2
    with pytest.raises(TopologyError, match="missing-" + queue):
        await mq.pull("missing-" + queue, int)


async def test_a_pulled_message_is_settled_once_and_by_the_table(mq: AceMQ, queue: str) -> None:
    await mq.send_many(queue, [Decimal("1.10"), Decimal("2.20"), Decimal("3.30"), Decimal("4.40")])
    first, second, third, fourth = await mq.pull_many(queue, Decimal)
    assert first.payload == Decimal("1.10")
    assert await first.accept()
    with pytest.raises(ClosedError, match="settled already"):
        await first.accept()
    await mq.declare(acemq.Topology().queue(f"{queue}.dlq", type="classic").queue(f"{queue}.parked", type="classic"))
    assert await second.reject("bad")
    assert await third.park()
    assert await fourth.retry(delay=timedelta())
    assert (await mq.depth(f"{queue}.dlq")).ready == 1
    assert (await mq.depth(f"{queue}.parked")).ready == 1
    again = await mq.pull(queue, Decimal, wait=timedelta(seconds=1))
    assert again is not None
    assert again.attempt == 2
    assert await again.release()
    assert (await mq.pull(queue, Decimal, wait=timedelta(seconds=1))) is not None


async def test_pulled_messages_go_back_when_the_connection_closes(url: str, mq: AceMQ, queue: str) -> None:
    await mq.send(queue, 1)
    async with acemq.connect(url) as short:
        pulled = await short.pull(queue, int)
        assert pulled is not None
    assert not await pulled.accept()
    again = await mq.pull(queue, int, wait=timedelta(seconds=2))
    assert again is not None
    await again.accept()


async def test_a_loop_that_only_publishes_does_not_keep_the_consumers_from_their_turn(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda message: None) as consumer:
        for n in range(500):
            await mq.send(queue, n)
        assert consumer.counters.acked + consumer.held + consumer.in_flight > 0


@pytest.fixture
async def quorum(name: str) -> tuple[MemoryBroker, str]:
    """A queue that counts deliveries, on a broker whose links the test can cut."""
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(acemq.Topology().queue("q", type="quorum"))
    return broker, f"memory://{name}"


async def test_o15_of_what_is_delivered_too_often_only_the_foremost_is_given_up(
    quorum: tuple[MemoryBroker, str],
) -> None:
    _, url = quorum
    handled: list[str] = []
    async with acemq.connect(url) as mq:
        await mq.send_many("q", ["good 1", "bomb", "good 2", "good 3"])
    for death in range(4):
        # A process that dies: its link goes in the middle of the handler, and nothing it held is settled.
        mq = await acemq.connect(url)

        async def work(message: Message[str], mq: AceMQ = mq) -> None:
            if message.payload == "bomb":
                await asyncio.Event().wait()
            handled.append(message.payload)

        consumer = await mq.consume("q", str, work, max_deliveries=3)
        if death < 3:
            await until(lambda consumer=consumer: "bomb" in running(consumer))  # type: ignore[misc]
            await mq.close(timedelta())
        else:
            await until(lambda: len(handled) == 3)
            await until(lambda consumer=consumer: consumer.counters.dead_lettered == 1)  # type: ignore[misc]
            letter = await mq.pull("q.dlq", str)
            assert letter is not None
            assert letter.payload == "bomb"
            assert letter.wire_headers["x-acemq-error"] == "delivery limit: 3 deliveries without an outcome"
            await mq.close()
    assert sorted(handled) == ["good 1", "good 2", "good 3"]


def running(consumer: acemq.Consumer) -> list[str]:
    return [delivery.body.decode().strip('"') for delivery in consumer._running.values()]


async def test_what_is_delivered_again_is_handled_alone(quorum: tuple[MemoryBroker, str]) -> None:
    _, url = quorum
    async with acemq.connect(url) as mq:
        await mq.send_many("q", range(6))
        for _ in range(2):  # twice, since one lost connection makes nobody a suspect
            for held in await mq.pull_many("q", int):
                await held.release()
        at_once = most = 0

        async def work(message: Message[int]) -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.001)
            at_once -= 1

        async with mq.consume("q", int, work) as consumer:
            await until(lambda: consumer.counters.acked == 6)
            assert most == 1
            await mq.send_many("q", range(6))
            await until(lambda: consumer.counters.acked == 12)
            assert most > 1


@pytest.mark.parametrize("batches", [False, True], ids=["one by one", "batches"])
async def test_t036_what_is_released_for_ever_is_given_up_and_what_is_behind_it_is_not(
    quorum: tuple[MemoryBroker, str], batches: bool
) -> None:
    _, url = quorum
    seen: list[int | None] = []
    good: list[str] = []

    def release(message: Message[str]) -> Ack | None:
        if message.payload == "bad":
            seen.append(message.deliveries)
            return Ack.release()
        good.append(message.payload)
        return None

    def release_of(batch: acemq.Batch[str]) -> None:
        for message in batch:
            batch.settle(message, release(message) or Ack.accept())

    async with acemq.connect(url) as mq:
        opening = mq.consume_batches("q", str, release_of) if batches else mq.consume("q", str, release)
        await mq.send_many("q", ["first", "bad", "last"])
        async with opening as consumer:
            await until(lambda: consumer.counters.dead_lettered == 1)
            await until(lambda: len(good) == 2)
        letter = await mq.pull("q.dlq", str)
        assert letter is not None
        assert letter.wire_headers["x-acemq-error"] == "delivery limit: 15 deliveries without an outcome"
    assert seen == [*range(1, 16)]


async def test_a_handler_that_never_ends_holds_up_no_other_once_its_delivery_is_lost(
    quorum: tuple[MemoryBroker, str],
) -> None:
    broker, url = quorum
    gate = asyncio.Event()
    handled: list[str] = []

    async def work(message: Message[str]) -> None:
        if message.payload == "hangs":
            await gate.wait()
        else:
            handled.append(message.payload)

    async with acemq.connect(url) as mq:
        async with mq.consume("q", str, work, max_deliveries=4) as consumer:
            await mq.send("q", "hangs")
            for number in range(4):
                await until(lambda n=number: consumer.in_flight == n + 1)  # type: ignore[misc]
                broker.disconnect("cut by a test")
            await until(lambda: consumer.counters.dead_lettered == 1)
            await mq.send("q", "another")
            await until(lambda: handled == ["another"])
            gate.set()
            await until(lambda: consumer.counters.stale == 4)


async def test_retries_in_place_are_outcomes_and_no_deliveries_without_one(name: str) -> None:
    """A store that counts each take has many of a message that was often retried; it is no suspect for that."""
    clock = acemq.MovableClock()
    broker = MemoryBroker.named(name, clock=clock)
    policy, at_once, most = RetryPolicy.forever(ceiling=timedelta(seconds=1)).with_jitter(0), 0, 0

    async def fail(message: Message[int]) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1
        if message.attempt < 25:
            raise ValueError("boom")

    async with acemq.connect(f"memory://{broker.name}", clock=clock) as mq:
        await mq.declare(acemq.Topology().queue("q"))
        await mq.send_many("q", range(5))
        async with mq.consume("q", int, fail, retry=policy) as consumer:
            await clock.advance(timedelta(seconds=18))
            assert consumer.counters.retried > 5 * 15
        at_once = most = 0
        async with mq.consume("q", int, fail, retry=policy) as consumer:  # the next, after a deployment
            await clock.advance(timedelta(seconds=30))
            assert consumer.counters.acked == 5
            assert consumer.counters.dead_lettered == 0
    assert most > 1
