"""Which queues have lanes: what this connection has applied, else what the broker has said lately."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

from acemq.clock import Clock
from acemq.topology import NAME_LIMIT, Topology, lanes_of

ASKED_FOR = timedelta(seconds=60)
"""For so long the broker's answer holds."""
KEPT = 1_000
"""Queues whose last answer is kept."""


class KnownLanes:
    """Of one connection. A queue that was applied here is never asked about."""

    def __init__(self, exists: Callable[[str], Awaitable[bool]], clock: Clock) -> None:
        self._exists, self._clock = exists, clock
        self._applied: set[str] = set()
        self._asked: dict[str, tuple[float, bool]] = {}
        self._asking: dict[str, asyncio.Lock] = {}

    def applied(self, topology: Topology) -> None:
        """Its queues are there, and were spelled out: of one with lanes all three are among them."""
        self._applied.update(queue.name for queue in topology.queues)

    def known(self, queue: str) -> bool | None:
        """`None`: the broker has to be asked."""
        lanes = lanes_of(queue)
        if queue in self._applied:
            return self._applied.issuperset(lanes)
        if len(lanes[-1].encode()) > NAME_LIMIT:
            return False
        asked = self._asked.get(queue)
        if asked is None or self._clock.monotonic() - asked[0] >= ASKED_FOR.total_seconds():
            return None
        return asked[1]

    async def has(self, queue: str) -> bool:
        """Whether it has lanes, by one look at the last that is made of them. Raises what that raises."""
        known = self.known(queue)
        if known is not None:
            return known
        asking = self._asking.setdefault(queue, asyncio.Lock())
        try:
            async with asking:  # many who send to one queue ask once, and nobody waits for another queue's answer
                known = self.known(queue)
                return await self._ask(queue) if known is None else known
        finally:
            if not asking.locked():
                self._asking.pop(queue, None)

    async def _ask(self, queue: str) -> bool:
        there = await self._exists(lanes_of(queue)[-1])
        self._asked.pop(queue, None)
        self._asked[queue] = self._clock.monotonic(), there
        if len(self._asked) > KEPT:
            del self._asked[next(iter(self._asked))]
        return there
