"""Batches: many messages for one call of the handler, an outcome for each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeAlias, TypeVar, overload

from opentelemetry.trace import Span

from acemq.ack import ACCEPT, Ack
from acemq.clock import Timer
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.errors import ClosedError, ConfigurationError
from acemq.interceptors import ConsumeChain
from acemq.message import CURRENT, IN_BATCH, Message
from acemq.telemetry import end_batch_span, within_span
from acemq.transport import Delivery, LostBy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Batch(Sequence[Message[T_co]], Generic[T_co]):
    """One message or more, at most as many as were asked for, in the order of the queue."""

    def __init__(self, messages: Sequence[Message[T_co]]) -> None:
        self._messages = tuple(messages)
        self._outcomes: dict[Message[Any], Ack] = {}
        self._over = False

    def settle(self, message: Message[Any], outcome: Ack) -> None:
        """Give one message its own outcome; it is carried out when the handler ends.

        `ClosedError` for the second outcome of a message, and when the handler has ended already.
        """
        if not isinstance(outcome, Ack):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"outcome={outcome!r} must be an Ack, for example Ack.reject('why')")
        if not any(message is each for each in self._messages):
            raise ConfigurationError(f"{message!r} is not of this batch; settle the messages that the batch holds")
        if self._over:
            raise ClosedError(f"the handler of message {message.id} has ended, and with it what it could decide")
        if message in self._outcomes:
            raise ClosedError(f"message {message.id} has its outcome already; each is settled once")
        self._outcomes[message] = outcome

    def end(self, answer: object) -> Iterable[tuple[Message[T_co], object]]:
        """For the engine: what became of each message, `answer` being that of those without an outcome of their own."""
        self._over = True
        return ((message, self._outcomes.get(message, answer)) for message in self._messages)

    @overload
    def __getitem__(self, index: int) -> Message[T_co]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[T_co]]: ...
    def __getitem__(self, index: int | slice) -> Message[T_co] | Sequence[Message[T_co]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self._messages)} of {self._messages[0].queue}>" if self._messages else "<Batch of 0>"


BatchHandler: TypeAlias = Callable[[Batch[T]], Awaitable[Ack | None] | Ack | None]


class BatchConsumer(Consumer):
    """A consumer whose handlers are given batches. Made by `Connection.consume_batches`."""

    def __init__(self, queue: str, *, most: int, within: timedelta, **made: Any) -> None:
        super().__init__(queue, **made)
        self._most, self._within = most, within.total_seconds()
        self._forming: list[Message[Any]] = []
        """The batch that is not handed over yet."""
        self._timer: Timer | None = None
        self._due = False

    @property
    def held(self) -> int:
        return super().held + len(self._forming)

    def pause(self) -> None:
        if self.state in (ConsumerState.RUNNING, ConsumerState.RECOVERING):
            self._ready.extendleft(message.delivery for message in reversed(self._forming))
            self._form([])
        super().pause()

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        gone = set(batch)
        self._form([message for message in self._forming if message.delivery not in gone])
        super().lost(batch, by)

    def _put_back(self) -> None:
        self._given_back += len(self._forming)
        self._form([])
        super()._put_back()

    def _deliveries_of(self, work: Any) -> Iterable[Delivery]:
        return (message.delivery for message in work)

    def _is_current(self, work: Any) -> bool:
        return work is IN_BATCH.get() or CURRENT.get() in work

    # Forming: a batch takes in what is fit for the handler and nothing else, until it is full or due

    def _form(self, messages: list[Message[Any]]) -> None:
        self._forming = messages
        if not messages:
            self._due = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _expire(self) -> None:
        self._timer, self._due = None, True
        self._holding.wake(1)

    def _take(self) -> Batch[Any] | None:
        if self._suspects.alone is not None or self._holding.paused:
            return None
        while self._ready and len(self._forming) < self._most:
            if self._suspects.is_one(self._ready[0]):
                if self._forming:
                    self._due = True  # in their order, and not together
                    break
                if self._is_busy():
                    return None
                message = self._admit(self._pop())
                if message is not None:
                    self._suspects.alone = message.delivery
                    return Batch([message])
                continue
            message = self._admit(self._pop())
            if message is not None:
                self._forming.append(message)
                if self._timer is None:
                    self._timer = self._clock.call_later(self._within, self._expire)
        if not self._due and len(self._forming) < self._most:
            return None
        # It may have expired while the batch was formed.
        messages = [message for message in self._forming if self._is_fit(message.delivery)]
        self._form([])
        return Batch(messages) if messages else self._take()

    def _is_fit(self, delivery: Delivery) -> bool:
        unfit = self._admission.unfit(delivery)
        if unfit is not None:
            self._set_aside(unfit, delivery)
        return unfit is None

    # Handling

    async def _handle(self, work: Any, task: asyncio.Task[Any]) -> None:
        batch: Batch[Any] = work
        CURRENT.set(None)  # of this worker, which may have been started from within a handler
        if self._admission.waits:
            batch = Batch([message for message in batch if await self._fetch_payload(message)])
            if not batch:
                return
            self._running[task] = batch
        telemetry, chain = self._telemetry, self._around.chain
        watched = telemetry.tracing or telemetry.metering
        spans: dict[Message[Any], Span] = {}
        if telemetry.tracing:
            spans = {each: telemetry.process_span(each.queue, each.envelope, each.wire_headers) for each in batch}
        began, started = time.perf_counter() if watched else 0.0, len(batch)
        if telemetry.metering:
            telemetry.started(started)
        try:
            if chain is not None:
                batch = await self._let_through(chain, batch, spans, began, task)
            outcomes = list(batch.end(await self._batch_answer(batch, spans, task))) if batch else []
            if chain is not None:
                for message, outcome in outcomes:
                    await _with_hooks(message, spans.get(message), chain.after(message, outcome, self.handler))
        finally:
            if telemetry.metering:
                telemetry.ended(started)
        if self.state is ConsumerState.CLOSED:
            return  # it outlived its stop: all of it comes again
        accepted: list[Delivery] = []
        for message, outcome in outcomes:
            if not watched and (outcome is None or outcome is ACCEPT) and message.listeners is None:
                accepted.append(message.delivery)
            else:
                self._settle_beside(self._decide(outcome, message), message, spans.get(message), began)
        await self._accept_all(accepted)

    async def _let_through(
        self,
        chain: ConsumeChain,
        batch: Batch[Any],
        spans: Mapping[Message[Any], Span],
        began: float,
        task: asyncio.Task[Any],
    ) -> Batch[Any]:
        """The batch without what a `before_handle` refuses, which is settled beside."""
        refusals = [
            (message, await _with_hooks(message, spans.get(message), chain.before(message))) for message in batch
        ]
        if self.state is not ConsumerState.CLOSED:
            for message, refused in refusals:
                if refused is not None:
                    self._settle_beside(self._decide(refused, message), message, spans.get(message), began)
        # From here on the worker has no more in hand than its handler is given.
        self._running[task] = through = Batch([message for message, refused in refusals if refused is None])
        return through

    async def _batch_answer(
        self, batch: Batch[Any], spans: Mapping[Message[Any], Span], task: asyncio.Task[Any]
    ) -> object:
        whole = self._telemetry.batch_span(self.queue, [spans[each] for each in batch]) if spans else None
        answer: object = None
        try:
            answer = await self._answer(batch, IN_BATCH, None, whole, task)
        finally:
            if whole is not None:
                end_batch_span(whole, answer)
        return answer

    async def _accept_all(self, deliveries: Collection[Delivery]) -> None:
        if deliveries:
            self.counters.acked += len(deliveries)
            self._settled += len(deliveries)
            await self.mover.accept_all(deliveries)
            self._gone.difference_update(deliveries)


async def _with_hooks(message: Message[Any], span: Span | None, hooks: Coroutine[Any, Any, T]) -> T:
    """To them it is the message in hand, as where there are no batches."""
    token = CURRENT.set(message)
    try:
        with within_span(span):
            return await hooks
    finally:
        CURRENT.reset(token)


def check_batches(most: int, concurrency: int) -> int:
    """Refuse what makes no batches; gives the prefetch that fills those of all handlers."""
    if most < 1:
        raise ConfigurationError(f"most={most} must be 1 or more")
    if most * concurrency > 65_535:
        raise ConfigurationError(f"most={most} × concurrency={concurrency} must be 65,535 or less: it is the prefetch")
    return most * concurrency
