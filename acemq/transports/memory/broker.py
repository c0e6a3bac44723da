"""The broker itself: what happens to a message from publish to settlement, and when."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import cast

from msgspec.structs import replace

from acemq.clock import SYSTEM, Clock, check_duration
from acemq.errors import CapabilityError, ConfigurationError
from acemq.headers import HeaderValue
from acemq.topology import Queue
from acemq.transport import (
    ROUTED,
    AccessDenied,
    Capabilities,
    Delivery,
    ExchangeMissing,
    Kind,
    LostBy,
    MessageTooLarge,
    Nacked,
    Outgoing,
    Published,
    PublishResult,
    QueueFull,
    QueueMissing,
    Renewal,
    Settled,
    Settlement,
    TransportError,
    Unroutable,
    Verb,
)
from acemq.transports.memory.agenda import GRAIN, Agenda, Rank
from acemq.transports.memory.faults import Faults
from acemq.transports.memory.profiles import MAX_MESSAGE, Profile
from acemq.transports.memory.queues import DELAYED, HELD, MemoryQueue, Stored, admit
from acemq.transports.memory.receiving import Holder, Link, Receipt, Subscription, log
from acemq.transports.memory.routing import MemoryExchange


class Broker:
    """Queues, exchanges and links. A method with an underscore runs under `lock`, as does one that says so."""

    def __init__(
        self,
        *,
        clock: Clock = SYSTEM,
        profile: Profile | None = None,
        lease: timedelta | None = None,
        max_message: int = MAX_MESSAGE,
    ) -> None:
        self.clock, self.profile, self.lease, self.max_message = clock, profile or Profile.FULL, lease, max_message
        if lease is not None:
            check_duration("lease", lease)
            if not self.profile.fences:
                raise ConfigurationError(f"lease={lease}: profile {self.profile.name} holds until the link dies")
        self.name: str | None = None
        self.capabilities: Capabilities = self.profile.with_terms(lease, max_message)
        self.of_exchanges: Capabilities = replace(self.capabilities, **self.profile.of_exchanges)
        self.lock = threading.Lock()
        """Held for microseconds, never while anybody is called back."""
        self.queues: dict[str, MemoryQueue] = {}
        self.exchanges: dict[str, MemoryExchange] = {}
        self.links: list[Link] = []
        self.blocked: str | None = None
        """The reason why it takes no publishes."""
        self.refusing = False
        """Nobody is let in."""
        self.stalled: set[str] = set()
        """Verbs whose calls are swallowed."""
        self.faults = Faults()
        self.epoch = 0
        """How often everything was wiped."""
        self.expired: Counter[str] = Counter()
        """Messages whose time ran out, by queue."""
        self._agenda = Agenda(clock, self.links, self._wake)
        self._orphans: dict[str, list[Subscription]] = {}
        self._position = self._token = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or 'private'}, {self.profile.name}, {len(self.queues)} queues>"

    @property
    def switched(self) -> bool:
        """A switch or fault may concern the next publish or settlement."""
        return bool(self.blocked is not None or self.stalled or self.faults.armed)

    # Publishing

    def publish(self, batch: Sequence[Outgoing]) -> list[PublishResult]:
        """One result a message, in order. A fan-out reaches all of its queues or none."""
        now = self.clock.now()
        if self._agenda.overdue:
            self._wake()
        return [self._accept(message, now) for message in batch]

    def _accept(self, out: Outgoing, now: datetime) -> PublishResult:
        try:
            headers, size, flat = admit(out.headers)
            size += len(out.body)
            if size > self.max_message:
                raise MessageTooLarge(
                    f"the message has {size} bytes; at most {self.max_message}", size=size, limit=self.max_message
                )
            with self.lock:
                queues = self._route(out.exchange, out.routing_key)
                if not queues:
                    return self._unroutable(out)
                if out.delay is not None or out.expires_in is not None or out.priority is not None:
                    self._check_options(out, queues)
                for queue in queues:
                    if queue.limit is not None and queue.full:
                        return self._put_around_full(out, headers, flat, queues, now)
                for queue in queues:
                    self._put(queue, out, headers, flat, now)
        except (TransportError, CapabilityError) as error:
            return PublishResult(Published.REFUSED, error)
        return ROUTED

    def _route(self, exchange: str, key: str) -> Sequence[MemoryQueue]:
        if not exchange:
            queue = self.queues.get(key)
            return (queue,) if queue is not None else ()
        found = self.exchanges.get(exchange)
        if found is None:
            raise ExchangeMissing(f"there is no exchange {exchange!r}; declare it first", code=404)
        return [self.queues[name] for name in found.route(key)]

    def _unroutable(self, out: Outgoing) -> PublishResult:
        if not out.mandatory or self.capabilities.unroutable == "unknown":
            return ROUTED
        where = f"exchange {out.exchange!r} has no queue for key {out.routing_key!r}"
        text = where if out.exchange else f"there is no queue {out.routing_key!r}"
        return PublishResult(Published.UNROUTABLE, Unroutable(f"{text}; nothing is stored", code=312))

    def _check_options(self, out: Outgoing, queues: Iterable[MemoryQueue]) -> None:
        has = self.of_exchanges if out.exchange else self.capabilities
        if out.delay is not None and out.delay > (has.publish_delay or timedelta()):
            raise self.cannot("publish_delay", f"delay={out.delay}")
        if out.expires_in is not None and not has.expiry:
            raise self.cannot("expiry", f"expires_in={out.expires_in}")
        for queue in queues:
            if out.priority is not None and not 0 <= out.priority < queue.levels:
                raise self.cannot(
                    f"level {out.priority} on queue {queue.name!r} ({queue.levels} levels)", f"priority={out.priority}"
                )

    def cannot(self, capability: str, option: str) -> CapabilityError:
        return CapabilityError(self.profile.title, capability, option)

    def _put_around_full(
        self, out: Outgoing, headers: dict[str, HeaderValue], flat: bool, queues: Sequence[MemoryQueue], now: datetime
    ) -> PublishResult:
        full = ", ".join(repr(queue.name) for queue in queues if queue.full)
        if not self.profile.nacks:
            return PublishResult(Published.REFUSED, QueueFull(f"queue {full} has its max_length; nothing is stored"))
        for queue in queues:
            if not queue.full:
                self._put(queue, out, headers, flat, now)
        return PublishResult(Published.FAILED, Nacked(f"queue {full} has its max_length"))

    def _put(
        self, queue: MemoryQueue, out: Outgoing, headers: dict[str, HeaderValue], flat: bool, now: datetime
    ) -> None:
        self._position += 1
        message = Stored(
            queue,
            self._position,
            out.body,
            headers,
            flat,
            out.message_id,
            out.content_type,
            out.exchange,
            out.routing_key,
            out.reply_to,
            out.ordering_key,
            out.priority,
            now,
        )
        if out.delay is not None or out.expires_in is not None or queue.ttl is not None:
            self._put_timed(message, out.delay or timedelta(), out.expires_in)
            return
        queue.add(message)
        if queue.turns or queue.pullers:
            self.feed(queue)

    def _put_timed(self, message: Stored, delay: timedelta, expires_in: timedelta | None) -> None:
        queue, now = message.queue, self.clock.monotonic()
        lives = [] if expires_in is None else [expires_in.total_seconds()]
        if queue.ttl is not None:
            # Counted from when it can be had: a queue whose ttl is shorter than the delay still delivers it.
            lives.append(max(delay, timedelta()).total_seconds() + queue.ttl.total_seconds())
        if lives:
            message.expires_in, message.expires_at = expires_in, now + min(lives)
            self._agenda.add(message.expires_at, Rank.EXPIRY, message)
        if delay > timedelta():
            self._put_off(message, delay)
        else:
            queue.add(message)
            self.feed(queue)

    def _put_off(self, message: Stored, delay: timedelta) -> None:
        message.where, message.until = DELAYED, self.clock.monotonic() + delay.total_seconds()
        message.queue.delayed[message.position] = message
        self._agenda.add(message.until, Rank.DUE, message)

    # Handing out

    def feed(self, queue: MemoryQueue) -> None:
        """Under the lock: hand out what is ready, to subscriptions in turn while they have credit, then to pulls."""
        turns = queue.turns
        while turns and queue.ready and "deliver" not in self.stalled:
            message = queue.take()
            if message is None:
                break
            subscription = turns[0]
            self._hand(message, subscription)
            if len(subscription.held) < subscription.prefetch:
                turns.rotate(-1)
            else:
                turns.popleft()
                subscription.in_turn = False
        if queue.ready and queue.pullers:
            queue.wake_puller()

    def _hand(self, message: Stored, holder: Holder) -> Delivery:
        self._token = token = self._token + 1
        queue = message.queue
        queue.held[token] = message
        message.where, message.token, message.holder = HELD, token, holder
        message.deliveries += 1
        until = None
        hold = holder.lease or queue.hold
        if hold is not None:
            until = message.until = self.clock.monotonic() + hold
            self._agenda.add(until, Rank.LEASE, message)
        delivery = Delivery(
            queue=queue.name,
            body=message.body,
            headers=message.headers.copy() if message.flat else message.headers_for_one(),
            message_id=message.message_id,
            content_type=message.content_type,
            exchange=message.exchange,
            routing_key=message.routing_key,
            reply_to=message.reply_to,
            redelivered=message.redelivered,
            deliveries=message.deliveries if queue.counts else None,
            fence=token if self.profile.fences else None,
            lease_until=until if self.lease is not None else None,
            enqueued_at=message.enqueued_at,
            priority=message.priority,
            expires_in=message.expires_in,
            ordering_key=message.ordering_key,
            receipt=Receipt(message, token),
        )
        holder.hand(token, delivery)
        return delivery

    def pull(self, name: str, most: int, holder: Holder, waiter: asyncio.Future[None] | None) -> list[Delivery]:
        """What is ready; if nothing is, `waiter` is resolved once that may have changed."""
        with self.lock:
            self._catch_up()
            queue = self.queue(name, holder.link)
            taken: list[Delivery] = []
            while len(taken) < most and (message := queue.take()) is not None:
                taken.append(self._hand(message, holder))
            if not taken and waiter is not None:
                queue.pullers[waiter] = holder.link
            self.feed(queue)
            return taken

    def stop_waiting(self, name: str, waiter: asyncio.Future[None], *, pass_on: bool = False) -> None:
        with self.lock:
            queue = self.queues.get(name)
            if queue is not None and queue.pullers.pop(waiter, None) is None and pass_on:
                self.feed(queue)  # woken and gone: the next one may have what is there

    def queue(self, name: str, link: Link | None = None) -> MemoryQueue:
        """Under the lock. Raises `QueueMissing`, and `AccessDenied` where it is another link's own."""
        queue = self.queues.get(name)
        if queue is None:
            raise QueueMissing(f"there is no queue {name!r}; declare it first", code=404)
        if queue.owner is not None and queue.owner is not link:
            raise AccessDenied(f"queue {name!r} is exclusive to another connection", code=405)
        return queue

    # Subscriptions and links

    def rest(self, subscription: Subscription) -> None:
        """Nothing more for it; what it has not seen goes back as if it had never been taken."""
        with self.lock:
            subscription.leave_turn()
            self._give_back(subscription.unseen, None)

    def give_back(self, subscription: Subscription) -> None:
        """All that it holds, in its place."""
        with self.lock:
            self._give_back(subscription.held, None)

    def resume(self, subscription: Subscription) -> None:
        with self.lock:
            self._catch_up()
            subscription.take_turn()
            if subscription.home is not None:
                self.feed(subscription.home)

    def subscribe(self, subscription: Subscription) -> None:
        with self.lock:
            self._catch_up()
            self._register(subscription)
            subscription.link.subscriptions.append(subscription)

    def _register(self, subscription: Subscription) -> None:
        queue = self.queue(subscription.queue, subscription.link)
        subscription.home = queue
        subscription.generation += 1
        subscription.error = ""
        queue.subscriptions.append(subscription)
        queue.elect()
        subscription.waited = not subscription.active
        self.feed(queue)

    def _recover(self, subscription: Subscription) -> None:
        """Register it anew, or let it wait until somebody declares its queue."""
        try:
            self._register(subscription)
        except TransportError as error:
            subscription.error = str(error)
            self._orphans.setdefault(subscription.queue, []).append(subscription)
        subscription.changed()

    def end(self, subscription: Subscription) -> None:
        """Give back all that it holds and forget it."""
        with self.lock:
            if subscription.closed:
                return
            subscription.closed = True
            self._leave_queue(subscription, None)
            if subscription in subscription.link.subscriptions:
                subscription.link.subscriptions.remove(subscription)
            orphans = self._orphans.get(subscription.queue, [])
            if subscription in orphans:
                orphans.remove(subscription)

    def _leave_queue(self, subscription: Subscription, by: LostBy | None) -> None:
        queue = subscription.home
        if queue is None:
            return
        subscription.leave_turn()
        subscription.home, subscription.active = None, False
        queue.subscriptions.remove(subscription)
        self._give_back(subscription.held, by)
        if queue.described.auto_delete and not queue.subscriptions:
            self.drop_queue(queue.name)
        else:
            queue.elect()
            self.feed(queue)

    def link(self, link: Link, subscriptions: Iterable[Subscription]) -> None:
        """Let a client in, with the subscriptions that its last link has left."""
        with self.lock:
            self.links.append(link)
            self._catch_up()
            self._agenda.arm()
            for subscription in subscriptions:
                subscription.link = link
                link.subscriptions.append(subscription)
                self._recover(subscription)

    def unlink(self, link: Link, by: LostBy | None) -> None:
        """Hang up: give back what was out, and delete the queues that were the link's own."""
        with self.lock:
            if not link.alive:
                return
            link.alive = False
            self.links.remove(link)
            for subscription in link.subscriptions:
                # All of them first: what one gives back must not go to another of the same dead link.
                subscription.leave_turn()
            for subscription in link.subscriptions:
                self._leave_queue(subscription, by)
                if by is not None:
                    subscription.link_lost()
            self._give_back(link.pulled, None)
            for queue in link.owned:
                if self.queues.get(queue.name) is queue:
                    self.drop_queue(queue.name)
            link.owned.clear()
            self._agenda.arm()

    # Settling

    def settle(self, batch: Sequence[Settlement], link: Link | None) -> list[Settled]:
        results: list[Settled] = []
        touched: list[MemoryQueue] = []
        with self.lock:
            for item in batch:
                receipt = item.delivery.receipt
                if not isinstance(receipt, Receipt) or not receipt.is_good_for(link):
                    results.append(Settled.STALE)
                    continue
                message = receipt.message
                if not touched or touched[-1] is not message.queue:
                    touched.append(message.queue)
                if item.verb is Verb.REQUEUE:
                    results.append(self._requeue(message, item))
                else:
                    self.away(message, None)
                    results.append(Settled.DONE)
            self._catch_up()
            for queue in touched:
                if queue.ready:
                    self.feed(queue)
        return results

    def _requeue(self, message: Stored, item: Settlement) -> Settled:
        has = self.capabilities
        try:
            if item.delay > (has.requeue_delay or timedelta()):
                raise self.cannot("requeue_delay", f"delay={item.delay}")
            if item.headers is not None:
                if not has.requeue_rewrites:
                    raise self.cannot("requeue_rewrites", "headers=")
                message.headers, _, message.flat = admit(item.headers)
        except (TransportError, CapabilityError) as error:
            log.error("a requeue into %r was not done, the delivery stays held: %s", message.queue.name, error)
            return Settled.FAILED
        self._release(message, None)
        message.redelivered = True
        if item.delay > timedelta():
            self._put_off(message, item.delay)
        elif message.queue.capabilities.requeue_place == "tail":
            self._position += 1
            message.position = self._position
            self._return(message)
        else:
            self._return(message)
        return Settled.DONE

    def _release(self, message: Stored, by: LostBy | None) -> bool:
        """From its holder. Whether that one has seen it."""
        holder, token = message.holder, message.token
        assert holder is not None
        del message.queue.held[token]
        message.holder = message.until = None
        seen = holder.lose(token, by)
        if isinstance(holder, Subscription):
            holder.take_turn()
        return seen

    def _give_back(self, held: Mapping[int, Delivery], by: LostBy | None) -> None:
        """Back to their places, and on to whoever has credit."""
        queues: dict[str, MemoryQueue] = {}
        for delivery in tuple(held.values()):
            message = cast(Receipt, delivery.receipt).message
            if self._release(message, by):
                message.redelivered = True
            else:
                message.deliveries -= 1
            self._return(message)
            queues[delivery.queue] = message.queue
        for queue in queues.values():
            self.feed(queue)

    def _return(self, message: Stored) -> None:
        """To its position; time went on while it was held."""
        message.queue.put_back(message)
        if message.expires_at is not None and message.expires_at <= self.clock.monotonic():
            self._expire(message)

    def renew(self, delivery: Delivery, lease: float, link: Link) -> Renewal:
        receipt = delivery.receipt
        with self.lock:
            if not isinstance(receipt, Receipt) or not receipt.is_good_for(link):
                return Renewal("lost")
            message, until = receipt.message, self.clock.monotonic() + lease
            if until != message.until:
                message.until = until
                self._agenda.add(until, Rank.LEASE, message)
            return Renewal("renewed", until)

    # Time

    def _wake(self) -> None:
        with self.lock:
            self._do_what_is_due()

    def _catch_up(self) -> None:
        """Before anything is handed out: a timer may be due and not have run yet."""
        if self._agenda.overdue:
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        for rank, message in self._agenda.due():
            match rank:
                case Rank.LEASE:
                    self._lapse(message)
                case Rank.DUE:
                    self._come_due(message)
                case Rank.EXPIRY:
                    self._expire(message)
        self._agenda.arm()

    def _come_due(self, message: Stored) -> None:
        del message.queue.delayed[message.position]
        message.until = None
        message.queue.put_back(message)
        if message.expires_at is not None and message.expires_at < self.clock.monotonic() - GRAIN:
            self._expire(message)  # the timer came late: both are over
        else:
            self.feed(message.queue)

    def _lapse(self, message: Stored) -> None:
        if self.lease is not None:
            self.lose(message, LostBy.LEASE)
        else:
            # The hold limit: the channel dies, with all that was out on it.
            self._give_back(cast(Holder, message.holder).held, LostBy.CHANNEL)

    def _expire(self, message: Stored) -> None:
        """Its time is over: to the dead letters where its queue has some, else away. A held one is left alone."""
        if message.where is HELD:
            return
        queue, flat, letter = message.queue, message.flat, message.queue.dead_letter_of(message)
        self.expired[queue.name] += 1
        queue.forget(message)
        if letter is not None:
            headers = dict(letter.headers)
            with suppress(ExchangeMissing):  # what expires to nowhere is dropped
                for target in self._route(letter.exchange, letter.routing_key):
                    self._put(target, letter, headers, flat, self.clock.now())

    # Topology

    def create_queue(self, described: Queue, link: Link | None) -> None:
        """Under the lock. Subscriptions that waited for it go on, with a gap."""
        name = described.name
        owner = link if described.exclusive else None
        self.queues[name] = MemoryQueue(described, self.profile, self.capabilities, owner)
        if owner is not None:
            owner.owned.append(self.queues[name])
        for subscription in self._orphans.pop(name, ()):
            subscription.gap = True
            self._recover(subscription)

    def drop_queue(self, name: str) -> None:
        """Under the lock, with its messages and bindings. Its subscriptions wait until it is declared again."""
        queue = self.queues.pop(name)
        for exchange in self.exchanges.values():
            exchange.unbind(name)
        for subscription in queue.subscriptions:
            subscription.home, subscription.active, subscription.in_turn = None, False, False
        for message in tuple(queue.held.values()):
            self.away(message, LostBy.QUEUE)
        for message in (*queue.waiting(), *queue.delayed.values()):
            message.vanish()
        while queue.pullers:
            queue.wake_puller()
        for subscription in queue.subscriptions:
            self._recover(subscription)

    def delete(self, name: str, kind: Kind, only_if_empty: bool, link: Link) -> bool:
        with self.lock:
            if kind == "exchange":
                exchange = self.exchanges.get(name)
                if exchange is None or (only_if_empty and exchange.bindings):
                    return False
                del self.exchanges[name]
                return True
            if name not in self.queues or (only_if_empty and not self.queue(name, link).empty):
                return False
            self.queue(name, link)
            self.drop_queue(name)
            return True

    def purge(self, name: str, link: Link) -> int:
        with self.lock:
            self._catch_up()
            return self.queue(name, link).purge()

    def depth(self, name: str) -> tuple[int, int, int]:
        """Ready, held, delayed."""
        with self.lock:
            self._catch_up()
            queue = self.queue(name)
            return queue.ready, len(queue.held), len(queue.delayed)

    def lose(self, message: Stored, by: LostBy) -> None:
        """Under the lock: a held one, back to its place."""
        held = cast(Holder, message.holder).held
        self._give_back({message.token: held[message.token]}, by)

    def away(self, message: Stored, by: LostBy | None) -> None:
        """Under the lock: a held one, gone for good."""
        self._release(message, by)
        message.vanish()
