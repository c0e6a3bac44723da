"""What keeps the application's publishes back before they take a permit: it has paused them, or the broker is full."""

from __future__ import annotations

from enum import StrEnum

from acemq import transport as port
from acemq.clock import Clock, Pauses
from acemq.errors import AcemqError, PublishingPausedError

PAUSED = "publishing is paused; resume_publishing() ends that"


class WhenBlocked(StrEnum):
    """What a publish does while the broker takes none."""

    REFUSE = "refuse"
    """Raise `BlockedError` at once."""
    WAIT = "wait"
    """Wait inside its own time limit first."""


class Gate:
    """Open unless `is_shut`: one look on the way of each publish."""

    def __init__(self, when_blocked: WhenBlocked, clock: Clock) -> None:
        self.waits = when_blocked is WhenBlocked.WAIT
        self.is_shut = self.is_paused = False
        self._clock = clock
        self._blocked: str | None = None
        self._is_closing = False
        self._waiting = Pauses(clock)

    def pause(self) -> None:
        self.is_paused = self.is_shut = True

    def resume(self) -> None:
        self.is_paused = False
        self.is_shut = self._blocked is not None

    def told(self, blocked: str | None) -> None:
        """By the transport: the broker's reason, or that there is none (any more)."""
        if self._is_closing or blocked == self._blocked:
            return
        self._blocked = blocked
        self.is_shut = self.is_paused or blocked is not None
        if blocked is None:
            self._waiting.end()

    def close(self) -> None:
        """Nobody waits here any longer."""
        self.told(None)
        self._is_closing = True

    async def refusal(self, within: float, *, own: bool = False) -> AcemqError | None:
        """Why not to write; `None` to go on. What is the library's `own` is not paused."""
        if self.is_paused and not own:
            return PublishingPausedError(PAUSED)
        if not self.waits:
            return None if self._blocked is None else port.Blocked(self._blocked)
        until = self._clock.monotonic() + within
        while (reason := self._blocked) is not None:
            left = until - self._clock.monotonic()
            if left <= 0:
                return port.Blocked(reason)
            await self._waiting.pause(left)
        return None
