"""The transport of one client: its link to the broker, lost and made again, and what meets a switch on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import ceil
from typing import TypeVar, assert_never
from weakref import WeakSet

from acemq.clock import Timer, check_duration, sleep
from acemq.errors import AcemqError, CapabilityError, ClosedError, ConfigurationError
from acemq.retry import Backoff
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Blocked,
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
from acemq.transports.memory import declaring
from acemq.transports.memory.agenda import GRAIN
from acemq.transports.memory.broker import Broker
from acemq.transports.memory.faults import Delay, Effect, Raises
from acemq.transports.memory.receiving import Holder, Link, Subscription, log

LIMIT = 10.0
"""Seconds for a verb that is given no limit."""

STEADY = 30.0
"""Seconds after which a link has worked: when it is lost, the first dial is at once again."""

T = TypeVar("T")

_IN_ROW = 64
"""Publishes that may follow each other without a turn of the event loop."""


class MemoryTransport:
    """`acemq.transport.Transport`. It holds its broker until it is closed, and finds it again when opened anew."""

    def __init__(
        self,
        find: Callable[[], Broker],
        *,
        endpoint: str,
        name: str,
        reconnect: Backoff,
        on_change: Callable[[TransportState], None] | None,
    ) -> None:
        self._find = find
        self._broker: Broker | None = None
        self._hold(find())
        self._endpoint, self._name, self._reconnect, self._on_change = endpoint, name, reconnect, on_change
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: Link | None = None
        self._phase, self._since = Phase.NEW, self._clock.now()
        self._announced: tuple[Phase, str | None] = (Phase.NEW, None)
        self._last_error: str | None = None
        self._last_error_at = self._since
        self._generation = self._dials = self._outstanding = 0
        self._tries, self._linked_at = 0, 0.0
        self._epoch = 0
        self._in_row = 0
        self._redial: Timer | None = None
        self._applied = Topology()
        self._waiters: set[asyncio.Future[None]] = set()
        """Resolved at every change of phase or switch."""
        self._warned: WeakSet[Delivery] = WeakSet()

    def _hold(self, broker: Broker) -> Broker:
        self._broker, self._clock = broker, broker.clock
        self._capabilities, self._title = broker.capabilities, broker.profile.title
        return broker

    def __repr__(self) -> str:
        return f"<MemoryTransport {self._endpoint} {self._phase}>"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        if self._broker is None:
            return self._capabilities
        if kind == "exchange":
            return self._broker.of_exchanges
        queue = self._broker.queues.get(name)
        return self._capabilities if queue is None else queue.capabilities

    @property
    def state(self) -> TransportState:
        cut = self._phase is Phase.CONNECTED and self._link is not None and not self._link.alive
        return TransportState(
            phase=Phase.RECONNECTING if cut else self._phase,
            since=self._since,
            endpoint=self._endpoint,
            blocked=self._link.broker.blocked if self._link is not None else None,
            last_error=self._last_error,
            last_error_at=self._last_error_at if self._last_error is not None else None,
            dials=self._dials,
            generation=self._generation,
            outstanding=self._outstanding,
        )

    # Opening, losing, closing

    async def open(self, *, within: timedelta) -> None:
        if self.state.phase not in (Phase.NEW, Phase.CLOSED):
            raise ClosedError(f"{self._endpoint} is open already")
        broker = self._hold(self._broker or self._find())
        self._loop = asyncio.get_running_loop()
        self._tries = self._dials = 0
        self._applied, self._epoch = Topology(), broker.epoch
        self._enter_phase(Phase.CONNECTING)
        until = self._clock.monotonic() + within.total_seconds()
        try:
            while broker.refusing:
                self._dials += 1
                self._note("the broker refuses dials")
                if self._passed(until):
                    raise NotConnected(f"no link to {self._endpoint} within {within}: {self._last_error}")
                pause = self._reconnect.pause(self._dials - 1)
                await self._change(min(self._clock.monotonic() + pause, until))
                if self._phase is not Phase.CONNECTING:
                    raise ClosedError(f"{self._endpoint} was closed while it was dialled")
            self._connect(broker)
        except BaseException:
            if self._phase is Phase.CONNECTING:
                self._loop = self._broker = None
                self._enter_phase(Phase.CLOSED)
            raise

    def _connect(self, broker: Broker) -> None:
        left = () if self._link is None else self._link.subscriptions
        self._link = Link(broker, self._name, lost=self._lost, changed=self._switch_thrown, restore=self._restore)
        self._dials, self._linked_at = 0, self._clock.monotonic()
        self._generation += 1
        broker.link(self._link, left)
        self._enter_phase(Phase.CONNECTED)
        if self._epoch != broker.epoch:
            self._restore()
        else:
            self._make(declaring.private(self._applied))

    def _lost(self, link: Link, reason: str) -> None:
        if link is not self._link or self._phase is not Phase.CONNECTED:
            return
        self._note(reason)
        if self._clock.monotonic() - self._linked_at >= STEADY:
            self._tries = 0
        self._enter_phase(Phase.RECONNECTING)
        if self._tries == 0:
            self._dial()
        else:
            self._redial = self._clock.call_later(self._reconnect.pause(self._tries - 1), self._dial)

    def _dial(self) -> None:
        broker = self._broker
        if self._phase is not Phase.RECONNECTING or broker is None:
            return
        self._tries += 1
        self._dials += 1
        if broker.refusing:
            self._note("the broker refuses dials")
            self._redial = self._clock.call_later(self._reconnect.pause(self._tries - 1), self._dial)
        else:
            self._connect(broker)

    def _restore(self) -> None:
        """The broker was wiped: make again what was applied here."""
        if self._link is not None and self._phase is Phase.CONNECTED:
            self._epoch = self._link.broker.epoch
            self._make(self._applied)

    def _make(self, topology: Topology) -> None:
        if self._link is None or topology == Topology():
            return
        try:
            declaring.apply(self._link.broker, self._link, topology, ApplyMode.CREATE)
        except AcemqError as error:
            log.error("what %s had applied could not be made again: %s", self._name, error)

    async def close(self, grace: timedelta = timedelta(seconds=5)) -> None:
        if self._phase is Phase.CLOSED:
            return
        if self._phase is Phase.NEW:
            self._broker = None
            self._enter_phase(Phase.CLOSED)
            return
        self._check_loop()
        if self._phase is Phase.CLOSING:
            while self._phase is Phase.CLOSING:
                await self._change(self._clock.monotonic() + grace.total_seconds())
            return
        self._enter_phase(Phase.CLOSING)
        until = self._clock.monotonic() + grace.total_seconds()
        try:
            for subscription in self._subscriptions():
                await subscription.stop()
            while self._outstanding and not self._passed(until):
                await self._change(until)
        finally:
            self._hang_up()
            self._enter_phase(Phase.CLOSED)

    def _hang_up(self) -> None:
        if self._redial is not None:
            self._redial.cancel()
        link, self._link = self._link, None
        if link is not None:
            for subscription in tuple(link.subscriptions):
                link.broker.end(subscription)
            link.broker.unlink(link, None)
        # A named broker lives as long as somebody holds it.
        self._broker = self._redial = None

    def _subscriptions(self) -> tuple[Subscription, ...]:
        return () if self._link is None else tuple(self._link.subscriptions)

    # Phases and waiting

    def _enter_phase(self, phase: Phase) -> None:
        self._phase, self._since = phase, self._clock.now()
        self._switch_thrown()

    def _switch_thrown(self) -> None:
        for waiter in tuple(self._waiters):
            _resolve(waiter)
        state = self.state
        if self._on_change is not None and self._announced != (state.phase, state.blocked):
            self._announced = (state.phase, state.blocked)
            try:
                self._on_change(state)
            except Exception:
                log.exception("on_change of %s has failed", self._name)

    def _note(self, error: str) -> None:
        self._last_error, self._last_error_at = error, self._clock.now()

    def _passed(self, until: float) -> bool:
        return self._clock.monotonic() >= until - GRAIN

    async def _change(self, until: float, waiter: asyncio.Future[None] | None = None) -> None:
        """Return when a phase or switch has changed, `waiter` was resolved by somebody else, or `until` has come."""
        waiter = waiter or asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        timer = self._clock.call_later(max(until - self._clock.monotonic(), 0.0), partial(_resolve, waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop(f"{self._endpoint} belongs to the event loop that opened it; open another transport here")

    def _check_open(self) -> None:
        if self._phase in (Phase.NEW, Phase.CLOSING, Phase.CLOSED):
            raise ClosedError(
                f"{self._endpoint} is {'not open yet' if self._phase is Phase.NEW else 'closed'}; open it first"
            )
        self._check_loop()

    async def _linked(self, until: float) -> Link:
        while True:
            self._check_open()
            if self._link is not None and self._link.alive:
                return self._link
            if self._passed(until):
                raise NotConnected(f"no link to {self._endpoint}: {self._last_error}")
            await self._change(until)

    async def _call(self, verb: str, subject: object, act: Callable[[Link], T]) -> T:
        """One verb of no hurry: wait for the link, meet the switches, act."""
        self._check_open()
        until = self._clock.monotonic() + LIMIT
        effect = await self._meet(verb, subject, await self._linked(until), until)
        result = act(await self._linked(until))
        if effect == "lose_answer":
            raise TimedOut(f"no answer to {verb}")
        return result

    async def _meet(self, verb: str, subject: object, link: Link, until: float) -> Effect | None:
        while verb in link.broker.stalled:
            if self._passed(until):
                raise TimedOut(f"no answer to {verb} within its limit")
            await self._change(until)
            self._check_open()
        effect = link.broker.faults.meet(verb, subject)
        match effect:
            case "refuse" | "fail":
                raise TransportError(f"{verb} has failed, as a test asked")
            case Raises(error):
                raise error
            case Delay(by):
                await sleep(self._clock, by.total_seconds())
            case "lose_answer" | None:
                pass
            case _:
                assert_never(effect)
        return effect

    # Publishing

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        link = self._link
        smooth = self._phase is Phase.CONNECTED and link is not None and link.alive and not link.broker.switched
        if link is None or not smooth or transaction is not None:
            return await self._publish_with_care(batch, within, transaction)
        if asyncio.get_running_loop() is not link.loop:
            self._check_loop()
        self._in_row += 1
        if self._in_row >= _IN_ROW:
            # Nothing here waits for anything, so whoever publishes in a loop would keep the consumers from their turn.
            self._in_row = 0
            await asyncio.sleep(0)
            return await self.publish(batch, within=within, transaction=transaction)
        return link.broker.publish(batch)

    async def _publish_with_care(
        self, batch: Sequence[Outgoing], within: timedelta, transaction: object | None
    ) -> Sequence[PublishResult]:
        self._check_open()
        if transaction is not None:
            return _all(batch, Published.REFUSED, CapabilityError(self._title, "transactions", "transaction"))
        until = self._clock.monotonic() + within.total_seconds()
        self._outstanding += len(batch)
        try:
            return await self._publish_past_switches(batch, until)
        finally:
            self._outstanding -= len(batch)
            if self._phase is Phase.CLOSING:
                self._switch_thrown()

    async def _publish_past_switches(self, batch: Sequence[Outgoing], until: float) -> Sequence[PublishResult]:
        try:
            link = await self._linked(until)
        except (NotConnected, ClosedError) as error:
            return _all(batch, Published.REFUSED, NotConnected(str(error)))
        broker = link.broker
        if broker.blocked is not None:
            return _all(batch, Published.REFUSED, Blocked(broker.blocked))
        while "publish" in broker.stalled and link.alive and not self._passed(until):
            await self._change(until)
        effects = [broker.faults.meet("publish", message) for message in batch]
        for effect in effects:
            if isinstance(effect, Raises):
                raise effect.error
        wait = max((effect.by.total_seconds() for effect in effects if isinstance(effect, Delay)), default=0.0)
        left = until - self._clock.monotonic()
        await sleep(self._clock, min(wait, left))
        if not link.alive:
            return _all(
                batch, Published.FAILED, NotConnected(f"the link to {self._endpoint} was lost: {self._last_error}")
            )
        if "publish" in broker.stalled or wait > left:
            return _all(batch, Published.FAILED, TimedOut("no confirm within the time"))
        through = [message for message, effect in zip(batch, effects, strict=True) if effect not in ("refuse", "fail")]
        done = iter(broker.publish(through))
        return [_SPOILT[effect](done) if isinstance(effect, str) else next(done) for effect in effects]

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
        if prefetch < 1:
            raise ConfigurationError(f"prefetch={prefetch} must be 1 or more")
        if exclusive and not self._capabilities.exclusive:
            raise CapabilityError(self._title, "exclusive consumers", "exclusive=True")
        for option, value in (options or {}).items():
            if option not in _OPTIONS:
                raise ConfigurationError(f"unknown option {option}={value!r}; known: {', '.join(_OPTIONS)}")
            if option != "name" and value is not None:
                raise CapabilityError(self._title, _OPTIONS[option], f"{option}={value!r}")
        seconds = self._lease(lease)

        def register(link: Link) -> Subscription:
            subscription = Subscription(link, queue, sink, prefetch=prefetch, exclusive=exclusive, lease=seconds)
            link.broker.subscribe(subscription)
            return subscription

        return await self._call("subscribe", queue, register)

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        if most < 1:
            raise ConfigurationError(f"most={most} must be 1 or more")
        seconds = self._lease(lease)
        self._check_open()
        until = self._clock.monotonic() + wait.total_seconds()
        effect = await self._meet("pull", queue, await self._linked(until), max(until, self._clock.monotonic() + LIMIT))
        while True:
            link = await self._linked(until)
            waiter = None if self._passed(until) else link.loop.create_future()
            taken = link.broker.pull(queue, most, Holder(link, seconds, link.pulled), waiter)
            if effect == "lose_answer":
                raise TimedOut("no answer to pull")
            if taken or waiter is None:
                return taken
            try:
                await self._change(until, waiter)
            except asyncio.CancelledError:
                link.broker.stop_waiting(queue, waiter, pass_on=True)
                raise
            link.broker.stop_waiting(queue, waiter)

    def _lease(self, lease: timedelta | None) -> float | None:
        """In seconds, rounded up to the step."""
        if lease is None:
            return None
        terms = self._capabilities.lease
        if terms is None:
            raise CapabilityError(self._title, "leases", f"lease={lease}", "A delivery is held until its link dies")
        if not terms.shortest <= check_duration("lease", lease) <= terms.longest:
            raise ConfigurationError(f"lease={lease} must be at least {terms.shortest} and at most {terms.longest}")
        return ceil(lease / terms.step) * terms.step.total_seconds()

    # Settling

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        link = self._link
        if link is None:
            results: Sequence[Settled] = [Settled.STALE] * len(batch)
        else:
            if asyncio.get_running_loop() is not link.loop:
                self._check_loop()
            if link.broker.switched:
                results = await self._settle_with_care(batch, link)
            else:
                results = link.broker.settle(batch, link)
        if Settled.STALE in results:
            self._warn_of_stale(batch, results)
        return results

    async def _settle_with_care(self, batch: Sequence[Settlement], link: Link) -> Sequence[Settled]:
        until = self._clock.monotonic() + LIMIT
        while "settle" in link.broker.stalled and link.alive:
            if self._passed(until):
                return [Settled.FAILED] * len(batch)
            await self._change(until)
        if not link.alive:
            return link.broker.settle(batch, link)
        results: list[Settled] = []
        for item in batch:
            try:
                effect = await self._meet("settle", item, link, until)
            except TransportError:
                results.append(Settled.FAILED)
                continue
            (result,) = link.broker.settle([item], link)
            results.append(Settled.FAILED if effect == "lose_answer" else result)
        return results

    def _warn_of_stale(self, batch: Sequence[Settlement], results: Sequence[Settled]) -> None:
        for item, result in zip(batch, results, strict=True):
            if result is Settled.STALE and item.delivery not in self._warned:
                self._warned.add(item.delivery)
                log.warning(
                    "%s of message %s from %r came too late: the broker no longer holds it for this delivery",
                    item.verb,
                    item.delivery.message_id,
                    item.delivery.queue,
                )

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        self._check_open()
        terms = self._capabilities.lease
        if terms is None or not terms.renewable:
            lacks = "no leases" if terms is None else "leases that are not renewed"
            return [Renewal("failed", error=TransportError(f"this broker has {lacks}")) for _ in batch]
        seconds = self._lease(lease) or 0.0
        until = self._clock.monotonic() + LIMIT
        link = await self._linked(until)
        results: list[Renewal] = []
        for delivery in batch:
            try:
                effect = await self._meet("renew", delivery, link, until)
            except TransportError as error:
                results.append(Renewal("failed", error=error))
                continue
            result = link.broker.renew(delivery, seconds, link)
            results.append(
                Renewal("failed", error=TimedOut("no answer to renew")) if effect == "lose_answer" else result
            )
        return results

    # Topology

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        if not isinstance(mode, ApplyMode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mode={mode!r} must be an ApplyMode")

        def apply(link: Link) -> list[Finding]:
            findings = declaring.apply(link.broker, link, topology, mode)
            if mode is ApplyMode.CREATE:
                self._applied |= topology
            return findings

        return await self._call("apply", topology, apply)

    async def depth(self, queue: str) -> Depth:
        self._check_open()
        has = self._capabilities.depth
        if has == "none":
            raise CapabilityError(self._title, "depth", f"depth({queue!r})")

        def count(link: Link) -> Depth:
            ready, held, delayed = link.broker.depth(queue)
            told = (held, delayed) if has == "exact" else (None, None)
            return Depth(ready=ready, held=told[0], delayed=told[1], exact=has == "exact", at=self._clock.now())

        return await self._call("depth", queue, count)

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        return await self._call(
            "exists", name, lambda link: name in (link.broker.queues if kind == "queue" else link.broker.exchanges)
        )

    async def is_claimed(self, queue: str) -> bool:
        return await self._call("is_claimed", queue, lambda link: bool(link.broker.queue(queue, link).subscriptions))

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        def delete(link: Link) -> bool:
            deleted = link.broker.delete(name, kind, only_if_empty, link)
            if deleted:
                self._applied = declaring.without(self._applied, kind, name)
            return deleted

        return await self._call("delete", name, delete)

    async def purge(self, queue: str) -> int | None:
        count = await self._call("purge", queue, lambda link: link.broker.purge(queue, link))
        return count if self._capabilities.depth != "none" else None


_OPTIONS = {
    "name": "",
    "priority": "consumer priority",
    "offset": "streams",
    "arguments": "arguments of a consumer",
}
"""Of `subscribe`, and the capability that each would need."""


def _refuse(done: Iterator[PublishResult]) -> PublishResult:
    return PublishResult(Published.REFUSED, TransportError("refused, as a test asked"))


def _fail(done: Iterator[PublishResult]) -> PublishResult:
    return PublishResult(Published.FAILED, TransportError("failed, as a test asked"))


def _lose_answer(done: Iterator[PublishResult]) -> PublishResult:
    next(done)
    return PublishResult(Published.FAILED, TimedOut("no confirm within the time"))


_SPOILT = {"refuse": _refuse, "fail": _fail, "lose_answer": _lose_answer}


def _all(batch: Sequence[Outgoing], outcome: Published, error: AcemqError) -> Sequence[PublishResult]:
    return [PublishResult(outcome, error)] * len(batch)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
