"""Settling and renewing: under the token of the delivery alone, so that whoever has lost it changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import sqlalchemy as sa

from acemq.headers import to_text
from acemq.transport import Settlement, Verb

from .dialects import Dialect, Statements
from .publish import properties_of, unless_all

_MICROSECOND = timedelta(microseconds=1)


class Receipt(msgspec.Struct, eq=False):
    """Where a delivery is settled, and who counts it as held."""

    seq: int
    token: int
    place: int
    holder: Any
    until: float
    gone: bool = False
    """Settled, or lost."""
    stale: bool = False
    """That it came too late was said."""


class Order(msgspec.Struct, frozen=True):
    """One settlement as the database is told it."""

    seq: int
    token: int
    place: int
    """The number of its queue."""
    delay: int | None = None
    """Microseconds until it is there again, 0 for at once; `None`: it is removed."""
    headers: str | None = None
    properties: str | None = None
    """What stands beside these headers, which may have had a part of it before."""
    until: float = float("inf")
    """When the lease ends under which it is asked, by the transport's clock."""


def order(settlement: Settlement, receipt: Receipt) -> Order:
    """Raises `ConfigurationError` for headers that cannot be stored."""
    if settlement.verb is not Verb.REQUEUE:
        return Order(receipt.seq, receipt.token, receipt.place, until=receipt.until)
    delay, headers, properties = max(settlement.delay // _MICROSECOND, 0), None, None
    if settlement.headers is not None:
        headers = to_text(settlement.headers)
        properties = properties_of(settlement.delivery, settlement.headers)
    return Order(receipt.seq, receipt.token, receipt.place, delay, headers, properties, receipt.until)


def settle(
    connection: sa.Connection, now: int, dialect: Dialect, statements: Statements, orders: Sequence[Order]
) -> set[int]:
    """The numbers of those that took effect."""
    if dialect.array_statements:
        told = {
            "seqs": [each.seq for each in orders],
            "tokens": [each.token for each in orders],
            "delays": unless_all([each.delay for each in orders], None),
            "headers": unless_all([each.headers for each in orders], None),
            "properties": unless_all([each.properties for each in orders], None),
        }
        return {row[0] for row in connection.execute(statements["settle"], told)}
    accepted = all(each.delay is None for each in orders)
    if accepted and dialect.name == "sqlite":
        # A list as one text, so that the statement is the same however long it is.
        told = {"told": msgspec.json.encode({each.seq: each.token for each in orders}).decode()}
        return {row[0] for row in statements.fetch(connection, "remove_ours", told)}
    if accepted:
        pairs = {"seqs": [each.seq for each in orders], "pairs": [(each.seq, each.token) for each in orders]}
        if connection.execute(statements["remove_ours"], pairs).rowcount == len(orders):
            return {each.seq for each in orders}
        connection.rollback()  # some are not ours any more: which ones is told by looking first
    ours = _ours(connection, statements, orders)
    removed = [each.seq for each in orders if each.delay is None and each.seq in ours]
    if removed:
        connection.execute(statements["remove"], {"seqs": removed})
    back: defaultdict[int, list[int]] = defaultdict(list)
    for each in orders:
        if each.delay is None or each.seq not in ours:
            continue
        if each.headers is None:
            back[each.delay].append(each.seq)
        else:
            changed = {"headers": each.headers, "properties": each.properties}
            told = {"seq": each.seq, "delay": each.delay, "now": now, **changed}
            connection.execute(statements["put_back_changed"], told)
    for delay, seqs in back.items():
        connection.execute(statements["put_back"], {"seqs": seqs, "delay": delay, "now": now})
    return ours


def settled_before(connection: sa.Connection, statements: Statements, orders: Sequence[Order]) -> set[int]:
    """Of settlements whose answer was lost, those that took effect: what was removed is gone, and nothing else goes."""
    there = {row[0] for row in connection.execute(statements["present"], {"seqs": [each.seq for each in orders]})}
    return {each.seq for each in orders if each.seq not in there or each.delay is not None}


def renew(
    connection: sa.Connection,
    now: int,
    dialect: Dialect,
    statements: Statements,
    orders: Sequence[Order],
    lease: timedelta,
) -> set[int]:
    length = lease // _MICROSECOND
    if dialect.array_statements:
        told = {"seqs": [each.seq for each in orders], "tokens": [each.token for each in orders], "lease": length}
        return {row[0] for row in connection.execute(statements["renew"], told)}
    ours = _ours(connection, statements, orders)
    if ours:
        connection.execute(statements["prolong"], {"seqs": sorted(ours), "lease": length, "now": now})
    return ours


def _ours(connection: sa.Connection, statements: Statements, orders: Sequence[Order]) -> set[int]:
    """Those that are still held under their token. Locked, where others could change that in between."""
    tokens = {each.seq: each.token for each in orders}
    held = connection.execute(statements["held"], {"seqs": sorted(tokens)})
    return {seq for seq, token in held if tokens[seq] == token}
