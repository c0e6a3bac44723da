"""Stopping: asked for by however many, done once, and over in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec

CLOSING = 0.5
"""Seconds for giving back, after whatever a stop may take."""


class Drained(msgspec.Struct, frozen=True):
    """How a stop went."""

    finished: bool = True
    """Every handler ended by itself within the time, and what it decided was carried out."""
    handled: int = 0
    """Deliveries settled while draining."""
    given_back: int = 0
    """Fetched, never started, returned without spending an attempt."""
    abandoned: int = 0
    """Handlers cut off, whose deliveries come again; and acceptances without an answer, whose deliveries may."""
    queues: Mapping[str, int] = msgspec.field(default_factory=dict[str, int])
    """Abandoned per queue, only those above 0."""

    def __add__(self, other: Drained) -> Drained:
        queues = dict(self.queues)
        for queue, count in other.queues.items():
            queues[queue] = queues.get(queue, 0) + count
        return Drained(
            self.finished and other.finished,
            self.handled + other.handled,
            self.given_back + other.given_back,
            self.abandoned + other.abandoned,
            queues,
        )


class StopOnce:
    """The stop of one thing: whoever asks first carries it out, and whoever asks later gets the same answer."""

    def __init__(self) -> None:
        self._drained: asyncio.Future[Drained] | None = None

    @property
    def is_asked(self) -> bool:
        return self._drained is not None

    @property
    def is_over(self) -> bool:
        return self._drained is not None and self._drained.done()

    async def once(self, stop: Callable[[], Awaitable[Drained]]) -> Drained:
        """Should it fail or be cancelled, the others learn that it has not finished."""
        if self._drained is not None:
            # Shielded: one who no longer waits does not take the answer from the others.
            return await asyncio.shield(self._drained)
        self._drained = asyncio.get_running_loop().create_future()
        drained = Drained(finished=False)
        try:
            drained = await stop()
        finally:
            self._drained.set_result(drained)
        return drained


async def until(end: float, work: Awaitable[object]) -> bool:
    """Await until the moment `end` of the monotonic clock; False when it was cut off there."""
    try:
        # Not `wait_for`, which until Python 3.12 forgets a cancellation that comes as the work ends.
        async with asyncio.timeout(max(end - time.monotonic(), 0)):
            await work
    except TimeoutError:
        return False
    return True
