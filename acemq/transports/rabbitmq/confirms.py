"""Which publish each delivery tag of a confirm channel stands for, and what became of it. No I/O."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

from msgspec.structs import replace

from acemq.errors import AcemqError
from acemq.transport import ROUTED, Nacked, Outgoing, Published, PublishResult, TimedOut, Unroutable

from .bell import Bell


class Call:
    """One `publish()` under way: one future for the whole batch, not one a message."""

    __slots__ = ("_answered", "batch", "deadline", "exchanges", "left", "results", "returned")

    def __init__(self, batch: Sequence[Outgoing], deadline: float) -> None:
        self.batch, self.deadline = batch, deadline
        self.results: list[PublishResult | None] = [None] * len(batch)
        self.left = len(batch)
        self.returned: dict[int, Unroutable] | None = None
        self.exchanges = {message.exchange for message in batch}
        """Without those that were refused."""
        self._answered: asyncio.Future[None] | None = None

    def settle(self, index: int, result: PublishResult) -> None:
        """The first word on a message counts."""
        if self.results[index] is None:
            self.results[index] = result
            self.left -= 1
            if not self.left and self._answered is not None and not self._answered.done():
                self._answered.set_result(None)

    def refuse(self, begin: int, error: AcemqError) -> None:
        """All from `begin` on: nothing of them was written, and nothing will be."""
        refused = PublishResult(Published.REFUSED, error)
        for index in range(begin, len(self.batch)):
            self.settle(index, refused)

    def refuse_exchange(self, exchange: str, error: AcemqError) -> None:
        refused = PublishResult(Published.REFUSED, error)
        self.exchanges.discard(exchange)
        for index, message in enumerate(self.batch):
            if message.exchange == exchange:
                self.settle(index, refused)

    async def answers(self) -> Sequence[PublishResult]:
        if self.left:
            self._answered = asyncio.get_running_loop().create_future()
            await self._answered
        return cast("list[PublishResult]", self.results)


_Entry = tuple[Call, int]
"""A message: its call and its place there."""


class Confirms:
    """Tags are consecutive from 1; the table is a queue whose head is the oldest that the broker has not answered.

    A call that timed out or was cancelled keeps its place until the broker answers, so that the answer, or a late
    return, is not taken for another's.
    """

    def __init__(self) -> None:
        self.open = 0
        """Publishes without a result."""
        self.late = 0
        """Publishes that ran out of time and that the broker has still not answered."""
        self._entries: deque[_Entry | None] = deque()
        self._first = 1
        """The tag of the head."""
        self._returned_below = 1
        """RabbitMQ returns in the order of the publishes: the next one is looked for from this tag on."""
        self._idle = Bell()

    def add(self, call: Call, index: int) -> None:
        """The next tag is this message's."""
        self._entries.append((call, index))
        self.open += 1

    def answered(self, tag: int, multiple: bool, positive: bool) -> None:
        """Basic.Ack or Basic.Nack. `multiple`: of all up to the tag, whether it is itself outstanding or not."""
        entries = self._entries
        if multiple:
            # Tag 0 is everything.
            for _ in range(min(tag - self._first + 1, len(entries)) if tag else len(entries)):
                entry = entries.popleft()
                self._first += 1
                if entry is not None:
                    self._settle(entry, positive)
        elif tag == self._first and entries:
            entry = entries.popleft()
            self._first += 1
            if entry is not None:
                self._settle(entry, positive)
        elif 0 < tag - self._first < len(entries):
            entry = entries[tag - self._first]
            entries[tag - self._first] = None
            if entry is not None:
                self._settle(entry, positive)
            return
        while entries and entries[0] is None:
            entries.popleft()
            self._first += 1

    def _settle(self, entry: _Entry, positive: bool) -> None:
        call, index = entry
        if call.results[index] is not None:
            self.late -= 1
            return  # out of time before; the late answer changes nothing
        self.open -= 1
        if not positive:
            call.settle(index, PublishResult(Published.FAILED, Nacked("the broker could not take the message")))
        elif call.returned is not None and (returned := call.returned.get(index)) is not None:
            call.settle(index, PublishResult(Published.UNROUTABLE, returned))
        else:
            call.settle(index, ROUTED)
        self._tell_if_idle()

    def was_returned(self, error: Unroutable, route: tuple[str, str], message_id: str | None) -> None:
        """Basic.Return, which comes before the confirm of the same message.

        Several publishes of one id may be under way, to other places or to the same: the place is compared too, and
        of those alike the first without a return is meant.
        """
        start = max(self._returned_below - self._first, 0)
        for at in chain(range(start, len(self._entries)), range(start)):
            entry = self._entries[at]
            if entry is None:
                continue
            call, index = entry
            message = call.batch[index]
            if (
                message.mandatory
                and message.message_id == (message_id or "")
                and (message.exchange, message.routing_key) == route
            ):
                if call.returned is None:
                    call.returned = {}
                elif index in call.returned:
                    continue
                call.returned[index] = error
                self._returned_below = self._first + at + 1
                return

    def expire(self, now: float) -> float | None:
        """Fail what is out of time; the next moment to look again, `None` when nothing waits."""
        late = PublishResult(Published.FAILED, TimedOut("no confirm within the time; the message may be there"))
        following: float | None = None
        for at, entry in enumerate(self._entries):
            if entry is None or entry[0].results[entry[1]] is not None:
                continue
            call, index = entry
            if call.deadline <= now:
                call.settle(index, late)
                self._entries[at] = _remains(call.batch[index], late), 0
                self.open -= 1
                self.late += 1
            elif following is None or call.deadline < following:
                following = call.deadline
        self._tell_if_idle()
        return following

    def fail(self, result_of: Callable[[Outgoing], PublishResult]) -> None:
        """The channel is gone: everything that waits ends."""
        for call, index in filter(None, self._entries):
            call.settle(index, result_of(call.batch[index]))
        self._entries.clear()
        self.open = self.late = 0
        self._tell_if_idle()

    async def idle(self) -> None:
        """Return once nothing waits for an answer."""
        while self.open:
            await self._idle.heard()

    def _tell_if_idle(self) -> None:
        if not self.open:
            self._idle.ring()


def _remains(message: Outgoing, result: PublishResult) -> Call:
    """What is kept of a message after its time: by what a late return knows it, not its body."""
    call = Call([replace(message, body=b"", headers={})], 0.0)
    call.settle(0, result)
    return call
