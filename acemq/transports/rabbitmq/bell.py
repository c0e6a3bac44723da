"""Waiting until it is worth looking again, and loops that must not end by mistake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("acemq.rabbitmq")


class Bell:
    """Whoever waits is woken by the next ring and looks for himself; who comes later waits for the one after it."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def heard(self, within: float | None = None) -> bool:
        """False when it did not ring in that many seconds."""
        if within is not None and within <= 0:
            return False
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(within):
                await waiting
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(waiting)
        return True


def keep(loop: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
    """Run what goes on until it is cancelled. Should it ever fail, that is said, and not only when it is collected."""
    task = asyncio.create_task(loop, name=f"acemq keeps {what}")
    task.add_done_callback(_say_failure)
    return task


def _say_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s: ended by a mistake of ours", task.get_name(), exc_info=error)
