"""One connection, kept: dialled again for ever after it was lost, until it is closed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, TypeVar

from acemq.clock import Clock, sleep
from acemq.errors import SecurityError
from acemq.retry import Backoff
from acemq.transport import NotConnected, Phase, TransportError

from .address import Address, Host
from .bell import Bell, keep
from .login import Login
from .session import Session, dial

T = TypeVar("T")

log = logging.getLogger("acemq.rabbitmq")

AT_ONCE = 0.1
"""Seconds at most before the first dial after a loss; spread, so that a thousand clients do not come in one wave."""
STEADY = 30.0
"""Seconds after which a link counts as working, and its next loss as the first."""
HOPELESS = (5.0, 30.0)
"""Seconds between dials, from and to, while the broker refuses us for a reason that waiting does not mend."""
_SAY_AGAIN = 30.0


class Link:
    """`session` is the live connection, `None` between two."""

    def __init__(
        self,
        name: str,
        address: Address,
        login: Login,
        clock: Clock,
        reconnect: Backoff,
        on_change: Callable[[], None],
    ) -> None:
        self.name, self.address, self._login = name, address, login
        self.phase = Phase.NEW
        self.dials = 0
        """Tries since last connected."""
        self.last_error: str | None = None
        self.last_error_at: datetime | None = None
        self.is_hopeless = False
        self.endpoint = ",".join(map(address.endpoint, address.hosts))
        self._clock, self._reconnect, self._on_change = clock, reconnect, on_change
        self._session: Session | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._arrival = Bell()
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._next_host = random.randrange(len(address.hosts))

    @property
    def session(self) -> Session | None:
        return self._session if self._session is not None and self._session.is_alive else None

    async def live(self) -> Session:
        """The session, as soon as there is one. `NotConnected` when the link is closed meanwhile."""
        while True:
            if (session := self.session) is not None:
                return session
            if self.phase in (Phase.CLOSING, Phase.CLOSED):
                raise NotConnected("the transport is closing")
            await self._arrival.heard()

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await what must not be interrupted: a cancelled caller only stops waiting, and the work goes on to its end.

        aiormq closes the channel of a call that is cancelled, and if the broker does the same at that moment, the
        second close costs the whole link.
        """
        return await asyncio.shield(self.start(work))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Nobody need wait for it; the link does, when it is closed."""
        task = asyncio.create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # read, should nobody wait for it any more

    async def open(self) -> None:
        """Return once connected. Raises at once what waiting does not mend; until cancelled it dials."""
        self._now(Phase.CONNECTING)
        rounds = 0
        while True:
            session = await self._round(patient=False)
            if session is not None:
                break
            await sleep(self._clock, self._reconnect.pause(rounds))
            rounds += 1
        self._arrived(session)
        self._keeping = keep(self._keep(session), self.name)

    async def close(self, within: float) -> None:
        self._now(Phase.CLOSING)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
            self._keeping = None
        self._arrival.ring()
        if self._session is not None:
            await self._session.close(within)
            self._session = None
        if self._unfinished:
            # Whatever they asked will not be answered.
            _, stuck = await asyncio.wait(self._unfinished, timeout=0.1)
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)
        self._now(Phase.CLOSED)

    async def _keep(self, session: Session) -> None:
        """Dial again whenever the link is lost. The only place that does."""
        rounds = 0
        while True:
            up_at = self._clock.monotonic()
            await session.ended()
            self._lost(session)
            await self.finish(session.close(0))
            if self._clock.monotonic() - up_at >= STEADY:
                rounds = 0
            pause = random.uniform(0, AT_ONCE) if rounds == 0 else self._reconnect.pause(rounds - 1)
            failures = _Failures(self)
            while True:
                await sleep(self._clock, pause)
                rounds += 1
                found = await self._round(patient=True)
                if found is not None:
                    break
                failures.say(self._clock.monotonic())
                pause = random.uniform(*HOPELESS) if self.is_hopeless else self._reconnect.pause(rounds - 1)
            session = found
            log.info("%s: connected to %s again", self.name, session.endpoint)
            self._arrived(session)

    async def _round(self, *, patient: bool) -> Session | None:
        """Every host once, from the next in turn."""
        for _ in self.address.hosts:
            host = self._turn()
            self.dials += 1
            try:
                return await dial(self.address, host, self.name, self._login, self._blocked_changed)
            except (TransportError, SecurityError) as error:
                self._failed(str(error), hopeless=isinstance(error, SecurityError) or not error.retryable)
                if self.is_hopeless and not patient:
                    raise
        return None

    def _turn(self) -> Host:
        hosts = self.address.hosts
        host = hosts[self._next_host % len(hosts)]
        self._next_host += 1
        return host

    def _arrived(self, session: Session) -> None:
        self._session, self.endpoint = session, session.endpoint
        self.dials, self.is_hopeless = 0, False
        self._now(Phase.CONNECTED)
        self._arrival.ring()

    def _lost(self, session: Session) -> None:
        self._session = None
        log.warning("%s: lost %s: %s; connecting again", self.name, session.endpoint, session.lane.end)
        self.phase = Phase.RECONNECTING
        self._failed(f"{session.endpoint}: {session.lane.end}", hopeless=False)

    def _failed(self, text: str, *, hopeless: bool) -> None:
        self.last_error, self.last_error_at, self.is_hopeless = text, self._clock.now(), hopeless
        self._on_change()

    def _blocked_changed(self, session: Session) -> None:
        if session.blocked is None:
            log.warning("%s: %s takes publishes again", self.name, session.endpoint)
        else:
            log.warning("%s: %s takes no publishes: %s", self.name, session.endpoint, session.blocked)
        self._on_change()

    def _now(self, phase: Phase) -> None:
        self.phase = phase
        self._on_change()


class _Failures:
    """Says the first failed round as an error, then what it has come to, at most every 30 s."""

    def __init__(self, link: Link) -> None:
        self._link, self._count, self._said_at = link, 0, float("-inf")

    def say(self, now: float) -> None:
        self._count += 1
        if now - self._said_at >= _SAY_AGAIN:
            log.log(
                logging.ERROR if self._count == 1 else logging.WARNING,
                "%s: cannot connect, %d rounds so far: %s", self._link.name, self._count, self._link.last_error,
            )  # fmt: skip
            self._said_at = now
