"""The outbox in a table beside the application's own, written within the application's own transactions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, Row, Table
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from acemq.adapters.memory import check_ceiling
from acemq.adapters.sql.database import (
    AsyncWithin,
    Database,
    SyncWithin,
    check_identifier,
    is_duplicate,
    kind_of,
    number_of,
    private_metadata,
)
from acemq.adapters.sql.header_text import from_text, to_text
from acemq.adapters.sql.outbox_sql import Statements
from acemq.adapters.sql.tables import SLOTS, outbox_table, slots_table
from acemq.adapters.sql.waking import Wakes, listen_on
from acemq.clock import check_duration
from acemq.envelope import from_millis, to_millis
from acemq.errors import ConfigurationError, TopologyError
from acemq.stores import (
    ERROR_LIMIT,
    MAX_ATTEMPTS,
    RELAY_LEASE,
    OutboxBatch,
    OutboxRecord,
    OutboxStatus,
    check_id,
    check_target,
)
from acemq.topology import check_key

KEEP = timedelta(hours=24)
_MILLISECOND = timedelta(milliseconds=1)
_WAKES: dict[object, Wakes] = {}


class DbOutboxStore:
    """Records in a table of PostgreSQL, MySQL 8, MariaDB 10.6 or SQLite, put there in the caller's own transaction.

    `add` never commits, rolls back or flushes: the record is there when the caller's transaction is, or not at all.
    """

    def __init__(
        self,
        engine: AsyncEngine | Engine,
        table: str = "acemq_outbox",
        *,
        schema: str | None = None,
        max_attempts: int = MAX_ATTEMPTS,
        lease: timedelta = RELAY_LEASE,
        keep: timedelta = KEEP,
        backoff: timedelta = timedelta(0),
        notify: bool = True,
    ) -> None:
        """`keep`: how long a published record stays, zero for not at all. `backoff`: before the attempt that follows
        the first failure, doubled with each, 5 minutes at most; zero: the next pass. `notify`: on PostgreSQL a commit
        wakes the relays, wherever they run."""
        self.name = check_identifier("table", table)
        self.max_attempts = check_ceiling(max_attempts)
        self._lease = check_duration("lease", lease)
        self._keep = check_duration("keep", keep, zero=True)
        self._backoff = check_duration("backoff", backoff, zero=True)
        self._database = database = Database(engine)
        self._metadata = private_metadata(schema)
        self._table = outbox_table(table, self._metadata, database.kind)
        slots = slots_table(table, self._metadata if database.kind == "mysql" else MetaData())
        channel = None
        if notify and database.kind == "postgresql":
            channel = f"acemq_{number_of(schema or '', table):x}".replace("-", "_")
        self._channel = channel
        self._sql = Statements(self._table, slots, database.dialect, database.kind, channel)
        self._wakes = _WAKES.setdefault((database.identity, self._table.fullname), Wakes())

    # Writing down

    async def add(self, record: OutboxRecord, within: AsyncWithin, /) -> bool:
        """In the caller's transaction, which begins with it if it has not begun. False: that id is there already.

        With a key it waits for the transaction that added the same key before it, until that one is over.
        """
        _check(record)
        return await self._database.run_within(
            within, lambda connection, session: self._add(record, connection, session)
        )

    def add_sync(self, record: OutboxRecord, within: SyncWithin, /) -> bool:
        """The same for synchronous sessions and connections."""
        return self._database.run_within_sync(within, functools.partial(self._add, _check(record)))

    def _add(self, record: OutboxRecord, connection: Connection, session: Session | None) -> bool:
        given: dict[str, Any] = {
            "id": self._as_key(record.id),
            "key": None if record.key is None else self._as_key(record.key),
            "exchange": record.exchange,
            "routing_key": record.routing_key,
            "body": record.body,
            "content_type": record.content_type,
            "headers": to_text(record.headers),
            "created_at": to_millis(record.created_at),
        }
        statement = self._sql.add
        if record.key is not None and self._database.kind != "sqlite":
            statement, lock = self._sql.add_keyed, number_of(self._table.fullname, record.key)
            given["lock"] = lock % SLOTS if self._database.kind == "mysql" else lock
        with self._database.translated(self._table):
            try:
                result = connection.execute(statement, given)
            except IntegrityError as error:
                if not is_duplicate(error):
                    raise
                return False
            added = result.first() is not None if result.returns_rows else result.rowcount == 1
        if not added and self._database.kind == "mysql":
            # Nothing was there to lock: without a word, the record would be lost.
            slots = f"table '{self._table.fullname}_slots' has not its {SLOTS} rows"
            raise TopologyError(slots, advice="Run await create()")
        if added:
            self._wakes.arm(connection if session is None else session)
        return added

    # For the relay

    async def claim(self, most: int, /) -> OutboxBatch:
        """By the clock of the database. What another relay is claiming at this moment is passed over."""
        due = {"most": most, "ceiling": self.max_attempts, "lease": self._lease // _MILLISECOND}
        work = self._claim_in_steps if self._database.kind == "mysql" else self._claim
        with self._database.translated(self._table):
            rows = await self._database.run(lambda connection: work(connection, due))
        records = sorted((self._record(row) for row in rows), key=lambda each: (each.created_at, each.id))
        return OutboxBatch(records, max((row.lease_token for row in rows), default=0), self._lease)

    def _claim(self, connection: Connection, due: dict[str, int]) -> Sequence[Row[Any]]:
        return connection.execute(self._sql.claim, due).all()

    def _claim_in_steps(self, connection: Connection, due: dict[str, int]) -> Sequence[Row[Any]]:
        lease = due.pop("lease")
        locked = connection.execute(self._sql.claim, due).all()
        keys = {row.order_key for row in locked if row.order_key is not None}
        if keys:
            # Asked again, as the one statement may have seen a record and not the one before it.
            foremost = {row.order_key: row.seq for row in connection.execute(self._sql.foremost, {"keys": list(keys)})}
            locked = [row for row in locked if row.order_key is None or foremost.get(row.order_key) == row.seq]
        if not locked:
            return []
        seqs = [row.seq for row in locked]
        token = 1 + max(row.lease_token for row in locked)
        connection.execute(self._sql.lease, {"seqs": seqs, "token": token, "lease": lease})
        return connection.execute(self._sql.leased, {"seqs": seqs}).all()

    async def published(self, ids: Sequence[str], token: int, /) -> int:
        statement = self._sql.published if self._keep else self._sql.published_and_gone
        return await self._change(statement, ids=[self._as_key(id) for id in ids], token=token)

    async def failed(self, id: str, error: str, token: int, /) -> bool:
        backoff = self._backoff // _MILLISECOND
        changed = await self._change(
            self._sql.failed, id=self._as_key(id), error=_kept(error), token=token, backoff=backoff
        )
        return changed == 1

    async def give_back(self, ids: Sequence[str], token: int, /) -> int:
        return await self._change(self._sql.give_back, ids=[self._as_key(id) for id in ids], token=token)

    async def listen(self, wake: Callable[[], None], /) -> None:
        """On PostgreSQL through a connection of its own; elsewhere of what is committed in this process."""
        if self._channel is not None and self._database.is_async:
            await listen_on(self._database.async_engine, self._channel, wake)
        else:
            await self._wakes.listen(wake)

    # For an operator

    async def pending_count(self) -> int:
        return int(
            await self._database.run(lambda connection: connection.execute(self._sql.pending_count).scalar_one())
        )

    async def status(self) -> OutboxStatus:
        row = await self._database.run(
            lambda connection: connection.execute(self._sql.status, {"ceiling": self.max_attempts}).one()
        )
        oldest = None if row[2] is None else max(timedelta(milliseconds=int(row[2])), timedelta())
        return OutboxStatus(int(row[0]), int(row[1]), oldest)

    async def oldest_age(self) -> timedelta | None:
        """Of what is pending and not retired, by the clock of the database."""
        return (await self.status()).oldest

    async def retired(self, most: int = 100, /) -> list[OutboxRecord]:
        """What failed `max_attempts` times, oldest first. It is tried no more until it is released."""
        if most < 1:
            raise ConfigurationError(f"most={most} must be 1 or more")
        given = {"ceiling": self.max_attempts, "most": most}
        rows = await self._database.run(lambda connection: connection.execute(self._sql.retired, given).all())
        return [self._record(row) for row in rows]

    async def release(self, id: str, /) -> bool:
        """Its attempts are 0 again, and it is tried at the next pass. False: no such record is pending."""
        released = await self._change(self._sql.release, id=self._as_key(id))
        if released:
            await self._wake()
        return released == 1

    async def discard(self, id: str, reason: str, /) -> bool:
        """A retired record will not be published, and what waits behind it may go. False: it is not retired.

        It is kept as if it had been published, with the reason as its last error.
        """
        error = _kept(f"discarded: {reason}")
        discarded = await self._change(self._sql.discard, id=self._as_key(id), error=error, ceiling=self.max_attempts)
        if discarded:
            await self._wake()
        return discarded == 1

    async def purge(self, *, before: datetime | None = None, batch: int = 1_000) -> int:
        """Delete at most `batch` records that were published before then, `keep` ago unless given; how many."""
        if batch < 1:
            raise ConfigurationError(f"batch={batch} must be 1 or more")
        if before is not None and before.utcoffset() is None:
            raise ConfigurationError(f"before={before.isoformat()} is naive; give it a time zone, for example UTC")

        def work(connection: Connection) -> int:
            limit = to_millis(before) if before is not None else connection.execute(self._sql.now).scalar_one()
            if before is None:
                limit -= self._keep // _MILLISECOND
            return connection.execute(self._sql.purge, {"before": limit, "most": batch}).rowcount

        return await self._database.run(work)

    def check_same(self, engine: AsyncEngine | Engine, what: str) -> None:
        """Refuse an engine of another database: `ConfigurationError`, beginning with `what`."""
        self._database.check_same(engine, what)

    # The table

    def create_table_sql(self, dialect: str | None = None) -> str:
        """What makes the table and its indexes, as text; `dialect` other than the engine's: postgresql, mysql, …"""
        kind = dialect or self._database.dialect.name
        metadata = MetaData(schema=self._metadata.schema)
        outbox_table(self.name, metadata, kind_of(kind))
        statements = self._database.statements(metadata, kind)
        if kind in ("mysql", "mariadb"):
            slots_table(self.name, slots := MetaData(schema=self._metadata.schema))
            statements += [*self._database.statements(slots, kind), self._sql.fill_slots]
        return ";\n\n".join(statements) + ";\n"

    def table(self, metadata: MetaData) -> Table:
        """The table, for Alembic and for queries. On MySQL and MariaDB `{table}_slots` comes with it.

        Its 256 rows have to be put there, by `create()` or by the last statement of `create_table_sql()`.
        """
        if self._database.kind == "mysql":
            slots_table(self.name, metadata)
        return outbox_table(self.name, metadata, self._database.kind)

    async def create(self) -> None:
        """Make the table where it is missing; safe from many processes at once. `TopologyError`: it is another one."""

        def fill(connection: Connection) -> None:
            if connection.execute(self._sql.slots).scalar_one() != SLOTS:
                connection.exec_driver_sql(self._sql.fill_slots)

        await self._database.create(self._metadata, self._table.fullname, fill)
        await self.check()

    async def check(self) -> None:
        """Raise `TopologyError` where the table is missing, old or somebody else's."""
        await self._database.check(self._table)
        if self._database.kind == "mysql":
            await self._database.check(self._metadata.tables[f"{self._table.fullname}_slots"])

    # Values

    async def _change(self, statement: Any, **given: object) -> int:
        with self._database.translated(self._table):
            return await self._database.run(lambda connection: connection.execute(statement, given).rowcount)

    async def _wake(self) -> None:
        if self._sql.notify is not None:
            notify = self._sql.notify
            await self._database.run(lambda connection: connection.execute(notify).all())
        self._wakes.wake()

    def _as_key(self, key: str) -> Any:
        return key.encode() if self._database.kind == "mysql" else key

    def _record(self, row: Row[Any]) -> OutboxRecord:
        return OutboxRecord(
            id=_text(row.id),
            exchange=row.exchange_name,
            routing_key=row.routing_key,
            body=bytes(row.body),
            content_type=row.content_type,
            headers=from_text(row.headers),
            key=None if row.order_key is None else _text(row.order_key),
            created_at=from_millis(row.created_at),
            attempts=row.attempts,
            last_error=row.last_error,
        )


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def _kept(error: str) -> str:
    return error.replace("\0", "").encode(errors="replace").decode()[:ERROR_LIMIT]


def _check(record: OutboxRecord) -> OutboxRecord:
    if not isinstance(record, OutboxRecord):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"record={record!r} is no OutboxRecord; make one with OutboxRecord.of()")
    check_id(record.id)
    check_target(record.exchange, record.routing_key)
    if record.key is not None:
        check_key("key", record.key)
    if record.content_type is not None:
        check_key("content_type", record.content_type)
    return record
