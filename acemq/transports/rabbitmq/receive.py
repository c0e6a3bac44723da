"""Subscriptions: a channel each, registered again by themselves for as long as they live."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from enum import IntEnum

from msgspec.structs import replace

from acemq.clock import Clock
from acemq.errors import AcemqError, ClosedError
from acemq.transport import (
    Delivery,
    LostBy,
    NotConnected,
    QueueMissing,
    Sink,
    SubscriptionPhase,
    SubscriptionState,
    TimedOut,
    TransportError,
)

from .bell import Bell, keep
from .consumer import ConsumeOptions, Consumer, Topology
from .incoming import refusal
from .lane import End
from .link import Link
from .owner import LOOK, REPORT_AFTER, RETRY, STAND_BACK, Owner
from .session import Session

log = logging.getLogger("acemq.rabbitmq")

_SPACED = (1.0, 5.0)
"""Seconds between two registrations on one link, from and to. So one that has lasted is made again at once."""
_MISSING = (5.0, 30.0)
"""Likewise while the queue does not exist."""


class _Wanted(IntEnum):
    """What its owner wants of a subscription. From STOP on there is no way back."""

    DELIVERIES = 0
    PAUSE = 1
    STOP = 2
    CLOSE = 3


class Subscription:
    """Kept registered by a task of its own, so that none waits for another."""

    def __init__(
        self,
        queue: str,
        sink: Sink,
        *,
        prefetch: int,
        name: str,
        options: ConsumeOptions,
        link: Link,
        clock: Clock,
        topology: Topology,
        owner: Owner | None,
        on_closed: Callable[[Subscription], None],
    ) -> None:
        """`owner`: of an exclusive subscription."""
        self.queue, self.prefetch, self.name, self.options, self.topology = queue, prefetch, name, options, topology
        self._sink, self._link, self._clock, self._on_closed = sink, link, clock, on_closed
        self._state = SubscriptionState(phase=SubscriptionPhase.RECOVERING, since=clock.now(), generation=0)
        self._wanted = _Wanted.DELIVERIES
        self._owner = owner
        self._waits_since: float | None = None
        """Since when it owns the queue, and others consume from it nevertheless."""
        self._has_begun = self._gave_back = False
        self._giving_back: asyncio.Task[None] | None = None
        self._consumer: Consumer | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._news = Bell()
        self._not_before = 0.0
        """When, by the monotonic clock, the next registration on the same link may be tried."""
        self._is_missing = self._was_deleted = False

    # What the port promises

    @property
    def state(self) -> SubscriptionState:
        consumer, session = self._consumer, self._link.session
        return replace(
            self._state,
            held=consumer.handed_out if consumer is not None else 0,
            last_contact=session.lane.heard_at if session is not None else None,
        )

    def pause(self) -> None:
        if self._wanted is _Wanted.DELIVERIES:
            self._wanted = _Wanted.PAUSE
            if self._consumer is not None:
                self._consumer.cancel()
                self._consumer.give_back()
            self._now(SubscriptionPhase.PAUSED, soon=True)

    async def give_back(self) -> None:
        if self._giving_back is None and self._wanted <= _Wanted.PAUSE:
            self._wanted, self._gave_back = _Wanted.PAUSE, True
            self._now(SubscriptionPhase.PAUSED, soon=True)
            self._giving_back = self._link.start(self._reopen())
        if self._giving_back is not None:
            await asyncio.shield(self._giving_back)

    async def _reopen(self) -> None:
        """Close the channel, for nothing else gives back in place, and open another, on which the loss shows."""
        before, self._consumer = self._consumer, None
        try:
            if self._owner is not None:
                self._owner.look_again()
            if before is not None:
                await before.close()
                idle = Consumer(before.session, self)
                await idle.prepare()
                if idle.is_usable and self._wanted is not _Wanted.CLOSE:
                    self._consumer = idle
                else:
                    await idle.close()
        except (TransportError, TimeoutError):
            pass  # the link is going, or gone
        finally:
            self._giving_back = None
            if self._consumer is None and self._wants_again():
                self._now(SubscriptionPhase.RECOVERING)
            self._news.ring()

    def _wants_again(self) -> bool:
        """Whether it wants deliveries, now that nothing it has given back keeps it from them."""
        if self._gave_back and self._wanted is _Wanted.PAUSE:
            self._wanted = _Wanted.DELIVERIES
        self._gave_back = False
        return self._wanted is _Wanted.DELIVERIES

    def resume(self) -> None:
        if self._wanted is _Wanted.PAUSE:
            self._wanted, self._gave_back = _Wanted.DELIVERIES, False
            self._now(SubscriptionPhase.RECOVERING, soon=True)
            self.nudge()

    async def stop(self) -> None:
        if self._wanted < _Wanted.STOP:
            self._wanted = _Wanted.STOP
            # What is on its way to a cancelled consumer a quorum queue puts at its end (measured with 3.10.8). Where
            # order may matter, it comes, is handed to nobody, and keeps its place with the end of the channel.
            if self._consumer is not None and self._owner is None:
                self._consumer.cancel()
            self._now(SubscriptionPhase.STOPPED)
        if self._keeping is not None and self._keeping is not asyncio.current_task():
            self._keeping.cancel()
            await asyncio.wait({self._keeping})

    async def close(self) -> None:
        await self.stop()
        consumer = self.forget()
        if consumer is not None:
            await consumer.close()
        if self._owner is not None:
            await self._link.finish(self._release(self._owner))

    async def _release(self, owner: Owner) -> None:
        try:
            await owner.release()
        except AcemqError as error:
            log.warning("%r: %s is left to the end of the connection: %s", self.queue, owner.name, error)

    def forget(self) -> Consumer | None:
        """The end, but for the channel: settling what is held is in vain from here on."""
        self._now(SubscriptionPhase.CLOSED)
        self._wanted = _Wanted.CLOSE
        self._on_closed(self)
        if self._keeping is not None:
            self._keeping.cancel()
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.flush()
            consumer.lose()
        return consumer

    # Registering

    async def open(self, within: float) -> None:
        """Register, or raise why it cannot be done."""
        try:
            try:
                async with asyncio.timeout(within):
                    session = await self._link.live()
            except TimeoutError:
                raise NotConnected(f"no link to subscribe to {self.queue!r} on: {self._link.last_error}") from None
            if self._owner is not None:
                await self._owner.others(session)
            if await self._comes_first(session):
                await self._register(session)
            else:
                self._now(SubscriptionPhase.WAITING)
            if self._wanted >= _Wanted.STOP:
                raise ClosedError(f"the subscription to {self.queue!r} was closed while it was opened")
        except BaseException:
            self.forget()
            if self._owner is not None:
                self._link.start(self._release(self._owner))
            raise
        self._keeping = keep(self._keep(), self.name)

    def begin(self) -> None:
        """Deliver, from the next turn on: the first delivery comes when whoever subscribes holds the subscription."""
        self._has_begun = True
        if self._consumer is not None:
            asyncio.get_running_loop().call_soon(self._consumer.hand_out)

    def abandon(self) -> None:
        """Nobody wants it any more, be it registered or about to be."""
        self._link.start(self.close())

    async def _register(self, session: Session, *, gap: bool = False) -> None:
        consumer = self._consumer
        if consumer is None or not consumer.is_usable:
            consumer = Consumer(session, self)
        try:
            await consumer.register()
            if not consumer.is_usable:
                raise TransportError(f"closed at once: {consumer.end or 'cancelled by the broker'}")
        except BaseException as error:
            if consumer is self._consumer:
                consumer.flush()
                self._tell_lost(consumer.lose(), LostBy.CHANNEL)
                self._consumer = None
            await consumer.close()
            if isinstance(error, TimeoutError):
                raise TimedOut(f"no answer to the subscription to {self.queue!r}") from None
            if isinstance(error, TransportError):
                raise refusal(self.queue, error) from None
            raise
        if self._wanted >= _Wanted.STOP:  # said meanwhile, like the pause below
            await consumer.close()
            return
        self._consumer, self._is_missing, self._was_deleted = consumer, False, False
        self._state = replace(self._state, generation=self._state.generation + 1, gap=gap)
        if self._wanted is _Wanted.PAUSE:
            consumer.cancel()
        else:
            self._now(SubscriptionPhase.ACTIVE)
            consumer.hand_out()

    async def _keep(self) -> None:
        """Register again whenever the registration is gone and is wanted: on a new link at once, else with pauses."""
        tried: Session | None = None
        failures = 0
        while True:
            consumer = self._consumer
            is_served = consumer is not None and consumer.is_registered and consumer.is_usable
            if self.is_paused or self._giving_back is not None or is_served:
                await self._news.heard()
                continue
            session = await self._link.live()
            if not await self._may_register(session):
                continue
            pause = self._not_before - self._clock.monotonic()
            if session is tried and pause > 0:
                await self._news.heard(within=pause)
                continue
            failures = failures + 1 if session is tried else 0
            self._not_before = self._clock.monotonic() + self._spacing(failures)
            tried = session
            try:
                await self._link.finish(self._register_or_restore(session))
            except AcemqError as error:
                self._failed(error, session)
            else:
                log.info("%r: subscribed again as %r", self.queue, self.name)

    async def _comes_first(self, session: Session) -> bool:
        """Whether nobody else may consume, or none has to be kept out."""
        owner = self._owner
        if owner is None or owner.may_consume_on(session):
            return True
        return (owner.owns_on(session) or await owner.take(session)) and not await owner.others(session)

    async def _may_register(self, session: Session) -> bool:
        """False when it is worth asking again: it stands by until then."""
        owner = self._owner
        if owner is None or owner.may_consume_on(session):
            return True
        if owner.has_lost:
            # Whoever stands by is sure to work, and we have just shown that we may not.
            self._now(SubscriptionPhase.WAITING)
            await self._news.heard(within=random.uniform(*STAND_BACK))
            owner.stand_back()
            return False
        try:
            comes_first = await self._link.finish(self._comes_first(session))
        except QueueMissing:
            return True  # registering has an answer to that
        except AcemqError as error:
            self._failed(error, session)
            await self._news.heard(within=random.uniform(*_SPACED))
            return False
        if comes_first:
            self._waits_since = None
            return True
        self._now(SubscriptionPhase.WAITING)
        if owner.owns_on(session):
            self._say_others()
            await self._news.heard(within=LOOK)
        else:
            self._waits_since = None
            await self._news.heard(within=random.uniform(*RETRY))
        return False

    def _say_others(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._waits_since is None:
            self._waits_since = now
        if now - self._waits_since >= REPORT_AFTER and self._state.error is None:
            text = f"queue {self.queue!r} has other consumers, which keep its exclusive one waiting; stop them"
            log.warning("%r: %s", self.name, text)
            self._state = replace(self._state, error=text)
            self._tell_changed(self.state)

    async def _register_or_restore(self, session: Session) -> None:
        before = self._consumer
        if before is not None and before.was_cancelled:
            await before.close()
        try:
            await self._register(session)
        except QueueMissing:
            if before is not None and before.session is session:
                self._was_deleted = True  # under our hands, and not by a server that lost its memory
            if not await self.topology.restore(session, self.queue, was_deleted=self._was_deleted):
                raise
            await self._register(session, gap=True)

    def _spacing(self, failures: int) -> float:
        low, high = _MISSING if self._is_missing else _SPACED
        return random.uniform(low, min(high, low * 2 ** min(failures + 1, 10)))

    def _failed(self, error: AcemqError, session: Session) -> None:
        was_said = self._state.error == str(error)
        if isinstance(error, QueueMissing) and not self._is_missing:
            self._is_missing = True
            self._not_before = self._clock.monotonic() + self._spacing(0)
        self._state = replace(self._state, error=str(error))
        self._now(SubscriptionPhase.RECOVERING)
        if session.is_alive and not was_said:
            log.warning("%r: cannot subscribe: %s; trying again", self.queue, error)

    def nudge(self) -> None:
        """There is reason to try at once."""
        self._not_before = 0.0
        self._news.ring()

    # From the channel

    @property
    def is_paused(self) -> bool:
        # Not while it gives back: what arrives then keeps its place only by the end of its channel.
        return self._wanted is _Wanted.PAUSE and self._giving_back is None

    def room(self, consumer: Consumer) -> int:
        """How many deliveries may be handed out now."""
        if self._state.phase is not SubscriptionPhase.ACTIVE or not self._has_begun:
            return 0
        return self.prefetch - consumer.handed_out if consumer is self._consumer and consumer.is_usable else 0

    def deliver(self, batch: Sequence[Delivery]) -> None:
        try:
            self._sink.deliver(batch)
        except Exception:
            log.exception("%r: deliveries could not be taken over; they stay unsettled", self.queue)

    def lost_queue(self, consumer: Consumer) -> None:
        if consumer is self._consumer and self._wanted < _Wanted.STOP:
            log.warning("%r: the broker has ended the subscription: the queue was deleted or moved", self.queue)
            consumer.flush()
            self._lost(consumer, LostBy.QUEUE, f"queue {self.queue!r} was deleted or moved")

    def lost_channel(self, consumer: Consumer, end: End) -> None:
        if consumer is not self._consumer or consumer.was_cancelled:
            return
        if end.by is LostBy.CHANNEL and self._wanted < _Wanted.STOP:
            log.warning("%r: the channel of %r was closed: %s; subscribing again", self.queue, self.name, end)
        self._lost(consumer, end.by, f"queue {self.queue!r}: {end}")

    def _lost(self, consumer: Consumer, by: LostBy, error: str) -> None:
        self._tell_lost(consumer.lose(), by)
        if self._wants_again():
            self._state = replace(self._state, error=error)
            self._now(SubscriptionPhase.RECOVERING)
        self._news.ring()

    def _tell_lost(self, lost: Sequence[Delivery], by: LostBy) -> None:
        if lost:
            try:
                self._sink.lost(lost, by)
            except Exception:
                log.exception("%r: the loss of %d deliveries could not be told", self.queue, len(lost))

    def _now(self, phase: SubscriptionPhase, *, soon: bool = False) -> None:
        """`soon`: told in a turn of its own, since `pause` and `resume` may be called from within the sink."""
        if phase is self._state.phase or self._wanted is _Wanted.CLOSE:
            return
        error = self._state.error if phase is SubscriptionPhase.RECOVERING else None
        self._state = replace(self._state, phase=phase, since=self._clock.now(), error=error)
        if not self._state.generation and self._keeping is None:
            return  # it never came to be
        if soon:
            asyncio.get_running_loop().call_soon(self._tell_changed, self.state)
        else:
            self._tell_changed(self.state)

    def _tell_changed(self, state: SubscriptionState) -> None:
        if self._wanted is _Wanted.CLOSE:
            return
        try:
            self._sink.changed(state)
        except Exception:
            log.exception("%r: the change to %s could not be told", self.queue, state.phase)
