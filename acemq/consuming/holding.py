"""What was fetched and not started, and how long a pause may keep it."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from acemq.clock import Clock, Timer
from acemq.transport import Delivery, Settled, Settlement, Subscription, Verb

log = logging.getLogger("acemq")

Settle = Callable[[Sequence[Settlement]], Awaitable[Sequence[Settled]]]

KEPT = timedelta(seconds=60)
"""For so long a pause keeps what was fetched: a short one costs nothing, a long one withholds nothing from others."""


class Ready(Protocol):
    """What is ready, in the order in which it is to be started: a deque, or the buffer of three lanes."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Delivery]: ...
    def __getitem__(self, index: int, /) -> Delivery: ...
    def popleft(self) -> Delivery: ...
    def appendleft(self, delivery: Delivery, /) -> None: ...
    def extendleft(self, batch: Iterable[Delivery], /) -> None: ...
    def extend(self, batch: Iterable[Delivery], /) -> None: ...
    def clear(self) -> None: ...


class Holding:
    """The deliveries of one subscription that nobody has started yet, and who waits for them, in turn."""

    def __init__(self, queue: str, settle: Settle, clock: Clock, ready: Ready | None = None) -> None:
        self.ready: Ready = deque[Delivery]() if ready is None else ready
        """The same object for ever."""
        self.paused = False
        self._queue, self._settle, self._clock = queue, settle, clock
        self._subscription: Subscription | None = None
        self._timer: Timer | None = None
        self._giving_back: set[asyncio.Task[object]] = set()
        self._turns: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return when there may be something to take; whoever asks looks for himself."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(ValueError):  # woken in the same moment, it is out already
                    self._turns.remove(turn)
            else:
                self.wake(1)  # it was somebody's turn, and now it is another's
            raise

    def wake(self, wanted: int) -> None:
        while wanted and self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                wanted -= 1

    def add(self, batch: Collection[Delivery]) -> None:
        self.ready.extend(batch)
        self.wake(len(batch))
        if self.paused and self._timer is None:
            self._keep()

    def drop(self, gone: Collection[Delivery]) -> None:
        """The broker has taken these back."""
        left = [delivery for delivery in self.ready if delivery not in gone]
        self.ready.clear()
        self.ready.extend(left)

    def pause(self, subscription: Subscription | None) -> None:
        """Nothing new is fetched; what is here goes back, with its attempt, unless it goes on within `KEPT`."""
        if self.paused:
            return
        self.paused, self._subscription = True, subscription
        if subscription is not None:
            subscription.pause()
        self._keep()

    def resume(self) -> None:
        if not self.paused:
            return
        self.end()
        if self._subscription is not None:
            self._subscription.resume()

    def end(self) -> None:
        """Forget the pause, and leave the subscription as it is. Whoever waits looks again."""
        self.wake(len(self._turns))
        self.paused = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep(self) -> None:
        self._timer = self._clock.call_later(KEPT.total_seconds(), self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        if not self.paused or not self.ready:
            return
        batch = [Settlement(delivery, Verb.REQUEUE) for delivery in self.ready]
        self.ready.clear()
        giving_back = asyncio.ensure_future(self._requeue(batch))
        self._giving_back.add(giving_back)
        giving_back.add_done_callback(self._giving_back.discard)

    async def _requeue(self, batch: list[Settlement]) -> None:
        try:
            answers = await self._settle(batch)
        except Exception:
            log.exception("what a paused consumer of %s held could not be given back", self._queue)
            return
        if failed := sum(answer is Settled.FAILED for answer in answers):
            log.warning("%d deliveries of %s could not be given back; the broker still has them", failed, self._queue)
