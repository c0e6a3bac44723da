"""One partition: a message at a time, tried again in its own place, held where it must not be passed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Any, Literal, Self

import msgspec
from opentelemetry.trace import Span

from acemq.ack import ACCEPT
from acemq.clock import Timer, sleep
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.consuming.settling import Case, Decision, decide, set_aside
from acemq.errors import ClosedError, DecodeError
from acemq.interceptors import tell_listeners
from acemq.message import Handled, Message, envelope_of
from acemq.stopping import Drained
from acemq.telemetry import OWNER_CHANGED, PARTITION_HALTED, Diagnostic, end_span, within_span
from acemq.transport import (
    Delivery,
    GivesBack,
    LostBy,
    Settlement,
    SubscriptionPhase,
    SubscriptionState,
    Verb,
)

log = logging.getLogger("acemq")

AGAIN = timedelta(seconds=1)
"""After `Ack.release()`, and `Ack.in_progress()` of no delay: an in-place retry without a pause would spin."""


class PartitionFailure(Enum):
    """What a message does to its partition when its handler fails."""

    STOP = auto()
    """It is tried so often, then the partition is halted until somebody decides."""
    RETRY_IN_PLACE = auto()
    """It is tried for ever, and nothing passes it."""
    SKIP = auto()
    """It is tried so often, then it goes to the dead letters and the next one is handled."""


class Halt(msgspec.Struct, frozen=True):
    """Where a partition stands still, and why."""

    partition: int
    message_id: str
    key: str | None
    """As `keyed_by` reads it; `None` where that cannot be read from the payload."""
    error: str
    attempts: int
    """By this process, since it was last resumed; 0 where it was not tried here."""
    since: datetime


class OrderedCounters(msgspec.Struct):
    """What this process has done with one ordered queue."""

    sent: int = 0
    handled: int = 0
    retried: int = 0
    halted: int = 0
    resumed: int = 0
    skipped: int = 0
    """To the dead letters, by `SKIP` or by `skip()`."""
    parked: int = 0


class Part(msgspec.Struct, frozen=True):
    """What a partition's consumer is told of the ordered queue that it serves."""

    name: str
    number: int
    failure: PartitionFailure
    hold: timedelta
    key_of: Callable[[Any], str | None]
    counted: OrderedCounters


class _Stand:
    """The first message of a partition has failed, and the partition stands at it until it is due."""

    def __init__(self, message_id: str) -> None:
        self.message_id = message_id
        self.tries = 0
        self.is_due = False
        """From then on until it has failed once more, however often it is delivered."""
        self.timer: Timer | None = None
        self.halt: Halt | None = None
        self.decision: Decision | None = None
        """Of a halt: what takes the message away, if that is what somebody decides."""
        self.is_moved = False
        """It lies in the dead letters already, and the halt is for whoever comes behind it."""
        self.skipping: asyncio.Future[str] | None = None


class PartitionConsumer(Consumer):
    """The consumer of one partition, alone in the world while it owns it.

    What it has in hand is settled, or waits here, before the next one is begun. Nothing is requeued: that might put a
    message behind others, and only the end of its channel puts it back in its place.
    """

    halts = True

    def __init__(self, queue: str, *, part: Part, **made: Any) -> None:
        super().__init__(queue, **made)
        self.part = part
        self.owns = False
        """Whether it is the one that is served."""
        self._is_owner_said = False
        self._stand: _Stand | None = None
        self._turn: asyncio.Future[bool] | None = None
        """Of the message in hand while it waits: True when it is due, False when it is taken away."""
        self._hold_is_over = self._is_away = False

    @property
    def halt(self) -> Halt | None:
        stand = self._stand
        if stand is None or not self.owns:
            return None
        # Whose link was lost shows again once its message is back: another process may have decided about it.
        is_here = self._turn is not None or self._is_away or stand.is_moved
        return stand.halt if is_here else None

    @property
    def halted(self) -> str | None:
        halt = self.halt
        return None if halt is None else said(self.part.name, halt)

    @property
    def in_flight(self) -> int:
        return super().in_flight - (self._turn is not None)

    @property
    def held(self) -> int:
        return super().held + (self._turn is not None)

    async def start(self) -> Self:
        await super().start()
        if self.subscription is not None:
            self._note_owner(self.subscription.phase)
        return self

    # What an operator decides

    def try_again(self) -> bool:
        """From the first attempt. False: it is not halted."""
        stand = self._stand
        if stand is None or stand.halt is None or stand.is_due:
            return False
        self.part.counted.resumed += 1
        stand.tries, stand.halt = 0, None
        self._go(stand)
        return True

    async def skip(self) -> str | None:
        """Return the id of the message once it is in the dead letters. `None`: it is not halted."""
        stand = self._stand
        if stand is None or stand.halt is None or stand.is_due:
            return None
        if stand.is_moved:
            self.part.counted.skipped += 1
            stand.halt = None
            self._go(stand)
            return stand.message_id
        stand.halt, stand.skipping = None, asyncio.get_running_loop().create_future()
        self._go(stand)
        return await asyncio.shield(stand.skipping)

    # The sink

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        super().lost(batch, by)
        if any(delivery in self._gone for delivery in self._in_hand()):
            self._take_away()

    def changed(self, state: SubscriptionState, /) -> None:
        super().changed(state)
        self._note_owner(state.phase)

    def _note_owner(self, phase: SubscriptionPhase) -> None:
        self.owns = phase in (SubscriptionPhase.ACTIVE, SubscriptionPhase.PAUSED)
        if self.owns == self._is_owner_said or not (self.owns or phase is SubscriptionPhase.WAITING):
            return
        self._is_owner_said = self.owns
        where = f"partition {self.part.number} of {self.part.name!r}"
        text = f"{where} is consumed here{'' if self.owns else ' no longer; this process stands by'}"
        self._report(Diagnostic(OWNER_CHANGED, "info", text, self.queue))

    # Handling

    async def _handle(self, work: Any, task: asyncio.Task[Any]) -> None:
        delivery: Delivery = work
        self._is_away = False
        try:
            if await self._is_first(delivery):
                while await self._stays(delivery, task):
                    assert self._stand is not None
                    if not await self._is_due(self._stand, delivery):
                        break
        except Exception:
            # A fault of ours must not let the next one pass: this one comes again, and before it.
            log.exception("handling a delivery of %s failed inside the library", self.queue)
            await self._fetch_again(delivery)
        finally:
            self._gone.discard(delivery)

    async def _is_first(self, delivery: Delivery) -> bool:
        """Whether it is this one's turn, now that it has come to what the partition stands at, if it stands."""
        stand = self._stand
        if stand is None:
            return True
        if not stand.is_moved and stand.message_id != envelope_of(delivery, self._clock).id:
            self._leave()  # it was decided about elsewhere, while another process had the partition
            return True
        if not await self._is_due(stand, delivery):
            return False
        if stand.is_moved:
            self._leave()
        return True

    async def _stays(self, delivery: Delivery, task: asyncio.Task[Any]) -> bool:
        """Try it once. True when it has failed and nothing may pass it."""
        admission, stand = self._admission, self._stand
        admitted = admission.examine(delivery)
        failure = await admission.fill(admitted) if admission.waits and isinstance(admitted, Message) else None
        if isinstance(failure, DecodeError):
            admitted = set_aside(Case.UNDECODABLE, failure)
        if isinstance(admitted, Decision):
            if await self._carry_out(admitted, Message(None, delivery, self._clock)):
                self._unfit_gone(admitted, delivery)
            return False
        message = admitted
        if stand is not None and stand.skipping is not None and stand.decision is not None:
            if await self._carry_out(stand.decision, message):
                self._skipped()
            return False
        # A store that cannot be reached fails the message as its handler would.
        span, began = self._watch(message) if failure is None else (None, time.perf_counter())
        if self.claims is not None and failure is None:
            decision = await self._decide_once(self.claims, message, span, task)
            if decision is None:
                return False
        else:
            answer = await self._ask(message, span, task) if failure is None else failure
            if self.state is ConsumerState.CLOSED:
                return False
            if not began and (answer is None or answer is ACCEPT) and message.listeners is None:
                await self._accept(delivery)
                self._leave()
                return False
            decision = self._decide(answer, message)
        fate = _FATES.get(decision.row.case, "away")
        skips = fate == "halt" and self.part.failure is PartitionFailure.SKIP
        if fate == "away" or skips or delivery in self._gone:
            if await self._carry_out(decision, message, span, began):
                self._skipped() if skips else self._leave()
            return False
        self._stand_at(message, decision)
        self._tell(message, decision, span, began)
        return True

    def _decide(self, answer: object, message: Message[Any]) -> Decision:
        # Tries are counted here and not in the message, which stays as it is and where it is.
        tries = self._stand.tries if self._stand is not None else 0
        return decide(answer, tries + 1, self._policy, None, self.handler)

    async def _carry_out(
        self, decision: Decision, message: Message[Any], span: Span | None = None, began: float = 0.0
    ) -> bool:
        """Return when it is done, so that nothing is begun before. False: the message comes again, and first."""
        move = self._settle_beside(decision, message, span or self._span_of(message), began or time.perf_counter())
        await asyncio.wait({move})
        if move.cancelled():
            return False
        if move.exception() is not None:
            await self._fetch_again(message.delivery)
            return False
        return move.result()

    # Standing at a message

    def _stand_at(self, message: Message[Any], decision: Decision) -> None:
        stand = self._stand
        if stand is None:
            stand = self._stand = _Stand(message.id)
        stand.is_due = False
        case = decision.row.case
        if case is Case.RETRY or _FATES[case] == "halt":
            stand.tries += 1
        if _FATES[case] == "halt":
            self._halt(stand, decision, self._key_of(message.payload))
            return
        delay = decision.delay if case is Case.RETRY else decision.delay or AGAIN
        if delay:
            stand.timer = self._clock.call_later(delay.total_seconds(), lambda: self._go(stand))
        else:
            stand.is_due = True

    def _halt(self, stand: _Stand, decision: Decision, key: str | None) -> None:
        stand.decision = decision
        error = decision.reason or "no reason given"
        halt = stand.halt = Halt(self.part.number, stand.message_id, key, error, stand.tries, self._clock.now())
        self.part.counted.halted += 1
        self._report(
            Diagnostic(
                PARTITION_HALTED,
                "error",
                said(self.part.name, halt),
                self.queue,
                message_id=halt.message_id,
                attempt=halt.attempts,
                failure=decision.error,
            )
        )

    def _unfit_gone(self, decision: Decision, delivery: Delivery) -> None:
        """What the handler was not given is away. Whatever kills its process stops its partition nevertheless."""
        is_asked_for = self._stand is not None and self._stand.skipping is not None
        if decision.row.case is not Case.DELIVERY_LIMIT or is_asked_for or self.part.failure is PartitionFailure.SKIP:
            self._skipped() if decision.row.case is Case.DELIVERY_LIMIT else self._leave()
            return
        self._leave()
        stand = self._stand = _Stand(envelope_of(delivery, self._clock).id)
        stand.is_moved = True
        self._halt(stand, decision, None)

    def _key_of(self, payload: Any) -> str | None:
        try:
            return self.part.key_of(payload)
        except Exception:  # what it may raise was shown where the message was sent
            return None

    async def _is_due(self, stand: _Stand, delivery: Delivery) -> bool:
        """Wait for it. False: the message was taken away meanwhile, and comes again."""
        if stand.is_due:
            await asyncio.sleep(0)  # without a delay, nobody else might have a turn
        elif self.state is not ConsumerState.DRAINING and delivery not in self._gone:
            turn = self._turn = asyncio.get_running_loop().create_future()
            can_give_back = stand.halt is not None and isinstance(self._subscription, GivesBack)
            limit = self._clock.call_later(self.part.hold.total_seconds(), self._hold_over) if can_give_back else None
            try:
                await turn
            finally:
                self._turn = None
                if limit is not None:
                    limit.cancel()
            if self._hold_is_over:
                self._hold_is_over = False
                await self._give_back(stand)
                return False
        if self.state is ConsumerState.DRAINING:
            self._given_back += 1
            return False
        return stand.is_due and delivery not in self._gone

    def _hold_over(self) -> None:
        self._hold_is_over = True
        self._take_away()

    def _take_away(self) -> None:
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(False)

    async def _give_back(self, stand: _Stand) -> None:
        """It has been held long enough. The partition stays ours, and nothing is fetched until it is due."""
        subscription = self._subscription
        assert isinstance(subscription, GivesBack)
        self._ready.clear()
        self._is_away = True
        await subscription.give_back()
        if stand.is_due:
            self._fetch()

    async def _fetch_again(self, delivery: Delivery) -> None:
        if self._comes_by_itself(delivery):
            return
        await sleep(self._clock, AGAIN.total_seconds())
        if self._comes_by_itself(delivery):
            return
        if isinstance(self._subscription, GivesBack):
            self._ready.clear()
            await self._subscription.give_back()
            self._fetch()
        else:  # whose requeue keeps the place
            await self._transport.settle((Settlement(delivery, Verb.REQUEUE),))

    def _comes_by_itself(self, delivery: Delivery) -> bool:
        """It was taken back, or the end of our channel puts it in its place."""
        return delivery in self._gone or self.state in (ConsumerState.DRAINING, ConsumerState.CLOSED)

    def _come_again(self, delivery: Delivery) -> None:
        """Nothing beside: whoever has it in hand waits for its end, and then sees to it in its place."""

    def _fetch(self) -> None:
        assert self._subscription is not None
        self._is_away = False
        self._suspects.begin_anew()
        if not self._holding.paused:  # or its resume() fetches
            self._subscription.resume()

    def _go(self, stand: _Stand) -> None:
        stand.is_due = True
        if stand.timer is not None:
            stand.timer.cancel()
            stand.timer = None
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(True)
        elif self._is_away:
            self._fetch()

    def _skipped(self) -> None:
        """It is in the dead letters, and the next one may come."""
        self.part.counted.skipped += 1
        if self._stand is not None and self._stand.skipping is not None:
            self._stand.skipping.set_result(self._stand.message_id)
        self._leave()

    def _leave(self) -> None:
        """The partition stands at nothing any more."""
        stand, self._stand = self._stand, None
        if stand is None:
            return
        if stand.timer is not None:
            stand.timer.cancel()
        if stand.skipping is not None and not stand.skipping.done():
            text = f"message {stand.message_id} of {self.queue} was let go before it was skipped; it is where it was"
            stand.skipping.set_exception(ClosedError(text))
            stand.skipping.exception()  # read, should nobody wait for it

    def _tell(self, message: Message[Any], decision: Decision, span: Span | None, began: float) -> None:
        """Of a try that has not moved the message."""
        is_halt = _FATES[decision.row.case] == "halt"
        outcome = "retried" if is_halt else decision.row.counted
        handled = Handled(outcome, None, decision.reason, message.attempt, decision.delay, landed=True)
        if not is_halt:
            with within_span(span):
                self.mover.tell(decision, handled, message.delivery, message.envelope)
        if self._telemetry.metering:
            took = time.perf_counter() - began
            self._telemetry.consumed(self.queue, message.type, outcome, message.attempt, took)
        if span is not None:
            end_span(span, outcome, decision.error if is_halt else None)
        tell_listeners(message, handled, self._report)

    # Stopping

    def _put_back(self) -> None:
        super()._put_back()
        self._take_away()

    async def _drain(self, end: float) -> Drained:
        try:
            return await super()._drain(end)
        finally:
            self.owns = False
            self._leave()


_FATES: dict[Case, Literal["again", "halt"]] = {
    Case.RETRY: "again",
    Case.IN_PROGRESS: "again",
    Case.RELEASED: "again",
    Case.EXHAUSTED: "halt",
    Case.FATAL: "halt",
    Case.BAD_ANSWER: "halt",
    Case.REFUSED: "halt",
}
"""Of what stays in its place. Everything else goes where it would go without an order, and the next one is handled."""


def said(name: str, halt: Halt) -> str:
    """For a person, with what to do."""
    key = "" if halt.key is None else f" (key {halt.key!r})"
    return (
        f"partition {halt.partition} of {name!r} is halted by message {halt.message_id}{key}: {halt.error}. "
        f"Go on with resume({halt.partition}), or without it with skip({halt.partition})"
    )
