"""Taking messages: the oldest first, each for as long as its lease, nobody twice at once."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from acemq.headers import ID, NONE, Headers, from_text
from acemq.transport import Delivery

from .dialects import Dialect, Row, Statements, text_of
from .publish import Properties, read_properties
from .routes import NOTHING
from .settle import Order, Receipt, renew

ROUNDS = 5
"""Of a claim that comes upon expired messages."""
_LOWEST_RANK = -(2**15)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_place = itemgetter(9, 0)
"""Where a row of a claim stands among others, whose columns are: seq, token, expires_at, enqueued_at, exchange,
routing_key, headers, properties, body, rank_key."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for how much of which queue."""

    queue: int
    most: int
    lease: int
    """Microseconds."""
    call: str
    """Names this claim. Should its answer be lost, what it took is found by that name."""
    lost: str | None = None
    """The last claim, where its answer was lost."""
    holder: str = ""
    fence: int | None = None
    """Of an exclusive consumer: it takes nothing unless it is still the one."""
    due: bool = True
    """Look for what waited and can be had now, too."""
    floor: int = 0
    """Of a queue without ranks: what comes before this row is not looked for."""
    letters: int | None = None
    """Where what has expired goes; `None`: it is dropped."""


class Taken(msgspec.Struct):
    rows: list[Row]
    topology: str
    """The version that the claim has seen."""
    due_in: float | None
    """Seconds until something that waits now can be had; `None`: nothing waits."""
    due: int = 0
    """Of what waited and could be had, how much was seen, where that was looked for."""
    expired: int = 0
    unheld: bool = False
    """An exclusive consumer that is not the one any more."""


def claim(connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, asked: Claim) -> Taken:
    take = _take_by_arrays if dialect.array_statements else _take_by_steps
    found: list[Row] = []
    if asked.lost is not None:
        found = _found_again(connection, now, dialect, statements, asked, asked.lost)
    taken = Taken(found, NOTHING, None)
    for _ in range(ROUNDS):
        most = asked.most - len(taken.rows)
        if most <= 0:
            break
        rows, at = take(connection, now, dialect, statements, asked, most, taken)
        late = [row for row in rows if row[2] is not None and row[2] <= at]
        if not late:
            taken.rows.extend(rows)
            break
        taken.rows.extend(row for row in rows if row[2] is None or row[2] > at)
        bury(connection, at, dialect, statements, late, asked.letters)
        taken.expired += len(late)
    if not dialect.array_statements and len(taken.rows) < asked.most and not taken.unheld:
        # What waits now is known to nobody else: the consumer sleeps until then, or until it is woken.
        seen = look(connection, now, statements, asked.queue)
        taken.due_in = 0.01 if seen is None else seen.due_in
        taken.topology = taken.topology if seen is None else seen.topology
    taken.rows.sort(key=_place)
    return taken


def _found_again(
    connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, asked: Claim, lost: str
) -> list[Row]:
    """What a claim has taken whose answer was lost; its leases begin anew."""
    rows = list(connection.execute(statements["again"], {"queue": asked.queue, "call": lost}).all())
    if not rows:
        return []
    orders = [Order(row[0], row[1], asked.queue) for row in rows]
    ours = renew(connection, now, dialect, statements, orders, timedelta(microseconds=asked.lease))
    return [row for row in rows if row[0] in ours]


def bury(
    connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, rows: Sequence[Row],
    letters: int | None,
) -> None:  # fmt: skip
    """Move what has expired to the dead letters, or remove it. Held by us, so nobody else touches it."""
    if dialect.array_statements:
        parameters = {"seqs": [row[0] for row in rows], "tokens": [row[1] for row in rows], "letters": letters}
        connection.execute(statements["bury"], parameters)
        return
    buried = {"seqs": [row[0] for row in rows], "letters": letters, "now": now}
    if letters is not None:
        connection.execute(statements["letters"], buried)
    connection.execute(statements["remove"], buried)


def _take_by_arrays(
    connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, asked: Claim, most: int, taken: Taken
) -> tuple[list[Row], int]:
    """One statement, which also tells what the next claim should know."""
    parameters = {
        "queue": asked.queue,
        "most": most,
        "lease": asked.lease,
        "call": asked.call,
        "holder": asked.holder,
        "fence": asked.fence,
        "due": asked.due,
        "rank": 0 if asked.floor else _LOWEST_RANK,
        "floor": asked.floor,
    }
    found = connection.execute(statements["claim"], parameters).all()
    at, topology, due, due_in = found[0][:4]
    taken.topology = topology or NOTHING
    taken.due += due
    taken.due_in = None if due_in is None else due_in / 1_000_000
    return [row[4:] for row in found if row[4] is not None], at


def _take_by_steps(
    connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, asked: Claim, most: int, taken: Taken
) -> tuple[list[Row], int]:
    if asked.fence is not None:
        asking = {"queue": asked.queue, "holder": asked.holder, "fence": asked.fence}
        if connection.execute(statements["is_holder"], asking).first() is None:
            taken.unheld = True
            return [], now
    if dialect.name == "sqlite":
        parameters = {"queue": asked.queue, "most": most, "lease": asked.lease, "call": asked.call, "now": now}
        return statements.fetch(connection, "claim", parameters), now
    return _take_locked(connection, statements, asked, most)


def _take_locked(connection: sa.Connection, statements: Statements, asked: Claim, most: int) -> tuple[list[Row], int]:
    """Found without a lock, then locked one by one.

    A search that locks as it goes sees the rows of a transaction that commits meanwhile, and would take the second
    message of a batch whose first it has passed as locked; and it touches the row behind the last, of another queue.
    """
    at: int = connection.execute(statements["clock"]).scalar_one()
    asking = {"queue": asked.queue, "most": most, "now": at}
    due = [
        row[0]
        for state in ((1, 2) if asked.due else ())
        for row in connection.execute(statements["candidates_due"], {**asking, "state": state})
    ]
    fresh = [row[0] for row in connection.execute(statements["candidates"], asking)]
    rows: list[Row] = []
    if due or fresh:
        rows.extend(connection.execute(statements["chosen"], {"seqs": due + fresh, "now": at}).all())
        if not rows and len(fresh) == most:
            # Others are at the same ones: between competing consumers there is no order to keep.
            rows.extend(connection.execute(statements["others"], {**asking, "seqs": fresh}).all())
    rows = sorted(rows, key=_place)[:most]
    if rows:
        taken = {"seqs": [row[0] for row in rows], "lease": asked.lease, "call": asked.call}
        connection.execute(statements["take"], taken)
    return rows, at


def look(connection: sa.Connection, now: int, statements: Statements, queue: int) -> Taken | None:
    """Whether a claim would find anything, without a lock. `None`: it would."""
    some, due_in, topology = connection.execute(statements["look"], {"queue": queue, "now": now}).one()
    if some:
        return None
    return Taken([], text_of(topology), None if due_in is None else due_in / 1_000_000)


def _id_in(headers: Headers) -> str | None:
    found = headers.get(ID)
    return found if isinstance(found, str) else None


def delivery(row: Row, queue: str, place: int, holder: Any, lease_until: float) -> Delivery:
    seq, token, _, enqueued_at, exchange, routing_key, headers_text, properties_text, body, _ = row
    fault = None
    headers: Headers = NONE
    try:
        headers = from_text(headers_text)
        told = read_properties(properties_text)
    except (msgspec.MsgspecError, ValueError) as error:
        told = Properties()
        fault = f"its row cannot be taken apart: {error}"
    return Delivery(
        queue=queue,
        body=body,
        headers=headers,
        message_id=told.message_id or _id_in(headers),
        content_type=told.content_type,
        exchange=exchange if type(exchange) is str else text_of(exchange),
        routing_key=routing_key if type(routing_key) is str else text_of(routing_key),
        reply_to=told.reply_to,
        redelivered=token > 1,
        deliveries=token,
        fence=token,
        lease_until=lease_until,
        enqueued_at=_EPOCH + timedelta(0, 0, enqueued_at),  # microseconds; by its name it takes twice as long
        priority=told.priority,
        expires_in=None if told.expires_in is None else timedelta(microseconds=told.expires_in),
        ordering_key=told.ordering_key,
        fault=fault,
        receipt=Receipt(seq, token, place, holder, lease_until),
    )
