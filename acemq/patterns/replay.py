"""Puts dead letters back where they came from, each only once its copy has landed (CONTRACT.md section 7)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from acemq import headers as h
from acemq.clock import whole_seconds
from acemq.connection import Connection
from acemq.envelope import to_millis
from acemq.errors import AcemqError, ConfigurationError, ReplayError
from acemq.headers import Headers, HeaderValue
from acemq.ids import new_id
from acemq.mapping import public_error
from acemq.message import Message
from acemq.telemetry import REPLAY_STOPPED, Diagnostic
from acemq.topology import check_name
from acemq.transport import Delivery, Depth, Outgoing, Published, PublishResult, Settlement, Verb

SUFFIXES = (".dlq", ".parked", ".dead")
HOLD = 10_000
"""Messages that a filter may refuse before a run stops: each is held until it ends."""

_PULL_WAIT = timedelta(milliseconds=200)
_REMEMBERED = 100_000

Accepts = Callable[[Message[bytes]], bool]


class StopReason(StrEnum):
    """Why a replay ended."""

    DRAINED = "drained"
    """Every message that was waiting when the run began has been looked at."""
    LIMIT = "limit"
    HELD = "held"
    """The filter refused as many as may be held."""
    CANCELLED = "cancelled"
    FAILED = "failed"
    """A copy did not land, or the filter raised; that message is where it was."""


class ReplayResult(msgspec.Struct, frozen=True):
    """What a replay did, up to its end or its failure."""

    source: str
    target: str
    looked_at: int
    replayed: int
    """In a dry run: how many would have been."""
    put_back: int
    stopped: StopReason
    took: timedelta
    dry: bool
    last_error: str | None = None


class Replay(msgspec.Struct, frozen=True):
    """A replay that is being described; each verb gives a new one, and nothing happens before `run`."""

    connection: Connection
    queue: str
    target: str | None = None
    filters: tuple[Accepts, ...] = ()
    hold: int = HOLD
    keep_attempts: bool = False

    def into(self, queue: str) -> Replay:
        """Not into the queue they came from, but into this one."""
        return replace(self, target=check_name("queue", queue))

    def where(self, accepts: Callable[[Message[bytes]], bool], *, hold: int = HOLD) -> Replay:
        """Only what `accepts` says yes to; of several, all must. The rest keeps its place."""
        if hold < 1:
            raise ConfigurationError(f"hold={hold} must be 1 or more")
        return replace(self, filters=(*self.filters, accepts), hold=hold)

    def keeping_attempts(self) -> Replay:
        """Leave the attempt as it is, instead of 1."""
        return replace(self, keep_attempts=True)

    async def pending(self) -> int:
        """How many wait in the source, by the broker's word."""
        return (await self.connection.depth(self.queue)).ready

    async def run(self, limit: int | None = None) -> ReplayResult:
        """Replay what waits now, one after the other and in order, `limit` at most.

        It ends by itself: what fails again and comes back is not taken a second time. Raises `ReplayError`, with the
        result so far, when a copy does not land; nothing leaves the source before its copy has.
        """
        return await self._run(limit, dry=False)

    async def dry_run(self, limit: int | None = None) -> ReplayResult:
        """Look, publish nothing, give everything back."""
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
        "name a target with .into(queue)"
    )


class _Run:
    """One pass over a queue."""

    def __init__(self, replay: Replay, target: str, limit: int | None, dry: bool) -> None:
        self._replay, self._target, self._limit, self._dry = replay, target, limit, dry
        self._connection = replay.connection
        self._transport = replay.connection.transport
        self._began, self._began_ms = time.monotonic(), to_millis(replay.connection.clock.now())
        self._moved: set[str] = set()
        self._looked_at = self._replayed = self._put_back = 0
        self._back: list[Delivery] = []
        """Held until the run ends, then given back in the order in which they were taken, so that they keep it."""

    async def go(self) -> ReplayResult:
        in_hand: Delivery | None = None
        try:
            depth = await self._connection.depth(self._replay.queue)
            while True:
                stopped = self._why_stop(depth)
                # Behind the count there may be more, but nothing is waited for.
                wait = _PULL_WAIT if self._looked_at < depth.ready else timedelta()
                in_hand = None if stopped else await self._pull(wait)
                if stopped or in_hand is None:
                    return await self._end(stopped or StopReason.DRAINED)
                if self._looked_at >= depth.ready and not self._was_there(in_hand):
                    return await self._end(StopReason.DRAINED, in_hand)
                self._looked_at += 1
                result = await self._look_at(in_hand)
                in_hand = None
                if result is not None and result.outcome is not Published.ROUTED:
                    await self._fail(result)
                # A transport that answers without waiting must not keep the loop to itself for the whole run.
                await asyncio.sleep(0)
        except BaseException as error:
            if isinstance(error, ReplayError):
                raise
            stopped = StopReason.CANCELLED if isinstance(error, asyncio.CancelledError) else StopReason.FAILED
            await asyncio.shield(self._end(stopped, in_hand, error))
            raise

    def _was_there(self, delivery: Delivery) -> bool:
        """Whether a message was waiting when the run began, although the broker's count did not include it.

        Such a count may be too low: RabbitMQ does not say when what was given back is there again.
        """
        failed_at = h.integer(delivery.headers.get(h.FAILED_AT))
        return (
            len(self._moved) < _REMEMBERED
            and delivery.message_id is not None
            and delivery.message_id not in self._moved
            and (failed_at is None or failed_at < self._began_ms)
        )

    def _why_stop(self, depth: Depth) -> StopReason | None:
        if self._limit is not None and self._replayed >= self._limit:
            return StopReason.LIMIT
        if len(self._back) >= self._replay.hold:
            return StopReason.HELD
        return StopReason.DRAINED if depth.exact and self._looked_at >= depth.ready else None

    async def _pull(self, wait: timedelta) -> Delivery | None:
        try:
            deliveries = await self._transport.pull(self._replay.queue, most=1, wait=wait)
        except AcemqError as error:
            raise public_error(error) from error
        return deliveries[0] if deliveries else None

    async def _look_at(self, delivery: Delivery) -> PublishResult | None:
        message = Message(delivery.body, delivery, self._connection.clock)
        if not all(accepts(message) for accepts in self._replay.filters):
            self._back.append(delivery)
            self._put_back += 1
            return None
        if self._dry:
            self._back.append(delivery)
            self._replayed += 1
            return None
        copy = copy_of(
            delivery, self._target, now=self._connection.clock.now(), keep_attempts=self._replay.keep_attempts
        )
        result = await self._connection.outbound.move(copy)
        if result.outcome is Published.ROUTED:
            # Confirmed first, accepted second: a crash in between leaves two, never none.
            await self._transport.settle((Settlement(delivery, Verb.ACCEPT),))
            self._replayed += 1
            if delivery.message_id is not None and len(self._moved) < _REMEMBERED:
                self._moved.add(delivery.message_id)
        else:
            self._back.append(delivery)
        return result

    async def _fail(self, result: PublishResult) -> None:
        text = f"a copy to {self._target!r} did not land: {result.error}"
        ended = await self._end(StopReason.FAILED, None, result.error or ReplayError(text, result=None))
        raise ReplayError(
            f"{text}; {ended.replayed} replayed before it, it and the rest are where they were",
            result=ended,
            routing_key=self._target,
            nacked=False,
        ) from result.error

    async def _end(
        self, stopped: StopReason, in_hand: Delivery | None = None, error: BaseException | None = None
    ) -> ReplayResult:
        back = [*self._back, in_hand] if in_hand is not None else self._back
        if back:
            await self._transport.settle([Settlement(delivery, Verb.REQUEUE) for delivery in back])
        result = ReplayResult(
            source=self._replay.queue,
            target=self._target,
            looked_at=self._looked_at,
            replayed=self._replayed,
            put_back=self._put_back,
            stopped=stopped,
            took=timedelta(seconds=time.monotonic() - self._began),
            dry=self._dry,
            last_error=str(error) if error is not None else None,
        )
        self._tell(result)
        return result

    def _tell(self, result: ReplayResult) -> None:
        if not result.dry:
            telemetry, failed = self._connection.telemetry, int(result.stopped is StopReason.FAILED)
            for outcome, count in (("replayed", result.replayed), ("put_back", result.put_back), ("failed", failed)):
                telemetry.replayed(result.source, result.target, outcome, count)
        text = f"{result.stopped}: {result.replayed} of {result.looked_at} replayed into {result.target}"
        self._connection.report(Diagnostic(REPLAY_STOPPED, "info", text, result.source, result.target))


def copy_of(delivery: Delivery, target: str, *, now: datetime, keep_attempts: bool = False) -> Outgoing:
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
    # A count under the new name is believed even when it cannot be read: the old one would be older still.
    count = headers.get(h.REPLAY_COUNT) if h.REPLAY_COUNT in headers else headers.get(h.LEGACY_REPLAY_COUNT)
    out[h.REPLAYED_FROM] = source
    out[h.REPLAYED_AT] = whole_seconds(now)
    out[h.REPLAY_COUNT] = (h.integer(count) or 0) + 1
    return out


_TAKEN_OFF = frozenset({h.ERROR, h.EXPIRES_AT, h.DELIVERY_COUNT, *h.FORENSICS, *h.LEGACY_REPLAY})
