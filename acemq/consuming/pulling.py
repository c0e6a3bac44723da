"""Deliveries held one by one and settled by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from acemq.ack import Ack
from acemq.clock import Clock
from acemq.codec import Reader
from acemq.consuming.moving import GivenBack, Mover
from acemq.consuming.settling import decide
from acemq.errors import ClosedError, CodecError
from acemq.message import Message
from acemq.public_errors import made_public
from acemq.transport import Delivery

T_co = TypeVar("T_co", covariant=True)


class Pulled(Message[T_co]):
    """A held message. Each verb settles it, once, by the table of outcomes, and waits for what that takes.

    `payload` is decoded at its first use and raises `DecodeError` there, or `ClaimStoreError`. Held messages go back
    when the connection closes.
    """

    __slots__ = ("_decoded", "_mover", "_reader", "_settled", "_unreadable")

    def __init__(self, delivery: Delivery, reader: Reader[T_co], mover: Mover, clock: Clock) -> None:
        super().__init__(None, delivery, clock)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self._reader, self._mover = reader, mover
        self._decoded = self._settled = False
        self._unreadable: CodecError | None = None

    @property
    def payload(self) -> T_co:
        if self._unreadable is not None:
            raise self._unreadable
        if not self._decoded:
            kind = self.envelope.type if self._reader.by_name else ""
            self._payload = self._reader.read(self.body, self.content_type, kind)
            self._decoded = True
        return self._payload

    async def fetch(self) -> None:
        """For the engine, where a codec has to be awaited: decode it now. What that raises is raised by `payload`."""
        try:
            self._payload = await self._reader.read_async(self.body, self.content_type, self.envelope.type)
            self._decoded = True
        except CodecError as error:
            self._unreadable = error

    async def accept(self) -> bool:
        """True once it took effect.

        False, here and below: the broker no longer holds this delivery for us, or the copy did not land (is there a
        `{queue}.dlq`? pulling declares nothing); the message is where it was.
        """
        return await self._settle(Ack.accept())

    async def retry(self, error: BaseException | str | None = None, *, delay: timedelta | None = None) -> bool:
        """By the connection's policy; a wait that is not spent in the broker is spent in this call."""
        return await self._settle(Ack.retry(error, delay=delay))

    async def reject(self, reason: str | None = None) -> bool:
        return await self._settle(Ack.reject(reason))

    async def park(self, reason: str | None = None) -> bool:
        return await self._settle(Ack.park(reason))

    async def release(self) -> bool:
        return await self._settle(Ack.release())

    async def _settle(self, ack: Ack) -> bool:
        if self._settled:
            raise ClosedError(f"message {self.id} of {self.queue} was settled already; each delivery is settled once")
        self._settled = True
        decision = decide(ack, self.envelope.attempt, self._mover.policy, self.age, "pull")
        try:
            with made_public():
                handled, held = await self._mover.carry_out(decision, self.delivery)
        except GivenBack:
            return False  # closed while it waited for its retry: it goes back with its attempt as it was
        except BaseException:
            self._settled = False  # cancelled before it took effect: still in hand
            raise
        return held and handled.landed


async def fetch(pulled: Sequence[Pulled[Any]]) -> None:
    """Decode all of them; cancelled meanwhile, none is held any more."""
    try:
        for each in pulled:
            await each.fetch()
    except BaseException:
        await asyncio.shield(asyncio.gather(*(each.release() for each in pulled)))
        raise
