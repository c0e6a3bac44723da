"""The only consumer of a queue: a row with a lease and a token that grows, so that a stalled one takes nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy import exc

from acemq.transport import TransportError

from .dialects import Statements, text_of

if TYPE_CHECKING:
    from .running import Running

LEASE = 15.0
"""Seconds for which a holder that is not heard of is waited for."""
RENEWED_EVERY = LEASE / 3


def seek(connection: sa.Connection, now: int, statements: Statements, queue: int, me: str, lease: float) -> int | None:
    """The token under which `me` has the row now; `None` while another has it."""
    asked = {"queue": queue, "holder": me, "lease": int(lease * 1_000_000), "now": now}
    row = connection.execute(statements["holder"], asked).first()
    if row is None:
        connection.execute(statements["first_holder"], asked)
        return 1
    holder, token, left = text_of(row[0]), int(row[1]), int(row[2])
    if holder == me and left > 0:
        connection.execute(statements["same_holder"], {**asked, "fence": token})
        return token
    if left > 0:
        return None
    connection.execute(statements["next_holder"], asked)
    # What the last one had in hand when it died comes first: its leases may be longer than this one, and nothing that
    # stands behind it may pass it.
    connection.execute(statements["held_by_the_last"], asked)
    return token + 1


def is_held(connection: sa.Connection, now: int, statements: Statements, queue: int) -> bool:
    """Whether anybody has the row now."""
    row = connection.execute(statements["holder"], {"queue": queue, "now": now}).first()
    return row is not None and int(row[2]) > 0


class Exclusive:
    """One subscription's part in it."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self.me = running.next_call()
        self.fence: int | None = None
        self._renew_at = 0.0

    @property
    def is_ours(self) -> bool:
        return self.fence is not None

    def forget(self) -> None:
        self.fence, self._renew_at = None, 0.0

    async def seek(self, queue: int) -> None:
        """Take it where it is free, and keep it where it is ours."""
        loop = asyncio.get_running_loop()
        if self.fence is not None and loop.time() < self._renew_at:
            return
        running = self._running
        began = loop.time()
        for _ in range(3):
            try:
                self.fence = await running.link.ask(
                    lambda connection: seek(connection, running.now(), running.statements, queue, self.me, LEASE),
                    within=10,
                )
                break
            except TransportError as error:
                # Two made the first row at once.
                cause = error.__cause__
                if not isinstance(cause, exc.IntegrityError):
                    raise
        self._renew_at = began + RENEWED_EVERY

    async def release(self, queue: int) -> None:
        fence, running = self.fence, self._running
        self.fence = None
        if fence is None:
            return
        told = {"queue": queue, "holder": self.me, "fence": fence}
        with suppress(TransportError):
            await running.link.ask(
                lambda connection: connection.execute(running.statements["no_holder"], told), within=1
            )
