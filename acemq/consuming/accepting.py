"""Acceptances that are calls to a server, beside the workers: while one is under way, handlers go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from acemq.consuming.moving import Mover
from acemq.transport import Delivery

log = logging.getLogger("acemq")

MOST = 1_000
"""Of one call."""


class Accepting:
    """What the handlers of one consumer have accepted, on its way: one call at a time, of all that waits for it.

    Should the process die meanwhile it comes again, as what its handlers have in hand does.
    """

    def __init__(
        self,
        mover: Mover,
        *,
        name: str,
        accepted: Callable[[Collection[Delivery]], None],
        failed: Callable[[Delivery], None],
        rests: Callable[[], None],
    ) -> None:
        """`accepted`: their call has ended. `failed`: by a fault of ours. `rests`: nothing is under way any more."""
        self._mover, self._name = mover, name
        self._accepted, self._failed, self._rests = accepted, failed, rests
        self._waiting: list[Delivery] = []
        self._asked: list[Delivery] = []
        self.task: asyncio.Task[None] | None = None
        """As long as anything is under way. Cancelled, what has not left comes again."""

    def __len__(self) -> int:
        """Accepted by their handlers, and not yet by the server."""
        return len(self._waiting) + len(self._asked)

    def add(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        if self.task is None:
            self._begin()

    async def at_rest(self) -> None:
        """Return when nothing is under way."""
        while self.task is not None:
            await asyncio.wait({self.task})

    def _begin(self) -> None:
        self.task = asyncio.create_task(self._accept(), name=f"{self._name} accepts")
        self.task.add_done_callback(self._ended)

    async def _accept(self) -> None:
        await asyncio.sleep(0)  # so that all of this turn of the loop go together
        while self._waiting:
            self._asked, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            await self._ask(self._asked)
            self._asked = []

    async def _ask(self, batch: list[Delivery]) -> None:
        try:
            await self._mover.accept_all(batch)
        except Exception:
            # A fault of ours must not keep what comes after it.
            log.exception("%s: accepting %d deliveries failed inside the library", self._name, len(batch))
            for delivery in batch:
                self._failed(delivery)
        else:
            self._accepted(batch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.task, self._asked = None, []
        if self._waiting and not task.cancelled():
            self._begin()  # added in the moment of its end
            return
        self._waiting = []
        self._rests()
