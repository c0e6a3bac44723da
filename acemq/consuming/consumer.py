"""Keeps a subscription alive and puts its deliveries through a handler, so many at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Literal, Self

from opentelemetry import trace
from opentelemetry.trace import Span

from acemq.ack import ACCEPT, Ack, Verdict
from acemq.codec import Reader
from acemq.consuming.accepting import Accepting
from acemq.consuming.admitting import Admission
from acemq.consuming.claiming import Claims
from acemq.consuming.early import Early
from acemq.consuming.handling import Call, in_time
from acemq.consuming.holding import Holding
from acemq.consuming.lanes import LaneBuffer, Lanes
from acemq.consuming.moving import GivenBack, Mover
from acemq.consuming.options import MAX_DELIVERIES, ConsumeOptions
from acemq.consuming.settling import Case, Decision, decide, set_aside
from acemq.consuming.suspects import Suspects
from acemq.errors import ClosedError, DecodeError
from acemq.interceptors import Around, ConsumeChain, tell_listeners
from acemq.message import CURRENT, Message
from acemq.public_errors import made_public
from acemq.retry import RetryPolicy
from acemq.stopping import CLOSING, Drained, StopOnce, until
from acemq.stores import Idempotency
from acemq.telemetry import (
    CONSUMER_LOST,
    HANDLER_STUCK,
    LISTENER_FAILED,
    WORKER_ENDED,
    Diagnostic,
    end_span,
    within_span,
)
from acemq.transport import Delivery, LostBy, Subscription, SubscriptionPhase, SubscriptionState

log = logging.getLogger("acemq")


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

    halts = False
    """Whether it may stand still until a person decides."""

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
        lanes: Lanes | None = None,
    ) -> None:
        """`lanes`: those of the queue, which are consumed together; `None`: it has none."""
        self.queue, self.name = queue, name
        self.queues = (queue,) if lanes is None else lanes.highest_first
        """Those that it takes from."""
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
        self._call, self._around = call, around
        self._transport, self._telemetry, self._clock = mover.transport, mover.telemetry, mover.clock
        self._report = mover.report
        self._policy, self._policy_for = mover.policy, options.get("retry_for")
        self._prefetch = prefetch
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
        self._suspects = Suspects(
            options.get("max_deliveries", MAX_DELIVERIES),
            mover.transport.capabilities_of("queue", queue),
            in_lanes=lanes is not None,
        )
        drops = options.get("expired") == "drop"
        self._admission = Admission(reader, self._suspects, mover.clock, drops_expired=drops)
        self._lanes = lanes
        buffer = None if lanes is None else LaneBuffer(lanes, is_suspect=self._suspects.is_one)
        self._holding = Holding(queue, mover.settle, mover.clock, buffer)
        self._ready = self._holding.ready
        self._workers: list[asyncio.Task[None]] = []
        self._running: dict[asyncio.Task[Any], Any] = {}
        """What each busy worker has in hand: a delivery here, a batch where there are batches."""
        self._gone: set[Delivery] = set()
        """Deliveries in work that the broker has taken back."""
        self._lapsed: set[Delivery] = set()
        """Those of them whose lease was lost: their handlers are cancelled."""
        self._early = Early.of(mover, queue)
        self._moving: dict[asyncio.Task[bool], Delivery] = {}
        self._settling: set[asyncio.Task[bool]] = set()
        """Those of them that need neither a copy nor a wait."""
        self._accepting = Accepting(
            mover, name=name, accepted=self._accepted, failed=self._come_again, rests=self._progressed
        )
        self._settled = 0
        self._given_back = 0
        self._generation = 1
        self._progress: asyncio.Event | None = None
        self._excused: set[asyncio.Task[Any]] = set()
        """Workers that a stop does not wait for, since their handlers wait for the stop."""
        self._stop = StopOnce()

    @property
    def in_flight(self) -> int:
        """Handlers running."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Fetched and not started."""
        return len(self._ready)

    @property
    def held(self) -> int:
        """Fetched and not started, kept by a pause, waiting for a retry, or on the way to be accepted."""
        return self.waiting + len(self._moving) + len(self._accepting)

    @property
    def halted(self) -> str | None:
        """Why it stands still now; a plain consumer never does."""
        return None

    @property
    def subscription(self) -> SubscriptionState | None:
        """The broker's side of it; `None` before it has started."""
        return None if self._subscription is None else self._subscription.state

    async def start(self) -> Self:
        """Return when the broker has accepted the subscription. `ClosedError`: it was closed meanwhile."""
        self._workers = [
            asyncio.create_task(self._work(), name=f"{self.name} worker {number}") for number in range(self.concurrency)
        ]
        for worker in self._workers:
            worker.add_done_callback(self._worker_ended)
        try:
            with made_public():
                subscription = await self._subscribe()
            if self._stop.is_asked:
                self._ready.clear()
                await until(time.monotonic() + CLOSING, subscription.close())
                raise ClosedError(f"{self.name} was closed while it started")
        except BaseException:
            self.state = ConsumerState.CLOSED
            await self._end_tasks()
            raise
        self._subscription, self.state = subscription, ConsumerState.RUNNING
        return self

    async def _subscribe(self) -> Subscription:
        if self._lanes is not None:
            return await self._lanes.subscribe(self._transport, self, self._subscribing)
        return await self._transport.subscribe(
            self.queue, self, prefetch=self._prefetch, exclusive=self._exclusive, options=self._subscribing
        )

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

    # The sink: plain calls by the transport

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.fetched_at = self._clock.monotonic()
        if self._early is not None:
            batch = self._early.sift(batch)
        if self.mover.leases is not None:
            self.mover.leases.keep(batch, self.lost)
        self._holding.add(batch)

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        gone = set(batch)
        if self.mover.leases is not None:
            self.mover.leases.lost(batch, by)
        self._holding.drop(gone)
        # The broker delivers them again, with the attempt they had: a copy now would be one too many.
        for move, delivery in self._moving.items():
            if delivery in gone:
                move.cancel()
        self._gone |= gone.intersection(self._in_hand())
        if self._suspects.alone in gone:
            # Its handler may never end, and it is not ours any more: whatever else there is must not wait for it.
            self._end_alone()
        if by is LostBy.LEASE:
            # Somebody else may have it now: what this one does from here on is done twice.
            for task, work in self._running.items():
                if isinstance(work, Delivery) and work in gone:
                    self._lapsed.add(work)
                    task.cancel()

    def changed(self, state: SubscriptionState, /) -> None:
        if state.error is not None and state.error != self.last_error:
            self._report(Diagnostic(CONSUMER_LOST, "warning", state.error, self.queue))
        self.last_error = state.error
        if state.generation != self._generation:
            self._generation = state.generation
            self._suspects.begin_anew()
        if self.state in (ConsumerState.RUNNING, ConsumerState.RECOVERING):
            self.state = state_in(state.phase)

    def _in_hand(self) -> Iterable[Delivery]:
        return (delivery for work in self._running.values() for delivery in self._deliveries_of(work))

    def _deliveries_of(self, work: Any) -> Iterable[Delivery]:
        return (work,)

    # The workers, which live as long as the consumer

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while self.state is not ConsumerState.CLOSED:
            work = self._take()
            if work is None:
                await self._holding.turn()
                continue
            self._running[task] = work
            try:
                if self._suspects.alone is None or await self._may_begin_alone(work):
                    await self._handle(work, task)
            except asyncio.CancelledError:
                if not self._has_lapsed(work):
                    raise
                self.mover.stale(work)
            except Exception:
                # A fault of ours must not end a worker.
                log.exception("handling a delivery of %s failed inside the library; it comes again", self.queue)
                for delivery in self._deliveries_of(work):
                    if delivery not in self._moving.values():
                        self._come_again(delivery)
            finally:
                if self._has_lapsed(work):
                    self._lapsed.discard(work)
                    self._gone.discard(work)
                    task.uncancel()
                del self._running[task]
                if self._suspects.alone is not None and not self._is_busy():
                    self._end_alone()
                self._progressed()

    def _progressed(self) -> None:
        if self._progress is not None:
            self._progress.set()

    async def _may_begin_alone(self, work: Any) -> bool:
        """Whether it is still to be handled, now that what was accepted has left and no crash takes that back."""
        await asyncio.sleep(0)
        await self._accepting.at_rest()
        if self._settling:
            await asyncio.wait(self._settling)
        deliveries = list(self._deliveries_of(work))
        if not self._gone.isdisjoint(deliveries):
            self._gone.difference_update(deliveries)
            return False
        if self.state is ConsumerState.DRAINING:
            self._given_back += len(deliveries)
            return False
        if self._holding.paused:
            self._ready.extendleft(reversed(deliveries))
            return False
        return True

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        error = None if worker.cancelled() else worker.exception()
        if error is not None:
            ended = f"{self.workers_ended} of {self.concurrency} workers have ended"
            text = f"{type(error).__name__}: {error} ended a worker; {ended}. What it had in hand stays unsettled"
            self._report(Diagnostic(WORKER_ENDED, "error", text, self.queue, failure=error))

    @property
    def workers_ended(self) -> int:
        """Of those that should handle as long as it is open. Whatever ends one is no answer to a message."""
        if self.state is ConsumerState.CLOSED:
            return 0
        return sum(worker.done() for worker in self._workers)

    def _take(self) -> Any:
        """The next delivery that may be started now, or `None`.

        What the broker delivers again and again may be what kills its process. So it is handled alone: if it kills
        again, nothing else is counted as tried with it, and whatever came before it is gone.
        """
        if not self._ready or self._suspects.alone is not None or self._holding.paused:
            return None
        if self._suspects.is_one(self._ready[0]):
            if self._is_busy():
                return None
            self._suspects.alone = self._ready[0]
        return self._pop()

    def _end_alone(self) -> None:
        self._suspects.alone = None
        self._holding.wake(len(self._ready))

    def _has_lapsed(self, work: object) -> bool:
        return isinstance(work, Delivery) and work in self._lapsed

    def _is_busy(self) -> bool:
        return any(delivery not in self._gone for delivery in self._in_hand())

    def _pop(self) -> Delivery:
        delivery = self._ready.popleft()
        self._suspects.begin(delivery)
        return delivery

    async def _handle(self, work: Any, task: asyncio.Task[Any]) -> None:
        delivery: Delivery = work
        message = self._admit(delivery)
        if message is None or (self._admission.waits and not await self._fetch_payload(message)):
            return
        span, began = self._watch(message)
        if self.claims is not None:
            decision = await self._decide_once(self.claims, message, span, task)
            if decision is not None:
                await self._finish(decision, message, span, began)
            return
        answer = await self._ask(message, span, task)
        if self.state is ConsumerState.CLOSED:
            return  # it outlived its stop: the delivery comes again, and what it says now is of no account
        if not began and (answer is None or answer is ACCEPT) and message.listeners is None:
            if self._settles_beside(delivery):
                self.counters.acked += 1
                self._gone.discard(delivery)
                self._accepting.add(delivery)
            else:
                await self._accept(delivery)
            return
        await self._finish(self._decide(answer, message), message, span, began)

    async def _decide_once(
        self, claims: Claims, message: Message[Any], span: Span | None, task: asyncio.Task[Any]
    ) -> Decision | None:
        """What becomes of the message, whose handler runs behind a claim on it. `None`: it outlived its stop."""
        held = await claims.take(message)
        if isinstance(held, Decision):
            return None if self.state is ConsumerState.CLOSED else held
        try:
            answer = await self._ask(message, span, task, partial(claims.hold, held))
        except BaseException:
            claims.let_go(held)
            raise
        if self.state is ConsumerState.CLOSED:
            claims.let_go(held)
            return None
        return await claims.end(held, self._decide(answer, message))

    async def _finish(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> None:
        if decision.row.copy != "none":
            self._settle_beside(decision, message, span, began)
        elif self._settles_beside(message.delivery):
            settling = self._settle_beside(decision, message, span, began)
            self._settling.add(settling)
            settling.add_done_callback(self._settling.discard)
        else:
            await self._settle(decision, message, span, began)

    def _settles_beside(self, delivery: Delivery) -> bool:
        """Whether the worker goes on meanwhile: not where order may count, as a crash would repeat more of it."""
        return delivery.lease_until is not None and not self._exclusive

    def _watch(self, message: Message[Any]) -> tuple[Span | None, float]:
        """The span that is open for its handling, and when that began; 0.0 where nobody watches."""
        telemetry = self._telemetry
        return self._span_of(message), time.perf_counter() if telemetry.tracing or telemetry.metering else 0.0

    async def _ask(
        self,
        message: Message[Any],
        span: Span | None,
        task: asyncio.Task[Any],
        hold: Callable[[Awaitable[object]], Awaitable[object]] | None = None,
    ) -> object:
        """The handler's answer. `hold`: what is to go on while it runs."""
        telemetry = self._telemetry
        if telemetry.metering:
            telemetry.started()
        try:
            answering = self._answer(message, CURRENT, self._around.chain, span, task)
            return await (answering if hold is None else hold(answering))
        finally:
            if telemetry.metering:
                telemetry.ended()

    async def _accept(self, delivery: Delivery) -> None:
        """The hot path: no copy, and nobody to tell."""
        self.counters.acked += 1
        self._settled += 1
        if not await self.mover.accept(delivery):
            self._gone.discard(delivery)

    def _accepted(self, batch: Collection[Delivery]) -> None:
        self._settled += len(batch)

    def _admit(self, delivery: Delivery) -> Message[Any] | None:
        """The message for the handler. `None`: it is not for a handler, and is settled beside.

        Where a codec has to be awaited it has no payload yet, and `_fetch_payload` gives it one.
        """
        admitted = self._admission.examine(delivery)
        if isinstance(admitted, Message):
            return admitted
        self._set_aside(admitted, delivery)
        return None

    async def _fetch_payload(self, message: Message[Any]) -> bool:
        """Give the message its payload. False: it has none, and is set aside, or tried again, beside."""
        delivery = message.delivery
        failure = await self._admission.fill(message)
        if isinstance(failure, DecodeError):
            self._set_aside(set_aside(Case.UNDECODABLE, failure), delivery)
        elif failure is not None:
            self._set_aside(self._decide(failure, message), delivery)
        elif delivery not in self._gone:
            return True
        else:
            self._gone.discard(delivery)  # the broker has taken it back meanwhile: it comes again
        return False

    def _set_aside(self, unfit: Decision, delivery: Delivery) -> None:
        message: Message[Any] = Message(None, delivery, self._clock)
        self._settle_beside(unfit, message, self._span_of(message), time.perf_counter())

    def _span_of(self, message: Message[Any]) -> Span | None:
        telemetry = self._telemetry
        if not telemetry.tracing:
            return None
        return telemetry.process_span(message.queue, message.envelope, message.wire_headers)

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
        return decide(answer, message.envelope.attempt, policy, age, self.handler)

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

    def _settle_beside(
        self, decision: Decision, message: Message[Any], span: Span | None, began: float
    ) -> asyncio.Task[bool]:
        settling = self._settle(decision, message, span, began)
        move = asyncio.create_task(settling, name=f"{self.name} settles {decision.row.case}")
        self._moving[move] = message.delivery
        move.add_done_callback(self._moved)
        return move

    async def _settle(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> bool:
        """Whether it was carried out. False: the delivery was lost or is given back, and comes again."""
        took = time.perf_counter() - began
        if message.delivery in self._gone:
            self._gone.discard(message.delivery)
            self.mover.stale(message.delivery)
            if span is not None:
                span.end()
            return False
        if decision.row.case is Case.RELEASED:
            self._suspects.gave_back(message.delivery, message.id)
        try:
            with trace.use_span(span) if span else _NO_SPAN:
                handled, _ = await self.mover.carry_out(decision, message.delivery)
        except (asyncio.CancelledError, GivenBack) as stopped:
            if span is not None:
                span.end()
            if isinstance(stopped, GivenBack):
                self._given_back += 1
                return False
            raise
        self._settled += 1
        if self._telemetry.metering:
            self._telemetry.consumed(message.queue, message.type, handled.outcome, message.attempt, took)
        if span is not None:
            end_span(span, handled.outcome, decision.error if decision.row.error_span else None)
        tell_listeners(message, handled, self._report)
        return True

    def _moved(self, move: asyncio.Task[bool]) -> None:
        delivery = self._moving.pop(move)
        if not move.cancelled() and (error := move.exception()) is not None:
            log.error("settling a delivery of %s failed inside the library; it comes again", self.queue, exc_info=error)
            self._come_again(delivery)
        self._progressed()

    def _come_again(self, delivery: Delivery) -> None:
        """After a fault of ours: left as it is, it would keep its prefetch slot until the link is lost."""
        if delivery in self._gone:
            self._gone.discard(delivery)
        elif self.state is not ConsumerState.CLOSED:
            again = asyncio.create_task(self._put_back_one(delivery), name=f"{self.name} gives back after a fault")
            self._moving[again] = delivery
            again.add_done_callback(self._moved)

    async def _put_back_one(self, delivery: Delivery) -> bool:
        try:
            return await self.mover.put_back(delivery)
        except GivenBack:
            self._given_back += 1
            return False

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
        self.excuse_caller()
        budget = self._drain_timeout() if timeout is None else timeout
        return await self._stop.once(lambda: self._drain(time.monotonic() + budget.total_seconds()))

    async def close(self) -> Drained:
        """The same as `drain()`."""
        return await self.drain()

    async def _drain(self, end: float) -> Drained:
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
            await self._wait_for_work(end)
        finally:
            abandoned = len(self._running) + len(self._accepting)
            self.state = ConsumerState.CLOSED
            self._call.leave_threads()
            await self._end_tasks()
            if self.mover.leases is not None:
                self.mover.leases.let_go_of(self.lost)
            if self.claims is not None:
                await self.claims.at_rest()
            if self._early is not None:
                await until(end, self._early.at_rest())
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

    def excuse_caller(self) -> None:
        """Whoever asks for the stop from within a handler, first or later, is not waited for by it."""
        self._excused.update(task for task, work in self._running.items() if self._is_current(work))
        self._progressed()

    def _is_current(self, work: Any) -> bool:
        message = CURRENT.get()
        return message is not None and work is message.delivery

    def _put_back(self) -> None:
        # Left unsettled here: the subscription gives them back, in their places, when it closes.
        self._given_back += len(self._ready)
        self._ready.clear()

    async def _wait_for_work(self, end: float) -> None:
        assert self._progress is not None
        while self._moving or len(self._accepting) or not self._excused.issuperset(self._running):
            self._progress.clear()
            if not await until(end, self._progress.wait()):
                return

    async def _end_tasks(self) -> None:
        left = [task for task in (*self._workers, *self._moving) if task not in self._excused]
        if self._accepting.task is not None:
            left.append(self._accepting.task)
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
