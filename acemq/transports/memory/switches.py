"""A broker with the switches that a test plays. They act where a client meets it, as a real one's faults do."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal, cast
from weakref import WeakValueDictionary

from msgspec import UNSET, UnsetType

from acemq.clock import SYSTEM, Clock
from acemq.errors import ConfigurationError
from acemq.headers import Headers
from acemq.transport import LostBy
from acemq.transports.memory.broker import Broker
from acemq.transports.memory.faults import Stallable, check_verb
from acemq.transports.memory.profiles import MAX_MESSAGE, Profile

_named: WeakValueDictionary[str, MemoryBroker] = WeakValueDictionary()
_naming = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class StoredMessage:
    """One line of a `snapshot`."""

    queue: str
    state: Literal["ready", "held", "delayed"]
    message_id: str | None
    body: bytes
    content_type: str | None
    headers: Headers
    exchange: str
    routing_key: str
    priority: int | None
    deliveries: int
    """How often it has been handed out."""
    until: float | None
    """End of the lease or the delay, by the broker's clock."""


class MemoryBroker(Broker):
    """Shared by any number of transports, on any loops and threads, while one of them or this handle lives.

    `lease=None`: a delivery is held until it is settled or its link dies, as on RabbitMQ. `faults.next` orders how
    single items of a verb end; `expired` counts by queue the messages whose time ran out.
    """

    @staticmethod
    def named(
        name: str,
        *,
        clock: Clock | None = None,
        profile: Profile | None = None,
        lease: timedelta | UnsetType | None = UNSET,
        max_message: int | None = None,
    ) -> MemoryBroker:
        """The broker of this name in this process, made with these options; one that exists must have them."""
        asked: dict[str, object] = {"clock": clock, "profile": profile, "lease": lease, "max_message": max_message}
        with _naming:
            broker = _named.get(name)
            if broker is None:
                broker = _named[name] = MemoryBroker(
                    clock=clock or SYSTEM,
                    profile=profile,
                    lease=None if isinstance(lease, UnsetType) else lease,
                    max_message=max_message or MAX_MESSAGE,
                )
                broker.name = name
        for option, wanted in asked.items():
            found: object = getattr(broker, option)
            if wanted is not (UNSET if option == "lease" else None) and found != wanted:
                raise ConfigurationError(
                    f"memory broker {name!r} exists with {option}={found!r}, not {wanted!r}; leave it out to share it"
                )
        return broker

    def block(self, reason: str) -> None:
        """Take no publishes: each is refused at once with this reason."""
        self.blocked = reason
        self._tell()

    def unblock(self) -> None:
        self.blocked = None
        self._tell()

    def refuse_dials(self, on: bool = True) -> None:
        """Let nobody in who is not in already."""
        self.refusing = on

    def stall(self, verb: Stallable) -> None:
        """Swallow the calls of this verb until `release`; each fails at its own limit. `deliver`: hand out nothing."""
        self.stalled.add(check_verb(verb))

    def release(self, verb: Stallable) -> None:
        self.stalled.discard(check_verb(verb))
        with self.lock:
            for queue in self.queues.values():
                self.feed(queue)
        self._tell()

    def disconnect(self, reason: str) -> None:
        """Cut every link. What was out comes back to its queue; the transports dial again."""
        for link in tuple(self.links):
            self.unlink(link, LostBy.CONNECTION)
            link.call(partial(link.lost, link, reason))

    def lapse(self, queue: str) -> None:
        """End all leases of this queue now."""
        with self.lock:
            for message in tuple(self.queue(queue).held.values()):
                self.lose(message, LostBy.LEASE)

    def remove(self, queue: str, count: int) -> int:
        """Take up to `count` held messages away, the longest held first, as an operator might. Returns how many."""
        with self.lock:
            robbed = self.queue(queue)
            taken = tuple(robbed.held.values())[:count]
            for message in taken:
                self.away(message, LostBy.QUEUE)
            self.feed(robbed)
            return len(taken)

    def wipe(self) -> None:
        """Lose everything, topology included; links stay. Transports notice, and make again what they had applied."""
        with self.lock:
            for name in tuple(self.queues):
                self.drop_queue(name)
            self.exchanges.clear()
            self.epoch += 1
        for link in tuple(self.links):
            link.call(link.restore)

    def snapshot(self) -> list[StoredMessage]:
        """Every message with its state: by queue, in it ready, held, delayed, each in its order."""
        with self.lock:
            self._catch_up()
            return [
                StoredMessage(
                    queue=queue.name,
                    state=cast(Literal["ready", "held", "delayed"], message.where),
                    message_id=message.message_id,
                    body=message.body,
                    content_type=message.content_type,
                    headers=message.headers_for_one(),
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                    priority=message.priority,
                    deliveries=message.deliveries,
                    until=message.until,
                )
                for queue in self.queues.values()
                for message in (*queue.waiting(), *queue.held.values(), *queue.delayed.values())
            ]

    def _tell(self) -> None:
        for link in tuple(self.links):
            link.call(link.changed)
