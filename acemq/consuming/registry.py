"""The consumers of one connection: those that are open, and what those that are gone have counted."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from acemq.consuming.consumer import Consumer
from acemq.consuming.private import PrivateConsumer
from acemq.consuming.receiving import Receiving
from acemq.consuming.settling import ConsumerCounters
from acemq.errors import ClosedError
from acemq.stopping import Drained

AnyConsumer: TypeAlias = Consumer | Receiving[Any]
C = TypeVar("C", bound=AnyConsumer)

KEPT = 1_000
"""Queues for which is known what their closed consumers have counted."""


class Consumers:
    """In the order in which they were started."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._open: dict[AnyConsumer, None] = {}
        self._gone: dict[str, ConsumerCounters] = {}
        self._numbers = itertools.count(1)
        self._is_draining = False
        self.alone: set[str] = set()
        """Ordered queues, of which a connection consumes each once."""

    def __iter__(self) -> Iterator[AnyConsumer]:
        return iter(tuple(self._open))

    def name(self, queue: str) -> str:
        """For the next one of this queue, unless its own options name it."""
        return f"{self._origin}/{queue}/{next(self._numbers)}"

    async def start(self, consumer: C) -> C:
        """`ClosedError` once they drain: nobody would stop one that came behind."""
        if self._is_draining:
            raise ClosedError("the connection is closed; connect again")
        self._open[consumer] = None
        try:
            await consumer.start()
        except BaseException:
            self.forget(consumer)
            raise
        return consumer

    def forget(self, consumer: AnyConsumer) -> None:
        """It is closed. What it has counted stays."""
        if consumer in self._open:
            del self._open[consumer]
            self._gone[consumer.queue] = self._gone.get(consumer.queue, ConsumerCounters()) + consumer.counters
            if len(self._gone) > KEPT:
                del self._gone[next(iter(self._gone))]

    def counted(self, queue: str) -> ConsumerCounters:
        """By all consumers of a queue, closed ones included."""
        return sum((each.counters for each in self if each.queue == queue), self._gone.get(queue, ConsumerCounters()))

    def excuse_caller(self) -> None:
        for each in self:
            if isinstance(each, Consumer):
                each.excuse_caller()

    async def drain(self, budget: timedelta) -> Drained:
        """All at once, then what their handlers may have waited for; for good. None that fails keeps others open."""
        self._is_draining = True
        end = time.monotonic() + budget.total_seconds()
        drained = Drained()
        try:
            drained = await _drained([each for each in self if not isinstance(each, PrivateConsumer)], budget)
        finally:
            left = timedelta(seconds=max(end - time.monotonic(), 0))
            drained = drained + await _drained([each for each in self if isinstance(each, PrivateConsumer)], left)
            self._open.clear()
        return drained


async def _drained(consumers: list[AnyConsumer], budget: timedelta) -> Drained:
    stops = [asyncio.ensure_future(consumer.drain(budget)) for consumer in consumers]
    try:
        results = await asyncio.gather(*stops, return_exceptions=True)
    except asyncio.CancelledError:
        if stops:
            await asyncio.wait(stops, timeout=1)
        raise
    return sum((_or_unfinished(result) for result in results), Drained())


def _or_unfinished(result: Drained | BaseException) -> Drained:
    return result if isinstance(result, Drained) else Drained(finished=False)
