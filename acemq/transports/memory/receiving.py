"""Who has deliveries out: a link, the pulls made through it, and its subscriptions.

Everything here but `Link._flush` and what the engine calls runs under the broker's lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from acemq.transport import Delivery, LostBy, Sink, SubscriptionPhase, SubscriptionState

if TYPE_CHECKING:
    from acemq.transports.memory.broker import Broker
    from acemq.transports.memory.queues import MemoryQueue, Stored

log: Final = logging.getLogger("acemq.transports.memory")


class Receipt(msgspec.Struct, frozen=True, eq=False):
    message: Stored
    token: int

    def is_good_for(self, link: Link | None) -> bool:
        """Whether the message is still held under this token, through this link."""
        holder = self.message.holder
        return self.message.token == self.token and holder is not None and holder.link is link


class Link:
    """One connection of one transport, from dial to loss; knows how to reach the transport's event loop."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        *,
        lost: Callable[[Link, str], None],
        changed: Callable[[], None],
        restore: Callable[[], None],
    ) -> None:
        self.broker, self.name = broker, name
        self.lost, self.changed, self.restore = lost, changed, restore
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.alive = True
        self.pulled: dict[int, Delivery] = {}
        self.owned: list[MemoryQueue] = []
        """Its exclusive queues."""
        self.subscriptions: list[Subscription] = []
        self._flagged: list[Subscription] = []

    def call(self, what: Callable[[], object]) -> None:
        """On the transport's loop, soon."""
        try:
            if threading.get_ident() == self.thread:
                self.loop.call_soon(what)
            else:
                self.loop.call_soon_threadsafe(what)
        except RuntimeError:
            log.warning(
                "the event loop of %r was closed before its transport; nobody is left there to be told", self.name
            )

    def flag(self, subscription: Subscription) -> None:
        """Hand out once in this turn of the loop what has gathered for it by then."""
        if not self._flagged:
            self.call(self._flush)
        self._flagged.append(subscription)

    def _flush(self) -> None:
        with self.broker.lock:
            flagged, self._flagged = self._flagged, []
            calls = [call for subscription in flagged for call in subscription.gather()]
        for subscription, tell, what in calls:
            if not subscription.closed:
                try:
                    tell(*what)
                except Exception:
                    log.exception("the sink of queue %r has failed; its deliveries stay held", subscription.queue)


class Holder:
    """The pulls of a link, or a subscription: what it has out, by token."""

    def __init__(self, link: Link, lease: float | None, held: dict[int, Delivery]) -> None:
        self.link, self.lease, self.held = link, lease, held

    def hand(self, token: int, delivery: Delivery) -> None:
        self.held[token] = delivery

    def lose(self, token: int, by: LostBy | None) -> bool:
        """It holds this one no longer, for the reason `by` unless it gave it up itself. Whether anybody has seen it."""
        del self.held[token]
        return True


class Subscription(Holder):
    """`acemq.transport.Subscription`."""

    def __init__(
        self, link: Link, queue: str, sink: Sink, *, prefetch: int, exclusive: bool, lease: float | None
    ) -> None:
        super().__init__(link, lease, {})
        self.exclusive, self.prefetch = exclusive, prefetch
        self.home: MemoryQueue | None = None
        self.active = self.paused = self.stopped = self.closed = False
        self.gave_back = False
        """Paused for as long as this link lives, and no longer."""
        self.in_turn = False
        self.waited = False
        """Registered behind an exclusive one."""
        self.unseen: dict[int, Delivery] = {}
        self.generation, self.gap, self.error = 0, False, ""
        self._broker, self._queue, self._sink = link.broker, queue, sink
        self._since = self._broker.clock.now()
        self._contact = self._broker.clock.monotonic()
        self._flagged = False
        self._lost: dict[LostBy, list[Delivery]] = {}
        self._changes: list[SubscriptionState] = []

    @property
    def queue(self) -> str:
        return self._queue

    @property
    def state(self) -> SubscriptionState:
        phase = self._phase()
        if phase in (SubscriptionPhase.ACTIVE, SubscriptionPhase.WAITING):
            self._contact = self._broker.clock.monotonic()  # in one process contact is only ever lost by a switch
        return SubscriptionState(
            phase=phase,
            since=self._since,
            generation=self.generation,
            gap=self.gap,
            held=len(self.held) - len(self.unseen),
            last_contact=self._contact,
            error=self.error or None,
        )

    def _phase(self) -> SubscriptionPhase:
        if self.closed:
            return SubscriptionPhase.CLOSED
        if self.stopped:
            return SubscriptionPhase.STOPPED
        if self.home is None:
            return SubscriptionPhase.RECOVERING
        if not self.active:
            return SubscriptionPhase.WAITING
        return SubscriptionPhase.PAUSED if self.paused else SubscriptionPhase.ACTIVE

    # What the engine calls

    def pause(self) -> None:
        self.paused, self._since = True, self._broker.clock.now()
        self._broker.rest(self)

    async def give_back(self) -> None:
        self.gave_back = True
        self.pause()
        self._broker.give_back(self)

    def resume(self) -> None:
        self.gave_back = False
        self.paused, self._since = False, self._broker.clock.now()
        self._broker.resume(self)

    async def stop(self) -> None:
        self.stopped, self._since = True, self._broker.clock.now()
        self._broker.rest(self)

    async def close(self) -> None:
        self._broker.end(self)

    # What the broker calls

    def activate(self) -> None:
        if not self.active:
            self.active = True
            if self.waited:
                self.changed()
            self.take_turn()

    def take_turn(self) -> None:
        """At the end of the row, if it has credit and may have more."""
        queue = self.home
        if queue is None or self.in_turn or not self.active or len(self.held) >= self.prefetch:
            return
        if self.link.alive and not (self.paused or self.stopped or self.closed):
            self.in_turn = True
            queue.turns.append(self)

    def leave_turn(self) -> None:
        if self.in_turn and self.home is not None:
            self.in_turn = False
            self.home.turns.remove(self)

    def hand(self, token: int, delivery: Delivery) -> None:
        self.held[token] = self.unseen[token] = delivery
        self.flag()

    def lose(self, token: int, by: LostBy | None) -> bool:
        delivery = self.held.pop(token)
        if self.unseen.pop(token, None) is not None:
            return False
        if by is not None:
            self._lost.setdefault(by, []).append(delivery)
            self.flag()
        return True

    def link_lost(self) -> None:
        if self.gave_back:
            self.gave_back = self.paused = False
        self.changed()

    def changed(self) -> None:
        """Something happened to it that it did not ask for."""
        self._since = self._broker.clock.now()
        self._changes.append(self.state)
        self.flag()

    def flag(self) -> None:
        if not self._flagged:
            self._flagged = True
            self.link.flag(self)

    def gather(self) -> list[Call]:
        """What to tell the sink outside the lock. What is lost was delivered in an earlier turn: it is told first."""
        self._flagged = False
        calls: list[Call] = []
        if self._lost:
            calls += [(self, self._sink.lost, (deliveries, by)) for by, deliveries in self._lost.items()]
            self._lost = {}
        if self._changes:
            calls += [(self, self._sink.changed, (state,)) for state in self._changes]
            self._changes = []
        if self.unseen:
            calls.append((self, self._sink.deliver, (tuple(self.unseen.values()),)))
            self.unseen = {}
        return calls


Call: TypeAlias = tuple[Subscription, Callable[..., None], tuple[object, ...]]
