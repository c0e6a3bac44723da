"""Held deliveries, pushed: what `pull` gives one at a time, as an async iterator."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, Self, TypeVar

from acemq.codec import Reader
from acemq.consuming.consumer import ConsumerState, state_in
from acemq.consuming.early import Early
from acemq.consuming.expiring import Expired
from acemq.consuming.holding import Holding
from acemq.consuming.lanes import LaneBuffer, Lanes
from acemq.consuming.moving import Mover
from acemq.consuming.pulling import Pulled
from acemq.errors import ClosedError
from acemq.public_errors import made_public
from acemq.stopping import CLOSING, Drained, StopOnce, until
from acemq.telemetry import CONSUMER_LOST, Diagnostic
from acemq.transport import Delivery, LostBy, Subscription, SubscriptionState

T_co = TypeVar("T_co", covariant=True)


class Receiving(AsyncIterator[Pulled[T_co]], Generic[T_co]):
    """Messages of a queue in its order, each settled by hand, in any order and from any task.

    Made by `Connection.receive`. At most `prefetch` of them are unsettled. The iteration ends when it is closed; what
    is unsettled then goes back with its attempt, and settling it later gives `False`.
    """

    halts = False
    """Nor is it ever `halted`."""
    halted: str | None = None

    def __init__(
        self,
        queue: str,
        *,
        name: str,
        reader: Reader[T_co],
        mover: Mover,
        prefetch: int,
        drain_timeout: Callable[[], timedelta],
        ended: Callable[[Receiving[Any]], None],
        lanes: Lanes | None = None,
    ) -> None:
        self.queue, self.name = queue, name
        self.queues = (queue,) if lanes is None else lanes.highest_first
        """Those that it takes from."""
        self.last_error: str | None = None
        self.counters, self.mover = mover.counters, mover
        self.fetched_at = mover.clock.monotonic()
        self._reader, self._prefetch = reader, prefetch
        self._drain_timeout, self._ended = drain_timeout, ended
        self._lanes = lanes
        self._holding = Holding(queue, mover.settle, mover.clock, None if lanes is None else LaneBuffer(lanes))
        self._expired = Expired(mover)
        self._early = Early.of(mover, queue)
        self._subscription: Subscription | None = None
        self._stop = StopOnce()

    @property
    def state(self) -> ConsumerState:
        if self._stop.is_asked:
            return ConsumerState.CLOSED if self._stop.is_over else ConsumerState.DRAINING
        if self._subscription is None:
            return ConsumerState.STARTING
        return ConsumerState.PAUSED if self._holding.paused else state_in(self._subscription.state.phase)

    @property
    def subscription(self) -> SubscriptionState | None:
        """The broker's side of it; `None` before it has started."""
        return None if self._subscription is None else self._subscription.state

    @property
    def in_flight(self) -> int:
        """Handed out and not settled yet."""
        return 0 if self._subscription is None else max(self._subscription.state.held - self.held, 0)

    @property
    def held(self) -> int:
        """Fetched, and not handed out yet."""
        return len(self._holding.ready)

    async def start(self) -> Self:
        """Return when the broker has accepted the subscription. `ClosedError`: it was closed meanwhile."""
        with made_public():
            subscription = await self._subscribe()
        if self._stop.is_asked:
            self._holding.ready.clear()
            await until(time.monotonic() + CLOSING, subscription.close())
            raise ClosedError(f"{self.name} was closed while it started")
        self._subscription = subscription
        return self

    async def _subscribe(self) -> Subscription:
        transport, options = self.mover.transport, {"name": self.name}
        if self._lanes is not None:
            return await self._lanes.subscribe(transport, self, options)
        return await transport.subscribe(self.queue, self, prefetch=self._prefetch, options=options)

    def pause(self) -> None:
        """Hand out nothing more, and fetch nothing more.

        What was fetched is kept for 60 s and then given back with its attempt. What was handed out is settled as ever.
        """
        if not self._stop.is_asked:
            self._holding.pause(self._subscription)

    def resume(self) -> None:
        """Go on where it was paused."""
        if not self._stop.is_asked:
            self.fetched_at = self.mover.clock.monotonic()
            self._holding.resume()

    # The iterator

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Pulled[T_co]:
        ready = self._holding.ready
        while not self._stop.is_asked:
            if ready and not self._holding.paused:
                delivery = ready.popleft()
                if self._expired.takes(delivery):
                    continue
                pulled = Pulled(delivery, self._reader, self.mover, self.mover.clock)
                if self._reader.is_async:
                    await self._fetch(pulled)
                return pulled
            await self._holding.turn()
        raise StopAsyncIteration

    async def _fetch(self, pulled: Pulled[T_co]) -> None:
        try:
            await pulled.fetch()
        except BaseException:
            # It was not handed out: it is the next one's, in its place.
            self._holding.ready.appendleft(pulled.delivery)
            self._holding.wake(1)
            raise

    # The sink: plain calls by the transport

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.fetched_at = self.mover.clock.monotonic()
        if self._early is not None:
            batch = self._early.sift(batch)
        if self.mover.leases is not None:
            self.mover.leases.keep(batch, self.lost)
        self._holding.add(batch)

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        if self.mover.leases is not None:
            self.mover.leases.lost(batch, by)
        self._holding.drop(set(batch))

    def changed(self, state: SubscriptionState, /) -> None:
        if state.error is not None and state.error != self.last_error:
            self.mover.report(Diagnostic(CONSUMER_LOST, "warning", state.error, self.queue))
        self.last_error = state.error

    # Stopping

    async def close(self) -> Drained:
        """The same as `drain()`."""
        return await self.drain()

    async def drain(self, timeout: timedelta | None = None) -> Drained:
        """Stop fetching, let copies under way land, give back what is unsettled. Idempotent, bounded by `timeout`."""
        budget = self._drain_timeout() if timeout is None else timeout
        return await self._stop.once(lambda: self._drain(time.monotonic() + budget.total_seconds()))

    async def _drain(self, end: float) -> Drained:
        subscription, given_back, finished = self._subscription, 0, True
        self._holding.end()
        try:
            self.mover.stop_waiting()
            if subscription is not None:
                await until(end, subscription.stop())
            finished = await until(end, self.mover.at_rest())
            if self._early is not None:
                await until(end, self._early.at_rest())
        finally:
            self._holding.ready.clear()
            if self.mover.leases is not None:
                self.mover.leases.let_go_of(self.lost)
            if subscription is not None:
                given_back = subscription.state.held
                await until(max(end, time.monotonic()) + CLOSING, subscription.close())
            self._ended(self)
        return Drained(finished=finished, given_back=given_back)
