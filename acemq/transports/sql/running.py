"""All that lives from one `open` to the next `close`, and belongs to one event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from acemq.clock import SYSTEM
from acemq.errors import AcemqError
from acemq.ids import new_id
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Capabilities,
    Delivery,
    Finding,
    NotConnected,
    Published,
    PublishResult,
    QueueMissing,
    Settled,
    TransportError,
)

from . import sweeping, topology
from .bell import Bell
from .claim import Claim, Taken, claim, delivery, look
from .database import Database, File, said
from .dialects import Row
from .gather import Gathering
from .link import Link
from .publish import Notice, Prepared, portions, write
from .receive import Holder, Subscription, receipt_of
from .routes import Routes, load, version_in
from .settle import Order, renew, settle, settled_before
from .waking import LISTENING_POLL, Hush, channel_of, waker

T = TypeVar("T")

log = logging.getLogger("acemq.sql")

ANSWER_LIMIT = 10.0
"""Seconds for a verb that is given no limit."""
_MICROSECONDS = 1_000_000
ALL_EVERY = 0.25
"""Seconds between two claims of a busy consumer that are of all there is: of what has come due, or others put back."""


class Last(msgspec.Struct):
    """What the last claims of a queue have told."""

    floor: int | None = None
    """The first row of the last that found any; of a queue without ranks, where a claim is one statement."""
    whole_at: float = 0.0
    """When the last one was of all there is, by the event loop's clock."""


class Running:
    def __init__(self, database: Database, can: Callable[[], Capabilities], changed: Callable[[], None]) -> None:
        self.database, self.statements = database, database.statements
        self.options = database.options
        self.instance = new_id()[:18]
        self.routes = Routes()
        self.applied = Topology()
        self.subscriptions: set[Subscription] = set()
        self.pulled = Holder()
        self.loop = asyncio.get_running_loop()
        self.link = Link(database, changed=changed, lost=self._lost, back=self._back, ask=self._ask)
        self.desk = topology.Desk(self.statements, can(), self.instance)
        self._can = can
        self._bells: dict[int, set[Bell]] = {}
        self._calls = count(1)
        self._waker = waker(database, self._heard, self.link.lose, self.instance)
        is_file = isinstance(database, File)
        trips = 1 if is_file else min(4, self.options.pool)
        self.publishing: Gathering[Prepared, PublishResult] = Gathering(
            self._write, at_once=trips, most=1_000, may=lambda: self.link.is_live
        )
        self.settling: Gathering[Order, Settled] = Gathering(self._settle, at_once=trips, most=1_000, may=lambda: True)
        self._channel = channel_of(database.tables)
        self._notifies = database.dialect.name == "postgresql" and self.options.listen
        self._hush = Hush(self._say)
        self._last: dict[int, Last] = {}
        """By queue."""
        self._refreshing: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._sweep_soon = asyncio.Event()
        self._has_said_old = False

    # Time

    def now(self) -> int:
        """The host's clock, in microseconds: that of a file, and of nothing on a server."""
        clock = self.options.clock
        return time.time_ns() // 1_000 if clock is SYSTEM else int(clock.now().timestamp() * _MICROSECONDS)

    @property
    def poll(self) -> float:
        poll = self.options.poll.total_seconds()
        return max(LISTENING_POLL, poll) if self._notifies and self._waker.is_live else poll

    @property
    def is_woken(self) -> bool:
        return self._waker.is_live

    # Opening and closing

    async def open(self) -> None:
        await self.link.open()
        self.desk = topology.Desk(self.statements, self._can(), self.instance)
        await self._read_topology()
        await self._waker.start()
        self._sweeping = asyncio.create_task(self._sweep_on(), name="acemq sweeps a database")

    async def close(self, grace: float) -> None:
        until = self.loop.time() + grace
        for subscription in self.subscriptions:
            subscription.halt()
        for asked in self.publishing.withdraw_all():
            asked.refuse(PublishResult(Published.REFUSED, NotConnected("the transport is closing")))
        if self._sweeping is not None:
            self._sweeping.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await asyncio.gather(*(subscription.stop() for subscription in self.subscriptions))
                await self.publishing.idle()
        held = [each for holder in (self.pulled, *self.subscriptions) for each in holder.held.values()]
        if self.link.is_live:
            with suppress(TimeoutError, TransportError):
                async with asyncio.timeout_at(max(until, self.loop.time() + 0.5)):
                    await self._end_subscriptions()
                    await self.give_back(held)
                    await self.settling.idle()
                    await self.link.start(lambda connection: topology.leave(connection, self.now(), self.desk))
        for subscription in tuple(self.subscriptions):
            subscription.forget()
        self._hush.stop()
        await self._waker.stop()
        await self.link.close(max(until - self.loop.time(), 0.2))
        self._end_gathering()

    async def abandon(self, opening: asyncio.Task[None]) -> None:
        """Nothing is left of an `open` that has failed or been cancelled."""
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            opening.exception()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await self._waker.stop()
        await self.link.close(0)
        self._end_gathering()

    def _end_gathering(self) -> None:
        self.publishing.end()
        self.settling.end()

    def die(self) -> None:
        """End as a process does that is killed. For tests; whoever closes it afterwards finds nothing left to do."""
        for subscription in tuple(self.subscriptions):
            subscription.forget()
        self.pulled.held.clear()
        if self._sweeping is not None:
            self._sweeping.cancel()

    async def _end_subscriptions(self) -> None:
        await asyncio.gather(*(subscription.release() for subscription in self.subscriptions))

    # The link

    def _lost(self) -> None:
        for subscription in tuple(self.subscriptions):
            subscription.disconnected()

    async def _back(self) -> None:
        """The link is there again, and nobody uses it yet."""
        work = partial(load, statements=self.statements)
        self.routes = await self.link.start(work, reading=True)
        await self._waker.start()
        self.loop.call_soon(self._take_up)

    def _take_up(self) -> None:
        self.publishing.go_on()
        if self._is_wiped(self.routes.version):
            self._refresh()
            return
        for subscription in tuple(self.subscriptions):
            subscription.registered()

    async def _ask(self) -> None:
        """Something small, which shows that the link works and whether the topology has changed."""
        self.saw(await self.link.start(lambda connection: version_in(connection, self.statements), reading=True))

    # Topology

    def saw(self, version: str) -> None:
        """This is the version of the topology, as something that was asked for something else has told."""
        if version != self.routes.version:
            self._refresh()

    def _refresh(self) -> None:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = self.link.keep(self._read_topology())

    async def _read_topology(self) -> None:
        work = partial(load, statements=self.statements)
        routes = await self.link.ask(work, within=ANSWER_LIMIT, reading=True)
        gap = self._is_wiped(routes.version)
        if gap:
            log.warning(
                "the tables in %s were emptied; what was declared here is made again", self.database.address.endpoint
            )
            await self.apply(self.applied, ApplyMode.CREATE)
            routes = await self.link.ask(work, within=ANSWER_LIMIT, reading=True)
        self.learn(routes, gap=gap)

    def _is_wiped(self, version: str) -> bool:
        known = self.routes.epoch
        return bool(self.applied != Topology() and known and version.partition(":")[0] != known)

    def learn(self, routes: Routes, *, gap: bool = False) -> None:
        if routes.epoch == self.routes.epoch and routes.number < self.routes.number:
            return  # what a long transaction of a caller's still sees
        changed, self.routes = routes.version != self.routes.version, routes
        if changed:
            for subscription in tuple(self.subscriptions):
                subscription.registered(gap=gap)

    async def apply(self, wanted: Topology, mode: ApplyMode) -> list[Finding]:
        def work(connection: Any) -> tuple[list[Finding], Routes]:
            findings = topology.apply(connection, self.now(), self.desk, wanted, mode)
            return findings, load(connection, self.statements)

        findings, routes = await self.link.ask(work, within=ANSWER_LIMIT)
        if mode is ApplyMode.CREATE:
            self.applied |= wanted
            if self.routes.epoch and routes.epoch != self.routes.epoch:
                self._refresh()  # emptied meanwhile: the rest is made again, too
            else:
                self.learn(routes)
            self.changed_topology()
        return findings

    def changed_topology(self) -> None:
        if self._notifies:
            self._notify("t")

    def place_of(self, queue: str) -> int:
        place = self.routes.queues.get(queue)
        if place is None:
            raise QueueMissing(f"there is no queue {queue!r}; declare it first")
        return place.id

    async def find(self, queue: str) -> int:
        """As it is now, and not as it was when something was last heard of it."""
        await self.recheck()
        place = self.routes.queues.get(queue)
        if place is not None and place.described.exclusive:
            work = partial(topology.check_owner, desk=self.desk, place=place, now=self.now())
            await self.link.ask(lambda connection: work(connection), within=ANSWER_LIMIT, reading=True)
        return self.place_of(queue)

    async def recheck(self) -> None:
        known = self.routes
        work = partial(load, statements=self.statements, known=known)
        routes = await self.link.ask(work, within=ANSWER_LIMIT, reading=True)
        if routes is not known:
            if self._is_wiped(routes.version):
                await self._read_topology()
            else:
                self.learn(routes)

    # Publishing

    async def _write(self, batch: list[Prepared]) -> list[PublishResult]:
        results: list[PublishResult] = []
        for portion in portions(batch):
            results.extend(await self._write_portion(portion))
        return results

    async def _write_portion(self, portion: Sequence[Prepared]) -> Sequence[PublishResult]:
        routes = self.routes
        notice = Notice(self._channel, self.instance, self._hush.hushed()) if self._notifies else None
        try:
            written = await self.link.start(
                lambda connection: write(
                    connection, self.now(), self.database.dialect, self.statements, routes, portion, notice=notice
                ),
                alone=True,
            )
        except AcemqError as error:
            # Only a link that was lost leaves a doubt: what a database has refused it has not done.
            outcome = Published.FAILED if isinstance(error, NotConnected) else Published.REFUSED
            return [PublishResult(outcome, error)] * len(portion)
        if written.routes is not routes:
            self.saw(written.routes.version)
        for queue in written.touched:
            self.ring(queue)
        if self._notifies:
            self._hush.said(written.told)
            self._hush.owe(written.touched - written.told)
        return written.results

    def notice(self) -> Notice | None:
        """For a caller's transaction: nobody sees its commit, so everybody is told, this process too."""
        return Notice(self._channel, "") if self._notifies else None

    def _say(self, queues: set[int]) -> None:
        for queue in queues:
            self._notify(str(queue))

    def _notify(self, what: str) -> None:
        told = {"channel": self._channel, "payload": f"{what}@{self.instance}"}
        if self.link.is_live:
            self.link.task(lambda connection: connection.execute(self.statements["notify"], told), alone=True)

    # Waking

    def ring(self, queue: int) -> None:
        for bell in self._bells.get(queue, ()):
            bell.ring()

    def listen(self, queue: int, bell: Bell) -> None:
        self._bells.setdefault(queue, set()).add(bell)

    def unlisten(self, queue: int, bell: Bell) -> None:
        bells = self._bells.get(queue)
        if bells is not None:
            bells.discard(bell)
            if not bells:
                del self._bells[queue]

    def _heard(self, queue: int | None) -> None:
        if queue is not None:
            self.ring(queue)
            return
        for each in tuple(self._bells):
            self.ring(each)
        if self._notifies and self.link.is_live:
            self.link.keep(self._ask())

    # Taking

    def next_call(self) -> str:
        return f"{self.instance}/{next(self._calls)}"

    async def take(
        self,
        place: int,
        most: int,
        lease: float,
        *,
        call: str,
        lost: str | None = None,
        fence: int | None = None,
        holder: str = "",
        likely: bool = False,
    ) -> Taken:
        """Once, now. Raises `NotConnected` where it cannot be known what became of it."""
        dialect, statements = self.database.dialect, self.statements
        if not dialect.array_statements and not likely and lost is None:
            # A look takes no lock, and most looks find nothing.
            seen = await self.link.start(
                lambda connection: look(connection, self.now(), statements, place), reading=True
            )
            if seen is not None:
                self.saw(seen.topology)
                return seen
        known = self.routes.by_id.get(place)
        last, now = self._last.setdefault(place, Last()), self.loop.time()
        floor = last.floor if fence is None else None
        # Now and then a claim is of all there is; in between of what is fresh, from where the last one began.
        is_whole = lost is not None or now - last.whole_at >= ALL_EVERY
        is_whole = is_whole or (floor is None if dialect.array_statements else not likely)
        if is_whole:
            last.whole_at, floor = now, None
        asked = Claim(
            queue=place,
            most=most,
            lease=int(lease * _MICROSECONDS),
            call=call,
            lost=lost,
            holder=holder,
            fence=fence,
            due=is_whole,
            floor=floor or 0,
            letters=None if known is None else self.routes.letters_of(known.described.name),
        )
        taken = await self.link.start(
            lambda connection: claim(connection, self.now(), dialect, statements, asked), alone=True
        )
        if taken.rows and dialect.array_statements and known is not None and not known.levels:
            # Where something was due there may be more of it, which comes before what is fresh.
            last.floor = None if taken.due else taken.rows[0][0]
        if taken.topology:
            self.saw(taken.topology)
        if floor is not None and len(taken.rows) < most:
            if not taken.rows:
                last.floor = None
                return await self.take(place, most, lease, call=call, holder=holder, likely=likely)
            taken.due_in = max(last.whole_at + ALL_EVERY - now, 0.0)  # something may be there before the floor
        return taken

    def deliveries(self, rows: Sequence[Row], queue: str, place: int, holder: Holder, until: float) -> list[Delivery]:
        return [delivery(row, queue, place, holder, until) for row in rows]

    async def give_back(self, deliveries: Sequence[Delivery]) -> None:
        """As if they had not been taken. What cannot be told comes back with the end of its lease."""
        orders: list[Order] = []
        for each in deliveries:
            receipt = receipt_of(each)
            if not receipt.gone:
                receipt.gone = True
                orders.append(Order(receipt.seq, receipt.token, receipt.place, 0))
        if not orders:
            return
        try:
            await self.settling.answers(self.settling.ask(orders, ANSWER_LIMIT))
        except (AcemqError, TimeoutError) as error:
            why = said(error)
            log.warning(
                "%d deliveries could not be given back (%s); they come again after their lease", len(orders), why
            )

    def _returned(self, places: set[int]) -> None:
        """Something is there again in these queues."""
        for place in places:
            self._last.pop(place, None)  # and not changed, since a claim under way may still write to it
            self.ring(place)
        if self._notifies:
            self._hush.owe(places)

    # Settling

    async def _settle(self, orders: list[Order]) -> Sequence[Settled]:
        # Whoever asked may have given up meanwhile. It is done all the same: else it came again for nothing.
        await self.link.live(float("inf"))
        dialect, statements = self.database.dialect, self.statements

        def work(connection: Any) -> set[int]:
            return settle(connection, self.now(), dialect, statements, orders)

        try:
            done = await self.link.start(work, alone=True)
        except NotConnected:
            # The answer was lost, and perhaps not the settlement: done again, and then what is left is looked at.
            await self.link.live(float("inf"))
            done = await self.link.start(work, alone=True)
            before = await self.link.start(
                lambda connection: settled_before(connection, statements, orders), reading=True
            )
            # Past its lease somebody else may have taken a message, and settled it: then nothing is known of ours.
            now = self.options.clock.monotonic()
            done |= before & {order.seq for order in orders if order.until > now}
        back = {order.place for order in orders if order.delay is not None}
        if back:
            self._returned(back)
        return [Settled.DONE if order.seq in done else Settled.STALE for order in orders]

    async def renew(self, orders: Sequence[Order], lease: timedelta) -> set[int]:
        dialect, statements = self.database.dialect, self.statements
        return await self.link.ask(
            lambda connection: renew(connection, self.now(), dialect, statements, orders, lease),
            within=ANSWER_LIMIT,
            alone=True,
        )

    # Sweeping

    def sweep_soon(self) -> None:
        self._sweep_soon.set()

    async def _sweep_on(self) -> None:
        me = self.next_call()
        while True:
            pause = random.uniform(*sweeping.EVERY)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._sweep_soon.wait()
            self._sweep_soon.clear()
            try:
                await self._sweep(me)
            except TransportError as error:
                log.debug("a sweep has failed, and is done again later: %s", error)
            except Exception:
                log.exception("a sweep has failed by a mistake of ours")

    async def _sweep(self, me: str) -> None:
        await self.link.live(float("inf"))
        start, desk, statements = self.link.start, self.desk, self.statements
        await start(lambda connection: topology.renew_owned(connection, self.now(), desk))
        if not await start(lambda connection: sweeping.may_sweep(connection, self.now(), statements, me)):
            return
        if await start(lambda connection: sweeping.sweep_private(connection, self.now(), desk)):
            self.changed_topology()
            await self.recheck()
        kept = self.options.keep_dead_letters
        left = sweeping.MOST
        works: list[Callable[[Any], int]] = [
            lambda connection: sweeping.sweep_expired(connection, self.now(), desk, self.routes),
            lambda connection: sweeping.sweep_deleted(connection, self.now(), desk),
        ]
        if kept is not None:
            works.append(lambda connection: sweeping.sweep_letters(connection, self.now(), desk, self.routes, kept))
        for work in works:
            while left and await start(work):
                left -= 1
        if self.database.dialect.name == "postgresql":
            self._say_old(
                await start(lambda connection: sweeping.oldest_snapshot(connection, statements), reading=True)
            )
        if not left:
            self.sweep_soon()

    def _say_old(self, snapshot: timedelta) -> None:
        is_old = snapshot >= sweeping.OLD_SNAPSHOT
        if is_old and not self._has_said_old:
            log.warning(
                "%s: a transaction has held its snapshot for %d s; until it ends, the rows of handled messages are not "
                "removed, and claims slow down. It is in pg_stat_activity, with the oldest xact_start",
                self.database.address.endpoint,
                snapshot.total_seconds(),
            )
        self._has_said_old = is_old
