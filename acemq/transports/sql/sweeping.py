"""What nobody else would remove: the expired where nobody consumes, the messages of deleted queues, the queues of the
dead. Bounded, and by one process at a time."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import sqlalchemy as sa

from .dialects import Statements, text_of
from .exclusive import seek
from .routes import Routes
from .topology import SOME, Desk, remove_queues

EVERY = (15.0, 45.0)
"""Seconds between two sweeps, from and to."""
MOST = 20
"""Statements of one sweep."""
LEASE = 30.0
KEPT = 3600 * 1_000_000
"""Microseconds for which a deleted queue is remembered: a caller's transaction may still write into it."""
OLD_SNAPSHOT = timedelta(minutes=10)
"""A transaction that reads for longer keeps dead rows from being removed, and is worth a word."""
NOBODY = 0
"""The number of no queue: the row of the sweepers."""


class Swept(msgspec.Struct):
    expired: int = 0
    removed: int = 0
    queues: int = 0
    more: bool = False
    """There is something left."""


def may_sweep(connection: sa.Connection, now: int, statements: Statements, me: str) -> bool:
    return seek(connection, now, statements, NOBODY, me, LEASE) is not None


def sweep_expired(connection: sa.Connection, now: int, desk: Desk, routes: Routes) -> int:
    found = connection.execute(desk.statements["some_expired"], {"now": now, "most": SOME}).all()
    by_queue: dict[int, list[int]] = {}
    for seq, queue in found:
        by_queue.setdefault(queue, []).append(seq)
    for queue, seqs in by_queue.items():
        place = routes.by_id.get(queue)
        letters = None if place is None else routes.letters_of(place.described.name)
        if letters is not None:
            connection.execute(desk.statements["letters"], {"seqs": seqs, "letters": letters, "now": now})
        connection.execute(desk.statements["remove"], {"seqs": seqs})
    return len(found)


def sweep_deleted(connection: sa.Connection, now: int, desk: Desk) -> int:
    """Some messages of one deleted queue."""
    for name, at in connection.execute(desk.statements["tombstones"]).all():
        queue = int(text_of(name).partition(":")[2])
        seqs = [row[0] for row in connection.execute(desk.statements["some_of"], {"queue": queue, "most": SOME})]
        if seqs:
            connection.execute(desk.statements["remove"], {"seqs": seqs})
            return len(seqs)
        if now - int(text_of(at)) > KEPT:
            connection.execute(desk.statements["delete_meta"], {"name": text_of(name)})
    return 0


def sweep_private(connection: sa.Connection, now: int, desk: Desk) -> int:
    """Queues whose owners have not been heard of."""
    lives: dict[int, bool] = {}
    for queue, _, left in connection.execute(desk.statements["owned"], {"now": now}).all():
        lives[queue] = lives.get(queue, False) or left > 0
    dead = [queue for queue, alive in lives.items() if not alive]
    if dead:
        remove_queues(connection, now, desk, dead)
    return len(dead)


def sweep_letters(connection: sa.Connection, now: int, desk: Desk, routes: Routes, kept: timedelta) -> int:
    """Dead letters that are older than they are kept."""
    age = kept // timedelta(microseconds=1)
    for name, place in routes.queues.items():
        if name.endswith(".dlq"):
            asked = {"queue": place.id, "age": age, "now": now, "most": SOME}
            seqs = [row[0] for row in connection.execute(desk.statements["some_old"], asked)]
            if seqs:
                connection.execute(desk.statements["remove"], {"seqs": seqs})
                return len(seqs)
    return 0


def oldest_snapshot(connection: sa.Connection, statements: Statements) -> timedelta:
    """For how long somebody has kept what is dead from being removed; on PostgreSQL, and as far as we may know."""
    seconds: int | None = connection.execute(statements["oldest_snapshot"]).scalar()
    return timedelta(seconds=seconds or 0)
