"""The statements of an outbox table, one set a kind of database."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import BigInteger, LargeBinary, String, Table, Text, TextClause, bindparam, text
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeEngine

from acemq.adapters.sql.database import NOW, Kind, quoted
from acemq.adapters.sql.tables import SLOTS

WORST_WAIT_MS = 300_000
"""No failure waits longer than this for its next attempt."""

COLUMNS = "id, order_key, exchange_name, routing_key, body, content_type, headers, created_at, attempts, last_error"
_GIVEN = "id, order_key, exchange_name, routing_key, body, content_type, headers, created_at"
_VALUES = ":id, :key, :exchange, :routing_key, :body, :content_type, :headers, :created_at"


class Statements:
    """`table` is quoted as its dialect has it; nothing else is ever put into a text."""

    def __init__(self, table: Table, slots: Table, dialect: Dialect, kind: Kind, channel: str | None) -> None:
        t, now = quoted(table, dialect), NOW[kind]
        types: dict[str, TypeEngine[Any]] = {
            **dict.fromkeys(("id", "ids"), table.c.id.type),
            **dict.fromkeys(("key", "keys"), table.c.order_key.type),
            **dict.fromkeys(("exchange", "routing_key", "content_type", "error"), String()),
            "body": LargeBinary(),
            "headers": Text(),
        }

        def sql(statement: str) -> TextClause:
            names = dict.fromkeys(_NAMES.findall(statement))
            given = [bindparam(each, type_=types.get(each, _NUMBER), expanding=each in _LISTS) for each in names]
            return text(statement).bindparams(*given)

        waits = "f.published_at IS NULL" if kind == "mysql" else "COALESCE(f.published_at, 0) = 0"
        due = (
            f"r.published_at IS NULL AND r.attempts < :ceiling AND (r.leased_until IS NULL OR r.leased_until <= {now}) "
            f"AND (r.not_before IS NULL OR r.not_before <= {now}) "
            # Of each key the foremost alone, whatever keeps it: a failure, a lease, its retirement.
            f"AND (r.order_key IS NULL OR r.seq = (SELECT f.seq FROM {t} f WHERE f.order_key = r.order_key "
            f"AND {waits} ORDER BY f.seq LIMIT 1)) "
            f"ORDER BY r.created_at, r.id LIMIT :most"
        )
        taken = f"SET lease_token = 1 + (SELECT max(lease_token) FROM due), leased_until = {now} + :lease"
        notify = f", pg_notify('{channel}', '')" if channel else ""

        self.add: TextClause
        self.add_keyed: TextClause
        self.claim: TextClause
        match kind:
            case "postgresql":
                into = f"INSERT INTO {t} ({_GIVEN})"
                ending = f"ON CONFLICT (id) DO NOTHING RETURNING seq) SELECT seq{notify} FROM added"
                self.add = sql(f"WITH added AS ({into} VALUES ({_VALUES}) {ending}")
                # The lock first and the number second, so that numbers of one key grow as their transactions commit.
                self.add_keyed = sql(
                    f"WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock(:lock)), "
                    f"added AS ({into} SELECT {_VALUES} FROM held {ending}"
                )
                self.claim = sql(
                    f"WITH due AS (SELECT r.seq, r.lease_token FROM {t} r WHERE {due} FOR UPDATE OF r SKIP LOCKED) "
                    f"UPDATE {t} AS o {taken} FROM due WHERE o.seq = due.seq "
                    f"RETURNING {_of('o', COLUMNS)}, o.lease_token"
                )
            case "sqlite":
                # Its single writer is the lock: from the insert to the commit nobody else inserts.
                self.add = sql(f"INSERT INTO {t} ({_GIVEN}) VALUES ({_VALUES}) ON CONFLICT (id) DO NOTHING")
                self.add_keyed = self.add
                self.claim = sql(
                    f"WITH due AS MATERIALIZED (SELECT r.seq, r.lease_token FROM {t} r WHERE {due}) "
                    f"UPDATE {t} {taken} WHERE seq IN (SELECT seq FROM due) RETURNING {COLUMNS}, lease_token"
                )
            case "mysql":
                self.add = sql(f"INSERT INTO {t} ({_GIVEN}) VALUES ({_VALUES})")
                self.add_keyed = sql(
                    f"INSERT INTO {t} ({_GIVEN}) SELECT {_VALUES} FROM {quoted(slots, dialect)} "
                    f"WHERE slot = :lock FOR UPDATE"
                )
                index = dialect.identifier_preparer.quote(f"{table.name}_pending")
                self.claim = sql(
                    f"SELECT r.seq, r.order_key, r.lease_token FROM {t} r FORCE INDEX ({index}) "
                    f"WHERE {due} FOR UPDATE SKIP LOCKED"
                )
        # On MySQL the rest of a claim: what was locked is read as it is now, its keys as they were when it began.
        self.foremost = sql(
            f"SELECT order_key, min(seq) AS seq FROM {t} WHERE published_at IS NULL AND order_key IN :keys "
            f"GROUP BY order_key"
        )
        self.lease = sql(f"UPDATE {t} SET lease_token = :token, leased_until = {now} + :lease WHERE seq IN :seqs")
        self.leased = sql(f"SELECT {COLUMNS}, lease_token FROM {t} WHERE seq IN :seqs")
        self.is_there = sql(f"SELECT seq FROM {t} WHERE id = :id" + (" FOR UPDATE" if kind == "mysql" else ""))

        # Found by their ids, and by no index of what is pending, which is long when they are late.
        still = "lease_token = :token AND COALESCE(published_at, 0) = 0"
        held = f"id IN :ids AND {still}"
        self.published = sql(f"UPDATE {t} SET published_at = {now}, leased_until = NULL WHERE {held}")
        self.published_and_gone = sql(f"DELETE FROM {t} WHERE {held}")
        self.give_back = sql(f"UPDATE {t} SET leased_until = NULL WHERE {held}")
        wait = f"CASE WHEN attempts > 20 OR :backoff * (1 << attempts) > {WORST_WAIT_MS} THEN {WORST_WAIT_MS} "
        self.failed = sql(
            f"UPDATE {t} SET last_error = :error, leased_until = NULL, "
            f"not_before = CASE WHEN :backoff > 0 THEN {now} + {wait} ELSE :backoff * (1 << attempts) END END, "
            # Last, as MySQL goes from left to right and would count with the new one.
            f"attempts = attempts + 1 WHERE id = :id AND {still}"
        )
        self.pending_count = sql(f"SELECT count(*) FROM {t} WHERE published_at IS NULL")
        self.status = sql(
            f"SELECT count(*), count(CASE WHEN attempts >= :ceiling THEN 1 END), "
            f"{now} - min(CASE WHEN attempts < :ceiling THEN created_at END) FROM {t} WHERE published_at IS NULL"
        )
        self.retired = sql(
            f"SELECT {COLUMNS}, lease_token FROM {t} WHERE published_at IS NULL AND attempts >= :ceiling "
            f"ORDER BY created_at, id LIMIT :most"
        )
        self.release = sql(
            f"UPDATE {t} SET attempts = 0, not_before = NULL WHERE id = :id AND COALESCE(published_at, 0) = 0"
        )
        self.discard = sql(
            f"UPDATE {t} SET published_at = {now}, leased_until = NULL, last_error = :error "
            f"WHERE id = :id AND COALESCE(published_at, 0) = 0 AND attempts >= :ceiling"
        )
        old = "published_at < :before ORDER BY published_at LIMIT :most"
        skipping = " FOR UPDATE SKIP LOCKED" if kind == "postgresql" else ""
        self.purge = sql(
            f"DELETE FROM {t} WHERE {old}"
            if kind == "mysql"
            else f"DELETE FROM {t} WHERE seq IN (SELECT seq FROM {t} WHERE {old}{skipping})"
        )
        self.now = sql(f"SELECT {now}")
        self.notify = sql(f"SELECT pg_notify('{channel}', '')") if channel else None
        numbers = ", ".join(f"({number})" for number in range(SLOTS))
        self.slots = sql(f"SELECT count(*) FROM {quoted(slots, dialect)}")
        self.fill_slots = f"INSERT IGNORE INTO {quoted(slots, dialect)} (slot) VALUES {numbers}"


_NAMES = re.compile(r":(\w+)")
_LISTS = ("ids", "keys", "seqs")
_NUMBER = BigInteger()


def _of(table: str, columns: str) -> str:
    return ", ".join(f"{table}.{column}" for column in columns.split(", "))
