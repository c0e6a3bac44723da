"""Keeps the leases of what a connection holds: renewed in good time and together, and told when one is lost.

One timer for all of a connection. Where the broker holds a delivery until its link dies, there is nothing to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import ceil

import msgspec

from acemq.clock import Clock, Timer
from acemq.errors import AcemqError
from acemq.telemetry import Telemetry
from acemq.transport import Delivery, LostBy, Renewal, Transport

log = logging.getLogger("acemq")

Lost = Callable[[Sequence[Delivery], LostBy], None]

ANSWER_LIMIT = 30.0
"""Seconds for one renewal, and never more than what is left of the lease."""
_AGAIN = 1.0
"""Seconds at most between a renewal that failed and the next."""


class _Kept(msgspec.Struct):
    delivery: Delivery
    lost: Lost | None
    length: int
    """Seconds of a whole lease."""
    until: float
    renew_at: float


class Leases:
    def __init__(self, transport: Transport, clock: Clock, telemetry: Telemetry) -> None:
        self._transport, self._clock, self._telemetry = transport, clock, telemetry
        self._kept: dict[int, _Kept] = {}
        self._timer: Timer | None = None
        self._timer_at = 0.0
        self._renewing: set[asyncio.Task[None]] = set()

    def keep(self, batch: Iterable[Delivery], lost: Lost | None = None) -> None:
        """From now on until they are let go. `lost` is told of those whose lease could not be kept."""
        now = self._clock.monotonic()
        soonest = float("inf")
        for delivery in batch:
            until = delivery.lease_until
            if until is None:
                return
            left = max(until - now, 0.0)
            kept = _Kept(delivery, lost, max(ceil(left), 1), until, now + left / 2)
            self._kept[id(delivery)] = kept
            soonest = min(soonest, kept.renew_at)
        self._arm(soonest)

    def let_go(self, delivery: Delivery) -> None:
        """It is settled, or not ours any more."""
        self._kept.pop(id(delivery), None)

    def lost(self, batch: Iterable[Delivery], by: LostBy) -> None:
        """They are ours no more, as the broker has said or as the clock has. Of each the first word counts."""
        gone = Counter(each.queue for each in batch if self._kept.pop(id(each), None) is not None)
        if by is LostBy.LEASE and self._telemetry.metering:
            for queue, count in gone.items():
                self._telemetry.leases_lost(queue, count)

    def let_go_of(self, lost: Lost) -> None:
        """All that was kept for one consumer."""
        self._kept = {key: kept for key, kept in self._kept.items() if kept.lost != lost}

    def close(self) -> None:
        self._kept.clear()
        if self._timer is not None:
            self._timer.cancel()
        for renewing in self._renewing:
            renewing.cancel()

    def _arm(self, at: float) -> None:
        if at == float("inf") or (self._timer is not None and self._timer_at <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._clock.call_later(max(at - self._clock.monotonic(), 0.0), self._tick)

    def _tick(self) -> None:
        """Renew what is due, and what will be within a tenth of its lease: fewer calls, each of many."""
        self._timer = None
        now = self._clock.monotonic()
        due: defaultdict[int, list[_Kept]] = defaultdict(list)
        for kept in self._kept.values():
            if kept.renew_at <= now + kept.length / 10:
                kept.renew_at = float("inf")  # until the answer is there
                due[kept.length].append(kept)
        for length, group in due.items():
            renewing = asyncio.create_task(self._renew(length, group))
            self._renewing.add(renewing)
            renewing.add_done_callback(self._renewed)
        self._arm(min((kept.renew_at for kept in self._kept.values()), default=float("inf")))

    async def _renew(self, length: int, group: list[_Kept]) -> None:
        group = [kept for kept in group if id(kept.delivery) in self._kept]
        left = min((kept.until for kept in group), default=0.0) - self._clock.monotonic()
        answers: Sequence[Renewal]
        try:
            async with asyncio.timeout(min(ANSWER_LIMIT, max(left, 0.05))):
                answers = await self._transport.renew([kept.delivery for kept in group], timedelta(seconds=length))
        except (AcemqError, TimeoutError) as error:
            log.debug("%d leases could not be renewed: %s", len(group), error)
            answers = [Renewal("failed")] * len(group)
        if self._telemetry.metering:
            for outcome, count in Counter(answer.outcome for answer in answers).items():
                self._telemetry.leases_renewed(outcome, count)
        lost: list[_Kept] = []
        now, soonest = self._clock.monotonic(), float("inf")
        for kept, answer in zip(group, answers, strict=True):
            if id(kept.delivery) not in self._kept:
                continue  # settled meanwhile
            if answer.outcome == "renewed" and answer.until is not None:
                kept.until = answer.until
                kept.renew_at = now + (kept.until - now) / 2
            elif answer.outcome == "failed" and now < kept.until:
                kept.renew_at = now + min(_AGAIN, (kept.until - now) / 4)
            else:
                lost.append(kept)
                continue
            soonest = min(soonest, kept.renew_at)
        self._arm(soonest)
        self._lose(lost)

    def _lose(self, lost: list[_Kept]) -> None:
        together: defaultdict[tuple[Lost | None, str], list[Delivery]] = defaultdict(list)
        for kept in lost:
            together[kept.lost, kept.delivery.queue].append(kept.delivery)
        for (tell, queue), deliveries in together.items():
            log.warning("the lease of %d deliveries of %s was lost; they come again", len(deliveries), queue)
            self.lost(deliveries, LostBy.LEASE)
            if tell is not None:
                tell(deliveries, LostBy.LEASE)

    def _renewed(self, renewing: asyncio.Task[None]) -> None:
        self._renewing.discard(renewing)
        if not renewing.cancelled() and (error := renewing.exception()) is not None:
            log.error("renewing leases has failed inside the library", exc_info=error)
