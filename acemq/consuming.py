"""Keeps a subscription alive and puts its deliveries through a handler, so many at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, Self

from opentelemetry import trace
from opentelemetry.trace import Span

from acemq import headers as h
from acemq.ack import ACCEPT, Ack, Verdict
from acemq.claiming import Claims
from acemq.codec import Reader
from acemq.consume_options import MAX_DELIVERIES, ConsumeOptions
from acemq.envelope import to_millis
from acemq.errors import AcemqError, DecodeError
from acemq.handling import Call, in_time
from acemq.holding import Holding
from acemq.interceptors import Around, ConsumeChain, tell_listeners
from acemq.mapping import public_error
from acemq.message import CURRENT, Message
from acemq.moving import GivenBack, Mover
from acemq.retry import RetryPolicy
from acemq.settling import TABLE, Case, Decision, decide, set_aside
from acemq.stopping import CLOSING, Drained, Stop, until
from acemq.stores import Idempotency
from acemq.telemetry import CONSUMER_LOST, HANDLER_STUCK, LISTENER_FAILED, Diagnostic, end_span, within_span
from acemq.transport import Delivery, LostBy, Subscription, SubscriptionPhase, SubscriptionState

log = logging.getLogger("acemq")

_SUSPECT_AFTER = 2
"""Deliveries after which a message is handled alone. The first two may be owed to one lost connection."""


class ConsumerState(StrEnum):
    """What a consumer is doing now."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
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
        ended: Callable[[Consumer], None],
    ) -> None:
        self.queue, self.name = queue, name
        self.handler = call.name
        """Its name."""
        self.state = ConsumerState.STARTING
        self.last_error: str | None = None
        self.counters = mover.counters
        self.concurrency = options.get("concurrency", 10)
        self.fetched_at = mover.clock.monotonic()
        self.stuck: set[object] = set()
        """What handlers have in hand that still run at twice their time limit."""
        self.mover = mover
        self._call, self._reader, self._around = call, reader, around
        self._transport, self._telemetry, self._clock = mover.transport, mover.telemetry, mover.clock
        self._report = mover.report
        self._policy, self._policy_for = mover.policy, options.get("retry_for")
        self._prefetch = prefetch
        self._max_deliveries = options.get("max_deliveries", MAX_DELIVERIES)
        self._expired: Case = Case.EXPIRED_DROPPED if options.get("expired") == "drop" else Case.EXPIRED
        self._handler_timeout = options.get("handler_timeout")
        self.claims = Claims(Idempotency.of(options["idempotency"]), mover) if "idempotency" in options else None
        """Of idempotent handling."""
        self._subscribing: dict[str, object] = {"name": name}
        if "priority" in options:
            self._subscribing["priority"] = options["priority"]
        if "arguments" in options:
            self._subscribing["arguments"] = options["arguments"]
        self._exclusive = options.get("exclusive", False)
        self._drain_timeout, self._ended = drain_timeout, ended
        self._subscription: Subscription | None = None
        self._holding = Holding(queue, mover.transport, mover.clock)
        self._ready = self._holding.ready
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: list[asyncio.Task[None]] = []
        self._running: dict[asyncio.Task[Any], Any] = {}
        """What each busy worker has in hand: a delivery here, a batch where there are batches."""
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
        self._stop = Stop()

    @property
    def in_flight(self) -> int:
        """Handlers running."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Fetched and not started, kept by a pause, or waiting for a retry."""
        return len(self._ready) + len(self._moving)

    @property
    def subscription(self) -> SubscriptionState | None:
        """The broker's side of it; `None` before it has started."""
        return None if self._subscription is None else self._subscription.state

    async def start(self) -> Self:
        """Return when the broker has accepted the subscription."""
        self._workers = [
            asyncio.create_task(self._work(), name=f"{self.name} worker {number}") for number in range(self.concurrency)
        ]
        try:
            self._subscription = await self._transport.subscribe(
                self.queue, self, prefetch=self._prefetch, exclusive=self._exclusive, options=self._subscribing
            )
        except BaseException as error:
            self.state = ConsumerState.CLOSED
            await self._end_tasks()
            if isinstance(error, AcemqError):
                raise public_error(error) from error
            raise
        self.state = ConsumerState.RUNNING
        return self

    def pause(self) -> None:
        """Start no more handlers, and fetch nothing more. Those that run end as always.

        What was fetched is kept for 60 s and then given back with its attempt. Nothing happens where it pauses already
        or stops.
        """
        if self.state in (ConsumerState.RUNNING, ConsumerState.RECOVERING):
            self.state = ConsumerState.PAUSED
            self._holding.pause(self._subscription)

    def resume(self) -> None:
        """Go on where it was paused."""
        if self.state is ConsumerState.PAUSED and self._subscription is not None:
            self.fetched_at = self._clock.monotonic()
            self._holding.resume()
            self.state = state_in(self._subscription.state.phase)
            self._wake(self.concurrency)

    # The sink: plain calls by the transport

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.fetched_at = self._clock.monotonic()
        self._holding.add(batch)
        self._wake(len(batch))

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        gone = set(batch)
        self._holding.drop(gone)
        # The broker delivers them again, with the attempt they had: a copy now would be one too many.
        for move, delivery in self._moving.items():
            if delivery in gone:
                move.cancel()
        self._gone |= gone.intersection(self._in_hand())

    def changed(self, state: SubscriptionState, /) -> None:
        if state.error is not None and state.error != self.last_error:
            self._report(Diagnostic(CONSUMER_LOST, "warning", state.error, self.queue))
        self.last_error = state.error
        if state.generation != self._generation:
            self._generation, self._foremost = state.generation, None
        if self.state in (ConsumerState.RUNNING, ConsumerState.RECOVERING):
            self.state = state_in(state.phase)

    def _in_hand(self) -> Iterable[Delivery]:
        return self._running.values()

    # The workers, which live as long as the consumer

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while self.state is not ConsumerState.CLOSED:
            work = self._take()
            if work is None:
                turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(turn)
                await turn
                continue
            self._running[task] = work
            try:
                if self._alone:
                    await asyncio.sleep(0)  # what was accepted leaves first, so that a crash does not take it back
                await self._handle(work, task)
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

    def _take(self) -> Any:
        """The next delivery that may be started now, or `None`.

        What the broker delivers again and again may be what kills its process. So it is handled alone: if it kills
        again, nothing else is counted as tried with it, and whatever came before it is gone.
        """
        if not self._ready or self._alone or self._holding.paused:
            return None
        if self._is_suspect(self._ready[0]):
            if self._is_busy():
                return None
            self._alone = True
        return self._pop()

    def _is_suspect(self, delivery: Delivery) -> bool:
        return (delivery.deliveries or 0) > self._suspect_after

    def _is_busy(self) -> bool:
        return any(delivery not in self._gone for delivery in self._in_hand())

    def _pop(self) -> Delivery:
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

    async def _handle(self, work: Any, task: asyncio.Task[Any]) -> None:
        delivery: Delivery = work
        message = self._admit(delivery)
        if message is None:
            return
        telemetry = self._telemetry
        watched = telemetry.tracing or telemetry.metering
        span = telemetry.process_span(self.queue, message.envelope, delivery.headers) if telemetry.tracing else None
        began = time.perf_counter() if watched else 0.0
        if self.claims is not None:
            await self._handle_once(self.claims, message, span, began, task)
            return
        if telemetry.metering:
            telemetry.started()
        try:
            answer = await self._answer(message, CURRENT, self._around.chain, span, task)
        finally:
            if telemetry.metering:
                telemetry.ended()
        if self.state is ConsumerState.CLOSED:
            return  # it outlived its stop: the delivery comes again, and what it says now is of no account
        if not watched and (answer is None or answer is ACCEPT) and message.listeners is None:
            # The hot path: no copy, and nobody to tell.
            self.counters.acked += 1
            self._settled += 1
            if not await self.mover.accept(delivery):
                self._gone.discard(delivery)
            return
        await self._carry_out(self._decide(answer, message), message, span, began)

    async def _handle_once(
        self, claims: Claims, message: Message[Any], span: Span | None, began: float, task: asyncio.Task[Any]
    ) -> None:
        """The same behind a claim on the message."""
        held, telemetry = await claims.take(message), self._telemetry
        if isinstance(held, Decision):
            if self.state is not ConsumerState.CLOSED:
                await self._carry_out(held, message, span, began)
            return
        if telemetry.metering:
            telemetry.started()
        try:
            answer = await claims.hold(held, self._answer(message, CURRENT, self._around.chain, span, task))
        except BaseException:
            claims.let_go(held)
            raise
        finally:
            if telemetry.metering:
                telemetry.ended()
        if self.state is ConsumerState.CLOSED:
            claims.let_go(held)
            return
        await self._carry_out(await claims.end(held, self._decide(answer, message)), message, span, began)

    async def _carry_out(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> None:
        if decision.row.copy == "none":
            await self._settle(decision, message, span, began)
        else:
            self._settle_beside(decision, message, span, began)

    def _admit(self, delivery: Delivery) -> Message[Any] | None:
        """The message for the handler. `None`: it is not for a handler, and is settled beside."""
        unfit = self._unfit(delivery)
        if unfit is None:
            try:
                return Message(self._decode(delivery), delivery, self._clock)
            except DecodeError as error:
                unfit = set_aside(Case.UNDECODABLE, error)
        self._set_aside(unfit, delivery)
        return None

    def _set_aside(self, unfit: Decision, delivery: Delivery) -> None:
        message: Message[Any] = Message(None, delivery, self._clock)
        telemetry = self._telemetry
        span = telemetry.process_span(self.queue, message.envelope, delivery.headers) if telemetry.tracing else None
        self._settle_beside(unfit, message, span, time.perf_counter())

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

    async def _answer(
        self,
        given: Any,
        current: ContextVar[Any],
        chain: ConsumeChain | None,
        span: Span | None,
        task: asyncio.Task[Any],
    ) -> object:
        """What the handler returned or raised. Only a cancellation by us goes on as one."""
        token = current.set(given)
        call = self._call if self._handler_timeout is None else self._call_in_time
        try:
            if chain is None and span is None:
                return await call(given)
            with within_span(span):
                return await (call(given) if chain is None else chain.answer(given, call, self.handler))
        except asyncio.CancelledError as cancelled:
            if task.cancelling():
                raise
            return cancelled  # the handler's own doing, and so its failure
        except Exception as error:
            return error
        finally:
            current.reset(token)

    async def _call_in_time(self, given: Any) -> object:
        limit = self._handler_timeout
        assert limit is not None
        try:
            handling = self._call(given)
            return await in_time(handling, limit, self._clock, stuck=lambda: self._report_stuck(given, limit))
        finally:
            self.stuck.discard(given)

    def _report_stuck(self, given: object, limit: timedelta) -> None:
        self.stuck.add(given)
        text = f"the handler was cancelled after {limit.total_seconds():g} s and still runs; it keeps its slot"
        self._say(HANDLER_STUCK, "error", text, given)

    def _decide(self, answer: object, message: Message[Any]) -> Decision:
        policy = self._policy if self._policy_for is None else self._ask_policy(answer, message)
        age = message.age if policy.max_age is not None else None
        return decide(answer, message.envelope, policy, age, self.handler)

    def _ask_policy(self, answer: object, message: Message[Any]) -> RetryPolicy:
        """The policy that decides this time."""
        failure = answer.reason if isinstance(answer, Ack) and answer.verdict is Verdict.RETRY else answer
        if self._policy_for is None or not isinstance(failure, BaseException):
            return self._policy
        try:
            policy = self._policy_for(message, failure)
        except Exception as error:
            self._say(
                LISTENER_FAILED, "warning", f"retry_for raised {type(error).__name__}: {error}", message, failure=error
            )
            return self._policy
        if policy is None or isinstance(policy, RetryPolicy):  # pyright: ignore[reportUnnecessaryIsInstance]
            return policy or self._policy
        text = f"retry_for gave a {type(policy).__name__}, expected a RetryPolicy or None"
        self._say(LISTENER_FAILED, "warning", text, message)
        return self._policy

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
            self.mover.stale(message.delivery)
            if span is not None:
                span.end()
            return
        try:
            with trace.use_span(span) if span else _NO_SPAN:
                handled, _ = await self.mover.carry_out(decision, message.delivery)
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

    def _say(
        self,
        name: str,
        level: Literal["warning", "error"],
        text: str,
        given: object,
        *,
        failure: BaseException | None = None,
    ) -> None:
        which, attempt = (given.id, given.attempt) if isinstance(given, Message) else (None, 0)
        self._report(Diagnostic(name, level, text, self.queue, message_id=which, attempt=attempt, failure=failure))

    # Stopping

    async def drain(self, timeout: timedelta | None = None) -> Drained:
        """Stop fetching, wait for running handlers, cancel what is left, give back. Idempotent, bounded by `timeout`.

        What was fetched and not started, and what waits for a retry, goes back and spends no attempt. A handler that
        outlives the time is cancelled and settles nothing. Cancelling `drain` cancels the handlers at once.
        """
        budget = self._drain_timeout() if timeout is None else timeout
        return await self._stop.once(lambda: self._drain(time.monotonic() + budget.total_seconds()))

    async def close(self) -> Drained:
        """The same as `drain()`."""
        return await self.drain()

    async def _drain(self, end: float) -> Drained:
        me = self._caller()
        self.state, settled_before, abandoned = ConsumerState.DRAINING, self._settled, 0
        self._progress = asyncio.Event()
        subscription = self._subscription
        self._holding.end()
        try:
            self._put_back()
            if subscription is not None:
                await until(end, subscription.stop())
            self._put_back()
            self.mover.stop_waiting()
            await self._wait_for_work(end, me)
        finally:
            abandoned = len(self._running)
            self.state = ConsumerState.CLOSED
            self._call.leave_threads()
            await self._end_tasks(me)
            if self.claims is not None:
                await self.claims.at_rest()
            if subscription is not None:
                await until(max(end, time.monotonic()) + CLOSING, subscription.close())
            self._ended(self)
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
            if not await until(end, self._progress.wait()):
                return

    async def _end_tasks(self, me: asyncio.Task[Any] | None = None) -> None:
        left = [task for task in (*self._workers, *self._moving) if task is not me]
        for task in left:
            task.cancel()
        if left:
            # Bounded: a handler may swallow its cancellation. It is left behind, and settles nothing any more.
            await asyncio.wait(left, timeout=_SWALLOWING)


_SWALLOWING = 0.1
"""Seconds for a handler to end once it was cancelled."""
_NO_SPAN = nullcontext()


def state_in(phase: SubscriptionPhase) -> ConsumerState:
    active = phase in (SubscriptionPhase.ACTIVE, SubscriptionPhase.WAITING, SubscriptionPhase.PAUSED)
    return ConsumerState.RUNNING if active else ConsumerState.RECOVERING
