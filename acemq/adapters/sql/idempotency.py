"""Claims in a table: beside the work, with a lease, or in the work's own transaction, with none."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

from sqlalchemy import BigInteger, Connection, Engine, LargeBinary, Table, TextClause, bindparam, text
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.schema import MetaData

from acemq.adapters.sql.database import (
    NOW,
    AsyncWithin,
    Database,
    SyncWithin,
    check_identifier,
    is_duplicate,
    number_of,
    private_metadata,
    quoted,
)
from acemq.adapters.sql.tables import claims_table
from acemq.clock import check_duration
from acemq.errors import ConfigurationError, IdempotencyConflictError
from acemq.stores import RETENTION, Claim, check_claim_key

_MILLISECOND = timedelta(milliseconds=1)
_TRIES = 5
"""Of a claim that met another on the same row. Each time one of the two has gone on."""
_CLAIMED, _CONFIRMED = "CLAIMED", "CONFIRMED"


class DbIdempotencyStore:
    """Claims in a table of PostgreSQL, MySQL 8, MariaDB or SQLite, by the clock of that database."""

    def __init__(
        self, engine: AsyncEngine | Engine, table: str = "acemq_idempotency", *, schema: str | None = None
    ) -> None:
        self.name = check_identifier("table", table)
        self._database = Database(engine)
        self._metadata = private_metadata(schema)
        self._table = claims_table(table, self._metadata)
        self._sql = _Statements(self._table, self._database)

    # Beside the work

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        """Hold the key for `lease`, in a transaction of its own."""
        given = self._given(key, _CLAIMED, check_duration("lease", lease), fingerprint)

        def attempt(connection: Connection) -> Claim | None:
            return self._try(connection, given, key)

        for left in reversed(range(_TRIES)):
            try:
                made = await self._database.run(attempt)
            except DBAPIError as error:
                if not (left and _met_another(error)):
                    raise
            else:
                if made is not None:
                    return made
        return Claim("in_progress")

    async def renew(self, key: str, token: int, /, *, lease: timedelta) -> bool:
        return await self._change(self._sql.renew, key, token, check_duration("lease", lease))

    async def confirm(self, key: str, token: int, /, *, retention: timedelta) -> bool:
        return await self._change(self._sql.confirm, key, token, check_duration("retention", retention))

    async def release(self, key: str, token: int, /) -> bool:
        return await self._change(self._sql.release, key, token, timedelta())

    async def purge(self, *, batch: int = 1_000) -> int:
        """Delete at most `batch` claims that have run out; how many. For room only: nothing ever depends on it."""
        if batch < 1:
            raise ConfigurationError(f"batch={batch} must be 1 or more")
        given = {"most": batch}
        return await self._database.run(lambda connection: connection.execute(self._sql.purge, given).rowcount)

    # In the work

    async def claim_within(
        self,
        key: str,
        within: AsyncWithin,
        /,
        *,
        retention: timedelta = RETENTION,
        fingerprint: bytes | None = None,
    ) -> Claim:
        """Claimed and confirmed at once, in the caller's transaction: it holds when that commits, and else never was.

        "in_progress": another transaction holds the key. It is not waited for, but for a second on MySQL and MariaDB
        and for its end on SQLite, which has one writer.
        """

        given = self._given(key, _CONFIRMED, check_duration("retention", retention), fingerprint)
        return await self._database.run_within(
            within, lambda connection, _: self._claim_in_work(connection, given, key)
        )

    def claim_within_sync(
        self,
        key: str,
        within: SyncWithin,
        /,
        *,
        retention: timedelta = RETENTION,
        fingerprint: bytes | None = None,
    ) -> Claim:
        """The same for synchronous sessions and connections."""
        given = self._given(key, _CONFIRMED, check_duration("retention", retention), fingerprint)
        return self._database.run_within_sync(within, lambda connection, _: self._claim_in_work(connection, given, key))

    @property
    def engine(self) -> Engine:
        """The synchronous side of the engine it was made with."""
        return self._database.sync_engine

    def check_same(self, engine: AsyncEngine | Engine, what: str) -> None:
        """Refuse an engine of another database: `ConfigurationError`, beginning with `what`."""
        self._database.check_same(engine, what)

    # The table

    def create_table_sql(self, dialect: str | None = None) -> str:
        """What makes the table and its index, as text; `dialect` other than the engine's: postgresql, mysql, …"""
        return ";\n\n".join(self._database.statements(self._metadata, dialect)) + ";\n"

    def table(self, metadata: MetaData) -> Table:
        """The table, for Alembic and for queries."""
        return claims_table(self.name, metadata)

    async def create(self) -> None:
        """Make the table where it is missing; safe from many processes at once. `TopologyError`: it is another one."""
        await self._database.create(self._metadata, self._table.fullname)
        await self.check()

    async def check(self) -> None:
        """Raise `TopologyError` where the table is missing, old or somebody else's."""
        await self._database.check(self._table)

    # How a claim is made

    def _given(self, key: object, state: str, length: timedelta, fingerprint: bytes | None) -> dict[str, Any]:
        text_key = check_claim_key(key)
        return {
            "key": text_key.encode() if self._database.kind == "mysql" else text_key,
            "state": state,
            "length": length // _MILLISECOND,
            "fingerprint": fingerprint,
        }

    def _claim_in_work(self, connection: Connection, given: dict[str, Any], key: str) -> Claim:
        sql = self._sql
        with self._database.translated(self._table):
            if sql.try_lock is not None:
                lock = number_of(self._table.fullname, check_claim_key(key))
                if not connection.execute(sql.try_lock, {"lock": lock}).scalar_one():
                    # Another looks at it just now. What is known of it already is known here, too.
                    return self._known(connection, given, key) or Claim("in_progress")
            try:
                return self._try(connection, given, key, wait_at_most=1) or Claim("in_progress")
            except OperationalError as error:
                if _met_another(error):
                    return Claim("in_progress")
                raise

    def _try(
        self, connection: Connection, given: dict[str, Any], key: str, wait_at_most: int | None = None
    ) -> Claim | None:
        """`None`: what stood in the way is gone; look again."""
        sql = self._sql
        with self._database.translated(self._table):
            if sql.claim is not None:
                token = connection.execute(sql.claim, given).scalar()
            else:
                token = self._claim_on_mysql(connection, given, wait_at_most)
            if token is not None:
                return Claim("claimed", int(token))
            return self._known(connection, given, key)

    def _known(self, connection: Connection, given: dict[str, Any], key: str) -> Claim | None:
        row = connection.execute(self._sql.look, {"key": given["key"]}).first()
        if row is None:
            return None
        fingerprint = given["fingerprint"]
        if fingerprint is not None and row.fingerprint is not None and bytes(row.fingerprint) != fingerprint:
            raise IdempotencyConflictError(check_claim_key(key))
        return Claim("duplicate" if row.state == _CONFIRMED else "in_progress")

    def _claim_on_mysql(self, connection: Connection, given: dict[str, Any], wait_at_most: int | None) -> int | None:
        sql = self._sql
        waited: int | None = None
        if wait_at_most is not None:
            waited = int(connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout").scalar_one())
            connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {wait_at_most}")
        try:
            try:
                made: CursorResult[Any] = connection.execute(sql.insert, given)
            except IntegrityError as error:
                if not is_duplicate(error):
                    raise
                # All that met the row share its lock now, and two that want it alone are a deadlock. So only who sees
                # that the claim has run out asks for that.
                if connection.execute(sql.look, {"key": given["key"]}).first() is not None:
                    return None
                made = connection.execute(sql.take_over, given)
            return connection.execute(sql.token, {"key": given["key"]}).scalar() if made.rowcount == 1 else None
        finally:
            if waited is not None and not connection.invalidated:
                connection.exec_driver_sql(f"SET SESSION innodb_lock_wait_timeout = {waited}")

    async def _change(self, statement: TextClause, key: str, token: int, length: timedelta) -> bool:
        given = self._given(key, _CLAIMED, length, None)
        del given["state"], given["fingerprint"]
        if ":length" not in statement.text:
            del given["length"]

        def work(connection: Connection) -> int:
            return connection.execute(statement, {**given, "token": token}).rowcount

        with self._database.translated(self._table):
            return await self._database.run(work) == 1


class _Statements:
    def __init__(self, table: Table, database: Database) -> None:
        t, now, kind = quoted(table, database.dialect), NOW[database.kind], database.kind
        key, types = table.c.message_id.type, {"fingerprint": LargeBinary(), "state": table.c.state.type}

        def sql(statement: str) -> TextClause:
            names = dict.fromkeys(re.findall(r":(\w+)", statement))
            known: dict[str, Any] = {"key": key, **types}
            return text(statement).bindparams(*(bindparam(name, type_=known.get(name, BigInteger())) for name in names))

        columns = "message_id, state, token, fingerprint, recorded_at, expires_at"
        # Also after a purge the next token is larger than any before: it is never below the time.
        values = f":key, :state, {now}, :fingerprint, {now}, {now} + :length"
        self.claim: TextClause | None = None
        if kind != "mysql":
            larger = "GREATEST" if kind == "postgresql" else "MAX"
            self.claim = sql(
                f"INSERT INTO {t} AS c ({columns}) VALUES ({values}) ON CONFLICT (message_id) DO UPDATE SET "
                f"state = excluded.state, token = {larger}(c.token + 1, excluded.token), "
                f"fingerprint = excluded.fingerprint, recorded_at = excluded.recorded_at, "
                f"expires_at = excluded.expires_at WHERE c.expires_at <= {now} RETURNING token"
            )
        self.insert = sql(f"INSERT INTO {t} ({columns}) VALUES ({values})")
        self.take_over = sql(
            f"UPDATE {t} SET state = :state, token = GREATEST(token + 1, {now}), fingerprint = :fingerprint, "
            f"recorded_at = {now}, expires_at = {now} + :length WHERE message_id = :key AND expires_at <= {now}"
        )
        self.token = sql(f"SELECT token FROM {t} WHERE message_id = :key")
        self.look = sql(
            f"SELECT state, fingerprint FROM {t} WHERE message_id = :key AND expires_at > {now}"
            # As it is now, and not as it was when the caller's transaction first read.
            + (" LOCK IN SHARE MODE" if kind == "mysql" else "")
        )
        self.try_lock = sql("SELECT pg_try_advisory_xact_lock(:lock)") if kind == "postgresql" else None
        held = f"WHERE message_id = :key AND token = :token AND state = '{_CLAIMED}'"
        self.renew = sql(f"UPDATE {t} SET expires_at = {now} + :length {held}")
        self.confirm = sql(f"UPDATE {t} SET state = '{_CONFIRMED}', expires_at = {now} + :length {held}")
        # Kept, so that the next claim's token is larger.
        self.release = sql(f"UPDATE {t} SET expires_at = 0 {held}")
        old = f"expires_at <= {now} ORDER BY expires_at LIMIT :most"
        skipping = " FOR UPDATE SKIP LOCKED" if kind == "postgresql" else ""
        self.purge = sql(
            f"DELETE FROM {t} WHERE {old}"
            if kind == "mysql"
            else f"DELETE FROM {t} WHERE message_id IN (SELECT message_id FROM {t} WHERE {old}{skipping})"
        )


def _met_another(error: DBAPIError) -> bool:
    """A lock that was not had in time, or a deadlock that this side lost."""
    orig: Any = error.orig
    number = orig.args[0] if getattr(orig, "args", ()) else None
    return number in (1205, 1213, 1020) or "database is locked" in str(orig)
