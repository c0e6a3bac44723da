"""Messages that may be what kills the process: handled with nothing beside them, and given up after so many deliveries.

A broker that counts deliveries counts every one that was fetched when the process died, not the one that killed it.
So only the foremost is given up: whatever came before it is gone, and what was fetched behind it is as often delivered.
"""

from __future__ import annotations

from collections import deque

from acemq import headers as h
from acemq.consuming.options import MAX_DELIVERIES
from acemq.delays import put_backs
from acemq.transport import Capabilities, Delivery

_REMEMBERED = 100
"""Suspects whose release is known; with more of them at once, one is given up a few deliveries later."""

_SUSPECT_AFTER = 2
"""Deliveries after which a message is handled alone. The first two may be owed to one lost connection."""


class Suspects:
    """Those of one consumer."""

    def __init__(self, max_deliveries: int | None, can: Capabilities, *, in_lanes: bool = False) -> None:
        """`can`: of the queue.

        `in_lanes`: the foremost is the first suspect, for what has only just come to a higher lane goes before it.
        """
        self.most, self._can, self._in_lanes = max_deliveries, can, in_lanes
        self.alone: Delivery | None = None
        """What is handled with nothing beside it."""
        self._after = max(min(_SUSPECT_AFTER, (max_deliveries or MAX_DELIVERIES) - 1), 1)
        self._has_begun = False
        """Whether the foremost was started since the subscription was last made."""
        self._foremost: Delivery | None = None
        """The first of them, until it was looked at: its body is not to be kept."""
        self._released: deque[str] = deque(maxlen=_REMEMBERED)
        """Ids of the suspects that their handlers have given back."""

    def begin_anew(self) -> None:
        """The next delivery is the foremost: the subscription was made again."""
        self._has_begun, self._foremost = False, None

    def begin(self, delivery: Delivery) -> None:
        """It is about to be looked at."""
        if not self._has_begun and not (self._in_lanes and not self.is_one(delivery)):
            self._has_begun, self._foremost = True, delivery

    def is_one(self, delivery: Delivery) -> bool:
        return (delivery.deliveries or 0) > self._after and self._unanswered(delivery) > self._after

    def gave_back(self, delivery: Delivery, message_id: str) -> None:
        """By its handler: so it did not kill, and comes again behind others."""
        if self.is_one(delivery):
            self._released.append(message_id)

    def is_over_limit(self, delivery: Delivery) -> bool:
        """Whether it is given up now."""
        most, is_foremost = self.most, delivery is self._foremost
        if is_foremost:
            self._foremost = None
        return (
            most is not None
            and (delivery.deliveries or 0) > most
            and self._unanswered(delivery) > most
            and (is_foremost or delivery.message_id in self._released)
        )

    def forget_foremost(self) -> None:
        """For a consumer that gives nothing up."""
        self._foremost = None

    def _unanswered(self, delivery: Delivery) -> int:
        """How often it was delivered, this time included, without counting what ended in a retry or came too early."""
        # Where a retry is the same delivery put back with another attempt, it is counted with the others.
        told = (h.integer(delivery.headers.get(h.ATTEMPT)) or 1) - 1 if self._can.requeue_rewrites else 0
        return (delivery.deliveries or 0) - told - put_backs(delivery.headers, self._can)
