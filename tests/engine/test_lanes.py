"""A queue with lanes (case T-067): the same on every transport, since the engine keeps them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    CapabilityError,
    ConfigurationError,
    ConnectionFailedError,
    ConsumerState,
    Draft,
    Message,
    MovableClock,
    PublishInterceptor,
    PublishRefusedError,
    Receipt,
    RetryPolicy,
    Topology,
    TopologyError,
)
from acemq.topology import lanes_of
from acemq.transport import ApplyMode, Delivery, NotConnected
from acemq.transports.memory import MemoryBroker, Profile
from acemq.transports.memory.port import MemoryTransport
from tests.waiting import until, until_async

SECOND = timedelta(seconds=1)
LOW, NORMAL, HIGH = range(3)
PREFETCH, SHARES = 12, {"low": 3, "normal": 3, "high": 6}

MEMORY: dict[str, dict[str, Any]] = {
    "memory": {"lease": timedelta(seconds=30)},
    "memory, unleased": {},
    "memory, as RabbitMQ": {"profile": Profile.RABBITMQ},
    "memory, bare": {"profile": Profile.BARE},
}
EVERYWHERE = (*MEMORY, "rabbitmq", "rabbitmq, classic queues", "sqlite", "postgresql", "mariadb")


@pytest.fixture
def place() -> str:
    return "memory"


@pytest.fixture
def url(request: pytest.FixtureRequest, place: str, name: str, tmp_path: Path) -> str:
    """Where the test runs: a broker or a database of its own, or the shared RabbitMQ."""
    match place:
        case "rabbitmq" | "rabbitmq, classic queues":
            address: str = request.getfixturevalue("rabbit_url")
            return address
        case "sqlite":
            return f"sqlite:///{tmp_path / 'messages.db'}"
        case "postgresql" | "mariadb":
            fixture = "postgres_url" if place == "postgresql" else "mariadb_url"
            return f"{request.getfixturevalue(fixture)}?create_schema=true"
        case _:
            # Held by the test, or it would be gone with its last connection.
            request.node.broker = MemoryBroker.named(name, **MEMORY[place])
            return f"memory://{name}"


@pytest.fixture
async def mq(url: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url) as mq:
        yield mq


@pytest.fixture
async def queue(place: str, mq: AceMQ, name: str) -> AsyncIterator[str]:
    kind: Any = "classic" if place == "rabbitmq, classic queues" else "quorum"
    await mq.declare(Topology().queue(name, type=kind, priorities="lanes"))
    yield name
    for lane in lanes_of(name):
        for each in (lane, *(f"{lane}.{beside}" for beside in ("dlq", "parked", "retry.1s"))):
            await mq.delete(each)


on_every_transport = pytest.mark.parametrize("place", EVERYWHERE)
on_memory_and_rabbitmq = pytest.mark.parametrize("place", ["memory", "memory, as RabbitMQ", "rabbitmq"])


def lane_of(message: Message[Any], queue: str) -> str:
    return {f"{queue}.low": "low", queue: "normal", f"{queue}.high": "high"}[message.queue]


class Pace:
    """A handler of 20 ms that notes whose turn it was, and ends once the buffer holds what it may.

    So what is counted is the choice among three lanes that all have something, and not how quickly this broker fetches.
    """

    def __init__(self, queue: str, **sent: int) -> None:
        self.queue = queue
        self.sent = Counter(sent)
        self.starts: list[str] = []
        self.bodies: list[int] = []
        self.running: Counter[str] = Counter()
        self.consumer: acemq.Consumer | None = None
        self.then: Callable[[], Any] | None = None

    async def __call__(self, message: Message[int]) -> None:
        lane = lane_of(message, self.queue)
        self.starts.append(lane)
        self.bodies.append(message.payload)
        self.running[lane] += 1
        await asyncio.sleep(0.02)
        if self.then is not None:
            await self.then()
        await until(self.is_full)
        self.running[lane] -= 1

    def is_full(self) -> bool:
        if self.consumer is None:
            return False  # the first may be handled before its consumer has all three
        if self.consumer.state is not ConsumerState.RUNNING:
            return True  # it fetches nothing more
        waiting = self.sent - Counter(self.starts)
        return self.consumer.waiting >= sum(min(SHARES[lane] - self.running[lane], waiting[lane]) for lane in SHARES)


async def watch(mq: AceMQ, consumer: acemq.Consumer, queue: str, most: list[int]) -> None:
    """Note every 20 ms how many are unsettled over the three queues."""
    while True:
        assert consumer.subscription is not None
        most.append(consumer.subscription.held)
        if mq.capabilities.depth == "exact":
            most.append(sum([(await mq.depth(lane)).held or 0 for lane in lanes_of(queue)]))
        await asyncio.sleep(0.02)


@on_every_transport
async def test_t067_urgent_first_and_nobody_starved(mq: AceMQ, queue: str) -> None:
    await mq.send_many(queue, range(300), priority=LOW)
    await mq.send_many(queue, range(100))
    pace, most = Pace(queue, low=300, normal=100), list[int]()
    async with mq.consume(queue, int, pace, prefetch=PREFETCH, concurrency=2) as consumer:
        pace.consumer = consumer
        watching = asyncio.create_task(watch(mq, consumer, queue, most))
        await until(lambda: len(pace.starts) >= 10)
        pace.sent["high"] += 30
        await mq.send_many(queue, range(30), priority=HIGH)
        began = len(pace.starts)
        await until(lambda: len(pace.starts) >= began + 40)
        assert pace.starts[: began + 40].count("high") == 30

        async def another() -> None:
            await mq.send(queue, pace.sent["high"], priority=HIGH)
            pace.sent["high"] += 1

        pace.sent["high"] += 30
        await mq.send_many(queue, range(30, 60), priority=HIGH)
        pace.then = another
        await until(lambda: len(pace.starts) >= began + 60)
        began = len(pace.starts)
        await until(lambda: len(pace.starts) >= began + 400, within=60)
        shares = Counter(pace.starts[began : began + 400])
        assert abs(shares["low"] - 20) <= 1
        assert abs(shares["normal"] - 20) <= 1
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    assert max(most) <= PREFETCH
    assert max(most) > 0
    assert consumer.counters.retried == 0


@on_every_transport
async def test_t067_of_300_low_and_30_high_that_wait_all_high_ones_are_among_the_first_40_starts(
    mq: AceMQ, queue: str
) -> None:
    await mq.send_many(queue, range(300), priority=LOW)
    await mq.send_many(queue, range(30), priority=HIGH)
    pace = Pace(queue, low=300, high=30)
    async with mq.consume(queue, int, pace, prefetch=PREFETCH, concurrency=2) as pace.consumer:
        await until(lambda: len(pace.starts) >= 40)
    assert pace.starts[:40].count("high") == 30
    high = [body for body, lane in zip(pace.bodies, pace.starts, strict=True) if lane == "high"]
    assert high == sorted(high), "each lane keeps its order"


@on_every_transport
async def test_t067_a_high_one_that_fails_is_retried_dead_lettered_and_replayed_as_high(mq: AceMQ, queue: str) -> None:
    policy = RetryPolicy.fixed(2, SECOND).wait_in_broker_from(SECOND)
    seen: list[tuple[str, int]] = []

    async def fail_twice(message: Message[str]) -> Ack | None:
        seen.append((lane_of(message, queue), message.attempt))
        return Ack.accept() if len(seen) == 3 else Ack.retry("not yet")

    async with mq.consume(queue, str, fail_twice, retry=policy) as consumer:
        await mq.send(queue, "urgent", priority=HIGH)
        await until(lambda: consumer.counters.dead_lettered == 1)
        assert consumer.counters.retried == 1, "one set of counters"
        if mq.capabilities.depth == "none":  # a replay wants to know how many there are; by hand, then
            letter = await mq.pull(f"{queue}.high.dlq", str)
            assert letter is not None
            assert letter.failure is not None
            assert letter.failure.queue == f"{queue}.high"
            await mq.send(queue, letter.payload, envelope=letter.envelope.replace(attempt=1, error=None), priority=HIGH)
        else:
            assert (await mq.replay(f"{queue}.high.dlq").run()).replayed == 1
        await until(lambda: consumer.counters.acked == 1)
    assert seen == [("high", 1), ("high", 2), ("high", 1)]
    for lane in lanes_of(queue):
        assert await mq.exists(f"{lane}.dlq")
        assert await mq.exists(f"{lane}.parked")
        assert await mq.exists(f"{lane}.retry.1s") is mq.capabilities.dead_letter_routes


@on_every_transport
async def test_t067_a_delayed_one_enters_its_lane_when_it_is_due(place: str, mq: AceMQ, queue: str) -> None:
    if place == "memory, bare":
        with pytest.raises(CapabilityError, match="delay"):
            await mq.send(queue, 1, priority=HIGH, delay=SECOND)
        return
    async with mq.scheduler():
        await mq.send(queue, 1, priority=HIGH, delay=SECOND)
        assert [(await mq.depth(lane)).ready for lane in lanes_of(queue)] == [0, 0, 0]
        pulled = await mq.pull(f"{queue}.high", int, wait=5 * SECOND)
    assert pulled is not None
    assert (pulled.payload, pulled.queue) == (1, f"{queue}.high")
    await pulled.accept()


@on_every_transport
async def test_t067_who_has_applied_nothing_finds_the_lanes_with_one_look(
    url: str, mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []
    async with acemq.connect(url) as other:
        exists = other.transport.exists

        async def counted(name: str, kind: Any = "queue") -> bool:
            looked.append(name)
            return await exists(name, kind)

        monkeypatch.setattr(other.outbound.lanes, "_exists", counted)
        await asyncio.gather(*(other.send(queue, number, priority=number % 3) for number in range(30)))
        receipt = await other.send(queue, 30, priority=LOW)
    assert looked == [f"{queue}.high"]
    assert (receipt.exchange, receipt.routing_key) == ("", f"{queue}.low")
    got = await mq.pull_many(queue, int, most=100)
    assert Counter(message.queue for message in got) == dict(zip(lanes_of(queue), (11, 10, 10), strict=True))


async def ready(mq: AceMQ, queue: str) -> int:
    return (await mq.depth(queue)).ready


@on_every_transport
async def test_a_pull_looks_into_high_normal_and_low_and_waits_for_all_three(mq: AceMQ, queue: str) -> None:
    for priority in (LOW, NORMAL, HIGH):
        await mq.send_many(queue, [10 * priority, 10 * priority + 1], priority=priority)
    first = await mq.pull_many(queue, int, most=3)
    rest = await mq.pull_many(queue, int, most=10, wait=SECOND)
    assert [message.payload for message in (*first, *rest)] == [20, 21, 10, 11, 0, 1]
    for message in (*first, *rest):
        assert await message.accept()
    assert await mq.pull(queue, int) is None
    assert await mq.pull(queue, int, wait=timedelta(milliseconds=100)) is None
    for priority in (LOW, NORMAL, HIGH):
        pulling = asyncio.create_task(mq.pull(queue, int, wait=10 * SECOND))
        await asyncio.sleep(0.05)
        await mq.send(queue, priority, priority=priority)
        message_ = await pulling
        assert message_ is not None
        assert message_.payload == priority
        assert await message_.accept()
    assert await mq.pull(queue, int) is None


def behind(gate: asyncio.Event) -> Callable[[Message[int]], Awaitable[None]]:
    async def wait(message: Message[int]) -> None:
        await gate.wait()

    return wait


# What only the engine does: the same everywhere, and shown where it is quick


async def test_a_priority_that_is_no_lane_is_refused_before_any_io(mq: AceMQ, queue: str) -> None:
    with pytest.raises(ConfigurationError, match=r"priority=3: queue .* has lanes: 0 low, 1 normal, 2 high"):
        await mq.send(queue, 1, priority=3)
    with pytest.raises(ConfigurationError, match="priority=7"):
        await mq.send_many(queue, [1], priority=7)
    with pytest.raises(ConfigurationError, match="priority=4"):
        mq.publisher("", queue, int, priority=4)


@pytest.mark.parametrize("place", ["memory, bare"])
async def test_a_priority_needs_lanes_or_levels_and_an_exchange_needs_levels(mq: AceMQ, queue: str, name: str) -> None:
    await mq.declare(Topology().queue(f"{name}-plain").exchange(f"{name}-x", "fanout"))
    with pytest.raises(CapabilityError, match=r"priority=2.*priorities='lanes'"):
        await mq.send(f"{name}-plain", 1, priority=2)
    with pytest.raises(CapabilityError, match="priority=2"):
        await mq.publish(f"{name}-x", "k", 1, priority=2)
    with pytest.raises(CapabilityError, match="priority=2"):
        mq.publisher("", f"{name}-plain", int, priority=2)


async def test_whether_there_are_lanes_is_asked_again_after_a_minute(name: str) -> None:
    clock = MovableClock()
    broker = MemoryBroker.named(name, clock=clock)
    async with (
        acemq.connect(f"memory://{broker.name}", clock=clock) as mq,
        acemq.connect(f"memory://{broker.name}", clock=clock) as other,
    ):
        await mq.declare(Topology().queue("q", type="classic", priorities=5))
        await other.send("q", 1, priority=2)
        assert await ready(mq, "q") == 1, "levels of the broker's own"
        await mq.delete("q")
        await mq.declare(Topology().queue("q", priorities="lanes"))
        await clock.advance(timedelta(seconds=59))
        with pytest.raises(CapabilityError):
            await other.send("q", 1, priority=2)
        await clock.advance(timedelta(seconds=1))
        await other.send("q", 1, priority=2)
        assert await ready(mq, "q.high") == 1


async def test_a_send_whose_lane_cannot_be_seen_in_time_is_refused_and_nothing_is_written(name: str) -> None:
    broker = MemoryBroker.named(name)
    async with acemq.connect(f"memory://{name}") as mq, acemq.connect(f"memory://{name}") as other:
        await mq.declare(Topology().queue("q", priorities="lanes"))
        broker.stall("exists")
        with pytest.raises(PublishRefusedError, match="whether queue 'q' has lanes") as found:
            await other.send("q", 1, priority=2, timeout=timedelta(milliseconds=50))
        assert (found.value.outcome, found.value.routing_key) == ("refused", "q")
        broker.release("exists")
        await other.send("q", 1, priority=2)
        assert [await ready(mq, lane) for lane in lanes_of("q")] == [0, 0, 1]


class Noting(PublishInterceptor):
    def __init__(self) -> None:
        self.drafts: list[tuple[str, str]] = []
        self.receipts: list[Receipt] = []

    def before_publish(self, draft: Draft, /) -> None:
        self.drafts.append((draft.routing_key, draft.envelope.type))

    def after_publish(self, draft: Draft, receipt: Receipt, /) -> None:
        self.receipts.append(receipt)


async def test_every_way_to_send_goes_to_the_lane_with_the_type_of_the_queue(mq: AceMQ, queue: str) -> None:
    async def send_in_every_way() -> None:
        await mq.send(queue, 1, priority=HIGH)
        await mq.publish("", queue, 2, priority=HIGH)
        await mq.send_many(queue, [3, 4], priority=HIGH)
        await mq.publish_batch([Draft("", queue, 5, priority=HIGH)])
        await mq.publisher("", queue, int, priority=HIGH).publish(6)
        await mq.send(queue, 7, priority=HIGH, type="order.placed")

    await send_in_every_way()
    noting = Noting()
    mq.intercept(noting)
    await send_in_every_way()
    got = await mq.pull_many(f"{queue}.high", int, most=20)
    assert [message.payload for message in got] == [*range(1, 8), *range(1, 8)]
    assert [message.type for message in got] == 2 * [*([queue] * 6), "order.placed"]
    assert noting.drafts == [*([(queue, queue)] * 6), (queue, "order.placed")], "hooks see what was asked for"
    assert {receipt.routing_key for receipt in noting.receipts} == {f"{queue}.high"}
    stats = await mq.stats(queue)
    assert stats.published == 14


async def test_stats_and_health_cover_the_three(mq: AceMQ, queue: str) -> None:
    await mq.send(queue, 1, priority=LOW)
    await mq.send_many(queue, [2, 3], priority=HIGH)
    stats = await mq.stats(queue)
    assert {lane: depth.ready for lane, depth in stats.lanes.items()} == {
        f"{queue}.low": 1,
        queue: 0,
        f"{queue}.high": 2,
    }
    assert stats.published == 3
    async with mq.consume(queue, int, lambda message: None) as consumer:
        await until(lambda: consumer.counters.acked == 3)
        assert (await mq.stats(queue)).counters.acked == 3
        health = await mq.health()
        assert [part.status for part in health.parts if part.name.startswith("consumer")] == ["up"]
        await mq.delete(f"{queue}.low")

        async def says_so() -> bool:
            (part,) = [part for part in (await mq.health()).parts if part.name.startswith("consumer")]
            return part.status != "up" and f"{queue}.low" in part.detail

        await until_async(says_so)
        await mq.declare(Topology().queue(f"{queue}.low"))
        await mq.send(queue, 4, priority=LOW)
        await until(lambda: consumer.counters.acked == 4)


@on_memory_and_rabbitmq
async def test_a_pause_a_resume_and_a_drain_cover_the_three(mq: AceMQ, queue: str) -> None:
    gate, started = asyncio.Event(), list[str]()

    async def work(message: Message[int]) -> None:
        started.append(lane_of(message, queue))
        await gate.wait()

    async with mq.consume(queue, int, work, prefetch=6, concurrency=3) as consumer:
        consumer.pause()
        for priority in (LOW, NORMAL, HIGH):
            await mq.send_many(queue, range(5), priority=priority)
        assert started == []
        consumer.resume()
        await until(lambda: consumer.in_flight == 3 and consumer.held == 3)
        assert len(started) == 3, "which of them depends on what the broker brings first to an empty buffer"
        assert [await ready(mq, lane) for lane in lanes_of(queue)] == [4, 3, 2]
        gate.set()
        drained = await consumer.drain()
    assert drained.finished
    settled = consumer.counters.acked

    async def all_back() -> bool:
        return sum([await ready(mq, lane) for lane in lanes_of(queue)]) == 15 - settled

    await until_async(all_back)


@on_memory_and_rabbitmq
async def test_concurrency_counts_over_all_lanes(mq: AceMQ, queue: str) -> None:
    gate = asyncio.Event()
    for priority in (LOW, NORMAL, HIGH):
        await mq.send_many(queue, range(20), priority=priority)
    async with mq.consume(queue, int, behind(gate), concurrency=4) as consumer:
        await until(lambda: consumer.in_flight == 4 and consumer.held > 4)
        gate.set()
        await until(lambda: consumer.counters.acked == 60)


async def test_one_lane_alone_keeps_every_handler_busy(mq: AceMQ, queue: str) -> None:
    gate = asyncio.Event()
    await mq.send_many(queue, range(20))
    async with mq.consume(queue, int, behind(gate), concurrency=10) as consumer:
        await until(lambda: consumer.in_flight == 10)
        gate.set()


async def test_batches_take_the_highest_first(mq: AceMQ, queue: str) -> None:
    for priority in (LOW, NORMAL, HIGH):
        await mq.send_many(queue, [priority] * 4, priority=priority)
    batches: list[list[int]] = []

    async def load(batch: acemq.Batch[int]) -> None:
        batches.append([message.payload for message in batch])

    async with mq.consume_batches(queue, int, load, most=6, within=timedelta(milliseconds=50)) as consumer:
        await until(lambda: consumer.counters.acked == 12)
    assert batches[0][:4] == [HIGH] * 4
    assert sorted(payload for batch in batches for payload in batch) == [LOW] * 4 + [NORMAL] * 4 + [HIGH] * 4


async def test_receiving_takes_the_highest_first_and_gives_the_rest_back(mq: AceMQ, queue: str) -> None:
    for priority in (LOW, NORMAL, HIGH):
        await mq.send_many(queue, [priority] * 4, priority=priority)
    async with mq.receive(queue, int, prefetch=8) as receiving:
        await until(lambda: receiving.held == 8)
        got = [await anext(receiving) for _ in range(8)]
        assert [message.payload for message in got] == [HIGH] * 4 + [NORMAL] * 2 + [LOW] * 2
        assert await got[0].accept()
    assert [await ready(mq, lane) for lane in lanes_of(queue)] == [4, 4, 3]
    with pytest.raises(ConfigurationError, match="prefetch=2"):
        mq.receive(queue, int, prefetch=2)


async def test_a_group_of_consumers_has_the_lanes_each(mq: AceMQ, queue: str) -> None:
    async with mq.consume_group(queue, int, lambda message: None, size=2) as group:
        for priority in (LOW, NORMAL, HIGH):
            await mq.send_many(queue, range(10), priority=priority)
        await until(lambda: group.counters.acked == 30)


async def test_who_answers_answers_the_urgent_first(mq: AceMQ, queue: str) -> None:
    async def double(message: Message[int]) -> int:
        return 2 * message.payload

    async with mq.respond(queue, int, double):
        assert await mq.request("", queue, 21, int, priority=HIGH) == 42
        assert await mq.request("", queue, 1, int, priority=LOW) == 2
    with pytest.raises(ConfigurationError, match="priority=3"):
        await mq.request("", queue, 1, int, priority=3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exclusive": True}, "exclusive=True"),
        ({"prefetch": 2, "concurrency": 1}, "prefetch=2"),
        ({"turn": 1}, "turn=1"),
    ],
)
async def test_what_lanes_cannot_be_consumed_with_is_refused_at_the_call(
    mq: AceMQ, queue: str, options: Any, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        mq.consume(queue, int, lambda message: None, **options)


async def test_a_turn_without_lanes_is_refused(mq: AceMQ, name: str) -> None:
    await mq.declare(Topology().queue(name))
    with pytest.raises(ConfigurationError, match="turn=5"):
        mq.consume(name, int, lambda message: None, turn=5)


@pytest.mark.parametrize("place", ["memory, as RabbitMQ"])  # where a broker keeps order, declaring it is refused
async def test_an_ordered_queue_has_no_lanes(mq: AceMQ) -> None:
    ordered = mq.ordered("ledger", int).partitions(1)
    described = ordered.topology().queues[0].name
    await mq.declare(Topology().queue(described, priorities="lanes"))
    declared = await ordered.declare()
    with pytest.raises(ConfigurationError, match="an ordered consumer"):
        declared.consume(lambda message: None)


async def test_a_lane_that_is_missing_is_named_before_anything_is_consumed(url: str, mq: AceMQ, queue: str) -> None:
    await mq.delete(f"{queue}.low")
    async with acemq.connect(url) as other:
        with pytest.raises(TopologyError, match=rf"there is no queue '{queue}\.low'.*priorities='lanes'"):
            await other.consume(queue, int, lambda message: None)


@on_memory_and_rabbitmq
async def test_a_consumer_in_a_process_that_applied_nothing_has_the_three(url: str, mq: AceMQ, queue: str) -> None:
    async with acemq.connect(url) as other, other.consume(queue, int, lambda message: None) as consumer:
        for priority in (LOW, NORMAL, HIGH):
            await mq.send(queue, priority, priority=priority)
        await until(lambda: consumer.counters.acked == 3)
    for lane in lanes_of(queue):
        assert await mq.exists(f"{lane}.dlq")


async def test_what_was_declared_is_the_same_applied_elsewhere(url: str, mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, int, lambda message: None):
        declared = mq.declared()
    async with acemq.connect("memory://another") as other:
        await other.declare(declared)
        with pytest.raises(ConfigurationError, match="has lanes"):
            await other.send(queue, 1, priority=3)
        await other.send(queue, 1, priority=HIGH)
        assert await ready(other, f"{queue}.high") == 1


async def test_a_plan_lists_all_of_them_and_one_that_is_there_without_lanes_is_no_drift(mq: AceMQ, name: str) -> None:
    await mq.declare(Topology().queue(name))
    topology = Topology().queue(name, priorities="lanes")
    found = {finding.name: finding.verdict for finding in (await mq.plan(topology)).findings}
    assert found == {f"{name}.low": "missing", name: "present", f"{name}.high": "missing"}
    with pytest.raises(CapabilityError, match=f"{name}"):
        await mq.send(name, 1, priority=HIGH)
    await mq.declare(topology)
    await mq.declare(topology, mode=ApplyMode.VERIFY)
    await mq.send(name, 1, priority=HIGH)
    assert await ready(mq, f"{name}.high") == 1


async def test_a_subscription_that_is_refused_leaves_none_of_the_others_behind(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mq.send(queue, 1, priority=HIGH)
    subscribe = MemoryTransport.subscribe

    async def refusing(self: MemoryTransport, subscribed: str, *rest: Any, **options: Any) -> Any:
        if subscribed == f"{queue}.low":
            raise ConfigurationError("refused by a test")
        return await subscribe(self, subscribed, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryTransport, "subscribe", refusing)
        with pytest.raises(ConfigurationError, match="refused by a test"):
            await mq.receive(queue, int)
    depths = [await mq.depth(lane) for lane in lanes_of(queue)]
    assert [(depth.ready, depth.held) for depth in depths] == [(0, 0), (0, 0), (1, 0)]
    async with mq.consume(queue, int, lambda message: None) as consumer:
        await until(lambda: consumer.counters.acked == 1)


async def test_a_cancelled_pull_of_three_lanes_loses_nothing(mq: AceMQ, queue: str) -> None:
    for round_ in range(20):
        pulling = asyncio.create_task(mq.pull_many(queue, int, most=5, wait=10 * SECOND))
        await asyncio.sleep(0)
        sending = asyncio.create_task(mq.send(queue, round_, priority=round_ % 3))
        for _ in range(round_):
            await asyncio.sleep(0)
        pulling.cancel()
        taken = (await asyncio.gather(pulling, return_exceptions=True))[0]
        await sending
        for message in [] if isinstance(taken, BaseException) else taken:
            await message.release()
    depths = [await mq.depth(lane) for lane in lanes_of(queue)]
    assert sum(depth.ready for depth in depths) == 20
    assert sum(depth.held or 0 for depth in depths) == 0


async def test_one_of_three_pulls_that_fails_is_the_error_of_the_pull(
    mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are cut off for it, which is no cancellation of whoever pulls."""
    pull = mq.transport.pull

    async def failing(name: str, /, *, most: int, wait: timedelta) -> Sequence[Delivery]:
        if wait and name.endswith(".low"):
            raise NotConnected("the link was lost")
        return await pull(name, most=most, wait=wait)

    monkeypatch.setattr(mq.transport, "pull", failing)
    with pytest.raises(ConnectionFailedError, match="the link was lost"):
        await mq.pull(queue, int, wait=SECOND)


async def test_o15_a_low_one_that_kills_is_given_up_although_high_ones_come_before_it(name: str) -> None:
    """What has only just come to the high lane is started first, and is not what killed."""
    broker = MemoryBroker.named(name, profile=Profile.RABBITMQ)
    url, handled = f"memory://{broker.name}", list[str]()
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue("q", priorities="lanes"))
        await mq.send_many("q", ["bomb", "good low"], priority=LOW)
    for death in range(4):
        mq = await acemq.connect(url)
        await mq.send("q", f"high {death}", priority=HIGH)

        async def work(message: Message[str]) -> None:
            if message.payload == "bomb":
                await asyncio.Event().wait()
            handled.append(message.payload)

        consumer = await mq.consume("q", str, work, max_deliveries=3)
        if death < 3:
            await until(lambda consumer=consumer, death=death: consumer.in_flight == 1 and len(handled) > death)  # type: ignore[misc]
            await mq.close(timedelta())
        else:
            await until(lambda consumer=consumer: consumer.counters.dead_lettered == 1)  # type: ignore[misc]
            letter = await mq.pull("q.low.dlq", str)
            assert letter is not None
            assert letter.payload == "bomb"
            await until(lambda: "good low" in handled)
            await mq.close()
    assert sorted(handled) == ["good low", *(f"high {death}" for death in range(4))]
