"""Delivers messages later: by the broker's own delay, by hops of it, or over the ladder that stands in on RabbitMQ."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TypedDict, Unpack, cast

import msgspec

from acemq import delays, ladder
from acemq.ack import Ack
from acemq.clock import check_duration
from acemq.codec import AnyCodec
from acemq.connection import Connection
from acemq.consuming.consumer import Consumer
from acemq.consuming.private import AGAIN
from acemq.delays import Way
from acemq.envelope import Envelope, to_millis
from acemq.errors import CapabilityError, ClosedError, ConfigurationError
from acemq.headers import HeaderValue
from acemq.keywords import check_keywords
from acemq.ladder import Waiting
from acemq.message import Message
from acemq.opening import Opening
from acemq.publishing.options import PublishOptions
from acemq.stopping import Drained
from acemq.telemetry import MOVE_FAILED, SCHEDULE_FOREIGN, Diagnostic
from acemq.topology import SCHEDULE_QUEUE
from acemq.transport import FOREVER, Outgoing, Published, PublishResult

FURTHEST = timedelta(days=366)
"""8,784 hops of an hour."""

PREFETCH = 50
"""Of the control queue (CONTRACT.md section 6)."""

REMEMBERED = 10_000
"""Places for which is known that they take nothing."""


class ScheduleOptions(TypedDict, total=False):
    """What may be said about one scheduled message; all of it optional."""

    codec: AnyCodec
    """The connection's."""
    content_type: str
    """Picks the codec; for bytes it is only the label."""
    timeout: timedelta
    """For the publish of the call; the connection's `publish_timeout`."""
    headers: Mapping[str, HeaderValue]
    """The application's own. This and what follows only where the broker delays by itself, so not on RabbitMQ."""
    envelope: Envelope
    """Instead of the headers and the id."""
    message_id: str
    """A new UUID of version 4."""


_NOTHING, _MILLISECOND = timedelta(), timedelta(milliseconds=1)
_OPTIONS = frozenset(ScheduleOptions.__annotations__)


class Scheduled(msgspec.Struct, frozen=True):
    """The broker has the message, and it is delivered at or about its time."""

    due: datetime
    hops: int | None
    """Moves on the way, if each rung takes exactly its time; `None` where the broker delays by itself."""


class SchedulerCounters(msgspec.Struct):
    """What this scheduler has done. Only ever grows; all but the first concern what it moved on, whoever sent it."""

    scheduled: int = 0
    delivered: int = 0
    """Due, and in a queue."""
    hops: int = 0
    """Put on a rung, at scheduling and on the way."""
    foreign: int = 0
    """Dropped: they did not say where to go."""
    kept: int = 0
    """Tries of a move that did not land; the message stayed."""


class Scheduler:
    """Made by `AceMQ.scheduler()`. Closing it deletes nothing: what waits is moved on by the next, or by another."""

    def __init__(self, connection: Connection) -> None:
        can = connection.capabilities
        if can.publish_delay is None and not can.dead_letter_routes:
            raise CapabilityError(can.transport, "delayed publishes, or queues that can stand in for them", "delay=")
        self.counters = SchedulerCounters()
        self._connection, self._has_ladder = connection, can.publish_delay is None
        self._moves_on = can.publish_delay != FOREVER
        """Whether there is a control queue, and something to do with what comes from it."""
        self._consumer: Consumer | None = None
        self._failing: dict[tuple[str, str], None] = {}
        self._is_closed = False

    def opening(self) -> Opening[Scheduler]:
        return Opening("scheduler", self._open, lambda opened: opened.close())

    async def _open(self) -> Scheduler:
        if self._moves_on:
            await self._connection.lay_ladder()
            self._consumer = await self._connection.private(
                SCHEDULE_QUEUE, self._move, prefetch=PREFETCH, concurrency=PREFETCH
            )
        return self

    async def after(
        self, delay: timedelta, exchange: str, routing_key: str, payload: object, **options: Unpack[ScheduleOptions]
    ) -> Scheduled:
        """Publish after so long; zero is now. Returns, and raises, as a publish does: the broker has the message.

        The destination is not looked at before it is due.
        """
        if type(delay) is not timedelta or delay < _NOTHING:
            check_duration("delay", delay, zero=True)
        if delay > FURTHEST:
            raise _too_far(delay)
        due = self._connection.clock.now() + delay
        return await self._schedule(due, delay, exchange, routing_key, payload, options)

    async def at(
        self, moment: datetime, exchange: str, routing_key: str, payload: object, **options: Unpack[ScheduleOptions]
    ) -> Scheduled:
        """The same at an aware moment; one that has passed is now."""
        if not isinstance(moment, datetime) or moment.utcoffset() is None:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"moment={moment!r} must be an aware datetime, for example datetime.now(UTC) + …")
        now = self._connection.clock.now()
        delay = moment - now
        if delay > FURTHEST:
            raise _too_far(delay)
        if delay < _NOTHING:
            moment, delay = now, _NOTHING
        return await self._schedule(moment, delay, exchange, routing_key, payload, options)

    async def close(self, timeout: timedelta | None = None) -> Drained:
        """Stop moving messages on; what is under way ends. Idempotent, bounded by `timeout`."""
        self._is_closed = True
        return Drained() if self._consumer is None else await self._consumer.drain(timeout)

    async def _schedule(
        self,
        due: datetime,
        delay: timedelta,
        exchange: str,
        routing_key: str,
        payload: object,
        options: ScheduleOptions,
    ) -> Scheduled:
        if self._is_closed:
            raise ClosedError("this scheduler is closed; schedule inside `async with mq.scheduler()`")
        # By the ladder's rules also where nothing is waited for, so that every delivery looks alike.
        given: PublishOptions = {"delay": delay or timedelta.resolution if self._has_ladder else delay}
        if options:
            check_keywords("schedule", options, _OPTIONS)
            given = cast("PublishOptions", {**options, **given})
        await self._connection.outbound.publish(exchange, routing_key, payload, given)
        self.counters.scheduled += 1
        self._connection.telemetry.scheduled("scheduled")
        return Scheduled(due, self._first_step(exchange, routing_key, delay))

    def _first_step(self, exchange: str, routing_key: str, delay: timedelta) -> int | None:
        """Count what scheduling has done; how many hops there will be, this one included."""
        if self._has_ladder:
            hops = _hops(delay)
            self._count_step("hopped" if hops else "delivered")
            return hops
        if self._connection.outbound.encoder.way(exchange, routing_key, delay) is not Way.HOPS:
            return None
        self._count_step("hopped")
        return -(-delay // self._longest)

    @property
    def _longest(self) -> timedelta:
        """For so long the control queue delays, where there is no ladder."""
        return self._connection.transport.capabilities_of("queue", SCHEDULE_QUEUE).publish_delay or _MILLISECOND

    # Moving on

    async def _move(self, message: Message[bytes]) -> Ack | None:
        waiting = Waiting.from_headers(message.wire_headers)
        if waiting is None:
            self._drop(message)
            return None
        now_ms = to_millis(self._connection.clock.now())
        if self._has_ladder:
            copy = ladder.onward(waiting, message.body, now_ms=now_ms, origin=self._connection.origin)
        else:
            copy = delays.next_hop(waiting, message.delivery, now_ms=now_ms, longest=self._longest)
        result = await self._connection.outbound.move(copy)
        if result.outcome is not Published.ROUTED:
            self._keep(message, copy, result)
            # An attempt more is nothing to a message that gets another envelope; one that keeps its own has had none.
            return Ack.retry(str(result.error), delay=AGAIN) if self._has_ladder else Ack.in_progress(AGAIN)
        # Confirmed first, and accepted when this returns: a crash in between delivers twice, never loses.
        self._failing.pop((copy.exchange, copy.routing_key), None)
        self._count_step("hopped" if delays.is_on_its_way(copy) else "delivered")
        return None

    def _count_step(self, outcome: str) -> None:
        if outcome == "hopped":
            self.counters.hops += 1
        else:
            self.counters.delivered += 1
        self._connection.telemetry.scheduled(outcome)

    def _drop(self, message: Message[bytes]) -> None:
        self.counters.foreign += 1
        self._connection.telemetry.scheduled("foreign")
        text = "does not say where it is to go, or when; dropped. Whatever sent it does not keep the wire contract"
        self._connection.report(Diagnostic(SCHEDULE_FOREIGN, "error", text, SCHEDULE_QUEUE, message_id=message.id))

    def _keep(self, message: Message[bytes], copy: Outgoing, result: PublishResult) -> None:
        self.counters.kept += 1
        self._connection.telemetry.scheduled("kept")
        place = copy.exchange, copy.routing_key
        if place in self._failing:
            return  # said once, until it takes something again
        if len(self._failing) >= REMEMBERED:
            del self._failing[next(iter(self._failing))]
        self._failing[place] = None
        target = f"exchange {copy.exchange!r} with key {copy.routing_key!r}" if copy.exchange else copy.routing_key
        self._connection.report(
            Diagnostic(
                MOVE_FAILED,
                "error",
                f"a scheduled message did not get to {target} ({result.outcome}: {result.error}); it is kept, and "
                f"tried again every {AGAIN.seconds} s",
                SCHEDULE_QUEUE,
                copy.exchange or copy.routing_key,
                message.id,
                message.attempt,
                result.error,
            )
        )


@lru_cache(1_024)
def _hops(delay: timedelta) -> int:
    return ladder.hops(delay // _MILLISECOND)


def _too_far(delay: timedelta) -> ConfigurationError:
    return ConfigurationError(
        f"a message that is due in {delay.days} days is refused: {FURTHEST.days} days are the most. Let a job of your "
        "own schedule it when its time is nearer"
    )
