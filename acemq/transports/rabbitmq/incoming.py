"""A channel on which deliveries come in, pushed or pulled: from frames to `Delivery`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from struct import error as StructError

from acemq.headers import DELIVERY_COUNT, Headers
from acemq.transport import AccessDenied, Delivery, QueueMissing, TransportError

from . import frames
from .lane import End
from .ledger import Ledger, Receipt
from .session import Session


class IncomingChannel(ABC):
    """Takes Basic.Deliver and Basic.GetOk of one queue. A subclass says what becomes of each delivery."""

    is_patient = False
    """Whether its acceptances may wait for each other (`Ledger`)."""

    def __init__(self, session: Session, queue: str, *, counts: bool | None) -> None:
        """`counts`: whether the queue counts deliveries; `None` where that is not known."""
        self.session, self.queue = session, queue
        self.end: End | None = None
        self.over = asyncio.Event()
        self._counts = counts
        self._tag = 0
        self._redelivered = False
        self._route = ("", "")
        self.is_open = False

    async def open(self) -> None:
        self.channel = await self.session.channel(self)
        self.ledger = Ledger(self.session.lane, self.channel.number, is_patient=self.is_patient)
        self.is_open = True

    def method(self, method: int, arguments: bytes) -> bool:
        if method == frames.BASIC_DELIVER:
            at = 1 + arguments[0]  # behind the consumer tag: a channel has but one consumer
            self._route = frames.route(arguments[at + 9 :])
        elif method == frames.BASIC_GET_OK:
            at = 0
            self._route = frames.route(arguments[9:-4])  # behind it stands how many are left
        else:
            return False
        self._tag = frames.u64_at(arguments, at)[0]
        self._redelivered = arguments[at + 8] == 1
        return True

    def content(self, properties: bytes, body: bytes) -> None:
        fault = None
        try:
            told = frames.read_properties(properties)
        except (IndexError, StructError):
            told, fault = frames.NO_PROPERTIES, "its properties cannot be read"
        content_type, headers, priority, reply_to, expiration, message_id = told
        exchange, routing_key = self._route
        delivery = Delivery(
            queue=self.queue,
            body=body,
            headers=headers,
            message_id=message_id,
            content_type=content_type,
            exchange=exchange,
            routing_key=routing_key,
            reply_to=reply_to,
            redelivered=self._redelivered,
            deliveries=self._deliveries(headers),
            priority=priority,
            expires_in=frames.expires_in(expiration),
            fault=fault,
            receipt=Receipt(self.ledger, self._tag),
        )
        self.ledger.hold(self._tag, delivery)
        self.arrived(self._tag, delivery)

    @abstractmethod
    def arrived(self, tag: int, delivery: Delivery) -> None: ...

    def ended(self, end: End) -> None:
        self.end = end
        self.over.set()

    def _deliveries(self, headers: Headers) -> int | None:
        if self._counts is False:
            return None
        count = headers.get(DELIVERY_COUNT)
        if isinstance(count, int):
            self._counts = True
            return count + 1
        return 1 if self._counts else None


def refusal(queue: str, error: TransportError) -> TransportError:
    """What the broker means by the code with which it refuses deliveries of `queue`."""
    match error.code:
        case 404:
            return QueueMissing(f"queue {queue!r} does not exist: {error}; declare it first", code=404)
        case 403:
            return AccessDenied(f"queue {queue!r} may not be read: {error}", code=403)
        case _:
            return error
