"""Expiry of one message where the broker knows none: its instant travels in a header, and whoever receives it looks."""

from __future__ import annotations

import asyncio
import logging

from acemq import headers as h
from acemq.clock import Clock
from acemq.consuming.moving import GivenBack, Mover
from acemq.consuming.settling import Case, set_aside
from acemq.envelope import to_millis
from acemq.transport import Delivery

log = logging.getLogger("acemq")


def has_expired(delivery: Delivery, clock: Clock) -> bool:
    """By the receiver's clock; from that instant on, and not only after it."""
    expires_at = h.integer(delivery.headers.get(h.EXPIRES_AT))
    return expires_at is not None and expires_at <= to_millis(clock.now())


class Expired:
    """What has expired goes to its dead letters beside whoever settles by hand, and is never handed to him."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._moves: set[asyncio.Task[bool]] = set()

    def takes(self, delivery: Delivery) -> asyncio.Task[bool] | None:
        """Its move, which goes on whoever waits for it: whether it landed. `None`: it has not expired."""
        if not has_expired(delivery, self._mover.clock):
            return None
        move = asyncio.create_task(self._move(delivery), name=f"sets aside what expired in {delivery.queue}")
        self._moves.add(move)
        move.add_done_callback(self._moved)
        return move

    async def _move(self, delivery: Delivery) -> bool:
        try:
            handled, _ = await self._mover.carry_out(set_aside(Case.EXPIRED), delivery)
        except GivenBack:
            return False
        return handled.landed

    def _moved(self, move: asyncio.Task[bool]) -> None:
        self._moves.discard(move)
        if not move.cancelled() and (error := move.exception()) is not None:
            log.error("%s: failed inside the library", move.get_name(), exc_info=error)
