"""A subscription: a loop that looks when there is room and a reason to, and hands on what it has taken."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from acemq.clock import Clock
from acemq.transport import (
    Delivery,
    LostBy,
    NotConnected,
    QueueMissing,
    Sink,
    SubscriptionPhase,
    SubscriptionState,
    TransportError,
)

from .bell import Bell
from .claim import Taken
from .exclusive import RENEWED_EVERY, Exclusive
from .settle import Receipt

if TYPE_CHECKING:
    from .running import Running

log = logging.getLogger("acemq.sql")

SOONEST = 0.05
"""Seconds between the first two looks of an idle consumer; each further one waits twice as long, up to `poll`."""
MOST = 500
"""Messages of one claim."""
STANDBY = 1.0
"""Seconds between two looks whether the holder of an exclusive queue is still there."""


class Holder:
    """Who has deliveries out: the pulls of a transport, or one subscription."""

    def __init__(self) -> None:
        self.held: dict[int, Delivery] = {}
        """By row."""
        self.leaving = 0
        """Settled here, and not yet in the database: to whoever looks there they are out."""

    def let_go(self, receipt: Receipt) -> None:
        """One is not ours any more."""
        self.held.pop(receipt.seq, None)

    def prolong(self, receipt: Receipt, until: float) -> None:
        """Its lease ends then: later than before, or sooner."""
        receipt.until = until

    def leave(self, receipt: Receipt) -> None:
        """The settlement of one is on its way."""
        self.held.pop(receipt.seq, None)
        self.leaving += 1

    def left(self, count: int) -> None:
        """So many have arrived, or nobody waits for that any more."""
        self.leaving -= count


class Subscription(Holder):
    """`acemq.transport.Subscription`."""

    def __init__(
        self,
        queue: str,
        sink: Sink,
        running: Running,
        clock: Clock,
        *,
        prefetch: int,
        lease: float,
        exclusive: bool,
        ended: Callable[[Subscription], None],
    ) -> None:
        super().__init__()
        self._queue, self._sink, self._running, self._clock = queue, sink, running, clock
        self._prefetch, self.lease = prefetch, lease
        self.bell = Bell()
        self.place: int | None = None
        self.exclusive = Exclusive(running) if exclusive else None
        self._me = "" if self.exclusive is None else self.exclusive.me
        self._ended = ended
        self._phase = SubscriptionPhase.RECOVERING
        self._since: datetime = clock.now()
        self._paused = self._stopped = self._closed = False
        self.generation, self.gap, self._error = 0, False, ""
        self._contact = clock.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._busy = False
        self._between = asyncio.Event()
        self._between.set()
        self._pause = SOONEST
        self._due_at: float | None = None
        self._lost_call: str | None = None
        self._likely = False
        """The last look has found something, and so may the next."""
        self._told: SubscriptionPhase | None = None
        self._lapses_at = float("inf")
        """No lease of what is held ends before. Some end later, and what was settled need not be counted off here."""

    @property
    def queue(self) -> str:
        return self._queue

    @property
    def state(self) -> SubscriptionState:
        return SubscriptionState(
            phase=self._now(),
            since=self._since,
            generation=max(self.generation, 1),
            gap=self.gap,
            held=len(self.held),
            last_contact=self._contact,
            error=self._error or None,
        )

    def _now(self) -> SubscriptionPhase:
        if self._closed:
            return SubscriptionPhase.CLOSED
        if self._stopped:
            return SubscriptionPhase.STOPPED
        if self._phase is SubscriptionPhase.ACTIVE and self._paused:
            return SubscriptionPhase.PAUSED
        return self._phase

    # What the engine calls

    def pause(self) -> None:
        self._paused, self._since = True, self._clock.now()

    def resume(self) -> None:
        self._paused, self._since = False, self._clock.now()
        self.bell.ring()

    async def stop(self) -> None:
        self.halt()
        await self._between.wait()

    async def close(self) -> None:
        if self._closed:
            return
        await self.stop()
        held = list(self.held.values())
        self.forget()
        await self._running.give_back(held)
        await self.release()

    # What the transport calls

    def halt(self) -> None:
        """Take nothing more; whoever waits for that calls `stop`."""
        if not self._stopped:
            self._stopped, self._since = True, self._clock.now()
            self.bell.ring()

    async def release(self) -> None:
        """Let the next one of an exclusive queue have its turn."""
        if self.exclusive is not None and self.place is not None:
            await self.exclusive.release(self.place)

    def forget(self) -> None:
        """It is over; nothing is told and nothing given back."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self.place is not None:
            self._running.unlisten(self.place, self.bell)
        self.held.clear()
        self._ended(self)

    async def begin(self) -> None:
        """Register. Raises where there is no such queue."""
        self.place = await self._running.find(self._queue)
        self._running.listen(self.place, self.bell)
        self.generation = 1
        if self.exclusive is not None:
            await self.exclusive.seek(self.place)
        self._phase = self._registered()
        self._told = self._phase
        self._task = asyncio.create_task(self._keep(), name=f"acemq takes from {self._queue}")

    def let_go(self, receipt: Receipt) -> None:
        super().let_go(receipt)
        self.bell.ring()

    def prolong(self, receipt: Receipt, until: float) -> None:
        super().prolong(receipt, until)
        self._lapses_at = min(self._lapses_at, until)

    def left(self, count: int) -> None:
        super().left(count)
        self.bell.ring()

    def registered(self, *, gap: bool = False) -> None:
        """The topology is known anew, or the link is: see whether the queue is still there."""
        if self._closed:
            return
        try:
            place = self._running.place_of(self._queue)
        except QueueMissing as error:
            self._lose(list(self.held.values()), LostBy.QUEUE)
            self._move_to(None)
            self._error = f"{error}; it is taken up again as soon as it is declared"
            self._become(SubscriptionPhase.RECOVERING)
            return
        if place != self.place or self._phase is SubscriptionPhase.RECOVERING:
            if self.place is not None and place != self.place:
                self._lose(list(self.held.values()), LostBy.QUEUE)
            self.generation += 1
            self.gap = self.gap or gap or (self.place is not None and place != self.place)
            self._move_to(place)
            self._error = ""
            if self.exclusive is not None:
                self.exclusive.forget()
            self._become(self._registered())
        self.bell.ring()

    def _move_to(self, place: int | None) -> None:
        if self.place is not None:
            self._running.unlisten(self.place, self.bell)
        self.place = place
        if place is not None:
            self._running.listen(place, self.bell)

    def disconnected(self) -> None:
        """What is held stays ours: the database knows nothing of links."""
        if not self._closed:
            self._become(SubscriptionPhase.RECOVERING)

    def _registered(self) -> SubscriptionPhase:
        if self.exclusive is not None and not self.exclusive.is_ours:
            return SubscriptionPhase.WAITING
        return SubscriptionPhase.ACTIVE

    def _become(self, phase: SubscriptionPhase) -> None:
        if phase is not self._phase or phase is SubscriptionPhase.RECOVERING:
            self._phase, self._since = phase, self._clock.now()
        if not self._stopped and (phase is not self._told or self._error):
            self._told = phase
            self._tell(self._sink.changed, self.state)

    # The loop

    async def _keep(self) -> None:
        while not self._closed:
            try:
                await self._turn()
            except NotConnected:
                await self._running.link.live(float("inf"))
            except TransportError as error:
                log.warning("taking from %r has failed: %s; tried again", self._queue, error)
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("taking from %r has failed by a mistake of ours; tried again", self._queue)
                await asyncio.sleep(1)

    async def _turn(self) -> None:
        self._likely = self._likely or self.bell.is_rung
        self.bell.silence()
        self._drop_lapsed()
        if self._closed:
            return
        if self.exclusive is not None and self.place is not None and not self._stopped:
            await self._hold_on(self.place)
        room = min(self._prefetch - len(self.held) - self.leaving, MOST)
        if self._phase is not SubscriptionPhase.ACTIVE or self._paused or self._stopped or room <= 0:
            await self.bell.heard(self._until_lapse(self._rest()))
            return
        taken = await self._take(room)
        if taken is None:
            return
        count = len(taken.rows)
        self._due_at = None if taken.due_in is None else self._clock.monotonic() + taken.due_in
        if count or taken.expired:
            self._pause = SOONEST
            if count == room or taken.expired:
                return
        await self.bell.heard(self._until_lapse(self._wait()))
        if not self.bell.is_rung:
            self._pause = min(self._pause * 2, self._running.poll)

    async def _take(self, room: int) -> Taken | None:
        place, fence = self.place, None
        assert place is not None
        if self.exclusive is not None:
            fence = self.exclusive.fence
        self._between.clear()
        began = self._clock.monotonic()
        call = self._running.next_call()
        try:
            taken = await self._running.take(
                place,
                room,
                self.lease,
                call=call,
                lost=self._lost_call,
                fence=fence,
                holder=self._me,
                likely=self._likely,
            )
            self._lost_call, self._likely = None, bool(taken.rows)
            self._contact = self._clock.monotonic()
            if taken.rows:
                deliveries = self._running.deliveries(taken.rows, self._queue, place, self, began + self.lease)
                if self._stopped or self._closed or place != self.place:
                    await self._running.give_back(deliveries)
                else:
                    self._hand(deliveries)
            if taken.unheld:
                self._demote()
                return None
            return taken
        except NotConnected:
            self._lost_call = call if self._lost_call is None else self._lost_call
            raise
        finally:
            self._between.set()

    def _hand(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            self.held[receipt_of(delivery).seq] = delivery
        self._lapses_at = min(self._lapses_at, receipt_of(deliveries[0]).until)
        self._tell(self._sink.deliver, deliveries)

    def _tell(self, call: Callable[..., None], *what: object) -> None:
        try:
            call(*what)
        except Exception:
            log.exception("the sink of queue %r has failed; its deliveries stay held", self._queue)

    def _wait(self) -> float:
        """Seconds until the next look that nothing has asked for."""
        wait = self._running.poll if self._running.is_woken else self._pause
        if self._due_at is not None:
            wait = min(wait, max(self._due_at - self._clock.monotonic(), 0.001))
        return wait

    def _rest(self) -> float | None:
        """The same where there is nothing to look for."""
        if self.exclusive is None or self._stopped:
            return None
        return RENEWED_EVERY if self.exclusive.is_ours else STANDBY

    # Leases

    def _until_lapse(self, wait: float | None) -> float | None:
        if not self.held:
            return wait
        first = self._lapses_at - self._clock.monotonic() + 0.001
        return max(first if wait is None else min(wait, first), 0.001)

    def _drop_lapsed(self) -> None:
        now = self._clock.monotonic()
        if now < self._lapses_at:
            return  # without a look at each of them at every turn
        lapsed = [delivery for delivery in self.held.values() if receipt_of(delivery).until <= now]
        if lapsed:
            self._lose(lapsed, LostBy.LEASE)
        self._lapses_at = min((receipt_of(delivery).until for delivery in self.held.values()), default=float("inf"))

    def _lose(self, lost: list[Delivery], by: LostBy) -> None:
        for delivery in lost:
            receipt = receipt_of(delivery)
            receipt.gone = True
            self.held.pop(receipt.seq, None)
        if lost and not self._closed:
            self._tell(self._sink.lost, lost, by)

    # Exclusive

    async def _hold_on(self, place: int) -> None:
        assert self.exclusive is not None
        await self.exclusive.seek(place)
        if self._phase in (SubscriptionPhase.ACTIVE, SubscriptionPhase.WAITING):
            self._become(self._registered())

    def _demote(self) -> None:
        """Somebody else has taken over while we slept."""
        assert self.exclusive is not None
        self.exclusive.forget()
        self._become(SubscriptionPhase.WAITING)


def receipt_of(delivery: Delivery) -> Receipt:
    receipt = delivery.receipt
    assert isinstance(receipt, Receipt)
    return receipt
