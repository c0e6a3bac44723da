"""What lies in an outbox, what of it could not be published and why; letting it go again, and giving it up.

Of any store that retires records (`OutboxKeeper`). Which records are retired is the store's word: it knows its ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from acemq import headers as h
from acemq.errors import ConfigurationError
from acemq.headers import HeaderValue
from acemq.ops.letters import MOST, check_most
from acemq.patterns.relay import OLD
from acemq.stores import OutboxKeeper, OutboxRecord


class OutboxLine(msgspec.Struct, frozen=True):
    """One outbox, by its store's word of now."""

    outbox: str
    pending: int
    """Not published, retired records included."""
    retired: int
    oldest: timedelta | None
    """Age of the oldest record that is pending and not retired; `None`: there is none."""

    @property
    def needs_somebody(self) -> bool:
        """Records are retired, or one has waited for over a minute: no relay runs, or it cannot publish."""
        return self.retired > 0 or (self.oldest is not None and self.oldest > OLD)


class RetiredLine(msgspec.Struct, frozen=True):
    """One record that was tried as often as its store allows, and is tried no more."""

    id: str
    type: str
    exchange: str
    routing_key: str
    key: str | None
    """What else has this key waits behind it."""
    attempts: int
    written_at: datetime
    error: str
    content_type: str | None
    size: int
    headers: Mapping[str, HeaderValue]
    body: bytes

    @property
    def target(self) -> str:
        """As a person says it: a queue, or an exchange and its routing key."""
        return f"{self.exchange} on {self.routing_key!r}" if self.exchange else self.routing_key


class OutboxActed(msgspec.Struct, frozen=True):
    """How far an act came."""

    asked: int
    affected: int = 0
    not_retired: int = 0
    """Released, discarded or published by somebody else meanwhile: left as they are."""
    took: timedelta = timedelta()

    @property
    def skipped(self) -> dict[str, int]:
        return {"not_retired": self.not_retired} if self.not_retired else {}

    @property
    def is_whole(self) -> bool:
        return self.affected == self.asked


Progress = Callable[[OutboxActed], None]
"""Told after each record."""


async def look(store: OutboxKeeper) -> OutboxLine:
    """How much waits, and how much is retired."""
    status = await store.status()
    return OutboxLine(store.name, status.pending, status.retired, status.oldest)


async def look_at_retired(store: OutboxKeeper, *, most: int = 20) -> list[RetiredLine]:
    """What is retired, oldest first."""
    return [_line(record) for record in await store.retired(check_most(most))]


async def find(store: OutboxKeeper, id: str) -> RetiredLine:
    """The retired record of this id, among the oldest thousand; of its beginning, where that is of one record only."""
    return _line(_of(await store.retired(MOST), id, store.name))


async def ids_of(store: OutboxKeeper, ids: Sequence[str]) -> list[str]:
    """These, as `find` finds them, each once and whole. Refused when one of them is not retired."""
    there = await store.retired(MOST)
    return list(dict.fromkeys(_of(there, id, store.name).id for id in ids))


async def ids_of_all(store: OutboxKeeper) -> list[str]:
    """The oldest thousand."""
    return [record.id for record in await store.retired(MOST)]


async def release(store: OutboxKeeper, ids: Sequence[str], progress: Progress) -> OutboxActed:
    """Their attempts are 0 again, and the next pass of a relay tries them."""
    return await _act(ids, store.release, progress)


async def discard(store: OutboxKeeper, ids: Sequence[str], reason: str, progress: Progress) -> OutboxActed:
    """They will never be published, and what waits behind them may go; kept with the reason, as if published."""
    if not reason.strip():
        raise ConfigurationError("a discarded record is kept with a reason, and this one is empty; say why")
    return await _act(ids, lambda id: store.discard(id, reason), progress)


async def _act(ids: Sequence[str], act: Callable[[str], Awaitable[bool]], progress: Progress) -> OutboxActed:
    # Each in a commit of its own: cut short anywhere, what was done is done and the rest is as it was.
    began, affected, left = time.monotonic(), 0, 0
    result = OutboxActed(len(ids))
    for id in ids:
        if await act(id):
            affected += 1
        else:
            left += 1
        result = OutboxActed(len(ids), affected, left, timedelta(seconds=time.monotonic() - began))
        progress(result)
    return result


def _of(there: Sequence[OutboxRecord], id: str, outbox: str) -> OutboxRecord:
    found = [record for record in there if record.id == id] or [each for each in there if each.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{len(found)} retired records of {outbox} begin with {id!r}; give more of the id")
    among = f"the oldest {MOST:,} retired records" if len(there) == MOST else f"the {len(there):,} retired records"
    raise ConfigurationError(
        f"no record {id!r} is among {among} of {outbox}: it is not retired, was published or discarded, "
        "or is in another outbox"
    )


def _line(record: OutboxRecord) -> RetiredLine:
    return RetiredLine(
        id=record.id,
        type=h.text(record.headers.get(h.TYPE)) or "",
        exchange=record.exchange,
        routing_key=record.routing_key,
        key=record.key,
        attempts=record.attempts,
        written_at=record.created_at,
        error=record.last_error or "",
        content_type=record.content_type,
        size=len(record.body),
        headers=record.headers,
        body=record.body,
    )
