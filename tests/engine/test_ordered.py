"""Order by key: one message of a partition at a time, tried in its place. Cases M-071 to M-077 and O-19."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import acemq
from acemq import (
    AceMQ,
    Ack,
    BatchPublishError,
    CapabilityError,
    Claim,
    ClosedError,
    ConfigurationError,
    Diagnostic,
    EncodeError,
    FatalError,
    Handled,
    Idempotency,
    MemoryIdempotencyStore,
    Message,
    Ordered,
    OrderedQueue,
    PartitionCountError,
    PartitionFailure,
    PublishRefusedError,
    Topology,
)
from acemq.telemetry import CONSUMER_LOST
from acemq.transports.memory import MemoryBroker, Profile
from tests.conftest import StartRabbitMQ
from tests.engine.test_telemetry import points, seconds
from tests.proxy import Proxy
from tests.waiting import until, until_async

A_MOMENT = timedelta(milliseconds=10)
STOP, RETRY_IN_PLACE, SKIP = PartitionFailure.STOP, PartitionFailure.RETRY_IN_PLACE, PartitionFailure.SKIP


class Entry(msgspec.Struct, frozen=True):
    key: str
    number: int


KEYS = ("a", "b", "c")
"""On three partitions of four."""


def entries(most: int, *keys: str) -> list[Entry]:
    """Interleaved."""
    return [Entry(key, number) for number in range(1, most + 1) for key in keys or KEYS]


class Book:
    """What was handled, and who fails."""

    def __init__(self) -> None:
        self.tried: dict[str, list[int]] = defaultdict(list)
        self.done: dict[str, list[int]] = defaultdict(list)
        self.attempts: set[int] = set()
        self.fails: Callable[[Entry], bool] = lambda entry: False
        self.busy: set[str] = set()

    async def apply(self, message: Message[Entry]) -> None:
        entry = message.payload
        assert entry.key not in self.busy, "two handlers of one key at once"
        self.busy.add(entry.key)
        try:
            self.tried[entry.key].append(entry.number)
            self.attempts.add(message.attempt)
            await asyncio.sleep(0)
            if self.fails(entry):
                raise ValueError("no such account")
            self.done[entry.key].append(entry.number)
        finally:
            self.busy.discard(entry.key)

    def has(self, most: int, *keys: str) -> Callable[[], bool]:
        def has_handled() -> bool:
            return all(self.done[key] == list(range(1, most + 1)) for key in keys)

        has_handled.__qualname__ = f"{', '.join(keys)} to {most}"
        return has_handled


@pytest.fixture
def book() -> Book:
    return Book()


def keyed(mq: AceMQ, name: str) -> Ordered[Entry]:
    return mq.ordered(name, Entry).keyed_by(lambda entry: entry.key).on_failure(STOP, attempts=3, delay=A_MOMENT)


@pytest.fixture
def described(mq: AceMQ, name: str) -> Ordered[Entry]:
    return keyed(mq, name)


@pytest.fixture
async def ledger(mq: AceMQ, described: Ordered[Entry]) -> AsyncIterator[OrderedQueue[Entry]]:
    async with described.declare() as ledger:
        yield ledger
    await remove(mq, ledger)


async def remove(mq: AceMQ, ledger: OrderedQueue[Any]) -> None:
    for queue in ledger.queues:
        for suffix in ("", ".dlq", ".parked"):
            await mq.delete(f"{queue}{suffix}")


def halted(ledger: OrderedQueue[Any], *partitions: int) -> Callable[[], bool]:
    def is_halted() -> bool:
        return set(ledger.halted_partitions) == set(partitions)

    return is_halted


async def redeclared(described: Ordered[Entry], mq: AceMQ) -> OrderedQueue[Entry]:
    return await msgspec.structs.replace(described, connection=mq).declare()


# Stopping, resuming, skipping


async def test_m071_o19_a_failure_stops_its_partition_and_nothing_else_until_it_is_resumed(
    ledger: OrderedQueue[Entry], book: Book, diagnostics: list[Diagnostic]
) -> None:
    book.fails = lambda entry: entry == Entry("a", 7)
    partition = ledger.partition_of("a")
    async with ledger.consume(book.apply):
        receipts = await ledger.send_many(entries(20))
        await until(book.has(20, "b", "c"))
        await until(halted(ledger, partition))
        assert book.done["a"] == [1, 2, 3, 4, 5, 6]
        assert book.tried["a"] == [1, 2, 3, 4, 5, 6, 7, 7, 7]
        halt = ledger.halted_partitions[partition]
        assert (halt.key, halt.error, halt.attempts) == ("a", "no such account", 3)
        assert halt.message_id == receipts[entries(20).index(Entry("a", 7))].message_id
        (told,) = (each for each in diagnostics if each.name == "acemq.partition.halted")
        assert (told.level, told.queue, told.message_id) == ("error", ledger.queues[partition], halt.message_id)
        assert told.message.endswith(f"Go on with resume({partition}), or without it with skip({partition})")

        book.fails = lambda entry: False
        ledger.resume(partition)
        await until(book.has(20, *KEYS))
        assert not ledger.halted_partitions
    assert book.attempts == {1}
    counters = ledger.counters
    assert (counters.sent, counters.handled, counters.retried) == (60, 60, 2)
    assert (counters.halted, counters.resumed, counters.skipped) == (1, 1, 0)


async def test_resume_begins_with_the_first_attempt_and_may_halt_again(ledger: OrderedQueue[Entry], book: Book) -> None:
    book.fails = lambda entry: entry.key in ("a", "b")
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(2))
        both = ledger.partition_of("a"), ledger.partition_of("b")
        await until(halted(ledger, *both))
        ledger.resume()
        assert not ledger.halted_partitions
        await until(halted(ledger, *both))
        assert book.tried["a"] == book.tried["b"] == [1] * 6


async def test_m072_retry_in_place_tries_for_ever_and_nothing_passes(
    mq: AceMQ, described: Ordered[Entry], book: Book
) -> None:
    ledger = await described.on_failure(RETRY_IN_PLACE, delay=A_MOMENT).declare()
    book.fails = lambda entry: entry.number == 5 and len(book.tried["a"]) < 4 + 8
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(10, "a"))
        await until(book.has(10, "a"))
    assert book.tried["a"] == [1, 2, 3, 4, *[5] * 8, 6, 7, 8, 9, 10]
    assert book.attempts == {1}
    await remove(mq, ledger)


async def test_m072_skip_sends_it_to_the_dead_letters_and_goes_on(
    mq: AceMQ, described: Ordered[Entry], book: Book
) -> None:
    ledger = await described.on_failure(SKIP, attempts=3, delay=A_MOMENT).declare()
    book.fails = lambda entry: entry.number == 5
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(10, "a"))
        await until(lambda: book.done["a"] == [1, 2, 3, 4, 6, 7, 8, 9, 10])
        letter = await mq.pull(f"{ledger.queues[ledger.partition_of('a')]}.dlq", Entry, wait=timedelta(seconds=2))
        assert letter is not None
        assert (letter.payload, letter.attempt) == (Entry("a", 5), 1)
        assert letter.failure is not None
        assert letter.failure.text == "exhausted 3 attempts: no such account"
        await letter.accept()
    assert (ledger.counters.skipped, ledger.counters.halted) == (1, 0)
    await remove(mq, ledger)


async def test_skip_moves_the_halted_message_to_the_dead_letters_and_goes_on(
    mq: AceMQ, ledger: OrderedQueue[Entry], book: Book
) -> None:
    book.fails = lambda entry: entry.number == 2
    partition = ledger.partition_of("a")
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(3, "a"))
        await until(halted(ledger, partition))
        id = ledger.halted_partitions[partition].message_id
        assert await ledger.skip(partition) == id
        await until(lambda: book.done["a"] == [1, 3])
        letter = await mq.pull(f"{ledger.queues[partition]}.dlq", Entry, wait=timedelta(seconds=2))
        assert letter is not None
        assert letter.id == id
        await letter.accept()
    assert (ledger.counters.skipped, ledger.counters.resumed) == (1, 0)


# What a handler may answer, each followed by one that is handled


class Answers:
    """Answers for the message of number 1, one after the other; every other is accepted."""

    def __init__(self, *answers: Any) -> None:
        self.answers: list[Any] = list(answers)
        self.seen: list[int] = []
        self.outcomes: list[str] = []

    async def __call__(self, message: Message[Entry]) -> Ack | None:
        self.seen.append(message.payload.number)
        message.when_settled(lambda handled: self.outcomes.append(handled.outcome))
        if message.payload.number != 1 or not self.answers:
            return None
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return cast("Ack | None", answer)


@pytest.mark.parametrize(
    ("answer", "suffix"), [(Ack.reject("bad"), ".dlq"), (Ack.park("odd"), ".parked")], ids=["reject", "park"]
)
async def test_what_a_handler_sets_aside_is_moved_and_the_next_one_handled(
    mq: AceMQ, ledger: OrderedQueue[Entry], answer: Ack, suffix: str
) -> None:
    answers = Answers(answer)
    async with ledger.consume(answers):
        await ledger.send_many(entries(2, "a"))
        await until(lambda: len(answers.outcomes) == 2)
    assert answers.seen == [1, 2]
    queue = ledger.queues[ledger.partition_of("a")] + suffix
    assert (await mq.depth(queue)).ready == 1


@pytest.mark.parametrize(
    "answer",
    [FatalError("never"), Ack.retry(FatalError("never")), 7],
    ids=["fatal", "retry with fatal", "no answer at all"],
)
async def test_what_cannot_be_mended_by_trying_halts_at_once(ledger: OrderedQueue[Entry], answer: object) -> None:
    answers = Answers(answer)
    async with ledger.consume(answers):
        await ledger.send_many(entries(2, "a"))
        await until(halted(ledger, ledger.partition_of("a")))
        assert answers.seen == [1]
        ledger.resume()
        await until(lambda: answers.seen == [1, 1, 2])


async def test_in_progress_release_and_a_delay_of_ones_own_wait_in_place(
    ledger: OrderedQueue[Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    from acemq.patterns.ordered import partition

    monkeypatch.setattr(partition, "AGAIN", A_MOMENT)
    answers = Answers(
        Ack.in_progress(A_MOMENT), Ack.release(), Ack.retry("later", delay=A_MOMENT), Ack.release(), ValueError("x")
    )
    async with ledger.consume(answers):
        await ledger.send_many(entries(2, "a"))
        await until(lambda: answers.seen == [1] * 6 + [2])
        await until(lambda: len(answers.outcomes) == 7)
    assert answers.outcomes == ["in_progress", "rejected", "retried", "rejected", "retried", "acked", "acked"]
    assert ledger.counters.retried == 2, "what is in progress or released is not counted as a try"


async def test_what_was_handled_before_is_accepted_in_its_turn_without_its_handler(
    ledger: OrderedQueue[Entry], book: Book
) -> None:
    first, second, third = entries(3, "a")
    book.fails = lambda entry: entry.number == 2 and book.tried["a"].count(2) == 1
    async with ledger.consume(book.apply, idempotency=MemoryIdempotencyStore()):
        for entry, which in ((first, "1"), (first, "1"), (second, "2"), (second, "2"), (third, "3")):
            await ledger.send(entry, message_id=which)
        await until(book.has(3, "a"))
    assert book.tried["a"] == [1, 2, 2, 3], "a failure gives its claim back, and the next try has it again"


async def test_what_another_has_in_hand_is_waited_for_in_its_place(ledger: OrderedQueue[Entry], book: Book) -> None:
    class Asked(MemoryIdempotencyStore):
        asked = 0

        async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
            self.asked += 1
            return await super().claim(key, lease=lease, fingerprint=fingerprint)

    store = Asked()
    other = await store.claim("1", lease=timedelta(minutes=1))
    async with ledger.consume(book.apply, idempotency=Idempotency(store=store, put_back_after=A_MOMENT)):
        for number, entry in enumerate(entries(2, "a"), 1):
            await ledger.send(entry, message_id=str(number))
        await until(lambda: store.asked > 2)
        assert not book.tried
        await store.release("1", other.token)
        await until(book.has(2, "a"))


async def test_a_body_that_cannot_be_read_is_parked_and_the_next_one_handled(
    mq: AceMQ, ledger: OrderedQueue[Entry], book: Book
) -> None:
    queue = ledger.queues[ledger.partition_of("a")]
    await mq.send(queue, b"{", content_type="application/json")
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(2, "a"))
        await until(book.has(2, "a"))
    assert (await mq.depth(f"{queue}.parked")).ready == 1


async def test_an_interceptor_that_refuses_halts_too(ledger: OrderedQueue[Entry], mq: AceMQ, book: Book) -> None:
    class Refuses(acemq.ConsumeInterceptor):
        on = True

        async def before_handle(self, message: Message[Any]) -> None:
            if self.on and message.payload.number == 2:
                raise ValueError("not now")

    hook = Refuses()
    mq.intercept(hook)
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(3, "a"))
        await until(halted(ledger, ledger.partition_of("a")))
        hook.on = False
        ledger.resume()
        await until(book.has(3, "a"))


async def test_a_handler_that_runs_too_long_is_tried_again_in_its_place(ledger: OrderedQueue[Entry]) -> None:
    seen: list[int] = []

    async def apply(message: Message[Entry]) -> None:
        seen.append(message.payload.number)
        if seen == [1]:
            await asyncio.Event().wait()

    async with ledger.consume(apply, handler_timeout=timedelta(milliseconds=50)):
        await ledger.send_many(entries(2, "a"))
        await until(lambda: seen == [1, 1, 2])


async def test_with_a_larger_prefetch_it_is_still_one_at_a_time_and_in_order(
    ledger: OrderedQueue[Entry], book: Book
) -> None:
    book.fails = lambda entry: entry == Entry("a", 7)
    async with ledger.consume(book.apply, prefetch=20):
        await ledger.send_many(entries(20))
        await until(halted(ledger, ledger.partition_of("a")))
        await until(book.has(20, "b", "c"))
        book.fails = lambda entry: False
        ledger.resume()
        await until(book.has(20, "a"))


# Closing, and beginning again


async def test_m074_closed_while_halted_the_failed_one_comes_first_and_then_the_rest_in_order(
    url: str, mq: AceMQ, described: Ordered[Entry], ledger: OrderedQueue[Entry], book: Book
) -> None:
    book.fails = lambda entry: entry.number == 5
    async with acemq.connect(url) as first:
        stopped = await redeclared(described, first)
        await stopped.consume(book.apply)
        await stopped.send_many(entries(14, "a"))
        await until(halted(stopped, stopped.partition_of("a")))
        drained = await first.close()
        assert (drained.finished, drained.given_back) == (True, 1)
    book.fails, before = lambda entry: False, len(book.tried["a"])
    async with ledger.consume(book.apply):
        await until(book.has(14, "a"))
    assert book.tried["a"][before:] == list(range(5, 15))


async def test_after_a_restart_it_is_tried_as_often_and_halts_again(ledger: OrderedQueue[Entry], book: Book) -> None:
    book.fails = lambda entry: entry.number == 2
    partition = ledger.partition_of("a")
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(3, "a"))
        await until(halted(ledger, partition))
    assert not ledger.halted_partitions
    async with ledger.consume(book.apply):
        await until(halted(ledger, partition))
    assert book.tried["a"] == [1, 2, 2, 2, 2, 2, 2]


async def test_held_for_longer_than_hold_it_goes_back_to_its_place_and_the_partition_stays_ours(
    url: str, mq: AceMQ, described: Ordered[Entry], ledger: OrderedQueue[Entry], book: Book
) -> None:
    book.fails = lambda entry: entry.number == 2
    partition = ledger.partition_of("a")
    queue = ledger.queues[partition]

    async def is_back() -> bool:
        return (await mq.depth(queue)).ready == 4

    async with acemq.connect(url) as other:
        async with ledger.consume(book.apply, hold=timedelta(milliseconds=100)):
            await ledger.send_many(entries(5, "a"))
            await until(halted(ledger, partition))
            await until_async(is_back)
            standby = await redeclared(described, other)
            async with standby.consume(Answers()):
                await until(lambda: set(ledger.halted_partitions) == {partition})
                assert ledger.owned_partitions == {0, 1, 2, 3}
                assert not standby.owned_partitions
                before = len(book.tried["a"])
                book.fails = lambda entry: False
                ledger.resume(partition)
                await until(book.has(5, "a"))
                assert book.tried["a"][before:] == [2, 3, 4, 5]


async def test_skip_reaches_a_message_that_was_given_back(mq: AceMQ, ledger: OrderedQueue[Entry], book: Book) -> None:
    book.fails = lambda entry: entry.number == 2
    partition = ledger.partition_of("a")

    async def is_back() -> bool:
        return (await mq.depth(ledger.queues[partition])).ready == 2

    async with ledger.consume(book.apply, hold=timedelta(milliseconds=100)):
        await ledger.send_many(entries(3, "a"))
        await until(halted(ledger, partition))
        await until_async(is_back)
        await ledger.skip(partition)
        await until(lambda: book.done["a"] == [1, 3])


async def test_closing_does_not_wait_for_a_delay_between_two_tries(
    described: Ordered[Entry], mq: AceMQ, book: Book
) -> None:
    ledger = await described.on_failure(STOP, delay=timedelta(minutes=5)).declare()
    book.fails = lambda entry: True
    consumer = await ledger.consume(book.apply)
    await ledger.send(Entry("a", 1))
    await until(lambda: book.tried["a"] == [1])
    drained = await asyncio.wait_for(consumer.close(), 5)
    assert (drained.finished, drained.given_back) == (True, 1)
    await remove(mq, ledger)


async def test_a_message_that_kills_its_process_goes_to_the_dead_letters_and_its_partition_halts(
    url: str, mq: AceMQ, ledger: OrderedQueue[Entry], book: Book
) -> None:
    await ledger.send_many(entries(3, "a"))
    partition = ledger.partition_of("a")
    for _ in range(15):  # begun, and the process died
        async with acemq.connect(url) as dies:
            receiving = await dies.receive(ledger.queues[partition], Entry, prefetch=1)
            await anext(receiving)
    async with ledger.consume(book.apply):
        await until(halted(ledger, partition))
        halt = ledger.halted_partitions[partition]
        assert halt.attempts == 0
        assert (await mq.depth(f"{ledger.queues[partition]}.dlq")).ready == 1
        assert not book.tried["a"]
        assert await ledger.skip(partition) == halt.message_id
        await until(lambda: book.done["a"] == [2, 3])


# Several processes


async def test_of_two_processes_one_serves_and_the_other_takes_over_when_it_closes(
    url: str,
    mq: AceMQ,
    described: Ordered[Entry],
    ledger: OrderedQueue[Entry],
    book: Book,
    diagnostics: list[Diagnostic],
) -> None:
    async with acemq.connect(url) as first:
        serving = await redeclared(described, first)
        consumer = await serving.consume(book.apply)
        async with ledger.consume(book.apply):
            assert serving.owned_partitions == {0, 1, 2, 3}
            assert not ledger.owned_partitions
            health = await mq.health()
            assert health.status == "up"
            assert all("stands by" in part.detail for part in health.parts if part.name.startswith("consumer"))
            await ledger.send_many(entries(20))
            await until(book.has(20, *KEYS))
            assert ledger.counters.handled == 0
            await consumer.close()
            await until(lambda: ledger.owned_partitions == {0, 1, 2, 3})
            await ledger.send_many([Entry(key, 21) for key in KEYS])
            await until(book.has(21, *KEYS))
    changes = [each.message for each in diagnostics if each.name == "acemq.partition.owner.changed"]
    assert sorted(changes) == [f"partition {number} of {ledger.name!r} is consumed here" for number in range(4)]


async def test_sharing_gives_each_of_two_processes_its_half_though_one_came_first(
    url: str, mq: AceMQ, described: Ordered[Entry], book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch)
    shared = described.sharing(at_most=2, take_over_after=timedelta(milliseconds=600))
    early = await shared.declare()
    async with early.consume(book.apply):
        await until(lambda: len(early.owned_partitions) == 2)
        await until(lambda: len(early.owned_partitions) == 4)  # nobody else came
        async with acemq.connect(url) as other:
            late = await redeclared(shared, other)
            async with late.consume(book.apply):
                await until(lambda: len(early.owned_partitions) == len(late.owned_partitions) == 2, within=20)
                assert not early.owned_partitions & late.owned_partitions
                await early.send_many(entries(50))
                await until(book.has(50, *KEYS))
            await until(lambda: len(early.owned_partitions) == 4, within=20)
    await remove(mq, early)


async def test_sharing_goes_on_with_the_other_partitions_when_one_is_gone_and_says_so_once(
    mq: AceMQ,
    described: Ordered[Entry],
    book: Book,
    monkeypatch: pytest.MonkeyPatch,
    diagnostics: list[Diagnostic],
) -> None:
    quicken(monkeypatch)
    shared = described.partitions(3).sharing(at_most=1, take_over_after=timedelta(seconds=1))
    ledger = await shared.declare()
    async with ledger.consume(book.apply) as consumer:
        gone = next(partition for partition in range(3) if partition not in consumer.partitions)
        await mq.delete(ledger.queues[gone])
        await until(lambda: len(consumer.partitions) == 2)
        await until(lambda: len(consumer.partitions) == 1)  # offered to whoever wants it
        await until(lambda: len(consumer.partitions) == 2)
        (said,) = [each for each in diagnostics if each.name == CONSUMER_LOST]
        assert said.queue == ledger.queues[gone]
        assert f"partition {gone} of {ledger.name!r} cannot be had" in said.message
        await shared.declare()
        await until(lambda: gone in ledger.owned_partitions)
    await remove(mq, ledger)


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    from acemq.patterns.ordered import consumer

    monkeypatch.setattr(consumer, "LOOK", (0.08, 0.12))
    monkeypatch.setattr(consumer, "OFFERED", 0.4)
    monkeypatch.setattr(consumer, "OFFERS", (0.2, 1.0))


async def test_a_halted_partition_is_not_offered(
    described: Ordered[Entry], mq: AceMQ, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch)
    lonely = await described.sharing(at_most=1, take_over_after=timedelta(milliseconds=50)).partitions(2).declare()
    book.fails = lambda entry: True
    async with lonely.consume(book.apply):
        await lonely.send_many([Entry("a", 1), Entry("b", 1)])
        await until(halted(lonely, 0, 1))
        tried = len(book.tried["a"])
        await asyncio.sleep(0.5)  # two offers and more
        assert (len(book.tried["a"]), len(lonely.halted_partitions)) == (tried, 2)
    await remove(mq, lonely)


async def test_a_connection_consumes_an_ordered_queue_once(
    ledger: OrderedQueue[Entry], described: Ordered[Entry]
) -> None:
    async with ledger.consume(Answers()):
        with pytest.raises(ConfigurationError, match="consumed by this connection already"):
            await ledger.consume(Answers())
        with pytest.raises(ConfigurationError, match="consumed by this connection already"):
            await (await described.declare()).consume(Answers())
    async with ledger.consume(Answers()):
        pass


# Health and telemetry


async def test_health_is_degraded_by_a_halted_partition_and_says_what_to_do(
    mq: AceMQ, ledger: OrderedQueue[Entry], book: Book
) -> None:
    book.fails = lambda entry: entry.key == "a"
    partition = ledger.partition_of("a")
    async with ledger.consume(book.apply):
        assert (await mq.health()).status == "up"
        await ledger.send(Entry("a", 1))
        await until(halted(ledger, partition))
        health = await mq.health()
        assert health.status == "degraded"
        (part,) = (part for part in health.parts if part.status == "degraded")
        assert f"partition {partition} of {ledger.name!r} is halted by message" in part.detail
        assert f"resume({partition})" in part.detail
        book.fails = lambda entry: False
        ledger.resume()
        await until(book.has(1, "a"))
        assert (await mq.health()).status == "up"


async def test_each_try_has_a_span_and_a_halt_shows_as_a_gauge(
    url: str, name: str, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, traces, reader = InMemorySpanExporter(), TracerProvider(), InMemoryMetricReader()
    traces.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: traces)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    async with acemq.connect(url) as mq:
        ledger = await keyed(mq, name).partitions(1).declare()
        (queue,) = ledger.queues
        book.fails = lambda entry: entry.number == 1
        async with ledger.consume(book.apply):
            await ledger.send(Entry("a", 1))
            await until(halted(ledger, 0))
            assert points(reader)["acemq.ordered.halted"] == [({"queue": queue}, 1)]
            book.fails = lambda entry: False
            ledger.resume()
            await until(book.has(1, "a"))
            seen = points(reader)
            assert seen["acemq.ordered.halted"] == [({"queue": queue}, 0)]
        outcomes = {tags["outcome"]: count for tags, count in points(reader)["acemq.consume.total"]}
        assert outcomes == {"retried": 3, "acked": 1}
        assert seen["acemq.messages.retried.total"] == [({"queue": queue, "message.type": queue}, 2)]
        await remove(mq, ledger)
    tries = [span for span in exporter.get_finished_spans() if span.name == f"{queue} process"]
    assert [(span.attributes or {})["messaging.acemq.outcome"] for span in tries] == ["retried"] * 3 + ["acked"]
    assert len({span.context.trace_id for span in tries if span.context}) == 1
    traces.shutdown()
    meters.shutdown()


async def test_what_no_handler_was_given_took_no_longer_than_its_handling(
    name: str, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = InMemoryMetricReader()
    meters = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: meters)
    async with acemq.connect(f"memory://{name}") as mq:
        ledger = await keyed(mq, name).partitions(1).declare()
        book.fails = lambda entry: True
        async with ledger.consume(book.apply):
            began = time.perf_counter()
            await mq.send(ledger.queues[0], b"{", content_type="application/json")
            await ledger.send(Entry("a", 1))
            await until(halted(ledger, 0))
            await ledger.skip(0)
            passed = time.perf_counter() - began
    outcomes = {tags["outcome"]: count for tags, count in points(reader)["acemq.consume.total"]}
    assert outcomes == {"parked": 1, "retried": 3, "dead_lettered": 1}
    assert 0 < sum(seconds(reader, "acemq.consume.duration")) < passed
    meters.shutdown()


async def test_what_a_handler_logs_names_its_message(ledger: OrderedQueue[Entry]) -> None:
    seen: list[tuple[str, str]] = []

    async def apply(message: Message[Entry]) -> None:
        record = logging.LogRecord("test", logging.INFO, "", 0, "applied", None, None)
        acemq.LogContext().filter(record)
        seen.append((record.__dict__["message_id"], record.__dict__["queue"]))

    async with ledger.consume(apply):
        receipt = await ledger.send(Entry("a", 1))
        await until(lambda: seen == [(receipt.message_id, receipt.routing_key)])


# Sending


async def test_a_message_goes_to_the_partition_of_its_key_whoever_sends_it(
    mq: AceMQ, name: str, ledger: OrderedQueue[Entry]
) -> None:
    receipt = await ledger.send(Entry("a", 1))
    assert (receipt.exchange, receipt.routing_key) == ("", ledger.queues[ledger.partition_of("a")])
    assert (await ledger.send(Entry("a", 1), key="")).routing_key == ledger.queues[ledger.partition_of("")]
    assert sum((await ledger.depths()).values()) == 2
    keyless = await mq.ordered(name, Entry).declare()
    await keyless.send(Entry("a", 2), key="a")
    assert (await ledger.depths())[ledger.partition_of("a")] >= 2
    assert ledger.counters.sent == 2


async def test_a_message_without_a_key_is_refused_before_any_io(
    mq: AceMQ, name: str, ledger: OrderedQueue[Entry]
) -> None:
    keyless = await mq.ordered(name, Entry).declare()
    with pytest.raises(ConfigurationError, match="has no keyed_by"):
        await keyless.send(Entry("a", 1))
    no_key: Any = lambda entry: None  # noqa: E731
    nothing = await mq.ordered(name, Entry).keyed_by(no_key).declare()
    with pytest.raises(ConfigurationError, match="key None must be text"):
        await nothing.send(Entry("a", 1))
    wrong = await mq.ordered(name, Entry).keyed_by(lambda entry: {"x": "y"}[entry.key]).declare()
    with pytest.raises(ConfigurationError, match="raised KeyError"):
        await wrong.send(Entry("a", 1))
    with pytest.raises(ConfigurationError, match="keeps their order"):
        await ledger.send(Entry("a", 1), delay=timedelta(seconds=1))
    with pytest.raises(ConfigurationError, match="keeps their order"):
        await ledger.send_many([Entry("a", 1)], priority=1)
    assert set((await ledger.depths()).values()) == {0}


def key_of(payload: dict[str, Any]) -> str:
    key: str = payload["key"]
    return key


async def test_send_many_sends_nothing_more_of_a_key_after_a_failure_and_the_rest_goes_on(mq: AceMQ, name: str) -> None:
    anything = await mq.ordered(name, dict[str, Any]).keyed_by(key_of).declare()
    cannot = object()
    rows: list[dict[str, Any]] = [
        {"key": "a", "n": 1},
        {"key": "b", "n": 1},
        {"key": "a", "n": cannot},
        {"n": 7},
        {"key": "a", "n": 3},
        {"key": "b", "n": 2},
    ]
    with pytest.raises(BatchPublishError) as raised:
        await anything.send_many(rows)
    results = raised.value.results
    assert [isinstance(result, Exception) for result in results] == [False, False, True, True, True, False]
    assert isinstance(results[2], EncodeError)
    assert isinstance(results[3], ConfigurationError)
    assert isinstance(results[4], PublishRefusedError)
    assert "not sent, since the message of key 'a' before it" in str(results[4])
    assert sum((await anything.depths()).values()) == anything.counters.sent == 3
    await remove(mq, anything)


# Declaring


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_1_is_refused(mq: AceMQ, count: int) -> None:
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        mq.ordered("ledger", Entry).partitions(count)


def test_other_bad_input_is_refused_at_the_call(mq: AceMQ) -> None:
    described: Any = mq.ordered("ledger", Entry)
    for call in (
        lambda: mq.ordered("", Entry),
        lambda: described.keyed_by("key"),
        lambda: described.on_failure("stop"),
        lambda: described.on_failure(STOP, attempts=0),
        lambda: described.on_failure(STOP, delay=1),
        lambda: described.sharing(0),
        lambda: described.sharing(1, take_over_after=timedelta()),
    ):
        with pytest.raises(ConfigurationError):
            call()


async def test_bad_options_of_consume_are_refused_at_the_call(ledger: OrderedQueue[Entry]) -> None:
    consume: Any = ledger.consume
    for options in ({"prefetch": 0}, {"hold": timedelta()}, {"handler_timeout": timedelta()}):
        with pytest.raises(ConfigurationError):
            consume(Answers(), **options)
    with pytest.raises(acemq.HandlerTypeError):
        consume("no handler")


async def test_deciding_about_what_does_not_stand_still_is_refused(ledger: OrderedQueue[Entry]) -> None:
    with pytest.raises(ClosedError, match="does not consume"):
        ledger.resume(0)
    async with ledger.consume(Answers()):
        ledger.resume()
        with pytest.raises(ConfigurationError, match="not halted in this process; halted: none"):
            ledger.resume(0)
        with pytest.raises(ConfigurationError, match="not halted in this process"):
            await ledger.skip(3)
        with pytest.raises(ConfigurationError, match="partitions 0 to 3, no 4"):
            ledger.resume(4)


async def test_m077_another_count_is_refused_while_messages_wait_and_accepted_when_drained(
    mq: AceMQ, described: Ordered[Entry], ledger: OrderedQueue[Entry], book: Book
) -> None:
    await ledger.send(Entry("a", 1))
    with pytest.raises(PartitionCountError, match="their keys would move") as raised:
        await described.partitions(8).declare()
    assert (raised.value.name, raised.value.wanted, raised.value.found) == (ledger.name, 8, 4)
    assert not await mq.exists(f"{ledger.name}.4")
    async with ledger.consume(book.apply):
        await until(book.has(1, "a"))

    async def is_drained() -> bool:
        return not any((await ledger.depths()).values())

    await until_async(is_drained)
    larger = await described.partitions(8).declare()
    with pytest.raises(PartitionCountError, match="more than 4 partitions") as raised:
        await described.declare()
    assert (raised.value.wanted, raised.value.found) == (4, 8)
    for queue in larger.queues[4:]:
        await mq.delete(queue)
    await described.declare()
    await remove(mq, larger)


async def test_repartitioning_declares_whatever_is_there(
    mq: AceMQ, described: Ordered[Entry], ledger: OrderedQueue[Entry]
) -> None:
    await ledger.send(Entry("a", 1))
    larger = await described.partitions(8).repartitioning().declare()
    smaller = await described.partitions(2).repartitioning().declare()
    assert (len(larger.queues), len(smaller.queues)) == (8, 2)
    await remove(mq, larger)


async def test_a_count_that_is_no_power_of_two_works_and_warns_once(
    mq: AceMQ, described: Ordered[Entry], book: Book, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = await described.partitions(3).declare()
    assert [record.levelname for record in caplog.records if "no power of two" in record.message] == ["WARNING"]
    async with ledger.consume(book.apply):
        await ledger.send_many(entries(5))
        await until(book.has(5, *KEYS))
    await remove(mq, ledger)


async def test_where_nothing_may_be_made_what_is_missing_is_named(url: str, name: str) -> None:
    async with acemq.connect(url, topology=acemq.TopologyMode.VERIFY) as mq:
        with pytest.raises(acemq.TopologyError, match=rf"{name}\.0"):
            await mq.ordered(name, Entry).declare()


async def test_a_transport_without_exclusive_consumers_sends_and_refuses_to_consume(name: str) -> None:
    broker = MemoryBroker.named(name, profile=Profile.BARE)
    async with acemq.connect(f"memory://{broker.name}") as mq:
        ledger = await mq.ordered("ledger", Entry).keyed_by(lambda entry: entry.key).declare()
        await ledger.send(Entry("a", 1))
        with pytest.raises(CapabilityError, match="exclusive consumers"):
            ledger.consume(Answers())


async def test_partitions_that_a_database_had_before_they_were_called_ordered_are_the_same(tmp_path: Path) -> None:
    async with acemq.connect(f"sqlite:///{tmp_path}/messages.db") as mq:
        described = mq.ordered("ledger", Entry).partitions(2)
        await mq.declare(Topology().queue("ledger.0").queue("ledger.1"))
        assert not (await mq.plan(described.topology())).drifted
        await described.declare()


async def test_listeners_learn_of_each_try(ledger: OrderedQueue[Entry]) -> None:
    told: list[Handled] = []
    fails = [True, True, False]

    async def apply(message: Message[Entry]) -> None:
        message.when_settled(told.append)
        if fails.pop(0):
            raise ValueError("boom")

    async with ledger.consume(apply):
        await ledger.send(Entry("a", 1))
        await until(lambda: len(told) == 3)
    assert [(each.outcome, each.target, each.landed) for each in told] == [
        ("retried", None, True),
        ("retried", None, True),
        ("acked", None, True),
    ]


class TestOnRabbitMQ:
    @pytest.fixture
    def url(self, rabbit_url: str) -> str:
        return rabbit_url

    async def test_m073_cut_off_while_halted_it_is_held_again_and_not_handled(
        self,
        mq: AceMQ,
        described: Ordered[Entry],
        ledger: OrderedQueue[Entry],
        book: Book,
        proxy: Proxy,
        proxied: str,
    ) -> None:
        book.fails = lambda entry: entry.number == 2
        partition = ledger.partition_of("a")
        async with acemq.connect(proxied) as alone:
            served = await redeclared(described, alone)
            async with served.consume(book.apply):
                await ledger.send_many(entries(4, "a"))
                await until(halted(served, partition))
                tried = list(book.tried["a"])
                proxy.cut()
                await until(lambda: not served.owned_partitions)
                await until(halted(served, partition), within=15)

                async def is_in_hand() -> bool:
                    return (await mq.depth(ledger.queues[partition])).ready == 2

                await until_async(is_in_hand)
                assert book.tried["a"] == tried
                book.fails = lambda entry: False
                served.resume(partition)
                await until(book.has(4, "a"))

    async def test_cut_off_while_it_was_given_back_it_is_held_again(
        self,
        mq: AceMQ,
        described: Ordered[Entry],
        ledger: OrderedQueue[Entry],
        book: Book,
        proxy: Proxy,
        proxied: str,
    ) -> None:
        book.fails = lambda entry: entry.number == 2
        partition = ledger.partition_of("a")

        async def is_back() -> bool:
            return (await mq.depth(ledger.queues[partition])).ready == 3

        async with acemq.connect(proxied) as alone:
            served = await redeclared(described, alone)
            async with served.consume(book.apply, hold=timedelta(milliseconds=200)):
                await ledger.send_many(entries(4, "a"))
                await until(halted(served, partition))
                await until_async(is_back)
                tried = list(book.tried["a"])
                proxy.cut()
                await until(lambda: not served.owned_partitions)
                await until(halted(served, partition), within=15)
                await until_async(is_back)
                assert book.tried["a"] == tried
                book.fails = lambda entry: False
                served.resume(partition)
                await until(book.has(4, "a"))

    async def test_m077_a_foreign_consumer_keeps_a_partition_waiting_and_degrades_health(
        self, url: str, mq: AceMQ, ledger: OrderedQueue[Entry], book: Book, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from acemq.transports.rabbitmq import receive

        monkeypatch.setattr(receive, "REPORT_AFTER", 0.5)
        async with acemq.connect(url) as other:
            async with other.receive(ledger.queues[1], Entry), ledger.consume(book.apply):
                assert ledger.owned_partitions == {0, 2, 3}

                async def is_degraded() -> bool:
                    return (await mq.health()).status == "degraded"

                await until_async(is_degraded)
                (part,) = (part for part in (await mq.health()).parts if part.status == "degraded")
                assert "other consumers" in part.detail

    async def test_closing_again_and_again_under_load_keeps_every_place(
        self, ledger: OrderedQueue[Entry], book: Book
    ) -> None:
        await ledger.send_many(entries(400, "a"))
        for number in range(1, 11):
            async with ledger.consume(book.apply):
                await until(lambda number=number: len(book.done["a"]) >= 20 * number)  # type: ignore[misc]
        async with ledger.consume(book.apply):
            await until(book.has(400, "a"))

    async def test_beyond_the_brokers_time_limit_what_is_held_was_given_back_and_what_is_retried_goes_on(
        self, start_rabbitmq: StartRabbitMQ, name: str, book: Book
    ) -> None:
        server = start_rabbitmq(
            consumer_timeout=timedelta(seconds=1), channel_tick_interval=timedelta(milliseconds=300)
        )
        diagnostics: list[Diagnostic] = []
        async with acemq.connect(server.url, on_diagnostic=diagnostics.append) as mq:
            ledger = await keyed(mq, name).declare()
            book.fails = lambda entry: entry.number == 2
            async with ledger.consume(book.apply, hold=timedelta(milliseconds=200)):
                await ledger.send_many(entries(4, "a"))
                partition = ledger.partition_of("a")
                await until(halted(ledger, partition))
                since = time.monotonic()

                def the_limit_is_over_twice() -> bool:
                    return time.monotonic() - since > 3

                await until(the_limit_is_over_twice)
                assert book.tried["a"] == [1, 2, 2, 2]
                assert not [each for each in diagnostics if each.name == "acemq.consumer.lost"]
                book.fails = lambda entry: False
                ledger.resume(partition)
                await until(book.has(4, "a"))

            endless = await keyed(mq, name).on_failure(RETRY_IN_PLACE, delay=timedelta(milliseconds=100)).declare()
            book.fails = lambda entry: entry.number == 1 and len(book.tried["b"]) < 25
            async with endless.consume(book.apply):
                await endless.send_many(entries(3, "b"))
                await until(book.has(3, "b"))
            assert book.tried["b"] == [*[1] * 25, 2, 3]
            assert [each for each in diagnostics if each.name == "acemq.consumer.lost"], "its channel was closed"

    async def test_a_copy_that_cannot_land_is_tried_again_and_nothing_passes(
        self, mq: AceMQ, described: Ordered[Entry], ledger: OrderedQueue[Entry]
    ) -> None:
        dead = f"{ledger.queues[ledger.partition_of('a')]}.dlq"
        answers = Answers(Ack.reject("bad"))
        async with ledger.consume(answers):
            await mq.delete(dead)
            await ledger.send_many(entries(3, "a"))

            async def is_seen() -> bool:
                return any("copies do not land" in part.detail for part in (await mq.health()).parts)

            await until_async(is_seen)
            assert answers.seen == [1]
            await mq.declare(acemq.Topology().queue(dead, type="classic"))
            await until(lambda: answers.seen == [1, 2, 3])
        assert (await mq.depth(dead)).ready == 1
