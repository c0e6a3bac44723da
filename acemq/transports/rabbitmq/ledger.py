"""What one channel holds unsettled, and its acknowledgements, put together: one frame for many wherever that can be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from acemq.errors import CapabilityError
from acemq.transport import Delivery, Settled, Settlement, Verb

from . import frames
from .frames import Malformed
from .lane import Lane

log = logging.getLogger("acemq.rabbitmq")

_REQUEUES = {"delay": ("delayed requeue", "delay"), "headers": ("requeue with other headers", "headers")}
"""What only a copy can do here."""


_PATIENCE = 0.005
"""Seconds for which what was accepted out of turn waits for those before it, to leave with them as one frame."""
_SHARE = 8
"""For each that waits so many are held at the least, or the broker would have too few to deliver."""
_FEW = 32
"""Held, and with fewer nothing waits: who has but a few slots wants each of them back at once."""


class Receipt:
    """Where a delivery is settled. A tag means nothing on another channel, so it never travels without its ledger."""

    __slots__ = ("ledger", "stale", "tag")

    def __init__(self, ledger: Ledger, tag: int) -> None:
        self.ledger, self.tag, self.stale = ledger, tag, False


class Ledger:
    """Every delivery that the broker has handed to this channel, from its arrival to its settlement.

    Only a tag that is held is ever sent: an unknown one would make the broker close the channel.
    """

    def __init__(self, lane: Lane, channel: int, *, is_patient: bool = False) -> None:
        """`is_patient`: what is accepted out of turn may wait for others; whoever closes the channel calls `flush`."""
        self.held: dict[int, Delivery] = {}
        """In the order of the tags, since they arrive in it."""
        self._lane, self._channel, self._is_patient = lane, channel, is_patient
        self.after_turn: Callable[[], None] | None = None
        """Called at the end of a turn in which something was settled: there may be room for more."""
        self._accepted: list[int] = []
        self._requeued: list[int] = []
        self._is_due = False
        """They are looked at in the end of this turn of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._newest = 0
        self._redelivered = 0
        """Held, and delivered before: each may be what has killed a process, and may kill this one."""

    def hold(self, tag: int, delivery: Delivery) -> None:
        if tag <= self._newest:
            # A `multiple` for it would cover what is still held.
            raise Malformed(f"the broker sent delivery {tag} behind delivery {self._newest}")
        self.held[tag] = delivery
        self._newest = tag
        if delivery.redelivered:
            self._redelivered += 1
            if self._timer is not None:
                self._write()  # so that it has left before this one can begin

    def settle(self, tag: int, verb: Verb) -> bool:
        """False when it is no longer held. What is settled leaves at the end of this turn of the loop or 5 ms later."""
        delivery = self.held.pop(tag, None)
        if delivery is None:
            return False
        self._redelivered -= delivery.redelivered
        if not self._is_due:
            self._is_due = True
            self._lane.before_flush(self._end_turn)
        # A drop is an ack, too: a reject would feed the dead-letter exchange of the queue.
        (self._requeued if verb is Verb.REQUEUE else self._accepted).append(tag)
        return True

    def flush(self) -> None:
        """What was settled leaves now."""
        self._write()
        self._lane.flush()

    def _end_turn(self) -> None:
        self._is_due = False
        if not self._may_wait():
            self._write()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PATIENCE, self._write)
        if self.after_turn is not None:
            self.after_turn()

    def _may_wait(self) -> bool:
        """Whether some were accepted out of turn: a frame each, unless those before them are accepted meanwhile."""
        if not self._is_patient or self._requeued or self._redelivered:
            return False
        if len(self.held) < max(_FEW, _SHARE * len(self._accepted)):
            return False
        return max(self._accepted, default=0) > next(iter(self.held))

    def _write(self) -> None:
        """As one frame as far as nothing below it is still held, the rest one by one."""
        self._end_wait()
        accepted, requeued = self._accepted, self._requeued
        self._accepted, self._requeued = [], []
        for frame in settlement_frames(self._channel, accepted, requeued, next(iter(self.held), None)):
            self._lane.write(frame)

    def _end_wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def lose(self) -> Sequence[Delivery]:
        """The channel is gone, and with it all that it held."""
        lost = list(self.held.values())
        self.held.clear()
        self._redelivered = 0
        self._accepted, self._requeued = [], []
        self._end_wait()
        return lost


def settlement_frames(channel: int, accepted: list[int], requeued: list[int], lowest_held: int | None) -> list[bytes]:
    """A `multiple` covers every tag up to its own, so it may only name one below which nothing is held."""
    if requeued:
        # Accepted first, and one by one: a `multiple` before the requeues would accept them, too.
        out = [frames.ack(channel, tag) for tag in accepted]
        last = max(requeued)
        if lowest_held is None or lowest_held > last:
            # RabbitMQ sorts each requeue into the queue: ten thousand of them one by one keep it busy for a minute.
            return [*out, frames.nack(channel, last, multiple=len(requeued) > 1)]
        return [*out, *(frames.nack(channel, tag) for tag in requeued)]
    covered = [tag for tag in accepted if lowest_held is None or tag < lowest_held]
    single = [tag for tag in accepted if lowest_held is not None and tag > lowest_held]
    out = [frames.ack(channel, max(covered), multiple=len(covered) > 1)] if covered else []
    out.extend(frames.ack(channel, tag) for tag in single)
    return out


def settle(settlement: Settlement) -> Settled:
    """One item of `Transport.settle`: never waits, never raises."""
    delivery = settlement.delivery
    receipt = delivery.receipt
    if not isinstance(receipt, Receipt):
        return _stale(delivery, None)
    if settlement.delay or settlement.headers is not None:
        refusal = CapabilityError("rabbitmq", *_REQUEUES["delay" if settlement.delay else "headers"])
        log.error("settling %s of %r: %s", delivery.message_id, delivery.queue, refusal)
        return Settled.FAILED
    if receipt.ledger.settle(receipt.tag, settlement.verb):
        return Settled.DONE
    return _stale(delivery, receipt)


def _stale(delivery: Delivery, receipt: Receipt | None) -> Settled:
    if receipt is None or not receipt.stale:
        log.warning(
            "settling %s of %r: the broker no longer holds it for us; it may be delivered again",
            delivery.message_id,
            delivery.queue,
        )
    if receipt is not None:
        receipt.stale = True
    return Settled.STALE
