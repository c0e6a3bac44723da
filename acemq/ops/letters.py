"""What lies in a dead-letter or parked queue, looked at and left where it is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import msgspec

from acemq.connection import Connection
from acemq.errors import ConfigurationError
from acemq.headers import HeaderValue
from acemq.message import Message
from acemq.ops.queues import meant_to_be_there
from acemq.patterns.replay import replays_of
from acemq.transport import Settlement, Verb

MOST = 1_000
"""What is looked at, or acted on, in one go."""
WAIT = timedelta(milliseconds=200)


class Letter(msgspec.Struct, frozen=True):
    """One message that was set aside. What another library wrote knows less of itself."""

    place: int
    """In the queue, from 1."""
    id: str
    type: str
    attempt: int
    replays: int
    """How often it was replayed before."""
    error: str
    how: str | None
    error_type: str | None
    failed_queue: str | None
    failed_at: datetime | None
    failed_by: str | None
    first_seen: datetime | None
    correlation_id: str
    content_type: str | None
    size: int
    headers: Mapping[str, HeaderValue]
    """All of them, as they stand on the wire."""
    body: bytes


def check_most(most: int) -> int:
    """Refuse what cannot be looked at in one go."""
    if not 1 <= most <= MOST:
        raise ConfigurationError(f"most={most} must lie between 1 and {MOST:,}")
    return most


async def look(mq: Connection, source: str, *, most: int = 20) -> list[Letter]:
    """The first messages of a queue. They are held for the moment, and given back in their place and order.

    The broker marks them as redelivered, and a queue that counts deliveries counts this one. `TopologyError`: there is
    no such queue.
    """
    check_most(most)
    async with meant_to_be_there(mq, source):
        held = await mq.pull_many(source, bytes, most=most, wait=WAIT)
    try:
        return [_letter(place, message) for place, message in enumerate(held, 1)]
    finally:
        await mq.transport.settle([Settlement(message.delivery, Verb.REQUEUE) for message in held])


async def find(mq: Connection, source: str, id: str) -> Letter:
    """The message of this id, among the first thousand; of its beginning, where that is of one message only."""
    letters = await look(mq, source, most=MOST)
    found = [letter for letter in letters if letter.id == id] or [each for each in letters if each.id.startswith(id)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigurationError(f"{len(found)} messages of {source} begin with {id!r}; give more of the id")
    raise ConfigurationError(f"no message {id!r} is among the first {len(letters):,} of {source}")


def _letter(place: int, message: Message[bytes]) -> Letter:
    failure, envelope, wire = message.failure, message.envelope, message.wire_headers
    return Letter(
        place=place,
        id=envelope.id,
        type=envelope.type,
        attempt=envelope.attempt,
        replays=replays_of(wire),
        error=failure.text if failure is not None else "",
        how=failure.how if failure is not None else None,
        error_type=failure.error_type if failure is not None else None,
        failed_queue=failure.queue if failure is not None else None,
        failed_at=failure.at if failure is not None else None,
        failed_by=failure.by if failure is not None else None,
        first_seen=envelope.first_seen if message.age is not None else None,
        correlation_id=envelope.correlation_id,
        content_type=message.content_type,
        size=len(message.body),
        headers=wire,
        body=message.body,
    )
