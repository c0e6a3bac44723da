"""The transport itself: the verbs of `acemq.transport.Transport` on a database."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from math import ceil
from typing import Any

from msgspec.structs import replace

from acemq.clock import check_duration
from acemq.errors import AcemqError, CapabilityError, ClosedError, ConfigurationError
from acemq.topology import Topology
from acemq.transport import (
    FOREVER,
    ApplyMode,
    Capabilities,
    Delivery,
    Depth,
    Finding,
    Kind,
    NotConnected,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    Renewal,
    Settled,
    Settlement,
    Sink,
    TimedOut,
    TransportError,
    TransportState,
    WrongLoop,
)

from . import topology as tables
from .address import Address, Options, check_lease, lease_terms
from .bell import Bell
from .claim import Taken
from .database import Database, File, Server
from .exclusive import is_held
from .publish import Prepared, prepare
from .receive import Subscription, receipt_of
from .running import ANSWER_LIMIT, Running
from .settle import Order, Receipt, order
from .transaction import write_in

log = logging.getLogger("acemq.sql")

_PACKET_SPARED = 64 * 1024
"""Bytes of a packet to MariaDB for what stands beside a body."""


def _can(address: Address, options: Options) -> Capabilities:
    return Capabilities(
        transport="sql",
        durable=True,
        ordering="fifo",
        ordered_queues=True,
        requeue_place="head",
        unroutable="told",
        publish_delay=FOREVER,
        requeue_delay=FOREVER,
        requeue_rewrites=True,
        expiry=True,
        priorities=256,
        lease=lease_terms(options),
        fenced=True,
        counts_deliveries=True,
        exclusive=True,
        transactions=True,
        max_message=options.max_message,
        depth="exact",
        notes=_notes(address, options),
    )


def _notes(address: Address, options: Options) -> tuple[str, ...]:
    notes = (f"A depth above {tables.COUNTED:,} messages is not counted on, and says that it is not exact.",)
    if address.dialect.name == "sqlite" and options.durability == "process":
        return (*notes, "durability='process': what was confirmed last may be lost with the power.")
    if options.tls is not None and not options.tls.is_verified:
        return (*notes, f"No certificate is checked: {options.tls!r}.")
    return notes


class SqlTransport:
    """A `Transport` on SQLite, PostgreSQL, MariaDB or MySQL."""

    def __init__(self, address: Address, options: Options) -> None:
        self._address, self._options, self._clock = address, options, options.clock
        self._capabilities = _can(address, options)
        self._running: Running | None = None
        self._opening: asyncio.Task[None]
        self._closing: asyncio.Task[None] | None = None
        self._phase, self._since = Phase.NEW, options.clock.now()
        self._announced: Phase | None = None

    def __repr__(self) -> str:
        return f"<SqlTransport {self._address.endpoint} {self._phase}>"

    # How it is

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        place = self._running.routes.queues.get(name) if kind == "queue" and self._running is not None else None
        if place is None:
            return self._capabilities
        return replace(self._capabilities, priorities=place.levels)

    @property
    def state(self) -> TransportState:
        link = self._running.link if self._running is not None else None
        return TransportState(
            phase=self._phase,
            since=self._since,
            endpoint=self._address.endpoint,
            last_error=link.last_error if link is not None else None,
            last_error_at=link.last_error_at if link is not None else None,
            terminal=link is not None and link.is_hopeless,
            dials=link.dials if link is not None else 0,
            generation=link.generation if link is not None else 0,
            outstanding=self._running.publishing.outstanding if self._running is not None else 0,
        )

    def _link_changed(self) -> None:
        if self._running is not None and self._phase in (Phase.CONNECTING, Phase.CONNECTED, Phase.RECONNECTING):
            self._now(self._running.link.phase)

    def _now(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase, self._since = phase, self._clock.now()
        if self._options.on_change is not None:
            try:
                self._options.on_change(self.state)
            except Exception:
                log.exception("a change of state could not be told")

    # Opening and closing

    async def open(self, *, within: timedelta) -> None:
        limit = check_duration("within", within).total_seconds()
        if self._phase not in (Phase.NEW, Phase.CLOSED):
            raise ClosedError(f"{self._address.endpoint} is open already")
        self._running = running = Running(self._database(), lambda: self._capabilities, self._link_changed)
        self._now(Phase.CONNECTING)
        self._opening = opening = asyncio.create_task(self._open(running))
        try:
            await asyncio.wait({opening}, timeout=limit)
            if opening.cancelled():
                raise ClosedError(f"{self._address.endpoint} was closed while it was opening")
            if not opening.done():
                where, last = self._address.endpoint, running.link.last_error or "no answer"
                text = f"no database reached at {where} within {limit:g} s; last: {last}"
                raise NotConnected(text, hosts=(where,), last=last)
            opening.result()
        except BaseException:
            if self._closing is None:  # else that does what is left to do
                await running.abandon(opening)
                self._running = None
                self._now(Phase.NEW)
            raise

    async def _open(self, running: Running) -> None:
        await running.open()
        self._learn(running.database)

    def _database(self) -> Database:
        return (File if self._address.dialect.name == "sqlite" else Server)(self._address, self._options)

    def _learn(self, database: Database) -> None:
        """What a packet may hold bounds a message: in the worst case each of its bytes is written as two."""
        packet = database.facts.max_packet
        if packet is not None:
            most = min(self._options.max_message, max(packet - _PACKET_SPARED, 1024) // 2)
            self._capabilities = replace(self._capabilities, max_message=most)

    @property
    def server(self) -> str:
        """Name and version of what it is connected to; empty before that."""
        return self._running.database.facts.server if self._running is not None else ""

    async def close(self, grace: timedelta = timedelta(seconds=5)) -> None:
        if self._closing is None:
            running = self._running
            if running is None:
                self._now(Phase.CLOSED)
                return
            self._check_loop(running)
            self._now(Phase.CLOSING)
            self._closing = asyncio.create_task(self._close(running, grace.total_seconds()))
        # Every caller waits for the same end; a cancelled one does not stop it.
        await asyncio.shield(self._closing)

    async def _close(self, running: Running, grace: float) -> None:
        try:
            if not self._opening.done():
                await running.abandon(self._opening)
            else:
                await running.close(grace)
        finally:
            self._running = self._closing = None
            self._now(Phase.CLOSED)

    def _enter(self) -> Running:
        running = self._running
        if running is None or self._phase in (Phase.CLOSING, Phase.CLOSED):
            raise ClosedError(
                f"{self._address.endpoint} is {'closed' if self._phase is not Phase.NEW else 'not open yet'}"
            )
        self._check_loop(running)
        return running

    def _check_loop(self, running: Running) -> None:
        if asyncio.get_running_loop() is not running.loop:
            raise WrongLoop(f"{self._address.endpoint} belongs to the event loop that opened it; open one per loop")

    # Topology

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        running = self._enter()
        if not isinstance(mode, ApplyMode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mode={mode!r} must be one of ApplyMode")
        tables.check(topology, self._capabilities)
        for queue in topology.queues:
            if queue.lease is not None:
                check_lease(f"lease of queue {queue.name!r}:", queue.lease)
        return await asyncio.shield(running.link.keep(running.apply(tables.spelled_out(topology), mode)))

    async def depth(self, queue: str) -> Depth:
        running = self._enter()
        counts = await running.link.ask(
            lambda connection: tables.depth(connection, running.now(), running.desk, queue),
            within=ANSWER_LIMIT,
            reading=True,
        )
        return Depth(
            ready=counts.ready, held=counts.held, delayed=counts.delayed, exact=counts.exact, at=self._clock.now()
        )

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        running = self._enter()
        await running.recheck()
        return name in (running.routes.queues if kind == "queue" else running.routes.exchanges)

    async def is_claimed(self, queue: str) -> bool:
        running = self._enter()
        place = await running.find(queue)
        return await running.link.ask(
            lambda connection: is_held(connection, running.now(), running.statements, place), within=ANSWER_LIMIT
        )

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        running = self._enter()
        return await asyncio.shield(running.link.keep(self._delete(running, name, kind, only_if_empty)))

    async def _delete(self, running: Running, name: str, kind: Kind, only_if_empty: bool) -> bool:
        def work(connection: Any) -> bool:
            if kind == "exchange":
                return tables.delete_exchange(connection, running.desk, name)
            return tables.delete_queue(connection, running.now(), running.desk, name, only_if_empty)

        deleted = await running.link.ask(work, within=ANSWER_LIMIT)
        if deleted:
            running.applied = _without(running.applied, kind, name)
            running.changed_topology()
            running.sweep_soon()
            await running.recheck()
        return deleted

    async def purge(self, queue: str) -> int | None:
        running = self._enter()
        place = await running.find(queue)
        purged = 0
        # In parts: a transaction that removes a million rows would keep everybody from them.
        while some := await running.link.ask(
            lambda connection: tables.purge_some(connection, running.now(), running.desk, place), within=ANSWER_LIMIT
        ):
            purged += some
        return purged

    # Publishing

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        running = self._enter()
        limit = self._capabilities.max_message or 0
        answers = [prepare(message, limit) for message in batch]
        ready = [each for each in answers if isinstance(each, Prepared)]
        if not ready:
            return [each for each in answers if isinstance(each, PublishResult)]
        if transaction is not None:
            results = await write_in(transaction, running, ready, within.total_seconds())
        else:
            results = await self._publish(running, ready, running.loop.time() + within.total_seconds())
        if len(ready) == len(answers):
            return results
        told = iter(results)
        return [next(told) if isinstance(each, Prepared) else each for each in answers]

    async def _publish(self, running: Running, ready: Sequence[Prepared], until: float) -> Sequence[PublishResult]:
        if not running.link.is_live:
            try:
                await running.link.live(until)
            except (NotConnected, ClosedError) as error:
                return _all(ready, Published.REFUSED, NotConnected(str(error)))
        asked = running.publishing.ask(ready, max(until - running.loop.time(), 0.0))
        try:
            return await running.publishing.answers(asked)
        except TimeoutError:
            if running.publishing.withdraw(asked):
                return _all(ready, Published.REFUSED, TimedOut("nothing was written within the time"))
            return _all(ready, Published.FAILED, TimedOut("no answer within the time"))
        except asyncio.CancelledError:
            running.publishing.withdraw(asked)
            raise
        except AcemqError as error:
            return _all(ready, Published.FAILED, error)

    # Receiving

    async def subscribe(
        self,
        queue: str,
        sink: Sink,
        *,
        prefetch: int,
        exclusive: bool = False,
        lease: timedelta | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Subscription:
        running = self._enter()
        if prefetch < 1:
            raise ConfigurationError(f"prefetch={prefetch} must be 1 or more")
        for option, value in (options or {}).items():
            if option not in _OPTIONS:
                raise ConfigurationError(f"unknown option {option}={value!r}; known: {', '.join(_OPTIONS)}")
            if option != "name" and value is not None:
                raise CapabilityError("sql", _OPTIONS[option], f"{option}={value!r}")
        if lease is not None:
            check_lease("lease", lease)
        await running.recheck()
        subscription = Subscription(
            queue,
            sink,
            running,
            self._clock,
            prefetch=prefetch,
            lease=self._lease(running, queue, lease),
            exclusive=exclusive,
            ended=running.subscriptions.discard,
        )
        running.subscriptions.add(subscription)
        try:
            await subscription.begin()
        except BaseException:
            subscription.forget()
            raise
        return subscription

    def _lease(self, running: Running, queue: str, lease: timedelta | None) -> float:
        """In seconds, rounded up to the millisecond."""
        place = running.routes.queues.get(queue)
        own = None if place is None else place.described.lease
        length = lease or own or self._options.lease
        return ceil(length / timedelta(milliseconds=1)) / 1000

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        running = self._enter()
        if most < 1:
            raise ConfigurationError(f"most={most} must be 1 or more")
        if lease is not None:
            check_lease("lease", lease)
        until = running.loop.time() + check_duration("wait", wait, zero=True).total_seconds()
        bell, left = Bell(), asyncio.Event()
        pulling = running.link.keep(self._pull(running, queue, most, until, lease, bell, left))
        try:
            return await asyncio.shield(pulling)
        except asyncio.CancelledError:
            # It ends at its next look, and what it brings has nobody to go to.
            left.set()
            bell.ring()
            pulling.add_done_callback(lambda done: _give_back(running, done))
            raise

    async def _pull(
        self,
        running: Running,
        queue: str,
        most: int,
        until: float,
        lease: timedelta | None,
        bell: Bell,
        left: asyncio.Event,
    ) -> list[Delivery]:
        loop = running.loop
        lost: str | None = None
        place = await self._find(running, queue, until)
        length = self._lease(running, queue, lease)
        running.listen(place, bell)
        pause = 0.05
        try:
            while True:
                bell.silence()
                call = running.next_call()
                began = self._clock.monotonic()
                try:
                    await running.link.live(max(until, loop.time() + 0.001))
                    taken = await running.take(place, most, length, call=call, lost=lost)
                except NotConnected:
                    lost = lost or call
                    if loop.time() >= until:
                        raise
                    continue
                if taken.rows:
                    return _held(running, taken, queue, place, began + length)
                if loop.time() >= until or left.is_set():
                    return []
                wait = running.poll if running.is_woken else pause
                pause = min(pause * 2, running.poll)
                if taken.due_in is not None:
                    wait = min(wait, max(taken.due_in, 0.001))
                await bell.heard(min(wait, max(until - loop.time(), 0)))
        finally:
            running.unlisten(place, bell)

    async def _find(self, running: Running, queue: str, until: float) -> int:
        await running.link.live(max(until, running.loop.time() + 0.001))
        place = running.routes.queues.get(queue)
        if place is not None and not place.described.exclusive:
            return place.id
        return await running.find(queue)

    # Settling

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        running = self._running
        if running is None or self._phase is Phase.CLOSED:
            return [self._stale(item) for item in batch]
        self._check_loop(running)
        results = [self._order(item) for item in batch]
        orders = [told for told in results if isinstance(told, Order)]
        leaving = [
            receipt_of(item.delivery) for item, told in zip(batch, results, strict=True) if isinstance(told, Order)
        ]
        for receipt in leaving:
            receipt.holder.leave(receipt)
        try:
            answers = iter(await self._told(running, orders) if orders else ())
        finally:
            for holder, count in Counter(receipt.holder for receipt in leaving).items():
                holder.left(count)
        settled: list[Settled] = []
        for item, told in zip(batch, results, strict=True):
            if not isinstance(told, Order):
                settled.append(told)
                continue
            settled.append(next(answers))
            if settled[-1] is Settled.STALE:
                self._stale(item)
        return settled

    def _order(self, item: Settlement) -> Order | Settled:
        """What the database is told, or why it is told nothing."""
        receipt = item.delivery.receipt
        if not isinstance(receipt, Receipt) or receipt.gone:
            return self._stale(item)
        try:
            told = order(item, receipt)
        except ConfigurationError as error:
            log.warning("settling %s of %r: %s", item.delivery.message_id, item.delivery.queue, error)
            return Settled.FAILED
        receipt.gone = True
        return told

    async def _told(self, running: Running, orders: list[Order]) -> Sequence[Settled]:
        try:
            return await running.settling.answers(running.settling.ask(orders, ANSWER_LIMIT))
        except (TimeoutError, TransportError, ClosedError) as error:
            log.warning("%d settlements could not be told (%s); these messages come again", len(orders), error)
            return [Settled.FAILED] * len(orders)

    def _stale(self, item: Settlement) -> Settled:
        receipt = item.delivery.receipt
        if not isinstance(receipt, Receipt) or not receipt.stale:
            log.warning(
                "%s of message %s from %r came too late: it is not held for this delivery any more",
                item.verb,
                item.delivery.message_id,
                item.delivery.queue,
            )
        if isinstance(receipt, Receipt):
            receipt.stale = True
        return Settled.STALE

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        running = self._enter()
        check_lease("lease", lease)
        length = ceil(lease / timedelta(milliseconds=1)) / 1000
        receipts = [each.receipt for each in batch]
        asked = [each for each in receipts if isinstance(each, Receipt) and not each.gone]
        if not asked:
            return [Renewal("lost")] * len(batch)
        until = self._clock.monotonic() + length
        try:
            renewed = await running.renew(
                [Order(each.seq, each.token, each.place) for each in asked], timedelta(seconds=length)
            )
        except TransportError as error:
            return [
                Renewal("failed", error=error) if isinstance(each, Receipt) and not each.gone else Renewal("lost")
                for each in receipts
            ]
        for each in asked:
            if each.seq in renewed:
                each.holder.prolong(each, until)
            elif not each.gone:
                each.gone = True
                each.holder.let_go(each)
        return [
            Renewal("renewed", until) if isinstance(each, Receipt) and each.seq in renewed else Renewal("lost")
            for each in receipts
        ]


_OPTIONS = {
    "name": "",
    "priority": "consumer priority",
    "offset": "streams",
    "arguments": "arguments of a consumer",
}
"""Of `subscribe`, and the capability that each would need."""


def _held(running: Running, taken: Taken, queue: str, place: int, until: float) -> list[Delivery]:
    deliveries = running.deliveries(taken.rows, queue, place, running.pulled, until)
    for each in deliveries:
        running.pulled.held[receipt_of(each).seq] = each
    return deliveries


def _give_back(running: Running, pulled: asyncio.Task[list[Delivery]]) -> None:
    if pulled.cancelled() or pulled.exception() is not None:
        return
    for each in pulled.result():
        running.pulled.let_go(receipt_of(each))
    if pulled.result():
        with suppress(RuntimeError):
            running.link.keep(running.give_back(pulled.result()))


def _all(batch: Sequence[Prepared], outcome: Published, error: AcemqError) -> list[PublishResult]:
    return [PublishResult(outcome, error)] * len(batch)


def _without(topology: Topology, kind: Kind, name: str) -> Topology:
    """What was deleted on purpose is not made again."""
    if kind == "exchange":
        return Topology(
            tuple(exchange for exchange in topology.exchanges if exchange.name != name),
            topology.queues,
            tuple(binding for binding in topology.bindings if binding.exchange != name),
        )
    return Topology(
        topology.exchanges,
        tuple(queue for queue in topology.queues if queue.name != name),
        tuple(binding for binding in topology.bindings if binding.queue != name),
    )
