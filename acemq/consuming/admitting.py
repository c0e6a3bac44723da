"""Whether a delivery is one for the handler at all, and with which payload."""

from __future__ import annotations

from typing import Any

from acemq import headers as h
from acemq.clock import Clock
from acemq.codec import Reader
from acemq.consuming.expiring import has_expired
from acemq.consuming.settling import TABLE, Case, Decision, set_aside
from acemq.consuming.suspects import Suspects
from acemq.errors import ClaimStoreError, DecodeError
from acemq.message import Message
from acemq.transport import Delivery


class Admission:
    """Asked of every delivery before its handler is."""

    def __init__(self, reader: Reader[Any], suspects: Suspects, clock: Clock, *, drops_expired: bool) -> None:
        self._reader, self._suspects, self._clock = reader, suspects, clock
        self._expired = Decision(row=TABLE[Case.EXPIRED_DROPPED]) if drops_expired else set_aside(Case.EXPIRED)
        self.waits = reader.is_async
        """A codec has to be awaited: what is admitted has no payload until `fill` has given it one."""

    def unfit(self, delivery: Delivery) -> Decision | None:
        """What becomes of a delivery that no handler may have, whatever it carries."""
        if self._suspects.is_over_limit(delivery):
            return set_aside(Case.DELIVERY_LIMIT, f"{self._suspects.most} deliveries without an outcome")
        if h.EXPIRES_AT in delivery.headers and has_expired(delivery, self._clock):
            return self._expired
        return None

    def examine(self, delivery: Delivery) -> Message[Any] | Decision:
        """The message for the handler, or what becomes of the delivery instead."""
        unfit = self.unfit(delivery)
        if unfit is not None:
            return unfit
        try:
            return Message(None if self.waits else self._decode(delivery), delivery, self._clock)
        except DecodeError as error:
            return set_aside(Case.UNDECODABLE, error)

    async def fill(self, message: Message[Any]) -> DecodeError | ClaimStoreError | None:
        """Give the message its payload, where a codec has to be awaited for it. What is returned has prevented that."""
        delivery = message.delivery
        try:
            _refuse_malformed(delivery)
            message.fill(await self._reader.read_async(delivery.body, delivery.content_type, message.type))
        except (DecodeError, ClaimStoreError) as failure:
            return failure
        return None

    def _decode(self, delivery: Delivery) -> Any:
        _refuse_malformed(delivery)
        reader = self._reader
        if reader.by_name:
            kind = h.text(delivery.headers.get(h.TYPE)) or delivery.routing_key
            return reader.read(delivery.body, delivery.content_type, kind)
        return reader.read(delivery.body, delivery.content_type)


def _refuse_malformed(delivery: Delivery) -> None:
    if delivery.fault is not None:
        raise DecodeError(delivery.fault, content_type=delivery.content_type)
