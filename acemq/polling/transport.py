"""The transport, whose broker is seven verbs."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from acemq.clock import SYSTEM
from acemq.errors import AcemqError, CapabilityError, ClosedError
from acemq.lacking import refuse_lacking
from acemq.plan import Finding, refuse_drift
from acemq.polling.declared import as_it_is, compare, has, lacking, targets, without
from acemq.polling.subscription import SLOWEST, PollingSubscription
from acemq.topology import Topology, aside_of
from acemq.transport import (
    ROUTED,
    ApplyMode,
    Capabilities,
    Delivery,
    Depth,
    ExchangeMissing,
    Kind,
    NotConnected,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    QueueMissing,
    Renewal,
    Settled,
    Settlement,
    Sink,
    TimedOut,
    TransportState,
    Unroutable,
    Verb,
    WrongLoop,
)

T = TypeVar("T")

log = logging.getLogger("acemq.polling")

ANSWER_LIMIT = timedelta(seconds=30)
"""For one verb, where the caller gives no limit."""
LAST = 1.0
"""Seconds to hang up in, at the end of a `close` that was out of time."""


class PollingTransport(ABC):
    """A `acemq.transport.Transport` over anything that keeps messages and can be asked for them.

    Done here: phases, routing by exchange and key, subscriptions that ask every `poll` and at once after whatever this
    transport did, prefetch, pause and stop, giving back, and the refusal of all that `capabilities` does not declare.
    A verb may raise anything: an `AcemqError` reaches the caller as it is, the rest as a `NotConnected`. No verb is cut
    off by a caller that is cancelled or out of time, but for `connect`, and at the end of a `close`.

    Not done here: leases, delays, priorities, expiry, exclusive consumers. What a process had taken that died stays
    taken until the broker lets go of it, so this is for one that notices, or that ends with its process. A broker that
    can do more implements the port itself.
    """

    poll = timedelta(milliseconds=50)
    """Between two looks of an idle subscription."""

    def __init__(self, capabilities: Capabilities, *, endpoint: str) -> None:
        """`endpoint`: where the broker is, for logs and errors; no secret."""
        self.capabilities, self.endpoint = capabilities, endpoint
        self._phase, self._since, self._generation = Phase.NEW, SYSTEM.now(), 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._subscriptions: list[PollingSubscription] = []
        self._holders: dict[Delivery, set[Delivery]] = {}
        """All that is taken and not settled, and among whose it is."""
        self._pulled: set[Delivery] = set()
        self._late: WeakSet[Delivery] = WeakSet()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    # What a broker does, each as a whole or not at all

    @abstractmethod
    async def declared(self, change: Callable[[Topology], Topology]) -> Topology:
        """Change what is declared, in one step, and tell what is now. A queue that is no more loses its messages."""

    @abstractmethod
    async def put(self, copies: Sequence[tuple[str, Outgoing]]) -> None:
        """Each to the end of its queue, all or none, and safe there on return."""

    @abstractmethod
    async def take(self, queue: str, most: int) -> Sequence[Delivery]:
        """The first that nobody has, up to so many: they are ours from now on. Nothing of a queue that is not there.

        By their `receipt` the next two know them again.
        """

    @abstractmethod
    async def remove(self, deliveries: Sequence[Delivery]) -> None:
        """What was taken is settled. One that is gone, for whatever reason, is no fault."""

    @abstractmethod
    async def put_back(self, deliveries: Sequence[Delivery]) -> None:
        """What was taken can be taken again, as redelivered. One that is gone, for whatever reason, is no fault."""

    @abstractmethod
    async def count(self, queue: str) -> tuple[int, int]:
        """How many can be taken, and how many are."""

    @abstractmethod
    async def clear(self, queue: str) -> int:
        """Remove what can be taken, and tell how much that was."""

    async def connect(self) -> None:  # noqa: B027  nothing to do for a broker without a link
        """Once for each `open`. What it raises tells a stranger why the broker cannot be reached."""

    async def disconnect(self) -> None:  # noqa: B027
        """Once for each `open` that has succeeded."""

    # The port: opening and closing

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        return self.capabilities

    @property
    def state(self) -> TransportState:
        return TransportState(phase=self._phase, since=self._since, endpoint=self.endpoint, generation=self._generation)

    async def open(self, *, within: timedelta) -> None:
        if self._phase not in (Phase.NEW, Phase.CLOSED):
            raise ClosedError(f"the transport of {self.endpoint} is {self._phase}; open it once")
        before, self._closing, self._loop = self._phase, None, asyncio.get_running_loop()
        self._become(Phase.CONNECTING)
        try:
            async with asyncio.timeout(within.total_seconds()):
                await self.connect()
        except BaseException as error:
            self._become(before)
            if isinstance(error, Exception):
                self._raise(error)
            raise
        self._generation += 1
        self._become(Phase.CONNECTED)

    async def close(self, grace: timedelta = timedelta(seconds=5)) -> None:
        if self._phase is Phase.CONNECTED:
            self._become(Phase.CLOSING)
            self._closing = asyncio.create_task(self._close(grace.total_seconds()))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, grace: float) -> None:
        try:
            async with asyncio.timeout(grace):
                for subscription in list(self._subscriptions):
                    await subscription.close()
                while self._under_way:
                    await asyncio.wait(self._under_way)
                await asyncio.wait({self.give_back(list(self._pulled))})
        except TimeoutError:
            log.warning("%s: closed with %d calls still under way", self.endpoint, len(self._under_way))
        left = [*self._under_way, *(subscription.task for subscription in self._subscriptions)]
        for task in left:
            task.cancel()
        for forgotten in (self._subscriptions, self._holders, self._pulled):
            forgotten.clear()
        try:
            async with asyncio.timeout(LAST):
                await self.disconnect()
        except Exception as error:
            log.warning("%s: hanging up failed: %s", self.endpoint, _said(error))
        self._become(Phase.CLOSED)

    # What is declared

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        self._check()
        refuse_lacking(topology, self.capabilities)
        wanted = topology
        for queue in topology.queues:
            for option in (option for option in ("exclusive", "auto_delete") if getattr(queue, option)):
                raise self._lacks(f"{option} queues", f"{option}=True of queue {queue.name!r}")
            if queue.dead_letter:
                wanted |= aside_of(queue.name, exchanges=False)
        for binding in topology.bindings:
            if {"*", "#"} & set(binding.key.split(".")):
                raise self._lacks("topic patterns", f"the binding on {binding.key!r}")
        there, creates = await self._declared(), mode is ApplyMode.CREATE
        found = list(compare(wanted, there, "created" if creates else "missing"))
        if mode is not ApplyMode.REPORT:
            refuse_drift(found, nor_missing=not creates)
        if creates:
            await self._whole(self.declared(lambda now: now | lacking(wanted, now)))
        return found

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        return has(await self._declared(), name, kind)

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        """`only_if_empty` looks first: what comes in between goes with the queue."""
        if not await self.exists(name, kind):
            return False
        if kind == "queue" and only_if_empty and any(await self._whole(self.count(name))):
            return False
        await self._whole(self.declared(lambda now: without(now, name, kind)))
        return True

    async def depth(self, queue: str) -> Depth:
        await self._find(queue)
        ready, held = await self._whole(self.count(queue))
        return Depth(ready=ready, held=held, delayed=0, exact=self.capabilities.depth == "exact", at=SYSTEM.now())

    async def purge(self, queue: str) -> int | None:
        await self._find(queue)
        return await self._whole(self.clear(queue))

    # Publishing

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        self._check()
        if transaction is not None:
            return [PublishResult(Published.REFUSED, self._lacks("transactions", "transaction="))] * len(batch)
        try:
            return await self._whole(self._publish(batch), within)
        except AcemqError as error:
            return [PublishResult(Published.FAILED, error)] * len(batch)

    async def _publish(self, batch: Sequence[Outgoing]) -> Sequence[PublishResult]:
        there = await self.declared(as_it_is)
        results: list[PublishResult] = []
        copies: list[tuple[str, Outgoing]] = []
        for out in batch:
            result, queues = self._routed(out, there)
            results.append(result)
            copies.extend((queue, out) for queue in queues)
        if copies:
            await self.put(copies)
            self._look()
        return results

    def _routed(self, out: Outgoing, there: Topology) -> tuple[PublishResult, Sequence[str]]:
        for option in (option for option in ("delay", "expires_in", "priority") if getattr(out, option)):
            return PublishResult(Published.REFUSED, self._lacks(option, f"{option}=")), ()
        try:
            queues = targets(out, there)
        except ExchangeMissing as missing:
            return PublishResult(Published.REFUSED, missing), ()
        if queues or not out.mandatory:
            return ROUTED, queues
        return PublishResult(Published.UNROUTABLE, Unroutable(f"no queue takes {out.routing_key!r}")), ()

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
    ) -> PollingSubscription:
        asked = {"exclusive": exclusive, "lease": lease, **(options or {}), "name": None}
        for option in (option for option, value in asked.items() if value):
            raise self._lacks(option, f"{option}=")
        await self._find(queue)
        subscription = PollingSubscription(self, queue, sink, prefetch)
        self._subscriptions.append(subscription)
        return subscription

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        if lease is not None:
            raise self._lacks("leases", "lease=")
        clock = asyncio.get_running_loop().time
        until = clock() + wait.total_seconds()
        while True:
            await self._find(queue)
            taking = self._in_task(self.taken(queue, most, self._pulled))
            try:
                taken = await self._answer(taking, ANSWER_LIMIT)
            except BaseException:
                taking.add_done_callback(self._untake)  # nobody is there any more to be handed it
                raise
            left = until - clock()
            if taken or left <= 0:
                return taken
            await asyncio.sleep(min(self.poll.total_seconds(), left))

    def _untake(self, taking: asyncio.Task[Sequence[Delivery]]) -> None:
        if not taking.cancelled() and taking.exception() is None:
            self.give_back(taking.result())

    async def taken(self, queue: str, most: int, holder: set[Delivery]) -> Sequence[Delivery]:
        """What was taken, for this holder from now on."""
        taken = await self.take(queue, most)
        holder.update(taken)
        self._holders.update(dict.fromkeys(taken, holder))
        return taken

    def forget(self, subscription: PollingSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def _look(self) -> None:
        """There may be something to take."""
        for subscription in self._subscriptions:
            subscription.look()

    # Settling

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        self._check_loop()
        answers: dict[int, Settled] = {}
        orders: dict[bool, list[Delivery]] = {}
        for number, each in enumerate(batch):
            if each.delivery not in self._holders:
                answers[number] = self._too_late(each)
            elif each.delay or each.headers is not None:
                log.error("%s: a requeue neither waits nor rewrites; the delivery stays held", self.endpoint)
                answers[number] = Settled.FAILED
            else:
                orders.setdefault(each.verb is Verb.REQUEUE, []).append(each.delivery)
                self._let_go(each.delivery)
        # All begins now, so that whoever stops waiting leaves nothing behind that nobody will settle.
        settling = {
            returns: self._in_task(self._settled(self.put_back if returns else self.remove, deliveries))
            for returns, deliveries in orders.items()
        }
        if settling:
            await asyncio.wait(settling.values(), timeout=ANSWER_LIMIT.total_seconds())
            self._look()
        for number, each in enumerate(batch):
            if number not in answers:
                task = settling[each.verb is Verb.REQUEUE]
                answers[number] = task.result() if task.done() else Settled.FAILED
        return [answers[number] for number in range(len(batch))]

    async def _settled(
        self, verb: Callable[[Sequence[Delivery]], Coroutine[Any, Any, None]], deliveries: Sequence[Delivery]
    ) -> Settled:
        try:
            await verb(deliveries)
        except Exception as error:
            log.warning(
                "%s: %d settlements failed (%s); these come again", self.endpoint, len(deliveries), _said(error)
            )
            self._in_task(self._put_back(deliveries))
            return Settled.FAILED
        return Settled.DONE

    def _too_late(self, each: Settlement) -> Settled:
        if each.delivery not in self._late:
            self._late.add(each.delivery)
            log.warning("%s: %s of message %s came too late", self.endpoint, each.verb, each.delivery.message_id)
        return Settled.STALE

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        self._check()
        return [Renewal("failed")] * len(batch)

    def give_back(self, deliveries: Iterable[Delivery]) -> asyncio.Task[None]:
        """Begun now, whoever waits for it, and tried until it is done or the transport is closed."""
        return self._in_task(self._put_back([delivery for delivery in deliveries if self._let_go(delivery)]))

    async def _put_back(self, deliveries: Sequence[Delivery]) -> None:
        wait = self.poll.total_seconds()
        while deliveries:
            try:
                await self.put_back(deliveries)
                break
            except Exception as error:
                log.warning("%s: %d deliveries not given back yet: %s", self.endpoint, len(deliveries), _said(error))
            await asyncio.sleep(wait)
            wait = min(2 * wait, SLOWEST)
        self._look()

    def _let_go(self, delivery: Delivery) -> bool:
        """Whether it was still held."""
        holder = self._holders.pop(delivery, None)
        if holder is not None:
            holder.discard(delivery)
        return holder is not None

    # Asking the broker

    def _become(self, phase: Phase) -> None:
        self._phase, self._since = phase, SYSTEM.now()

    def _check(self) -> None:
        if self._phase is not Phase.CONNECTED:
            raise ClosedError(f"the transport of {self.endpoint} is not open")
        self._check_loop()

    def _check_loop(self) -> None:
        if self._loop not in (None, asyncio.get_running_loop()):
            raise WrongLoop(f"the transport of {self.endpoint} was opened by another event loop; make one for each")

    def _lacks(self, what: str, option: str) -> CapabilityError:
        return CapabilityError(self.capabilities.transport, what, option)

    async def _declared(self) -> Topology:
        self._check()
        return await self._whole(self.declared(as_it_is))

    async def _find(self, queue: str) -> None:
        if not await self.exists(queue):
            raise QueueMissing(f"there is no queue {queue!r}; declare it first")
        self._check()  # it may have begun to close meanwhile

    async def _whole(self, work: Coroutine[Any, Any, T], within: timedelta = ANSWER_LIMIT) -> T:
        return await self._answer(self._in_task(work), within)

    async def _answer(self, task: asyncio.Task[T], within: timedelta) -> T:
        """Only the wait for it ends early. Raises an `AcemqError`."""
        try:
            async with asyncio.timeout(within.total_seconds()):
                return await asyncio.shield(task)
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        if isinstance(error, AcemqError):
            raise error
        kind = TimedOut if isinstance(error, TimeoutError) else NotConnected
        raise kind(f"{self.endpoint}: {_said(error)}") from error

    def _in_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # read, should nobody wait for it any more


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
