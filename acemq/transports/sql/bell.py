"""Waiting until it is worth looking again."""

from __future__ import annotations

import asyncio


class Bell:
    """Whoever waits is woken by the next ring; a ring that nobody heard is heard by the next who waits."""

    __slots__ = ("_rung", "_waiting")

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self._rung = False

    @property
    def is_rung(self) -> bool:
        return self._rung

    def ring(self) -> None:
        self._rung = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def silence(self) -> None:
        """What rang until now is about to be looked at."""
        self._rung = False

    async def heard(self, within: float | None = None) -> bool:
        """False when it did not ring in that many seconds."""
        if self._rung:
            return True
        if within is not None and within <= 0:
            return False
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        timer = None
        if within is not None:
            timer = asyncio.get_running_loop().call_later(within, _end, waiting)
        try:
            await waiting
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.discard(waiting)
        return self._rung


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
