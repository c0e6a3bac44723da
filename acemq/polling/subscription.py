"""A subscription of a broker that never speaks first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from acemq.clock import SYSTEM
from acemq.transport import Delivery, Sink, SubscriptionPhase, SubscriptionState

log = logging.getLogger("acemq.polling")

SLOWEST = 30.0
"""Seconds at most between two tries of what has failed."""


class Taker(Protocol):
    """Of its transport, what a subscription needs."""

    poll: timedelta
    endpoint: str

    async def taken(self, queue: str, most: int, holder: set[Delivery]) -> Sequence[Delivery]: ...
    def give_back(self, deliveries: Iterable[Delivery]) -> asyncio.Task[None]: ...
    def forget(self, subscription: PollingSubscription) -> None: ...


class PollingSubscription:
    """Asks for as much as there is room for, whenever there may be something. `acemq.transport.Subscription`."""

    def __init__(self, transport: Taker, queue: str, sink: Sink, prefetch: int) -> None:
        self.queue, self._transport, self._sink, self._prefetch = queue, transport, sink, prefetch
        self._since, self._contact = SYSTEM.now(), asyncio.get_running_loop().time()
        self._paused = self._stopped = self._closed = False
        self._error: str | None = None
        self._held: set[Delivery] = set()
        self._bell = asyncio.Event()
        self.task = asyncio.create_task(self._keep(), name=f"acemq polls {queue}")

    @property
    def state(self) -> SubscriptionState:
        return SubscriptionState(
            phase=self._phase(),
            since=self._since,
            held=len(self._held),
            last_contact=self._contact,
            error=self._error,
        )

    def _phase(self) -> SubscriptionPhase:
        if self._closed:
            return SubscriptionPhase.CLOSED
        if self._stopped:
            return SubscriptionPhase.STOPPED
        if self._error is not None:
            return SubscriptionPhase.RECOVERING
        return SubscriptionPhase.PAUSED if self._paused else SubscriptionPhase.ACTIVE

    def look(self) -> None:
        self._bell.set()

    def pause(self) -> None:
        self._paused, self._since = True, SYSTEM.now()

    def resume(self) -> None:
        self._paused, self._since = False, SYSTEM.now()
        self.look()

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped, self._since = True, SYSTEM.now()
        self.look()
        await asyncio.wait({self.task})

    async def close(self) -> None:
        await self.stop()
        self._closed = True
        self._transport.forget(self)
        await asyncio.wait({self._transport.give_back(list(self._held))})

    async def _keep(self) -> None:
        poll = wait = self._transport.poll.total_seconds()
        while not self._stopped:
            self._bell.clear()
            try:
                await self._turn()
                wait = poll
            except Exception as error:
                wait = min(2 * wait, SLOWEST)
                self._fail(str(error) or type(error).__name__)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._bell.wait()

    async def _turn(self) -> None:
        room = self._prefetch - len(self._held)
        if self._paused or room <= 0:
            return
        taken = await self._transport.taken(self.queue, room, self._held)
        self._contact = asyncio.get_running_loop().time()
        if self._error is not None:
            self._error, self._since = None, SYSTEM.now()
            self._tell(self._sink.changed, self.state)
        if self._paused or self._stopped:
            self._transport.give_back(taken)
        elif taken:
            self._tell(self._sink.deliver, taken)

    def _fail(self, why: str) -> None:
        if self._error is None and not self._stopped:
            log.warning("%s: taking from %r failed: %s; tried again", self._transport.endpoint, self.queue, why)
            self._error, self._since = why, SYSTEM.now()
            self._tell(self._sink.changed, self.state)

    def _tell(self, call: Callable[..., None], *what: object) -> None:
        try:
            call(*what)
        except Exception:
            log.exception("the sink of queue %r has failed; its deliveries stay held", self.queue)
