"""What a queue hands out before its time is put back, and nobody sees it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta

from acemq import delays
from acemq.consuming.moving import Mover
from acemq.envelope import to_millis
from acemq.transport import Delivery, Settlement, Verb

log = logging.getLogger("acemq")


class Early:
    """Of one queue. It counts no attempt: no handler was asked."""

    def __init__(self, mover: Mover, longest: timedelta) -> None:
        """`longest`: for so long a delivery can be put back at once; again and again, if need be."""
        self._mover, self._longest = mover, longest
        self._under_way: set[asyncio.Task[None]] = set()

    @staticmethod
    def of(mover: Mover, queue: str) -> Early | None:
        """`None`: nothing comes early from this queue."""
        can = mover.transport.capabilities_of("queue", queue)
        return Early(mover, can.requeue_delay or timedelta()) if delays.comes_early(can) else None

    def sift(self, batch: Sequence[Delivery]) -> Sequence[Delivery]:
        """Those that are due. The others go back, beside."""
        now_ms = to_millis(self._mover.clock.now())
        left = [delays.left_of(delivery.headers, now_ms) for delivery in batch]
        early = [
            Settlement(delivery, Verb.REQUEUE, min(wait, self._longest))
            for delivery, wait in zip(batch, left, strict=True)
            if wait > timedelta()
        ]
        if not early:
            return batch
        putting_back = asyncio.get_running_loop().create_task(self._put_back(early), name="puts back what is early")
        self._under_way.add(putting_back)
        putting_back.add_done_callback(self._under_way.discard)
        return [delivery for delivery, wait in zip(batch, left, strict=True) if wait <= timedelta()]

    async def at_rest(self) -> None:
        if self._under_way:
            await asyncio.wait(self._under_way)

    async def _put_back(self, early: list[Settlement]) -> None:
        try:
            await self._mover.settle_counted(early)
        except Exception:
            # As if the process had died: the broker hands them out again when their lease or link ends.
            log.exception("what came too early could not be put back; it comes again")
