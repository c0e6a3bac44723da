"""From the outbox to the broker: claim, publish with no transaction open, mark; each step may be the last."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Self

import msgspec
from opentelemetry.trace import Span

from acemq.clock import sleep
from acemq.connection import Connection
from acemq.consuming.moving import will_pass
from acemq.health import HealthPart
from acemq.public_errors import publish_error
from acemq.stopping import Drained, StopOnce, until
from acemq.stores import OutboxBatch, OutboxKeeper, OutboxListening, OutboxRecord, OutboxStore
from acemq.telemetry import OUTBOX_FAILED, OUTBOX_RETIRED, Diagnostic
from acemq.transport import Outgoing, Phase, Published, PublishResult

log = logging.getLogger("acemq")

WINDOW = 100
"""Records that are handed to the transport at a time; between two the lease is looked at."""
OVERLAP = 3
"""Passes under way at once: one claims while others wait for confirms and for their marks."""
LOOK_AGAIN = 0.2
"""Seconds after which a relay that cannot publish looks at the link again. No query, no I/O."""
KEPT_EVERY = timedelta(seconds=30)
"""Between two looks at what may be purged and at the oldest record."""
PURGE_AT_ONCE = 1_000
OLD = timedelta(seconds=60)
"""A record that waits for longer is worth a look: health says so."""


class Sweep(msgspec.Struct, frozen=True):
    """What became of the records of one pass."""

    published: int = 0
    failed: int = 0
    """One attempt more, or retired."""
    given_back: int = 0
    """Not tried, or not written: no attempt was spent."""
    errors: tuple[BaseException, ...] = ()
    """Why each failed, and what the store raised while it was told."""


class RelayState(StrEnum):
    """What a relay is doing."""

    RUNNING = "running"
    HELD_UP = "held_up"
    """There is no link, or the broker takes nothing: nothing is claimed."""
    FAILING = "failing"
    """The store raises; it is asked again and again."""
    CLOSED = "closed"


class RelayCounters(msgspec.Struct):
    """Since the relay was made. Only ever grows."""

    published: int = 0
    failed: int = 0
    given_back: int = 0
    sweeps: int = 0
    lease_lost: int = 0
    """Records whose mark came too late: another relay had claimed them, and publishes them again."""


class Relaying:
    """One pass at a time, or several side by side: what they claim is never the same."""

    def __init__(self, connection: Connection, store: OutboxStore) -> None:
        self._connection, self._store = connection, store
        self._outbound, self._telemetry, self._clock = connection.outbound, connection.telemetry, connection.clock
        self.counters = RelayCounters()

    async def sweep(self, most: int) -> Sweep:
        return await self.finish(*await self.claim(most))

    async def claim(self, most: int) -> tuple[OutboxBatch, float]:
        """A batch, and until when it is ours."""
        asked = self._clock.monotonic()  # before it was asked for: whatever that took is gone from the lease
        batch = await self._store.claim(most)
        self.counters.sweeps += 1
        return batch, asked + batch.lease.total_seconds()

    async def finish(self, batch: OutboxBatch, ours_until: float) -> Sweep:
        """Publish a batch and mark it. What the store raises to a mark is tried again while the lease runs."""
        results: list[PublishResult] = []
        records, messages = batch.records, [_outgoing(record) for record in batch.records]
        while len(results) < len(messages):
            left = ours_until - self._clock.monotonic()
            if left <= 0:
                break  # another may have them by now
            window = messages[len(results) : len(results) + WINDOW]
            results += await self._publish(window, records[len(results) :], min(left, self._limit))
        return await self._mark(batch, results, ours_until)

    @property
    def _limit(self) -> float:
        return self._outbound.timeout.total_seconds()

    async def _publish(
        self, window: Sequence[Outgoing], records: Sequence[OutboxRecord], within: float
    ) -> Sequence[PublishResult]:
        telemetry = self._telemetry
        spans: Sequence[Span | None] = [None] * len(window)
        if telemetry.tracing:
            spans = [telemetry.relay_span(each.exchange, each.routing_key, each.headers) for each in window]
        results = await self._outbound.move_some(window, timedelta(seconds=within))
        if telemetry.tracing or telemetry.metering:
            now = self._clock.now()
            for outgoing, record, span, result in zip(window, records, spans, results, strict=False):
                lag = (now - record.created_at).total_seconds() if result.outcome is Published.ROUTED else None
                if not will_pass(result):
                    telemetry.relayed(outgoing.exchange, outgoing.routing_key, lag, span, result.error)
                elif span is not None:
                    span.end()
        for span in spans[len(results) :]:
            if span is not None:
                span.end()  # there was no room for it; it is opened again
        return results

    async def _mark(self, batch: OutboxBatch, results: Sequence[PublishResult], ours_until: float) -> Sweep:
        store, token, errors = self._store, batch.token, list[BaseException]()
        out = [record.id for record, result in zip(batch.records, results, strict=False) if _is_out(result)]
        failures = [
            (record, result)
            for record, result in zip(batch.records, results, strict=False)
            if not _is_out(result) and not will_pass(result)
        ]
        failed = {record.id for record, _ in failures}
        back = [record.id for record in batch.records if record.id not in failed and record.id not in set(out)]

        async def told(call: Callable[[], Awaitable[int]], count: int) -> int:
            changed = await self._told(call, ours_until, errors)
            if changed is None:
                return 0
            self.counters.lease_lost += count - changed
            return changed

        if out:
            self.counters.published += len(out)
            await told(lambda: store.published(out, token), len(out))
        for record, result in failures:
            error = publish_error(result, _outgoing(record))
            errors.append(error)
            self.counters.failed += 1
            counted = await told(_failing(store, record, str(error), token), 1)
            if counted and isinstance(store, OutboxKeeper) and record.attempts + 1 >= store.max_attempts:
                self._say_retired(record, store.max_attempts, error)
        if back:
            self.counters.given_back += await told(lambda: store.give_back(back, token), len(back))
        return Sweep(len(out), len(failures), len(back), tuple(errors))

    async def _told(
        self, call: Callable[[], Awaitable[int]], ours_until: float, errors: list[BaseException]
    ) -> int | None:
        """What it changed; `None`: the store could not be told while the lease ran, and the records come again."""
        wait = 0.05
        while True:
            try:
                return await call()
            except Exception as error:
                if self._clock.monotonic() + wait >= ours_until:
                    errors.append(error)
                    return None
            await sleep(self._clock, wait)
            wait = min(2 * wait, 1.0)

    def _say_retired(self, record: OutboxRecord, after: int, error: BaseException) -> None:
        where = record.exchange or record.routing_key
        text = f"record {record.id} to {where!r} failed {after} times and is retired; release or discard it: {error}"
        self._connection.report(
            Diagnostic(OUTBOX_RETIRED, "error", text, destination=where, message_id=record.id, failure=error)
        )


def _failing(store: OutboxStore, record: OutboxRecord, error: str, token: int) -> Callable[[], Awaitable[int]]:
    async def call() -> int:
        return int(await store.failed(record.id, error, token))

    return call


def _is_out(result: PublishResult) -> bool:
    return result.outcome is Published.ROUTED


def _outgoing(record: OutboxRecord) -> Outgoing:
    return Outgoing(
        exchange=record.exchange,
        routing_key=record.routing_key,
        body=record.body,
        headers=record.headers,
        message_id=record.id,
        content_type=record.content_type,
    )


class OutboxRelay:
    """Publishes what is committed to an outbox. Made by `Outbox.relay`; closed when its block is left."""

    def __init__(self, connection: Connection, store: OutboxStore, *, interval: timedelta, batch: int) -> None:
        self._connection, self._store = connection, store
        self._interval, self._batch = interval.total_seconds(), batch
        self._relaying = Relaying(connection, store)
        self.counters = self._relaying.counters
        self.state = RelayState.RUNNING
        self.last_error: str | None = None
        self.name = f"outbox {getattr(store, 'name', 'relay')}"
        """Of its part in the connection's health."""
        self._bell = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._passes: set[asyncio.Task[Sweep]] = set()
        self._stop = StopOnce()

    async def start(self) -> Self:
        store = self._store
        self._connection.attach(self, self.close)
        try:
            if isinstance(store, OutboxKeeper):
                await store.check()
            names = (self.name if n == 1 else f"{self.name} ({n})" for n in itertools.count(1))
            self.name = next(name for name in names if not self._connection.has_health(name))
            self._connection.add_health(self.name, self._health)
        except BaseException:
            self._connection.detach(self)
            raise
        self._begin(self._run())
        if isinstance(store, OutboxListening):
            self._begin(self._listen(store))
        if isinstance(store, OutboxKeeper):
            self._begin(self._keep(store))
        return self

    def wake(self) -> None:
        """Look now. For whoever learns of a commit in a way that the store does not."""
        self._bell.set()

    async def close(self, timeout: timedelta | None = None) -> None:
        """Claim nothing more, and let what is under way be published and marked, for `timeout` at most (10 s).

        What could not be marked by then is published again when its lease has run out.
        """
        budget = timedelta(seconds=10) if timeout is None else timeout
        await self._stop.once(lambda: self._close(time.monotonic() + budget.total_seconds()))

    async def _close(self, end: float) -> Drained:
        self.wake()
        main, *others = self._tasks
        try:
            for task in others:
                task.cancel()
            finished = await until(end, asyncio.wait({main}))
        finally:
            left: set[asyncio.Task[Any]] = {task for task in (*self._tasks, *self._passes) if not task.done()}
            # Not the others once more: a second cancellation would cut off what the first has its driver do.
            for task in left.difference(others):
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=1)
            self.state = RelayState.CLOSED
            self._connection.detach(self)
            self._connection.drop_health(self.name)
            self._connection.telemetry.outbox_oldest.pop(self, None)
        return Drained(finished=finished)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=f"{self.name} of {self._connection.name}"))

    # The loop

    async def _run(self) -> None:
        pause = self._interval
        while not self._stop.is_asked:
            if not self._can_publish():
                self.state = RelayState.HELD_UP
                await self._wait(min(self._interval, LOOK_AGAIN))
                continue
            if len(self._passes) >= OVERLAP:
                await self._wait(self._interval)
                continue
            try:
                batch, ours_until = await self._relaying.claim(self._batch)
            except Exception as error:
                self._failing(error)
                await self._wait(pause)
                pause = min(2 * pause, max(self._interval, 30.0))
                continue
            self.state, self.last_error, pause = RelayState.RUNNING, None, self._interval
            if batch.records:
                self._begin_pass(batch, ours_until)
            if len(batch.records) < self._batch:
                await self._wait(self._interval)
        if self._passes:
            await asyncio.wait(self._passes)

    def _begin_pass(self, batch: OutboxBatch, ours_until: float) -> None:
        task = asyncio.create_task(self._relaying.finish(batch, ours_until))
        self._passes.add(task)
        task.add_done_callback(self._pass_ended)

    def _pass_ended(self, task: asyncio.Task[Sweep]) -> None:
        self._passes.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("a pass of %s failed inside the library; its records come again", self.name, exc_info=error)
        elif task.result().published:
            # The next of a key may go now. Where nothing was published, there is no use in going on at once.
            self._bell.set()

    def _can_publish(self) -> bool:
        state = self._connection.state
        return state.phase is Phase.CONNECTED and state.blocked is None

    async def _wait(self, length: float) -> None:
        """Until the bell rings, or for so long. One that rang meanwhile counts."""
        timer = self._connection.clock.call_later(length, self._bell.set)
        try:
            await self._bell.wait()
        finally:
            timer.cancel()
        if not self._stop.is_asked:
            self._bell.clear()

    def _failing(self, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if self.state is not RelayState.FAILING:
            said = f"the store cannot be asked, and is asked again: {text}"
            self._connection.report(Diagnostic(OUTBOX_FAILED, "error", said, failure=error))
        self.state, self.last_error = RelayState.FAILING, text

    # Beside the loop

    async def _listen(self, store: OutboxListening) -> None:
        """Be woken as long as that works, and make it work again; the interval goes on beside it."""
        pause = 0.5
        while True:
            began = time.monotonic()
            try:
                await store.listen(self.wake)
            except Exception as error:
                self.last_error = f"not woken: {type(error).__name__}: {error}"
            pause = 0.5 if time.monotonic() - began > 30 else min(2 * pause, 5.0)
            await asyncio.sleep(pause)

    async def _keep(self, store: OutboxKeeper) -> None:
        """Purge what was kept for long enough, and know the age of the oldest record where somebody measures it."""
        telemetry = self._connection.telemetry
        while True:
            try:
                while await store.purge(batch=PURGE_AT_ONCE) == PURGE_AT_ONCE:
                    await asyncio.sleep(0.05)
                if telemetry.metering:
                    oldest = (await store.status()).oldest
                    telemetry.outbox_oldest[self] = 0.0 if oldest is None else oldest.total_seconds()
            except Exception as error:  # the loop says so, too, and nothing depends on this one
                self.last_error = f"not purged: {type(error).__name__}: {error}"
            await sleep(self._connection.clock, KEPT_EVERY.total_seconds())

    async def _health(self) -> HealthPart:
        if self._tasks[0].done():
            return HealthPart("", "down", "the relay does not run any more; start it again")
        if self.state is RelayState.FAILING:
            return HealthPart("", "down", f"the store cannot be asked: {self.last_error}")
        if isinstance(self._store, OutboxKeeper):
            status = await self._store.status()
            if status.retired:
                return HealthPart("", "degraded", f"{status.retired} records are retired; see retired()")
            if status.oldest is not None and status.oldest > OLD:
                return HealthPart("", "degraded", f"the oldest record waits for {status.oldest.total_seconds():.0f} s")
        return HealthPart("", "up", "nothing is relayed now" if self.state is RelayState.HELD_UP else "")
