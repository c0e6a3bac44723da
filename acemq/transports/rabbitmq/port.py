"""The transport itself: two links, a publisher, subscriptions, and the verbs of `acemq.transport.Transport`.

Two connections, because RabbitMQ stops reading from one that publishes while it is short of memory or disk: an
acknowledgement sent on it is not read either, and what was finished meanwhile would be delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from typing import Any, TypeVar

from msgspec.structs import replace

from acemq.clock import Clock, check_duration
from acemq.errors import CapabilityError, ClosedError, ConfigurationError
from acemq.retry import Backoff
from acemq.security import is_loopback
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Capabilities,
    Delivery,
    Depth,
    Finding,
    Kind,
    NotConnected,
    Outgoing,
    Phase,
    PublishResult,
    Renewal,
    Settled,
    Settlement,
    Sink,
    TransportError,
    TransportState,
    WrongLoop,
)

from . import capabilities, ledger
from .address import Address
from .advice import advice
from .bell import keep
from .consumer import ConsumeOptions
from .link import Link
from .login import Login
from .owner import Owner, is_claimed
from .publish import Publisher
from .pull import Pullers
from .receive import Subscription
from .session import ANSWER_LIMIT
from .topology import BrokerTopology

T = TypeVar("T")

log = logging.getLogger("acemq.rabbitmq")


class _Running:
    """All that lives from one `open` to the next `close`, and belongs to one event loop."""

    def __init__(
        self,
        address: Address,
        name: str,
        login: Login,
        clock: Clock,
        reconnect: Backoff,
        links: int,
        changed: Callable[[], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.login = login
        names = [f"{name} publish", f"{name} consume"] if links == 2 else [name]
        self.links = [Link(each, address, login, clock, reconnect, changed) for each in names]
        self.topology = BrokerTopology(self.links[-1], clock)
        self.publisher = Publisher(self.links[0], clock, look=self.topology.look_at_exchange)
        self.subscriptions: set[Subscription] = set()
        self.owners: dict[str, Owner] = {}
        self.pullers = Pullers(self.links[-1], self.topology)
        self.publishing: asyncio.Task[None] | None = None

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """What is asked of the broker goes to its end, whatever becomes of the caller."""
        return await self.links[-1].finish(work)

    async def open(self) -> None:
        try:
            async with asyncio.TaskGroup() as dialling:
                for link in self.links:
                    dialling.create_task(link.open())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        self.publishing = keep(self.publisher.keep(), "a channel to publish on")
        await self.publisher.ready()

    async def close(self, grace: float) -> None:
        deadline = self.loop.time() + grace
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(*(subscription.stop() for subscription in self.subscriptions))
                await self.publisher.idle()
        await self.hang_up(0.5)

    async def abandon(self, opening: asyncio.Task[None]) -> None:
        """Nothing is left of an `open` that has failed or been cancelled."""
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            opening.exception()
        await self.hang_up(0)

    async def hang_up(self, within: float) -> None:
        self.publisher.close()
        for subscription in list(self.subscriptions):
            subscription.forget()
        if self.publishing is not None:
            self.publishing.cancel()
            await asyncio.wait({self.publishing})
        # What is held goes back in place with its connection, behind what was settled.
        await asyncio.gather(*(link.close(within) for link in self.links))
        self.login.close()


class RabbitMQ:
    """A `Transport` on RabbitMQ."""

    def __init__(
        self,
        address: Address,
        *,
        name: str,
        login: Login,
        clock: Clock,
        reconnect: Backoff,
        on_change: Callable[[TransportState], None] | None,
        connections: int,
    ) -> None:
        self._address, self._name, self._clock, self._reconnect = address, name, clock, reconnect
        self._login = login
        self._on_change, self._connections = on_change, connections
        self._capabilities = capabilities.SHARED if connections == 1 else capabilities.OWN
        if login.tls is not None and not login.tls.is_verified:
            notes = (*self._capabilities.notes, f"No certificate is checked: {login.tls!r}.")
            self._capabilities = replace(self._capabilities, notes=notes)
        self._running: _Running | None = None
        self._opening: asyncio.Task[None]
        self._closing: asyncio.Task[None] | None = None
        self._phase = Phase.NEW
        self._since = clock.now()
        self._generation = 0
        self._numbers = count(1)

    def __repr__(self) -> str:
        return f"<RabbitMQ {self.state.endpoint} {self._phase}>"

    # How it is

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        declared = self._running.topology.known(kind, name) if self._running is not None else None
        return self._capabilities if declared is None else capabilities.of(declared, self._capabilities)

    @property
    def state(self) -> TransportState:
        running = self._running
        links = running.links if running is not None else []
        failed = max((link for link in links if link.last_error_at), key=_failed_at, default=None)
        publishing = links[0].session if links else None
        return TransportState(
            phase=self._phase,
            since=self._since,
            endpoint=links[0].endpoint if links else ",".join(map(self._address.endpoint, self._address.hosts)),
            blocked=publishing.blocked if publishing is not None else None,
            last_error=failed.last_error if failed is not None else None,
            last_error_at=failed.last_error_at if failed is not None else None,
            terminal=any(link.is_hopeless for link in links),
            dials=max((link.dials for link in links), default=0),
            generation=self._generation,
            outstanding=running.publisher.outstanding if running is not None else 0,
        )

    def _links_changed(self) -> None:
        phases = {link.phase for link in self._running.links} if self._running is not None else set[Phase]()
        if self._phase in (Phase.CONNECTING, Phase.CONNECTED, Phase.RECONNECTING):
            if phases == {Phase.CONNECTED}:
                if self._phase is not Phase.CONNECTED:
                    self._generation += 1
                self._now(Phase.CONNECTED)
                return
            if self._phase is Phase.CONNECTED:
                self._now(Phase.RECONNECTING)
                return
        self._tell()

    def _now(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase, self._since = phase, self._clock.now()
        self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            try:
                self._on_change(self.state)
            except Exception:
                log.exception("a change of state could not be told")

    # Opening and closing

    async def open(self, *, within: timedelta) -> None:
        limit = check_duration("within", within).total_seconds()
        if self._phase not in (Phase.NEW, Phase.CLOSED):
            raise ClosedError(f"{self._name} is open already")
        self._running = running = _Running(
            self._address,
            self._name,
            self._login,
            self._clock,
            self._reconnect,
            self._connections,
            self._links_changed,
        )
        self._warn()
        self._now(Phase.CONNECTING)
        self._opening = opening = asyncio.create_task(running.open())
        try:
            await asyncio.wait({opening}, timeout=limit)
            if opening.cancelled():
                raise ClosedError(f"{self._name} was closed while it was opening")
            if not opening.done():
                last = next((link.last_error for link in running.links if link.last_error), "no answer")
                hosts = list(map(self._address.endpoint, self._address.hosts))
                where = f"no broker reached at {', '.join(hosts)} within {limit:g} s"
                raise NotConnected(f"{where}; last: {last}", hosts=hosts, last=last)
            opening.result()
        except BaseException:
            if self._closing is None:  # else that does what is left to do
                await running.abandon(opening)
                self._running = None
                self._now(Phase.NEW)
            raise

    def _warn(self) -> None:
        """Once a connection, of what somebody in between could make of it."""
        if self._login.tls is None:
            open_to_all = [host.name for host in self._address.hosts if not is_loopback(host.name)]
            if open_to_all:
                where = ", ".join(open_to_all)
                log.warning("%s: the way to %s is not encrypted; amqps:// is", self._name, where)
        elif not self._login.tls.is_verified:
            log.warning("%s: no certificate is checked: %r", self._name, self._login.tls)

    async def close(self, grace: timedelta = timedelta(seconds=20)) -> None:
        if self._closing is None:
            if self._running is None:
                self._now(Phase.CLOSED)
                return
            self._check_loop(self._running)
            self._now(Phase.CLOSING)
            self._closing = asyncio.create_task(self._close(self._running, grace.total_seconds()))
        # Every caller waits for the same end; a cancelled one does not stop it.
        await asyncio.shield(self._closing)

    async def _close(self, running: _Running, grace: float) -> None:
        try:
            if not self._opening.done():
                self._opening.cancel()
                await asyncio.wait({self._opening})
                grace = 0
            await running.close(grace)
        finally:
            self._running = self._closing = None
            self._now(Phase.CLOSED)

    def _enter(self) -> _Running:
        running = self._running
        if running is None or self._phase in (Phase.CLOSING, Phase.CLOSED):
            raise ClosedError(f"{self._name} is {'closed' if self._phase is not Phase.NEW else 'not open yet'}")
        self._check_loop(running)
        return running

    def _check_loop(self, running: _Running) -> None:
        if asyncio.get_running_loop() is not running.loop:
            raise WrongLoop(f"{self._name} belongs to the event loop that opened it; open one per loop")

    # The verbs

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        running = self._enter()
        if not isinstance(mode, ApplyMode):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mode={mode!r} must be one of ApplyMode")
        findings = await running.finish(running.topology.apply(topology, mode))
        created = {finding.name for finding in findings if finding.verdict == "created" and finding.kind == "queue"}
        for subscription in running.subscriptions:
            if subscription.queue in created:
                subscription.nudge()
        return findings

    def advice(self, topology: Topology) -> Sequence[str]:
        return tuple(advice(topology))

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        running = self._enter()
        if transaction is not None:
            raise CapabilityError("rabbitmq", "transactions with a database", "transaction", "Use the outbox")
        return await running.publisher.publish(batch, within.total_seconds())

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
        if not 1 <= prefetch <= 65535:
            raise ConfigurationError(f"prefetch={prefetch} must be from 1 to 65535")
        _refuse_lease(lease)
        wanted = ConsumeOptions.read(options or {})
        subscription = Subscription(
            queue,
            sink,
            prefetch=prefetch,
            name=wanted.name or f"{self._name}/{next(self._numbers)}"[:80],
            options=wanted,
            link=running.links[-1],
            clock=self._clock,
            topology=running.topology,
            owner=Owner(queue, running.owners) if exclusive else None,
            on_closed=running.subscriptions.discard,
        )
        running.subscriptions.add(subscription)
        try:
            await running.finish(subscription.open(ANSWER_LIMIT))
        except asyncio.CancelledError:
            subscription.abandon()
            raise
        subscription.begin()
        return subscription

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        running = self._enter()
        if most < 1:
            raise ConfigurationError(f"most={most} must be 1 or more")
        _refuse_lease(lease)
        return await running.pullers.pull(queue, most, check_duration("wait", wait, zero=True).total_seconds())

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        if self._running is not None:
            self._check_loop(self._running)
        return [ledger.settle(settlement) for settlement in batch]

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        self._enter()
        error = TransportError("rabbitmq has no leases: a delivery is held until it is settled or its channel ends")
        return [Renewal("failed", error=error) for _ in batch]

    async def depth(self, queue: str) -> Depth:
        running = self._enter()
        return await running.finish(running.topology.depth(queue))

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        running = self._enter()
        return await running.finish(running.topology.exists(name, kind))

    async def is_claimed(self, queue: str) -> bool:
        running = self._enter()
        link = running.links[-1]
        if link.session is None:
            raise NotConnected(f"no link to look at {queue!r} on: {link.last_error}")
        return await running.finish(is_claimed(link.session, queue, running.owners))

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        running = self._enter()
        return await running.finish(running.topology.delete(name, kind, only_if_empty=only_if_empty))

    async def purge(self, queue: str) -> int | None:
        running = self._enter()
        return await running.finish(running.topology.purge(queue))


def _refuse_lease(lease: timedelta | None) -> None:
    if lease is not None:
        raise CapabilityError("rabbitmq", "leases", "lease", "A delivery is held until it is settled")


def _failed_at(link: Link) -> datetime:
    assert link.last_error_at is not None
    return link.last_error_at
