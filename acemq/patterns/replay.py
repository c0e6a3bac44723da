"""Puts dead letters back where they came from, each only once its copy has landed (CONTRACT.md section 7)."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from acemq import headers as h
from acemq.clock import Clock, Pauses, check_duration, whole_seconds
from acemq.connection import Connection
from acemq.envelope import to_millis
from acemq.errors import AcemqError, ConfigurationError, ReplayError
from acemq.headers import Headers, HeaderValue
from acemq.ids import new_id
from acemq.message import Message
from acemq.telemetry import REPLAY_STOPPED, Diagnostic
from acemq.topology import check_name
from acemq.transport import (
    Delivery,
    Depth,
    Nacked,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    Settled,
    Settlement,
    Verb,
)

SUFFIXES = (".dlq", ".parked", ".dead")
HOLD = 10_000
"""Messages that a filter may refuse before a run stops: each is held until it ends."""

_PULL_WAIT = timedelta(milliseconds=200)
_LOOKED_AT_TOGETHER = 100
"""Messages pulled in one go by a dry run, which copies nothing."""
MOST_TOGETHER = 1_000
_CATCH_UP = 0.1
"""Seconds by which a run with a rate may be behind and still make up for it; a longer stall is no reason to rush."""


class StopReason(StrEnum):
    """Why a replay ended."""

    RUNNING = "running"
    """It has not; in what `reporting` is told on the way."""
    DRAINED = "drained"
    """Every message that was waiting when the run began has been looked at."""
    LIMIT = "limit"
    DEADLINE = "deadline"
    """The time that `until` gave is over."""
    HELD = "held"
    """The filter refused as many as may be held."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """A copy did not land, the link was lost, or a function of yours raised; what had not gone is where it was."""


class ReplayResult(msgspec.Struct, frozen=True):
    """What a replay did, up to its end or its failure, and up to now while it runs."""

    source: str
    target: str
    looked_at: int
    replayed: int
    """Copies that landed. In a dry run: how many would have."""
    put_back: int
    """What the filters refused."""
    stopped: StopReason
    took: timedelta
    dry: bool
    last_error: str | None = None
    in_doubt: int = 0
    """Messages that may be in both queues, as the link was lost before the broker had said. 0: the counts are exact."""


Accepts = Callable[[Message[bytes]], bool]
Progress = Callable[[ReplayResult], None]


class Replay(msgspec.Struct, frozen=True):
    """A replay that is being described; each verb gives a new one, and nothing happens before `run`."""

    connection: Connection
    queue: str
    target: str | None = None
    filters: tuple[Accepts, ...] = ()
    hold: int = HOLD
    keep_attempts: bool = False
    rate: float | None = None
    deadline: datetime | timedelta | None = None
    progress: Progress | None = None
    progress_every: int = 100
    together: int = 1

    def into(self, queue: str) -> Replay:
        """Not into the queue they came from, but into this one."""
        return replace(self, target=check_name("queue", queue))

    def where(self, accepts: Callable[[Message[bytes]], bool], *, hold: int = HOLD) -> Replay:
        """Only what `accepts` says yes to; of several, all must. The rest keeps its place.

        What is refused is held until the run ends, `hold` messages at most; then it stops as `HELD`.
        """
        if hold < 1:
            raise ConfigurationError(f"hold={hold} must be 1 or more")
        return replace(self, filters=(*self.filters, _check_callable("where", accepts)), hold=hold)

    def keeping_attempts(self) -> Replay:
        """Leave the attempt as it is, instead of 1."""
        return replace(self, keep_attempts=True)

    def at_rate(self, per_second: float) -> Replay:
        """At most so many a second, evenly."""
        if not (math.isfinite(per_second) and per_second > 0):
            raise ConfigurationError(f"per_second={per_second!r} must be more than 0, for example 50 or 0.5")
        return replace(self, rate=float(per_second))

    def until(self, deadline: datetime | timedelta) -> Replay:
        """Stop as `DEADLINE` then, or so long after the run began; what is in hand is finished."""
        if isinstance(deadline, datetime):
            if deadline.utcoffset() is None:
                raise ConfigurationError(f"deadline={deadline.isoformat()} is naive; give it a time zone, such as UTC")
        else:
            check_duration("deadline", deadline)
        return replace(self, deadline=deadline)

    def reporting(self, progress: Callable[[ReplayResult], None], *, every: int = 100) -> Replay:
        """Call `progress` on the event loop after each `every` messages looked at, and once when the run has ended.

        The last call has the final result, however the run ended. What it raises on the way ends the run.
        """
        if every < 1:
            raise ConfigurationError(f"every={every} must be 1 or more")
        return replace(self, progress=_check_callable("reporting", progress), progress_every=every)

    def in_batches(self, most: int) -> Replay:
        """Copy up to `most` at a time (1–1,000): quicker by far, at the price that a crash may double as many.

        Order, confirms and counts are the same: nothing is accepted before its own copy is confirmed.
        """
        if not 1 <= most <= MOST_TOGETHER:
            raise ConfigurationError(f"most={most} must lie between 1 and {MOST_TOGETHER:,}")
        return replace(self, together=most)

    async def pending(self) -> int:
        """How many wait in the source, by the broker's word."""
        return (await self.connection.depth(self.queue)).ready

    async def run(self, limit: int | None = None) -> ReplayResult:
        """Replay what waits now, in order, `limit` at most.

        It ends by itself: what fails again and comes back is not taken a second time. Raises `ReplayError`, with the
        result so far, when a copy does not land or the link is lost; nothing leaves the source before its copy has
        landed. Cancelled, it finishes what is in hand and gives the rest back first.
        """
        return await self._run(limit, dry=False)

    async def dry_run(self, limit: int | None = None) -> ReplayResult:
        """Look, publish nothing, give everything back.

        All that it looks at is held meanwhile, so it stops as `HELD` at 10,000, or at what `where(…, hold=)` says.
        """
        return await self._run(limit, dry=True)

    async def _run(self, limit: int | None, *, dry: bool) -> ReplayResult:
        if limit is not None and limit < 0:
            raise ConfigurationError(f"limit={limit} must be 0 or more")
        target = self.target or target_of(self.queue)
        if target == self.queue:
            raise ConfigurationError(
                f"replaying {self.queue!r} onto itself would never end; name a target with .into(queue)"
            )
        return await _Run(self, target, limit, dry).go()


def target_of(queue: str) -> str:
    """Where the messages of a dead-letter or parked queue came from; refused when the name does not say."""
    check_name("queue", queue)
    for suffix in SUFFIXES:
        if queue.endswith(suffix) and queue != suffix:
            return queue.removesuffix(suffix)
    raise ConfigurationError(
        f"{queue!r} does not end in {', '.join(SUFFIXES)}, so where its messages came from is not known; "
        "name a target with .into(queue), on the command line --into QUEUE"
    )


def _check_callable(verb: str, function: Callable[..., object]) -> Callable[..., object]:
    if not callable(function):
        raise ConfigurationError(f"{verb}() takes a function, not {function!r}")
    return function


class _Stopped(Exception):
    """The run cannot go on; the text says why."""

    def __init__(self, text: str, *, nacked: bool = False) -> None:
        self.nacked = nacked
        super().__init__(text)


class _Run:
    """One pass over a queue."""

    def __init__(self, replay: Replay, target: str, limit: int | None, dry: bool) -> None:
        self._replay, self._target, self._limit, self._dry = replay, target, limit, dry
        self._connection = replay.connection
        self._transport = replay.connection.transport
        clock = self._clock = replay.connection.clock
        self._began, self._began_at = time.monotonic(), clock.now()
        self._ends_at = _ends_at(replay.deadline, clock)
        self._pace = _Pace(replay.rate, clock) if replay.rate is not None and not dry else None
        self._looked_at = self._replayed = self._put_back = self._in_doubt = self._told_at = 0
        self._held: dict[Delivery, None] = {}
        """Until the run ends, then given back in the order in which they were taken, so that they keep it."""
        self._unproved = 0
        """Accepted, with nothing heard from the broker since."""
        self._generation = 0
        self._is_cut_short = False
        self._pauses = Pauses(clock)

    async def go(self) -> ReplayResult:
        # In a task of its own: a cancelled caller must not leave a copy behind of which nobody knows.
        run = asyncio.create_task(self._run(), name=f"replay of {self._replay.queue}")
        try:
            return await asyncio.shield(run)
        except asyncio.CancelledError:
            self._cut_short()
            await asyncio.wait({run})
            if not run.cancelled():
                run.exception()
            raise

    def _cut_short(self) -> None:
        self._is_cut_short = True
        self._pauses.end()

    async def _run(self) -> ReplayResult:
        depth = await self._connection.depth(self._replay.queue)
        self._generation = self._transport.state.generation
        try:
            stopped = await self._go_through(depth)
            result = await self._end(stopped)
        except _Stopped as error:
            raise await self._failed(error) from error.__cause__
        except BaseException as error:
            is_cancelled = isinstance(error, asyncio.CancelledError)
            self._tell(await self._end(StopReason.CANCELLED if is_cancelled else StopReason.FAILED, error))
            raise
        self._tell(result)
        return result

    # Going through the queue

    async def _go_through(self, depth: Depth) -> StopReason:
        while True:
            room = await self._room(depth)
            if isinstance(room, StopReason):
                return room
            some = await self._pull(room, depth)
            ours = some[: self._count_waiting(some, depth)]
            await self._look_at(ours)
            if len(ours) < len(some) or not some:
                return StopReason.DRAINED
            if self._looked_at - self._told_at >= self._replay.progress_every:
                self._report(self._result(StopReason.RUNNING))
            # A transport that answers without waiting must not keep the loop to itself for the whole run.
            await asyncio.sleep(0)

    async def _room(self, depth: Depth) -> int | StopReason:
        """How many may be taken now, when the rate allows the next; or why none may."""
        while True:
            if (stop := self._why_stop(depth)) is not None:
                return stop
            # Behind the count there may be more, of which each is looked at before the next is taken.
            most = min(_LOOKED_AT_TOGETHER if self._dry else self._replay.together, self._replay.hold - len(self._held))
            most = min(most, max(depth.ready - self._looked_at, 1))
            if self._limit is not None:
                most = min(most, self._limit - self._replayed)
            wait = self._pace.wait() if self._pace is not None else 0.0
            if wait <= 0:
                return self._pace.due(most) if self._pace is not None else most
            await self._sleep(wait)

    def _why_stop(self, depth: Depth) -> StopReason | None:
        if self._is_cut_short:
            return StopReason.CANCELLED
        if self._limit is not None and self._replayed >= self._limit:
            return StopReason.LIMIT
        if self._ends_at is not None and self._clock.monotonic() >= self._ends_at:
            return StopReason.DEADLINE
        if len(self._held) >= self._replay.hold:
            return StopReason.HELD
        return StopReason.DRAINED if depth.exact and self._looked_at >= depth.ready else None

    async def _sleep(self, seconds: float) -> None:
        """Not beyond the deadline, and not when the run is cut short."""
        if self._ends_at is not None:
            seconds = min(seconds, self._ends_at - self._clock.monotonic())
        await self._pauses.pause(seconds)

    async def _pull(self, most: int, depth: Depth) -> Sequence[Delivery]:
        # Behind the count nothing is waited for.
        wait = _PULL_WAIT if self._looked_at < depth.ready else timedelta()
        try:
            some = await self._transport.pull(self._replay.queue, most=most, wait=wait)
        except AcemqError as error:
            raise _Stopped(str(error)) from error
        self._held.update(dict.fromkeys(some))
        if self._is_link_lost:
            raise _Stopped("the link was lost, and the broker has taken back what was held")
        self._unproved = 0  # it has answered behind them
        return some

    @property
    def _is_link_lost(self) -> bool:
        state = self._transport.state
        return state.generation != self._generation or state.phase is not Phase.CONNECTED

    def _count_waiting(self, some: Sequence[Delivery], depth: Depth) -> int:
        """How many of them were waiting when the run began.

        The broker's count may be too low: it leaves out what somebody held just then, or was giving back. That is
        marked as redelivered, and neither replayed nor set aside since.
        """
        counted = min(max(depth.ready - self._looked_at, 0), len(some))
        for delivery in some[counted:]:
            failed_at = h.integer(delivery.headers.get(h.FAILED_AT)) or 0
            replayed_at = h.text(delivery.headers.get(h.REPLAYED_AT)) or ""
            is_since = failed_at >= to_millis(self._began_at) or replayed_at >= whole_seconds(self._began_at)
            if depth.exact or is_since or not delivery.redelivered:
                break
            counted += 1
        return counted

    # What becomes of each

    async def _look_at(self, some: Sequence[Delivery]) -> None:
        accepted: list[Delivery] = []
        for delivery in some:
            self._looked_at += 1
            message = Message(delivery.body, delivery, self._clock)
            if all(accepts(message) for accepts in self._replay.filters):
                accepted.append(delivery)
            else:
                self._put_back += 1
        if self._dry:
            self._replayed += len(accepted)
            return
        if self._pace is not None:
            self._pace.spend(len(accepted))
        while accepted:
            accepted = accepted[await self._move(accepted) :]

    async def _move(self, some: Sequence[Delivery]) -> int:
        """How many of them have gone: as many as there was room for, one at least."""
        now, keep = self._clock.now(), self._replay.keep_attempts
        copies = [replayed_copy(delivery, self._target, now=now, keep_attempts=keep) for delivery in some]
        self._in_doubt += len(some)
        results = await self._connection.outbound.move_some(copies, self._connection.outbound.timeout)
        landed = [each for each, result in zip(some, results, strict=False) if result.outcome is Published.ROUTED]
        unknown = sum(result.outcome is Published.FAILED and not _is_nacked(result) for result in results)
        self._in_doubt += unknown - len(some)
        self._replayed += len(landed)
        # Confirmed first, accepted second: a crash in between leaves two, never none.
        settled = await self._transport.settle([Settlement(delivery, Verb.ACCEPT) for delivery in landed])
        for delivery in landed:
            del self._held[delivery]
        done = settled.count(Settled.DONE)
        self._unproved += done
        self._in_doubt += len(landed) - done
        for result in results:
            if result.outcome is not Published.ROUTED:
                text = f"a copy to {self._target!r} did not land: {result.error}"
                raise _Stopped(text, nacked=_is_nacked(result)) from result.error
        if done < len(landed):
            raise _Stopped("the broker has taken back what was held, after its copy had landed")
        return len(results)

    # The end

    async def _end(self, stopped: StopReason, error: BaseException | None = None) -> ReplayResult:
        """Give back what is held, in place and order."""
        held, self._held = self._held, {}
        settled = await self._transport.settle([Settlement(delivery, Verb.REQUEUE) for delivery in held])
        if self._is_link_lost:
            self._in_doubt += self._unproved  # they were written, and perhaps not read any more
        elif error is None and Settled.STALE in settled:
            raise _Stopped("the broker has taken back what was held before the run had ended")
        return self._result(stopped, error)

    async def _failed(self, error: _Stopped) -> ReplayError:
        result = await self._end(StopReason.FAILED, error)
        self._tell(result)
        text = f"{error}; {result.replayed} replayed before it, it and the rest are where they were"
        if result.in_doubt:
            text += f", and {result.in_doubt} may be in both queues"
        return ReplayError(text, result=result, routing_key=self._target, nacked=error.nacked)

    def _result(self, stopped: StopReason, error: BaseException | None = None) -> ReplayResult:
        return ReplayResult(
            source=self._replay.queue,
            target=self._target,
            looked_at=self._looked_at,
            replayed=self._replayed,
            put_back=self._put_back,
            stopped=stopped,
            took=timedelta(seconds=time.monotonic() - self._began),
            dry=self._dry,
            last_error=str(error) if error is not None else None,
            in_doubt=self._in_doubt,
        )

    def _report(self, result: ReplayResult) -> None:
        self._told_at = self._looked_at
        if self._replay.progress is not None:
            self._replay.progress(result)

    def _tell(self, result: ReplayResult) -> None:
        if not result.dry:
            telemetry, failed = self._connection.telemetry, int(result.stopped is StopReason.FAILED)
            for outcome, count in (("replayed", result.replayed), ("put_back", result.put_back), ("failed", failed)):
                telemetry.replayed(result.source, result.target, outcome, count)
        text = f"{result.stopped}: {result.replayed} of {result.looked_at} replayed into {result.target}"
        self._connection.report(Diagnostic(REPLAY_STOPPED, "info", text, result.source, result.target))
        self._report(result)


class _Pace:
    """When the next may go: evenly, by a clock that tests can move."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        self._gap, self._clock = 1 / per_second, clock
        self._next = clock.monotonic()

    def wait(self) -> float:
        """Seconds until the next may go."""
        return self._next - self._clock.monotonic()

    def due(self, most: int) -> int:
        """How many may go by now, one at least."""
        behind = self._clock.monotonic() - self._next
        return min(most, 1 + int(min(behind, _CATCH_UP) / self._gap))

    def spend(self, count: int) -> None:
        self._next = max(self._next, self._clock.monotonic() - _CATCH_UP) + count * self._gap


def _ends_at(deadline: datetime | timedelta | None, clock: Clock) -> float | None:
    """By the monotonic clock."""
    if deadline is None:
        return None
    length = deadline - clock.now() if isinstance(deadline, datetime) else deadline
    return clock.monotonic() + length.total_seconds()


def _is_nacked(result: PublishResult) -> bool:
    return isinstance(result.error, Nacked)


def replayed_copy(delivery: Delivery, target: str, *, now: datetime, keep_attempts: bool = False) -> Outgoing:
    """The copy of a dead letter: the same body and headers, stamped, with a first attempt ahead and no error."""
    return Outgoing(
        exchange="",
        routing_key=target,
        body=delivery.body,
        headers=stamped(delivery.headers, source=delivery.queue, now=now, keep_attempts=keep_attempts),
        message_id=delivery.message_id or new_id(),
        content_type=delivery.content_type,
        reply_to=delivery.reply_to,
        ordering_key=delivery.ordering_key,
    )


def stamped(headers: Headers, *, source: str, now: datetime, keep_attempts: bool = False) -> dict[str, HeaderValue]:
    out = {name: value for name, value in headers.items() if name not in _TAKEN_OFF}
    if not keep_attempts:
        out[h.ATTEMPT] = 1
    out[h.REPLAYED_FROM] = source
    out[h.REPLAYED_AT] = whole_seconds(now)
    out[h.REPLAY_COUNT] = replays_of(headers) + 1
    return out


def replays_of(headers: Headers) -> int:
    """How often the message was replayed before."""
    # A count under the new name is believed even when it cannot be read: the old one would be older still.
    count = headers.get(h.REPLAY_COUNT) if h.REPLAY_COUNT in headers else headers.get(h.LEGACY_REPLAY_COUNT)
    return h.integer(count) or 0


_TAKEN_OFF = frozenset({h.ERROR, h.EXPIRES_AT, h.DELIVERY_COUNT, *h.FORENSICS, *h.LEGACY_REPLAY})
