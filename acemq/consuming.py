"""Keeps a subscription alive and puts its deliveries through a handler, so many at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, TypedDict

import msgspec
from opentelemetry import trace
from opentelemetry.trace import Span

from acemq import headers as h
from acemq.ack import ACCEPT
from acemq.clock import check_duration
from acemq.codec import Codec, Reader
from acemq.envelope import to_millis
from acemq.errors import (
    AcemqError,
    CapabilityError,
    ConfigurationError,
    DecodeError,
    HandlerTimeoutError,
)
from acemq.handling import Call
from acemq.headers import HeaderValue
from acemq.interceptors import Around, ConsumeInterceptor, tell_listeners
from acemq.mapping import public_error
from acemq.message import CURRENT, Message
from acemq.moving import GivenBack, Mover
from acemq.retry import RetryPolicy
from acemq.settling import TABLE, Case, Decision, decide, set_aside
from acemq.telemetry import CONSUMER_LOST, HANDLER_STUCK, Diagnostic, end_span
from acemq.transport import Capabilities, Delivery, LostBy, Subscription, SubscriptionPhase, SubscriptionState

log = logging.getLogger("acemq")

_SUSPECT_AFTER = 2
"""Deliveries after which a message is handled alone. The first two may be owed to one lost connection."""

MAX_DELIVERIES = 15
"""Comes before the 20 after which a quorum queue of RabbitMQ 4 drops a message (transports.md section 12)."""


class ConsumeOptions(TypedDict, total=False):
    """How a queue is consumed; all of it optional."""

    concurrency: int
    """10; handlers at once."""
    prefetch: int
    """The connection's, raised to `concurrency`."""
    retry: RetryPolicy
    """The connection's."""
    handler_timeout: timedelta
    """None; then the handler is cancelled and the failure is `HandlerTimeoutError`."""
    max_deliveries: int | None
    """15; `None`: no limit. A message that kills its process more often than that goes to the dead letters.

    Counts what the broker counts: quorum queues do, classic ones do not.
    """
    expired: Literal["dead_letter", "drop"]
    """dead_letter; what becomes of a message that expired before it was handled."""
    set_aside: str
    """The queue whose `.dlq` and `.parked` take what is given up; the queue itself."""
    interceptors: Sequence[ConsumeInterceptor]
    """After the connection's."""
    codec: Codec
    """The connection's."""
    name: str
    """The consumer's name on the broker, stable over recovery; `{origin}/{queue}/{number}`."""
    priority: int
    """Consumer priority; needs the capability."""
    declare: bool
    """True: `.dlq`, `.parked` and rungs are made before the consumer starts (CONTRACT.md section 2)."""
    arguments: Mapping[str, HeaderValue]
    """Passed to the broker's consume; RabbitMQ only."""


_OPTIONS = frozenset(ConsumeOptions.__annotations__)


class Drained(msgspec.Struct, frozen=True):
    """How a stop went."""

    finished: bool = True
    """Every handler ended by itself within the time."""
    handled: int = 0
    """Deliveries settled while draining."""
    given_back: int = 0
    """Fetched, never started, returned without spending an attempt."""
    abandoned: int = 0
    """Handlers cut off; their deliveries come again."""
    queues: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """Abandoned per queue, only those above 0."""

    def __add__(self, other: Drained) -> Drained:
        queues = dict(self.queues)
        for queue, count in other.queues.items():
            queues[queue] = queues.get(queue, 0) + count
        return Drained(
            self.finished and other.finished,
            self.handled + other.handled,
            self.given_back + other.given_back,
            self.abandoned + other.abandoned,
            queues,
        )


class ConsumerState(StrEnum):
    """What a consumer is doing now."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    DRAINING = "draining"
    CLOSED = "closed"


class Consumer:
    """A running subscription. Made by `Connection.consume`; drained when its block is left."""

    def __init__(
        self,
        queue: str,
        *,
        name: str,
        call: Call,
        reader: Reader[Any],
        mover: Mover,
        around: Around,
        options: ConsumeOptions,
        prefetch: int,
        drain_timeout: Callable[[], timedelta],
    ) -> None:
        self.queue, self.name = queue, name
        self.state = ConsumerState.STARTING
        self.last_error: str | None = None
        self.counters = mover.counters
        self.concurrency = options.get("concurrency", 10)
        self.fetched_at = mover.clock.monotonic()
        self.stuck: set[Delivery] = set()
        """In handlers that still run at twice their time limit."""
        self.mover = mover
        self._call, self._reader, self._mover, self._around = call, reader, mover, around
        self._transport, self._telemetry, self._clock = mover.transport, mover.telemetry, mover.clock
        self._report = mover.report
        self._policy = mover.policy
        self._prefetch = prefetch
        self._max_deliveries = options.get("max_deliveries", MAX_DELIVERIES)
        self._expired: Case = Case.EXPIRED_DROPPED if options.get("expired") == "drop" else Case.EXPIRED
        self._handler_timeout = options.get("handler_timeout")
        self._subscribing: dict[str, object] = {"name": name}
        if "priority" in options:
            self._subscribing["priority"] = options["priority"]
        if "arguments" in options:
            self._subscribing["arguments"] = options["arguments"]
        self._drain_timeout = drain_timeout
        self._subscription: Subscription | None = None
        self._ready: deque[Delivery] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: list[asyncio.Task[None]] = []
        self._running: dict[asyncio.Task[Any], Delivery] = {}
        self._gone: set[Delivery] = set()
        """Deliveries in work that the broker has taken back."""
        self._suspect_after = max(min(_SUSPECT_AFTER, (self._max_deliveries or MAX_DELIVERIES) - 1), 1)
        self._alone = False
        self._foremost: Delivery | None = None
        """The first delivery started since the subscription was last made."""
        self._moving: dict[asyncio.Task[None], Delivery] = {}
        self._settled = 0
        self._given_back = 0
        self._generation = 1
        self._progress: asyncio.Event | None = None
        self._drained: asyncio.Future[Drained] | None = None

    @property
    def in_flight(self) -> int:
        """Handlers running."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Fetched and not started, or waiting for a retry."""
        return len(self._ready) + len(self._moving)

    @property
    def subscription(self) -> SubscriptionState | None:
        """The broker's side of it; `None` before it has started."""
        return None if self._subscription is None else self._subscription.state

    async def start(self) -> Consumer:
        """Return when the broker has accepted the subscription."""
        self._workers = [
            asyncio.create_task(self._work(), name=f"{self.name} worker {number}") for number in range(self.concurrency)
        ]
        try:
            self._subscription = await self._transport.subscribe(
                self.queue, self, prefetch=self._prefetch, options=self._subscribing
            )
        except BaseException as error:
            self.state = ConsumerState.CLOSED
            await self._end_tasks()
            if isinstance(error, AcemqError):
                raise public_error(error) from error
            raise
        self.state = ConsumerState.RUNNING
        return self

    # The sink: plain calls by the transport

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.fetched_at = self._clock.monotonic()
        self._ready.extend(batch)
        self._wake(len(batch))

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        gone = set(batch)
        self._ready = deque(delivery for delivery in self._ready if delivery not in gone)
        # The broker delivers them again, with the attempt they had: a copy now would be one too many.
        for move, delivery in self._moving.items():
            if delivery in gone:
                move.cancel()
        self._gone |= gone.intersection(self._running.values())

    def changed(self, state: SubscriptionState, /) -> None:
        if state.error is not None and state.error != self.last_error:
            self._report(Diagnostic(CONSUMER_LOST, "warning", state.error, self.queue))
        self.last_error = state.error
        if state.generation != self._generation:
            self._generation, self._foremost = state.generation, None
        if self.state in (ConsumerState.RUNNING, ConsumerState.RECOVERING):
            active = state.phase in (SubscriptionPhase.ACTIVE, SubscriptionPhase.WAITING, SubscriptionPhase.PAUSED)
            self.state = ConsumerState.RUNNING if active else ConsumerState.RECOVERING

    # The workers, which live as long as the consumer

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while self.state is not ConsumerState.CLOSED:
            delivery = self._take()
            if delivery is None:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(turn)
                await turn
                continue
            self._running[task] = delivery
            try:
                if self._alone:
                    await asyncio.sleep(0)  # what was accepted leaves first, so that a crash does not take it back
                await self._handle(delivery, task)
            except Exception:
                # A fault of ours must not end a worker: the delivery stays unsettled and comes again.
                log.exception("handling a delivery of %s failed inside the library", self.queue)
            finally:
                del self._running[task]
                if self._alone:
                    self._alone = False
                    self._wake(len(self._ready))
                if self._progress is not None:
                    self._progress.set()

    def _take(self) -> Delivery | None:
        """The next delivery that may be started now.

        What the broker delivers again and again may be what kills its process. So it is handled alone: if it kills
        again, nothing else is counted as tried with it, and whatever came before it is gone.
        """
        if not self._ready or self._alone:
            return None
        if (self._ready[0].deliveries or 0) > self._suspect_after:
            if any(delivery not in self._gone for delivery in self._running.values()):
                return None
            self._alone = True
        delivery = self._ready.popleft()
        if self._foremost is None:
            self._foremost = delivery
        return delivery

    def _wake(self, wanted: int) -> None:
        idle = self._idle
        while wanted and idle:
            turn = idle.popleft()
            if not turn.done():
                turn.set_result(None)
                wanted -= 1

    async def _handle(self, delivery: Delivery, task: asyncio.Task[Any]) -> None:
        unfit, payload = self._unfit(delivery), None
        if unfit is None:
            try:
                payload = self._decode(delivery)
            except DecodeError as error:
                unfit = set_aside(Case.UNDECODABLE, error)
        message: Message[Any] = Message(payload, delivery, self._clock)
        telemetry = self._telemetry
        watched = telemetry.tracing or telemetry.metering
        span = telemetry.process_span(self.queue, message.envelope, delivery.headers) if telemetry.tracing else None
        began = time.perf_counter() if watched else 0.0
        if unfit is not None:
            self._settle_beside(unfit, message, span, began)
            return
        if telemetry.metering:
            telemetry.started()
        try:
            answer = await self._answer(message, span, task)
        finally:
            if telemetry.metering:
                telemetry.ended()
        if self.state is ConsumerState.CLOSED:
            return  # it outlived its stop: the delivery comes again, and what it says now is of no account
        if not watched and (answer is None or answer is ACCEPT) and message.listeners is None:
            # The hot path: no copy, and nobody to tell.
            self.counters.acked += 1
            self._settled += 1
            if not await self._mover.accept(delivery):
                self._gone.discard(delivery)
            return
        age = message.age if self._policy.max_age is not None else None
        decision = decide(answer, message.envelope, self._policy, age, self._call.name)
        if decision.row.copy == "none":
            await self._settle(decision, message, span, began)
        else:
            self._settle_beside(decision, message, span, began)

    def _decode(self, delivery: Delivery) -> Any:
        if delivery.fault is not None:
            raise DecodeError(delivery.fault, content_type=delivery.content_type)
        reader = self._reader
        if reader.by_name:
            kind = h.text(delivery.headers.get(h.TYPE)) or delivery.routing_key
            return reader.read(delivery.body, delivery.content_type, kind)
        return reader.read(delivery.body, delivery.content_type)

    def _unfit(self, delivery: Delivery) -> Decision | None:
        """Why a delivery is not handed to the handler at all."""
        most = self._max_deliveries
        if most is not None and (delivery.deliveries or 0) > most and delivery is self._foremost:
            # The foremost alone: what was only fetched beside it when its process died is as often delivered.
            return set_aside(Case.DELIVERY_LIMIT, f"{most} deliveries without an outcome")
        if h.EXPIRES_AT in delivery.headers:
            expires_at = h.integer(delivery.headers.get(h.EXPIRES_AT))
            if expires_at is not None and expires_at <= to_millis(self._clock.now()):
                return (
                    Decision(row=TABLE[self._expired])
                    if self._expired is Case.EXPIRED_DROPPED
                    else set_aside(self._expired)
                )
        return None

    async def _answer(self, message: Message[Any], span: Span | None, task: asyncio.Task[Any]) -> object:
        """What the handler returned or raised. Only a cancellation by us goes on as one."""
        token, chain = CURRENT.set(message), self._around.chain
        call = self._call if self._handler_timeout is None else self._answer_in_time
        try:
            if chain is None and span is None:
                return await call(message)
            with trace.use_span(span, record_exception=False, set_status_on_exception=False) if span else _NO_SPAN:
                return await (call(message) if chain is None else chain.answer(message, call, self._call.name))
        except asyncio.CancelledError as cancelled:
            if task.cancelling():
                raise
            return cancelled  # the handler's own doing, and so its failure
        except Exception as error:
            return error
        finally:
            CURRENT.reset(token)

    async def _answer_in_time(self, message: Message[Any]) -> object:
        """Cancelled at its limit. A handler that swallows that keeps its slot and is reported at twice the limit."""
        limit = self._handler_timeout
        assert limit is not None
        stuck = self._clock.call_later(2 * limit.total_seconds(), lambda: self._report_stuck(message, limit))
        loop_task = asyncio.current_task()
        assert loop_task is not None
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            loop_task.cancel()

        timer = self._clock.call_later(limit.total_seconds(), expire)
        try:
            answer = await self._call(message)
        except asyncio.CancelledError:
            if late and loop_task.uncancel() == 0:
                raise HandlerTimeoutError(limit) from None
            raise
        else:
            if late:
                loop_task.uncancel()
                raise HandlerTimeoutError(limit)
            return answer
        finally:
            timer.cancel()
            stuck.cancel()
            self.stuck.discard(message.delivery)

    def _report_stuck(self, message: Message[Any], limit: timedelta) -> None:
        self.stuck.add(message.delivery)
        text = f"the handler was cancelled after {limit.total_seconds():g} s and still runs; it keeps its slot"
        self._report(
            Diagnostic(HANDLER_STUCK, "error", text, self.queue, message_id=message.id, attempt=message.attempt)
        )

    # Settling: what needs a copy or a wait happens beside the workers, in a prefetch slot and no handler slot

    def _settle_beside(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> None:
        settling = self._settle(decision, message, span, began)
        move = asyncio.create_task(settling, name=f"{self.name} settles {decision.row.case}")
        self._moving[move] = message.delivery
        move.add_done_callback(self._moved)

    async def _settle(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> None:
        took = time.perf_counter() - began
        if message.delivery in self._gone:
            self._gone.discard(message.delivery)
            self._mover.stale(message.delivery)
            if span is not None:
                span.end()
            return
        try:
            with trace.use_span(span) if span else _NO_SPAN:
                handled, _ = await self._mover.carry_out(decision, message.delivery)
        except (asyncio.CancelledError, GivenBack) as stopped:
            if span is not None:
                span.end()
            if isinstance(stopped, GivenBack):
                self._given_back += 1
                return
            raise
        self._settled += 1
        if self._telemetry.metering:
            self._telemetry.consumed(self.queue, message.type, handled.outcome, message.attempt, took)
        if span is not None:
            end_span(span, handled.outcome, decision.error if decision.row.error_span else None)
        tell_listeners(message, handled, self._report)

    def _moved(self, move: asyncio.Task[None]) -> None:
        del self._moving[move]
        if self._progress is not None:
            self._progress.set()
        if not move.cancelled() and (error := move.exception()) is not None:
            log.error("settling a delivery of %s failed inside the library; it comes again", self.queue, exc_info=error)

    # Stopping

    async def drain(self, timeout: timedelta | None = None) -> Drained:
        """Stop fetching, wait for running handlers, cancel what is left, give back. Idempotent, bounded by `timeout`.

        What was fetched and not started, and what waits for a retry, goes back and spends no attempt. A handler that
        outlives the time is cancelled and settles nothing. Cancelling `drain` cancels the handlers at once.
        """
        if self._drained is not None:
            return await asyncio.shield(self._drained)
        self._drained = asyncio.get_running_loop().create_future()
        budget = self._drain_timeout() if timeout is None else timeout
        result = Drained(finished=False)
        try:
            result = await self._drain(time.monotonic() + budget.total_seconds())
        finally:
            self._drained.set_result(result)
        return result

    async def close(self) -> Drained:
        """The same as `drain()`."""
        return await self.drain()

    async def _drain(self, end: float) -> Drained:
        me = self._caller()
        self.state, settled_before, abandoned = ConsumerState.DRAINING, self._settled, 0
        self._progress = asyncio.Event()
        subscription = self._subscription
        try:
            self._put_back()
            if subscription is not None:
                await _until(end, subscription.stop())
            self._put_back()
            self._mover.stop_waiting()
            await self._wait_for_work(end, me)
        finally:
            abandoned = len(self._running)
            self.state = ConsumerState.CLOSED
            self._call.leave_threads()
            await self._end_tasks(me)
            if subscription is not None:
                await _until(max(end, time.monotonic()) + _CLOSING, subscription.close())
        return Drained(
            finished=not abandoned,
            handled=self._settled - settled_before,
            given_back=self._given_back,
            abandoned=abandoned,
            queues={self.queue: abandoned} if abandoned else {},
        )

    def _caller(self) -> asyncio.Task[Any] | None:
        """The worker whose handler asked for the stop: it is not waited for, since it would wait for itself."""
        message = CURRENT.get()
        found = (task for task, delivery in self._running.items() if message and delivery is message.delivery)
        return next(found, None)

    def _put_back(self) -> None:
        # Left unsettled here: the subscription gives them back, in their places, when it closes.
        self._given_back += len(self._ready)
        self._ready.clear()

    async def _wait_for_work(self, end: float, me: asyncio.Task[Any] | None) -> None:
        assert self._progress is not None
        while self._moving or any(task is not me for task in self._running):
            self._progress.clear()
            if not await _until(end, self._progress.wait()):
                return

    async def _end_tasks(self, me: asyncio.Task[Any] | None = None) -> None:
        left = [task for task in (*self._workers, *self._moving) if task is not me]
        for task in left:
            task.cancel()
        if left:
            # Bounded: a handler may swallow its cancellation. It is left behind, and settles nothing any more.
            await asyncio.wait(left, timeout=_SWALLOWING)


_CLOSING = 0.5
_SWALLOWING = 0.1
_NO_SPAN = nullcontext()


async def _until(end: float, work: Awaitable[object]) -> bool:
    """Await until the moment `end` of the monotonic clock; False when it was cut off there."""
    try:
        await asyncio.wait_for(work, max(end - time.monotonic(), 0))
    except TimeoutError:
        return False
    return True


def check_policy(policy: RetryPolicy, can: Capabilities) -> None:
    """Refuse waits that would have to be spent in the consumer for longer than the broker lets a delivery be held."""
    if can.requeue_rewrites or can.publish_delay is not None or can.hold_limit is None:
        return
    rungs = policy.rungs() if can.dead_letter_routes else ()
    too_long = [wait for wait in policy.schedule() if wait not in rungs and wait > can.hold_limit * 0.9]
    if too_long:
        raise CapabilityError(
            can.transport,
            f"holding a delivery for longer than {can.hold_limit}",
            f"retry= with a wait of {too_long[0]} in the consumer",
            "Let whole seconds wait in the broker: wait_in_broker_from()",
        )


def check_options(options: ConsumeOptions, can: Capabilities, prefetch: int) -> int:
    """Refuse bad options of `consume`; gives the prefetch that holds."""
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(
            f"consume() got an unexpected keyword argument {min(unknown)!r}; known: {', '.join(sorted(_OPTIONS))}"
        )
    concurrency = options.get("concurrency", 10)
    if concurrency < 1:
        raise ConfigurationError(f"concurrency={concurrency} must be 1 or more")
    if "prefetch" in options:
        prefetch = options["prefetch"]
        if not 1 <= prefetch <= 65_535:
            raise ConfigurationError(
                f"prefetch={prefetch} must lie between 1 and 65,535; there is no unlimited prefetch"
            )
        if prefetch < concurrency:
            raise ConfigurationError(
                f"prefetch={prefetch} keeps {concurrency} handlers from being busy; raise it to {concurrency}"
            )
    limit = check_duration("handler_timeout", options["handler_timeout"]) if "handler_timeout" in options else None
    if limit is not None and can.hold_limit is not None and limit > can.hold_limit * 0.9:
        raise CapabilityError(
            can.transport, f"holding a delivery for longer than {can.hold_limit}", f"handler_timeout={limit}"
        )
    most = options.get("max_deliveries", MAX_DELIVERIES)
    if most is not None and most < 1:
        raise ConfigurationError(f"max_deliveries={most} must be 1 or more, or None for no limit")
    if options.get("expired", "dead_letter") not in ("dead_letter", "drop"):
        raise ConfigurationError(f"expired={options.get('expired')!r} must be 'dead_letter' or 'drop'")
    if "priority" in options and not can.consumer_priority:
        raise CapabilityError(can.transport, "consumer priorities", f"priority={options['priority']}")
    if "arguments" in options and can.transport != "rabbitmq":
        raise CapabilityError(can.transport, "consumer arguments", "arguments=")
    return max(prefetch, concurrency)
