"""Deliveries held one by one and settled by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from acemq.ack import Ack
from acemq.clock import Clock
from acemq.codec import Reader
from acemq.consuming.early import Early
from acemq.consuming.expiring import Expired
from acemq.consuming.moving import GivenBack, Mover
from acemq.consuming.settling import decide
from acemq.errors import ClosedError, CodecError
from acemq.message import Message
from acemq.public_errors import made_public
from acemq.publishing.lanes import KnownLanes
from acemq.topology import lanes_of
from acemq.transport import Delivery, Settlement, Verb

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


class Pulling:
    """The pulls of one connection."""

    def __init__(self, mover: Mover, lanes: KnownLanes) -> None:
        self._mover, self._known_lanes = mover, lanes
        self._transport, self._clock = mover.transport, mover.clock
        self._expired = Expired(mover)

    async def pull(self, queue: str, most: int, wait: timedelta) -> list[Delivery]:
        """Up to `most`: what is there when the first has come, after at most `wait`.

        What has expired is passed over, and set aside; what comes too early is put back. Raises the errors of the port.
        """
        queues = lanes_of(queue)[::-1] if await self._known_lanes.has(queue) else (queue,)
        early, end = Early.of(self._mover, queue), self._clock.monotonic() + wait.total_seconds()
        while deliveries := await self._take(queues, most, wait):
            if early is not None:
                deliveries = early.sift(deliveries)
            if self._mover.leases is not None:
                self._mover.leases.keep(deliveries)
            moves = {delivery: move for delivery in deliveries if (move := self._expired.takes(delivery))}
            fit = [delivery for delivery in deliveries if delivery not in moves]
            if fit:
                return fit
            # Shielded: whoever no longer waits for them leaves them to end. One that does not land comes again.
            if not all(await asyncio.shield(asyncio.gather(*moves.values()))):
                return []
            if early is not None:
                await early.at_rest()  # what is early leaves first
            wait = timedelta(seconds=max(end - self._clock.monotonic(), 0))
        return []

    async def _take(self, queues: Sequence[str], most: int, wait: timedelta) -> Sequence[Delivery]:
        if len(queues) == 1:
            return await self._transport.pull(queues[0], most=most, wait=wait)
        taken: list[Delivery] = []
        try:
            for lane in queues:
                taken += await self._transport.pull(lane, most=most - len(taken), wait=timedelta())
                if len(taken) == most:
                    break
        except BaseException:
            await self._give_back(taken)
            raise
        return taken if taken or not wait else await self._wait(queues, most, wait)

    async def _wait(self, lanes: Sequence[str], most: int, wait: timedelta) -> list[Delivery]:
        """What comes to the first of them in which something comes."""
        pulls = [asyncio.create_task(self._transport.pull(lane, most=most, wait=wait)) for lane in lanes]
        pending = set(pulls)
        try:
            while pending and not any(_came(pull) for pull in pulls):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._give_back(await _ended(pulls))
            raise
        came = await _ended(pulls)
        for pull in () if came else pulls:
            if not pull.cancelled():  # by us, for one that ended with an error
                pull.result()
        await self._give_back(came[most:])
        return came[:most]

    async def _give_back(self, taken: Sequence[Delivery]) -> None:
        if taken:
            await asyncio.shield(self._transport.settle([Settlement(each, Verb.REQUEUE) for each in taken]))


def _came(pull: asyncio.Task[Sequence[Delivery]]) -> bool:
    return pull.done() and (pull.cancelled() or pull.exception() is not None or bool(pull.result()))


async def _ended(pulls: Sequence[asyncio.Task[Sequence[Delivery]]]) -> list[Delivery]:
    """All that they brought, once none of them brings anything more: what is cut off gives back what it is handed."""
    for pull in pulls:
        pull.cancel()
    results = await asyncio.shield(asyncio.gather(*pulls, return_exceptions=True))
    return [delivery for result in results if not isinstance(result, BaseException) for delivery in result]
