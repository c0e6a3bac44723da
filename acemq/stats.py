"""What is known of a queue: what this process has counted, and what the broker has said lately."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import timedelta

import msgspec

from acemq.clock import Clock
from acemq.consuming.settling import ConsumerCounters
from acemq.errors import AcemqError
from acemq.transport import Depth, QueueMissing

FRESH = timedelta(seconds=5)
"""A queue is asked about no more often than this."""
AT_ONCE = 10
"""Questions under way."""
KEPT = 1_000
"""Queues whose last answer is kept."""


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """One queue, seen from here. Flow is counted where it happens, depth is the broker's word; neither is derived."""

    queue: str
    counters: ConsumerCounters
    """Of this connection's consumers of the queue, closed ones included. Only ever grows."""
    published: int
    """Confirmed sends to the queue, into any lane, by this connection; what came over an exchange is not among them."""
    depth: Depth | None
    """At most 5 s old, `at` says; `None`: the broker does not tell."""
    dead: Depth | None
    """Of `{queue}.dlq`; `None`: there is none."""
    parked: Depth | None
    """Of `{queue}.parked`; `None`: there is none."""
    lanes: Mapping[str, Depth] = msgspec.field(default_factory=dict[str, Depth])
    """Of a queue with lanes: each of its three queues by name. `dead` and `parked` are those of `{queue}` alone."""


class Depths:
    """The broker's last answer about each queue. However many ask, a queue is asked about once in `FRESH`."""

    def __init__(self, ask: Callable[[str], Awaitable[Depth]], clock: Clock) -> None:
        self._ask, self._clock = ask, clock
        self._known: dict[str, tuple[float, Depth | None]] = {}
        self._asking: dict[str, asyncio.Task[Depth | None]] = {}
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def of(self, queue: str) -> Depth | None:
        """`None`: there was no such queue when the broker was asked. What goes wrong in asking is raised."""
        known = self._known.get(queue)
        if known is not None and self._clock.monotonic() - known[0] < FRESH.total_seconds():
            return known[1]
        asking = self._asking.get(queue)
        if asking is None:
            asking = self._asking[queue] = asyncio.create_task(self._look(queue), name=f"depth of {queue}")
            asking.add_done_callback(lambda done: self._answered(queue, done))
        # Shared: one who stops waiting does not take the answer from the others.
        return await asyncio.shield(asking)

    def known(self, within: timedelta) -> dict[str, Depth]:
        """What was answered within so long; no I/O."""
        now = self._clock.monotonic()
        return {
            queue: depth
            for queue, (at, depth) in tuple(self._known.items())
            if depth is not None and now - at <= within.total_seconds()
        }

    def forget(self, queue: str) -> None:
        """Ask again next time."""
        self._known.pop(queue, None)

    async def _look(self, queue: str) -> Depth | None:
        async with self._turn:
            try:
                depth = await self._ask(queue)
            except QueueMissing:
                depth = None
        self._known.pop(queue, None)
        self._known[queue] = self._clock.monotonic(), depth
        if len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return depth

    def _answered(self, queue: str, done: asyncio.Task[Depth | None]) -> None:
        del self._asking[queue]
        if not done.cancelled():
            done.exception()  # whoever waited has it; nobody may have

    async def refresh(self, queues: Iterable[str]) -> None:
        """Ask about all of these that are not fresh. What goes wrong is left out: the old answer grows older."""
        await asyncio.gather(*(self._quietly(queue) for queue in set(queues)))

    async def _quietly(self, queue: str) -> None:
        try:
            await self.of(queue)
        except AcemqError:
            return

    def close(self) -> None:
        for asking in self._asking.values():
            asking.cancel()
