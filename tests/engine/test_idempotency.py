"""Idempotent handling: what a consumer does with each answer of the store of claims, and with none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    Claim,
    ConfigurationError,
    ConsumeInterceptor,
    Diagnostic,
    Idempotency,
    MemoryIdempotencyStore,
    Message,
    RetryPolicy,
    Topology,
    body_fingerprint,
)
from acemq.clock import MovableClock

LEASE = timedelta(seconds=30)


class Store(MemoryIdempotencyStore):
    """Remembers what it was told, and fails as it is told."""

    def __init__(self, clock: MovableClock) -> None:
        super().__init__(clock=clock)
        self.told: list[str] = []
        self.broken: set[str] = set()
        self.hung: asyncio.Event | None = None

    async def _tell(self, verb: str) -> None:
        self.told.append(verb)
        if verb in self.broken:
            raise OSError("disk full")

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        await self._tell("claim")
        claim = await super().claim(key, lease=lease, fingerprint=fingerprint)
        if self.hung is not None:
            await self.hung.wait()
        return claim

    async def renew(self, key: str, token: int, /, *, lease: timedelta) -> bool:
        await self._tell("renew")
        return await super().renew(key, token, lease=lease)

    async def confirm(self, key: str, token: int, /, *, retention: timedelta) -> bool:
        await self._tell("confirm")
        return await super().confirm(key, token, retention=retention)

    async def release(self, key: str, token: int, /) -> bool:
        await self._tell("release")
        return await super().release(key, token)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def mq(name: str, clock: MovableClock, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    """On a broker in memory whose time is moved: these tests are about waits."""
    async with acemq.connect(f"memory://{name}", clock=clock, on_diagnostic=diagnostics.append) as mq:
        yield mq


@pytest.fixture
def store(clock: MovableClock) -> Store:
    return Store(clock)


async def nothing(message: Any) -> None:
    """Handle it. On the loop, as the clock waits for no thread."""


AT_ONCE = RetryPolicy.fixed(5, timedelta())


async def test_m094_a_failure_frees_the_claim_and_success_keeps_it(
    mq: AceMQ, clock: MovableClock, store: Store
) -> None:
    runs: list[int] = []

    async def handle(message: Message[int]) -> None:
        runs.append(message.attempt)
        if message.attempt == 1:
            raise ValueError("boom")

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, handle, retry=AT_ONCE, idempotency=store) as consumer:
        await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=1))
        await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=1))
        assert runs == [1, 2]
        assert store.told == ["claim", "release", "claim", "confirm", "claim"]
        assert (consumer.counters.acked, consumer.counters.duplicates, consumer.counters.retried) == (2, 1, 1)
    assert (await mq.depth("q")).ready == 0


async def test_o056_eight_copies_for_four_workers_are_one_run(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    runs: list[str] = []
    gate = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        runs.append(message.id)
        await gate.wait()

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, handle, concurrency=4, idempotency=store) as consumer:
        for _ in range(8):
            await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=4))
        assert runs == ["m"]
        gate.set()
        await clock.advance(timedelta(seconds=20))
        counters = consumer.counters
        assert runs == ["m"]
        assert (counters.acked, counters.duplicates) == (8, 7)
        assert counters.in_progress >= 3
        assert counters.dead_lettered == counters.retried == 0


async def test_m095_a_claim_of_the_dead_is_waited_for_and_never_dead_lettered(
    mq: AceMQ, clock: MovableClock, store: Store
) -> None:
    await store.claim("m", lease=timedelta(seconds=60))
    runs: list[int] = []
    await mq.declare(Topology().queue("q"))
    idempotency = Idempotency(store=store, put_back_after=timedelta(seconds=1))

    async def handle(message: Message[int]) -> None:
        runs.append(message.attempt)

    async with mq.consume("q", int, handle, retry=RetryPolicy.none(), idempotency=idempotency) as consumer:
        await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=59))
        assert runs == []
        assert consumer.counters.in_progress >= 50
        await clock.advance(timedelta(seconds=3))
        assert runs == [1]
        assert consumer.counters.dead_lettered == 0


async def test_m096_a_store_that_raises_makes_no_duplicate(
    mq: AceMQ, clock: MovableClock, store: Store, diagnostics: list[Diagnostic]
) -> None:
    store.broken.add("claim")
    runs: list[int] = []
    await mq.declare(Topology().queue("q"))

    async def handle(message: Message[int]) -> None:
        runs.append(message.attempt)

    async with mq.consume("q", int, handle, retry=RetryPolicy.none(), idempotency=store) as consumer:
        await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=11))
        assert runs == []
        assert consumer.counters.in_progress == 3
        (part,) = [part for part in (await mq.health()).parts if part.name.startswith("consumer")]
        assert part.status == "degraded"
        assert "claims" in part.detail
        store.broken.clear()
        await clock.advance(timedelta(seconds=5))
        assert runs == [1]
        (part,) = [part for part in (await mq.health()).parts if part.name.startswith("consumer")]
        assert "claims" not in part.detail
    assert [each.name for each in diagnostics].count("acemq.idempotency.failed") == 1


@pytest.mark.parametrize("answer", [Ack.retry("later"), Ack.reject("no"), Ack.park("look"), Ack.release(), "nonsense"])
async def test_every_end_but_acceptance_releases(mq: AceMQ, clock: MovableClock, store: Store, answer: object) -> None:
    answers = iter([answer])
    await mq.declare(Topology().queue("q"))

    async def handle(message: Message[int]) -> Any:
        return next(answers, None)

    async with mq.consume("q", int, handle, retry=AT_ONCE, idempotency=store):
        await mq.send("q", 1, message_id="m")
        await clock.advance(timedelta(seconds=1))
    assert store.told[:2] == ["claim", "release"]


async def test_a_refusal_by_an_interceptor_releases(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    class No(ConsumeInterceptor):
        def before_handle(self, message: Message[Any]) -> None:
            raise PermissionError("no")

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, nothing, interceptors=[No()], idempotency=store):
        await mq.send("q", 1)
        await clock.advance(timedelta(seconds=1))
    assert store.told == ["claim", "release"]


async def test_a_stop_releases_what_it_cuts_off(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    began = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        began.set()
        await asyncio.Event().wait()

    await mq.declare(Topology().queue("q"))
    consumer = await mq.consume("q", int, handle, idempotency=store)
    await mq.send("q", 1, message_id="m")
    await began.wait()
    drained = await consumer.drain(timedelta())
    assert drained.abandoned == 1
    assert store.told == ["claim", "release"]
    assert (await store.claim("m", lease=LEASE)).answer == "claimed"


async def test_a_stop_while_a_claim_is_made_releases_it(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    store.hung = asyncio.Event()
    await mq.declare(Topology().queue("q"))
    consumer = await mq.consume("q", int, nothing, idempotency=store)
    await mq.send("q", 1, message_id="m")
    await clock.rest()
    asyncio.get_running_loop().call_later(0.2, store.hung.set)
    await consumer.drain(timedelta())
    assert store.told == ["claim", "release"]


async def test_a_claim_is_renewed_while_its_handler_runs(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    gate = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        await gate.wait()

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, handle, idempotency=Idempotency(store=store, lease=LEASE)):
        await mq.send("q", 1, message_id="m")
        for _ in range(12):
            await clock.advance(LEASE / 4)
        assert (await store.claim("m", lease=LEASE)).answer == "in_progress"
        gate.set()
        await clock.rest()
    assert store.told.count("renew") == 9
    assert "confirm" in store.told


@pytest.mark.parametrize("by", ["taking over", "not answering"])
async def test_a_lost_claim_cancels_its_handler_and_puts_the_message_back(
    mq: AceMQ, clock: MovableClock, store: Store, diagnostics: list[Diagnostic], by: str
) -> None:
    ended: list[str] = []

    async def handle(message: Message[int]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(f"cancelled {message.attempt}")
            raise

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, handle, idempotency=Idempotency(store=store, lease=LEASE)) as consumer:
        await mq.send("q", 1, message_id="m")
        await clock.rest()
        if by == "taking over":
            store._live["m"].expires_at = 0
            assert (await store.claim("m", lease=timedelta(hours=1))).answer == "claimed"
        else:
            store.broken.add("renew")
        await clock.advance(LEASE * 1.1)
        assert ended == ["cancelled 1"]
        store.broken.add("claim")
        await clock.advance(timedelta(seconds=5))
        assert consumer.counters.in_progress >= 1
        assert consumer.counters.retried == consumer.counters.acked == 0
        assert "acemq.lease.lost" in [each.name for each in diagnostics]
        assert "confirm" not in store.told
        await clock.advance(timedelta(seconds=1))


async def test_a_confirm_that_fails_accepts_all_the_same(
    mq: AceMQ, clock: MovableClock, store: Store, diagnostics: list[Diagnostic]
) -> None:
    store.broken.add("confirm")
    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, nothing, idempotency=store) as consumer:
        await mq.send("q", 1)
        await clock.rest()
        assert consumer.counters.acked == 1
    assert (await mq.depth("q")).ready == 0
    assert [each.name for each in diagnostics] == ["acemq.idempotency.failed"]


async def test_one_id_for_two_bodies_is_a_conflict(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    runs: list[int] = []
    await mq.declare(Topology().queue("q"))
    idempotency = Idempotency(store=store, fingerprint=body_fingerprint)

    async def handle(message: Message[int]) -> None:
        runs.append(message.payload)

    async with mq.consume("q", int, handle, idempotency=idempotency):
        for payload in (1, 1, 2):
            await mq.send("q", payload, message_id="m")
            await clock.rest()
    assert runs == [1]
    dead = await mq.pull("q.dlq", int)
    assert dead is not None
    assert dead.payload == 2
    assert dead.failure is not None
    assert "known with another body" in dead.failure.text


async def test_a_message_without_a_usable_key_is_dead_lettered(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    keys = iter(["", "k" * 256])

    def key(message: Message[Any]) -> str:
        return next(keys)

    await mq.declare(Topology().queue("q"))
    async with mq.consume("q", int, nothing, idempotency=Idempotency(store=store, key=key)) as consumer:
        for _ in range(3):  # the third time, the function itself raises
            await mq.send("q", 1)
        await clock.rest()
        assert consumer.counters.dead_lettered == 3
    assert store.told == []


async def test_a_pipeline_claims_each_step_of_a_run(mq: AceMQ, clock: MovableClock, store: Store) -> None:
    runs: list[str] = []

    async def first(n: int) -> int:
        runs.append("first")
        return n

    async def second(n: int) -> None:
        runs.append("second")

    described = mq.pipeline("p", int).step("first", first, idempotency=store).step("second", second, idempotency=store)
    async with described.start() as running:
        await running.send(1, message_id="m")
        await clock.rest()
    assert runs == ["first", "second"]
    assert (await store.claim("first:m", lease=LEASE)).answer == "duplicate"
    assert (await store.claim("second:m", lease=LEASE)).answer == "duplicate"


async def test_what_is_no_store_is_refused(mq: AceMQ, store: Store) -> None:
    no_store: Any = object()
    with pytest.raises(ConfigurationError, match="no store"):
        mq.consume("q", int, nothing, idempotency=no_store)
    with pytest.raises(ConfigurationError, match="lease="):
        Idempotency(store=store, lease=timedelta())
    with pytest.raises(ConfigurationError, match="retention="):
        Idempotency(store=store, retention=timedelta())
    with pytest.raises(ConfigurationError, match="one message at a time"):
        mq.consume_batches("q", int, nothing, idempotency=store)
