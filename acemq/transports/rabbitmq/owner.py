"""The right to be the only consumer of a queue.

The exclusive flag of `basic.consume` protects classic queues alone; a quorum queue takes several consumers that all say
they are exclusive. What is exclusive everywhere is a queue that belongs to a connection: `acemq.owner.{queue}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import aiormq

from acemq.transport import QueueMissing, TimedOut, TransportError

from .session import ANSWER_LIMIT, Session, ask

RETRY = (1.6, 2.4)
"""Seconds between two tries to become the owner, from and to."""
STAND_BACK = (3.6, 4.2)
"""Seconds for which an owner that lost its link leaves its queue to those that stand by: longer than they wait."""
LOOK = 0.2
"""Seconds between two looks whether others still consume from the queue."""
REPORT_AFTER = 30.0
"""Seconds after which it is said that they do."""


class Owner:
    """The claim of one exclusive subscription to its queue. Each connection is a new beginning."""

    def __init__(self, queue: str, owners: dict[str, Owner]) -> None:
        """`owners`: of this transport, by queue.

        A connection may declare again what is its own, so the broker does not keep two of ours apart.
        """
        self.queue, self.name = queue, f"acemq.owner.{queue}"
        self._owners = owners
        self._owned_on: Session | None = None
        self._alone_on: Session | None = None
        self._asking = asyncio.Lock()

    @property
    def is_owner(self) -> bool:
        return self._owned_on is not None and self._owned_on.is_alive

    def owns_on(self, session: Session) -> bool:
        return self._owned_on is session and session.is_alive

    def may_consume_on(self, session: Session) -> bool:
        """It owns the queue, and at some time since then nobody consumed from it."""
        return self.owns_on(session) and self._alone_on is session

    def look_again(self) -> None:
        """What it has given back is in its place only once the broker reports no consumer."""
        self._alone_on = None

    @property
    def has_lost(self) -> bool:
        """It owned the queue on a connection that is gone, and has not stood back since."""
        return self._owned_on is not None and not self._owned_on.is_alive

    def stand_back(self) -> None:
        if self.has_lost:
            self._owned_on = None

    async def take(self, session: Session) -> bool:
        """Become the owner; False if another is."""
        async with self._asking:
            other = self._owners.get(self.queue, self)
            if other is not self and other.is_owner:
                return False
            # Said before it is asked, so that no two of this connection ask at once.
            self._owners[self.queue], self._owned_on = self, session
            try:
                async with _asking(session) as channel:
                    await ask(channel.queue_declare(self.name, exclusive=True))
            except BaseException as error:
                self._owned_on = None
                if isinstance(error, TransportError) and error.code == 405:
                    return False
                raise
            return True

    async def others(self, session: Session) -> int:
        """How many consume from the queue now. `QueueMissing`: there is none."""
        async with _asking(session) as channel:
            try:
                found = await ask(channel.queue_declare(self.queue, passive=True))
            except TransportError as error:
                if error.code != 404:
                    raise
                raise QueueMissing(f"queue {self.queue!r} does not exist; declare it first", code=404) from None
        if not found.consumer_count:
            self._alone_on = session
        return found.consumer_count or 0

    async def release(self) -> None:
        """Leave the queue to others, when the last delivery has gone back. It falls with the connection, too."""
        async with self._asking:
            if self._owners.get(self.queue) is not self:
                return
            session, self._owned_on = self._owned_on, None
            try:
                if session is not None and session.is_alive:
                    async with _asking(session) as channel:
                        await ask(channel.queue_delete(self.name))
            finally:
                del self._owners[self.queue]


async def is_claimed(session: Session, queue: str, owners: Mapping[str, Owner]) -> bool:
    """Whether somebody consumes from the queue, or has the right to do so alone."""
    owner = owners.get(queue)
    if owner is not None and owner.owns_on(session):
        return True
    watched = Owner(queue, {})
    # First what the broker answers without an error, which it would put into its log.
    if await watched.others(session):
        return True
    try:
        async with _asking(session) as channel:
            await ask(channel.queue_declare(watched.name, passive=True))
    except TransportError as error:
        if error.code == 404:
            return False
        if error.code != 405:
            raise
    return True


@asynccontextmanager
async def _asking(session: Session) -> AsyncGenerator[aiormq.Channel]:
    try:
        async with asyncio.timeout(ANSWER_LIMIT), session.scratch() as channel:
            yield channel
    except TimeoutError:
        raise TimedOut(f"no answer from the broker within {ANSWER_LIMIT:g} s") from None
