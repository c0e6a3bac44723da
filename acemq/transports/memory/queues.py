"""One queue: what lies in it, in which order, and who waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from acemq.errors import ConfigurationError
from acemq.headers import Headers, HeaderValue, check
from acemq.topology import Queue
from acemq.transport import BadHeader, Capabilities, Outgoing
from acemq.transports.memory.profiles import Profile

if TYPE_CHECKING:
    from acemq.transports.memory.receiving import Holder, Link, Subscription

Where = Literal["ready", "held", "delayed", "gone"]
READY: Final = "ready"
HELD: Final = "held"
DELAYED: Final = "delayed"
GONE: Final = "gone"


class Stored(msgspec.Struct, eq=False):
    """One message in one queue. Its place is its position, given once: whatever comes back returns to it."""

    queue: MemoryQueue
    position: int
    body: bytes
    headers: dict[str, HeaderValue]
    flat: bool
    """No header holds a list or dict: a shallow copy shares nothing."""
    message_id: str
    content_type: str | None
    exchange: str
    routing_key: str
    reply_to: str | None
    ordering_key: str | None
    priority: int | None
    enqueued_at: datetime
    expires_in: timedelta | None = None
    expires_at: float | None = None
    where: Where = READY
    redelivered: bool = False
    deliveries: int = 0
    token: int = 0
    """Of the last take; a settlement under another one is stale."""
    holder: Holder | None = None
    until: float | None = None
    """End of the lease, of the hold limit, or of the delay."""

    def headers_for_one(self) -> dict[str, HeaderValue]:
        """A copy for one consumer to do with as he likes."""
        return self.headers.copy() if self.flat else copied(self.headers)

    def vanish(self) -> None:
        self.where = GONE
        self.body, self.headers = b"", {}  # the agenda may keep an entry for it until its time


class MemoryQueue:
    """Ready messages come out by priority, then position.

    Without levels they lie in `_fresh`, a deque, in the order of their positions; only what comes back out of that
    order goes into the heap `_placed`. With levels the heap holds them all.
    """

    def __init__(self, described: Queue, profile: Profile, general: Capabilities, owner: Link | None) -> None:
        self.described, self.owner = described, owner
        """An exclusive queue lives and dies with the link that owns it."""
        self.name = described.name
        self.capabilities = profile.of_queue(general, described)
        self.levels, self.counts = self.capabilities.priorities, self.capabilities.counts_deliveries
        self.limit, self.ttl = described.max_length, described.ttl
        self.hold = profile.hold(general, described)
        """Seconds, of a lease or up to the hold limit; `None`: for as long as the link lives."""
        self.ready = 0
        self.delayed: dict[int, Stored] = {}
        """By position."""
        self.held: dict[int, Stored] = {}
        """By token."""
        self.subscriptions: list[Subscription] = []
        """In the order of arrival."""
        self.turns: deque[Subscription] = deque()
        """Active, with free credit; each takes one message and goes to the end."""
        self.pullers: dict[asyncio.Future[None], Link] = {}
        """To be resolved, one for each message that nobody else takes."""
        self._letters = profile.dead_letters(described)
        self._fresh: deque[Stored] = deque()
        self._placed: list[tuple[int, int, Stored]] = []

    @property
    def full(self) -> bool:
        return self.limit is not None and self.ready + len(self.delayed) >= self.limit

    @property
    def empty(self) -> bool:
        return not (self.ready or self.held or self.delayed)

    def dead_letter_of(self, message: Stored) -> Outgoing | None:
        """What is published instead of a message whose time is over. It does not expire again."""
        if self._letters is None:
            return None
        exchange, key = self._letters
        return Outgoing(
            exchange=exchange,
            routing_key=message.routing_key if key is None else key,
            body=message.body,
            headers=message.headers,
            message_id=message.message_id,
            content_type=message.content_type,
            reply_to=message.reply_to,
            priority=message.priority,
            ordering_key=message.ordering_key,
        )

    def elect(self) -> None:
        """An exclusive subscription is active alone, as the first in the row; whoever came after it waits."""
        exclusive = False
        for place, subscription in enumerate(self.subscriptions):
            exclusive = exclusive or subscription.exclusive
            if place == 0 or not exclusive:
                subscription.activate()

    def wake_puller(self) -> None:
        """The one that has waited longest; it looks for itself what is there."""
        waiter = next(iter(self.pullers))
        self.pullers.pop(waiter).call(lambda: None if waiter.done() else waiter.set_result(None))

    def add(self, message: Stored) -> None:
        """A new one, whose position is the highest so far."""
        self.ready += 1
        if self.levels:
            heappush(self._placed, (-(message.priority or 0), message.position, message))
        else:
            self._fresh.append(message)

    def put_back(self, message: Stored) -> None:
        """At its position."""
        message.where = READY
        self.ready += 1
        if not self.levels and not self._placed and self._fresh and message.position < self._fresh[0].position:
            self._fresh.appendleft(message)
        else:
            heappush(self._placed, (-(message.priority or 0) if self.levels else 0, message.position, message))

    def take(self) -> Stored | None:
        fresh, placed = self._fresh, self._placed
        while self.ready:
            if placed and (not fresh or placed[0][1] < fresh[0].position):
                message = heappop(placed)[2]
            else:
                message = fresh.popleft()
            if message.where is READY:
                self.ready -= 1
                return message
        return None

    def forget(self, message: Stored) -> None:
        """A ready or delayed one. It lies where it is until it comes up, or until half of what lies there is gone."""
        if message.where is DELAYED:
            del self.delayed[message.position]
        else:
            self.ready -= 1
        message.vanish()
        if len(self._fresh) + len(self._placed) > 2 * self.ready + 64:
            self._fresh = deque(left for left in self._fresh if left.where is READY)
            self._placed = sorted(entry for entry in self._placed if entry[2].where is READY)

    def purge(self) -> int:
        """Forget all that is ready."""
        count = self.ready
        for message in self.waiting():
            message.vanish()
        self.ready = 0
        self._fresh.clear()
        self._placed.clear()
        return count

    def waiting(self) -> Iterator[Stored]:
        """What is ready, in the order in which it would come out."""
        lying = [*self._fresh, *(entry[2] for entry in self._placed)]
        lying.sort(key=lambda message: (-(message.priority or 0) if self.levels else 0, message.position))
        return (message for message in lying if message.where is READY)


# Headers


def admit(headers: Headers) -> tuple[dict[str, HeaderValue], int, bool]:
    """A copy that nobody else holds, its size in bytes, and whether it is flat. Raises `BadHeader`."""
    copy = dict(headers)
    size, flat = 0, True
    for name, value in copy.items():
        try:
            # Most are ASCII text and small integers, of names seen before: those are not looked at twice.
            size += _names.get(name) or _size_of_name(name)
            if type(value) is str and value.isascii():
                size += len(value)
            elif type(value) is int and -(2**63) <= value < 2**63:
                size += 8
            else:
                check(name, value)
                size += _size(value)
                if isinstance(value, Mapping | list | tuple):
                    flat = False
        except ConfigurationError as error:
            raise BadHeader(str(error), name=str(name)) from error
    return copy if flat else copied(copy), size, flat


def copied(headers: Headers) -> dict[str, HeaderValue]:
    return {name: _copy(value) for name, value in headers.items()}


_names: dict[str, int] = {}
"""Bytes of the names that were checked; a sender that invents names must not fill it."""


def _size_of_name(name: str) -> int:
    check(name, None)
    size = len(name.encode())
    if len(_names) < 4096:
        _names[name] = size
    return size


def _size(value: HeaderValue) -> int:
    match value:
        case None | bool():
            return 1
        case str():
            return len(value.encode())
        case bytes():
            return len(value)
        case Mapping():
            return sum(len(name.encode()) + _size(item) for name, item in value.items())
        case int() | float() | datetime():
            return 8
        case _:
            return sum(map(_size, value))


def _copy(value: HeaderValue) -> HeaderValue:
    match value:
        case str() | bytes():
            return value
        case Mapping():
            return {name: _copy(item) for name, item in value.items()}
        case list() | tuple():
            return [_copy(item) for item in value]
        case _:
            return value
