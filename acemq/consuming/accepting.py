"""Acceptances that are calls to a server, beside the workers: while one is under way, handlers go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from acemq.consuming.moving import Mover
from acemq.transport import Delivery

log = logging.getLogger("acemq")

MOST = 1_000
"""Of one call."""


class Accepting:
    """What the handlers of one consumer have accepted, on its way: one call at a time, of all that waits for it.

    Each stays in its prefetch slot until then. Should the process die meanwhile they come again, as what its handlers
    have in hand does.
    """

    def __init__(
        self, mover: Mover, *, name: str, failed: Callable[[Delivery], None], rests: Callable[[], None]
    ) -> None:
        """`failed`: by a fault of ours, so that it is not settled. `rests`: called whenever nothing is under way."""
        self._mover, self._name, self._failed, self._rests = mover, name, failed, rests
        self._waiting: list[Delivery] = []
        self._asked: list[Delivery] = []
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Accepted by their handlers, and not yet by the server."""
        return len(self._waiting) + len(self._asked)

    def add(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        if self._task is None:
            # It begins in the next turn of the loop, so that all of this one go together.
            self._task = asyncio.create_task(self._accept(), name=f"{self._name} accepts")

    async def at_rest(self) -> None:
        """Return when nothing is under way."""
        while self._task is not None:
            await asyncio.wait({self._task})

    def give_up(self) -> None:
        """What has not left comes again."""
        if self._task is not None:
            self._task.cancel()

    async def _accept(self) -> None:
        try:
            while self._waiting:
                self._asked, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                await self._ask(self._asked)
        finally:
            self._waiting, self._asked, self._task = [], [], None
            self._rests()

    async def _ask(self, batch: list[Delivery]) -> None:
        try:
            await self._mover.accept_all(batch)
        except Exception:
            log.exception("%s: accepting %d deliveries failed inside the library", self._name, len(batch))
            for delivery in batch:
                self._failed(delivery)
