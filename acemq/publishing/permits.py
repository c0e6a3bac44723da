"""The bound on publishes that the broker has not answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta


class Permits:
    """At most `limit` publishes without an answer, over every path of a connection.

    A cancelled publish still owes its permit: the message may be on its way. What is owed comes back as soon as the
    transport's own count (`outstanding`) shows that the broker has answered.
    """

    def __init__(self, limit: int, outstanding: Callable[[], int]) -> None:
        self.limit, self._free, self._owed = limit, limit, 0
        self._outstanding = outstanding
        self._waiting: dict[asyncio.Future[int], int] = {}
        """Who waits, in order, and for how many at most."""
        self._looking: asyncio.TimerHandle | None = None

    @property
    def in_use(self) -> int:
        self._reclaim()
        return self.limit - self._free

    def take_now(self) -> bool:
        if self._free > 0 and not self._waiting:
            self._free -= 1
            return True
        return False

    async def take_some(self, most: int, within: timedelta) -> int:
        """Between 1 and `most` permits, as many as are free; 0 when none was free in time."""
        self._reclaim()
        if self._free > 0 and not self._waiting:
            return self._take(most)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = most
        self._wake()
        self._look_again()
        try:
            async with asyncio.timeout(within.total_seconds()):
                return await turn
        except TimeoutError:
            return _handed(turn)
        except BaseException:
            self.give(_handed(turn))
            raise
        finally:
            self._waiting.pop(turn, None)

    def _take(self, most: int) -> int:
        taken = min(most, self._free)
        self._free -= taken
        return taken

    def give(self, count: int) -> None:
        self._free += count
        if self._waiting:
            self._wake()

    def owe(self, count: int) -> None:
        self._owed += count
        self._reclaim()
        self._wake()
        if self._waiting:
            self._look_again()

    def shortage(self, within: timedelta) -> str:
        return (
            f"{self.in_use} publishes are without an answer, {self.limit} are allowed, and none was answered within "
            f"{within.total_seconds():g} s; publish slower, or in batches"
        )

    def _reclaim(self) -> None:
        if self._owed:
            awaited = self.limit - self._free - self._owed
            still = min(max(self._outstanding() - awaited, 0), self._owed)
            self._free += self._owed - still
            self._owed = still

    def _wake(self) -> None:
        # Handed over, not offered: whoever is only woken may find that another has taken what woke him.
        while self._free > 0 and self._waiting:
            turn = next(iter(self._waiting))
            most = self._waiting.pop(turn)
            if not turn.done():
                turn.set_result(self._take(most))

    def _look_again(self) -> None:
        # Nobody awaits what is owed, so nobody says when it is answered: look, as long as somebody waits for it.
        if self._owed and self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(0.05, self._look)

    def _look(self) -> None:
        self._looking = None
        self._reclaim()
        self._wake()
        if self._waiting:
            self._look_again()


def _handed(turn: asyncio.Future[int]) -> int:
    """What was handed over in the very moment in which its taker was cancelled, or out of time."""
    return turn.result() if turn.done() and not turn.cancelled() else 0
