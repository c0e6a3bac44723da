"""The link to the database, kept: noticed when it is lost or silent, and made again for ever until it is closed."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

from acemq.errors import AcemqError, ClosedError, SecurityError
from acemq.transport import NotConnected, Phase, TransportError

from .bell import Bell
from .database import Database, Work, said
from .dialects import Trouble

T = TypeVar("T")

log = logging.getLogger("acemq.sql")

AT_ONCE = 0.1
"""Seconds at most before the first dial after a loss; spread, so that a thousand clients do not come in one wave."""
STEADY = 30.0
"""Seconds after which a link counts as working, and its next loss as the first."""
HOPELESS = (5.0, 30.0)
"""Seconds between dials while the database refuses us for a reason that waiting does not mend."""
QUIET = 2.0
"""Seconds without an answer after which the database is asked for one."""
SILENCE = 5.0
"""Seconds that this answer may take; then the link is given up."""
TRIES = 5
"""Of one piece of work that meets a deadlock or a lock."""
_SAY_AGAIN = 30.0


class Link:
    def __init__(
        self,
        database: Database,
        *,
        changed: Callable[[], None],
        lost: Callable[[], None],
        back: Callable[[], Coroutine[Any, Any, None]],
        ask: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """`back` is awaited before a link that was made again is used; `ask` asks the database something small."""
        self.database = database
        self.phase = Phase.NEW
        self.generation = self.dials = 0
        self.last_error: str | None = None
        self.last_error_at: datetime | None = None
        self.is_hopeless = False
        self.since = database.options.clock.now()
        self.answered_at = 0.0
        """By the event loop's clock."""
        self._changed, self._on_lost, self._back, self._ask = changed, lost, back, ask
        self._clock = database.options.clock
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(database.options.pool)
        self._arrival = Bell()
        self._loss = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._unfinished: set[asyncio.Task[Any]] = set()
        self._busy_said_at = float("-inf")

    @property
    def is_live(self) -> bool:
        return self.phase is Phase.CONNECTED

    async def open(self) -> None:
        """Return once connected. Raises at once what waiting does not mend; until cancelled it dials."""
        self._now(Phase.CONNECTING)
        rounds = 0
        while not await self._dialled(patient=False):
            await asyncio.sleep(self.database.options.reconnect.pause(rounds))
            rounds += 1
        self._arrived()
        self._keeping = asyncio.create_task(self._keep(), name="acemq keeps the link to a database")

    async def close(self, within: float) -> None:
        self.phase = Phase.CLOSING
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self._arrival.ring()
        if self._unfinished and within > 0:
            await asyncio.wait(self._unfinished, timeout=within)
        if self._unfinished:
            self.database.abort()
            await asyncio.wait(self._unfinished, timeout=0.2)
            for task in self._unfinished:
                task.cancel()
        await self.database.close()
        self.phase = Phase.CLOSED

    async def live(self, until: float) -> None:
        """Return as soon as there is a link. `NotConnected` when `until` has come, by the event loop's clock."""
        while not self.is_live:
            if self.phase in (Phase.CLOSING, Phase.CLOSED):
                raise ClosedError("the transport is closed")
            self._arrival.silence()
            if not await self._arrival.heard(until - self._loop.time()) and not self.is_live:
                where = self.database.address.endpoint
                raise NotConnected(
                    f"no link to {where}: {self.last_error or 'no answer'}", hosts=(where,), last=self.last_error
                )

    async def ask(self, work: Work[T], *, within: float, alone: bool = False, reading: bool = False) -> T:
        """A verb of no hurry: wait for the link, do it, wait for the answer. Raises a `TransportError`."""
        until = self._loop.time() + within
        await self.live(until)
        return await self.start(work, alone=alone, reading=reading)

    async def start(self, work: Work[T], *, alone: bool = False, reading: bool = False) -> T:
        """Do it now; a cancelled caller only stops waiting. Deadlocks and the like are met by doing it again."""
        return await asyncio.shield(self.task(work, alone=alone, reading=reading))

    def task(self, work: Work[T], *, alone: bool = False, reading: bool = False) -> asyncio.Task[T]:
        return self.keep(self._done(work, alone, reading))

    def keep(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that nobody need wait for; the link does, when it is closed."""
        task = asyncio.create_task(coroutine)
        self._unfinished.add(task)
        task.add_done_callback(self._finished)
        return task

    def lose(self, why: str) -> None:
        """The link was seen to be gone."""
        if self.phase is not Phase.CONNECTED:
            return
        log.warning("lost %s: %s; connecting again", self.database.address.endpoint, why)
        self._note(why, hopeless=False)
        self._now(Phase.RECONNECTING)
        self._loss.set()
        self.database.abort()
        self._on_lost()

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.discard(task)
        if not task.cancelled():
            task.exception()  # read, should nobody wait for it any more

    async def _done(self, work: Work[T], alone: bool, reading: bool) -> T:
        for number in range(TRIES):
            try:
                async with self._room:
                    done = await self.database.run(work, alone=alone, reading=reading)
            except AcemqError:
                raise
            except Exception as error:
                trouble = self.database.dialect.trouble(error)
                if trouble is Trouble.TRANSIENT and number < TRIES - 1:
                    self._say_busy(error)
                    await asyncio.sleep(0.02 * 2**number * random.uniform(0.5, 1))
                    continue
                if trouble in (Trouble.LOST, Trouble.SCHEMA):
                    self.lose(said(error))
                raise self.database.told(error) from error
            self.answered_at = self._loop.time()
            return done
        raise AssertionError

    async def _keep(self) -> None:
        rounds, up_at = 0, self._loop.time()
        while True:
            await self._watch()
            await self.database.drop_idle()
            if self._loop.time() - up_at >= STEADY:
                rounds = 0
            pause = random.uniform(0, AT_ONCE) if rounds == 0 else self.database.options.reconnect.pause(rounds - 1)
            said_at, failures = float("-inf"), 0
            while True:
                await asyncio.sleep(pause)
                rounds += 1
                if await self._dialled(patient=True) and await self._is_back():
                    break
                failures += 1
                if self._loop.time() - said_at >= _SAY_AGAIN:
                    level = logging.ERROR if failures == 1 else logging.WARNING
                    where = self.database.address.endpoint
                    log.log(level, "cannot connect to %s, %d tries so far: %s", where, failures, self.last_error)
                    said_at = self._loop.time()
                pause = (
                    random.uniform(*HOPELESS) if self.is_hopeless else self.database.options.reconnect.pause(rounds - 1)
                )
            up_at = self._loop.time()
            log.info("connected to %s again", self.database.address.endpoint)
            self._arrived()

    async def _watch(self) -> None:
        """Return when the link is lost. A database that has said nothing for a while is asked."""
        while not self._loss.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    await self._loss.wait()
            if self._loss.is_set() or self._loop.time() - self.answered_at < QUIET:
                continue
            asking = self.keep(self._ask())
            done, _ = await asyncio.wait({asking}, timeout=SILENCE if self.database.can_go_silent else None)
            if not done:
                self.lose(f"no answer within {SILENCE:g} s")

    async def _dialled(self, *, patient: bool) -> bool:
        self.dials += 1
        try:
            await self.database.dial()
        except (TransportError, SecurityError) as error:
            self._note(str(error), hopeless=isinstance(error, SecurityError) or not error.retryable)
            self._changed()
            if self.is_hopeless and not patient:
                raise
            return False
        return True

    async def _is_back(self) -> bool:
        try:
            await self._back()
        except TransportError as error:
            self._note(str(error), hopeless=False)
            return False
        return True

    def _arrived(self) -> None:
        self._loss.clear()
        self.dials, self.is_hopeless = 0, False
        self.generation += 1
        self.answered_at = self._loop.time()
        self._now(Phase.CONNECTED)
        self._arrival.ring()

    def _note(self, text: str, *, hopeless: bool) -> None:
        self.last_error, self.last_error_at, self.is_hopeless = text, self._clock.now(), hopeless

    def _now(self, phase: Phase) -> None:
        self.phase, self.since = phase, self._clock.now()
        self._changed()

    def _say_busy(self, error: BaseException) -> None:
        if self._loop.time() - self._busy_said_at >= _SAY_AGAIN:
            self._busy_said_at = self._loop.time()
            log.info("%s: %s; done again", self.database.address.endpoint, said(error))
