"""Messages that are written down in the caller's own transaction, and published once it is committed."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Unpack

from acemq.clock import check_duration
from acemq.codec import Codecs
from acemq.connection import Connection
from acemq.errors import ConfigurationError
from acemq.opening import Opening
from acemq.patterns.relay import OutboxRelay, Relaying, Sweep
from acemq.publishing.draft import Draft
from acemq.publishing.options import PublishOptions
from acemq.stores import OutboxRecord, OutboxStore, OutboxWriter
from acemq.topology import check_key
from acemq.transport import Outgoing

if TYPE_CHECKING:
    from acemq.adapters.sql.database import AsyncWithin, SyncWithin

BATCH_MOST = 1_000
_NOT_KEPT = (
    *("delay", "timeout", "mandatory", "persistent", "priority", "expires_in", "reply_to", "ordering_key"),
    *("transaction", "track"),
)
"""What a record does not keep, or the relay decides."""


class Outbox:
    """An outbox and the connection that its records go to. Holds nothing open until a relay is started."""

    def __init__(self, connection: Connection, store: OutboxStore) -> None:
        if not isinstance(store, OutboxStore):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"store={store!r} is no outbox: it needs claim, published, failed, give_back and pending_count"
            )
        self.connection, self.store = connection, store

    def bind(self, within: AsyncWithin) -> BoundOutbox:
        """For one transaction of the caller's. Nothing is committed, rolled back or flushed on its behalf."""
        return BoundOutbox(self.connection, self._writer(), within)

    def bind_sync(self, within: SyncWithin) -> BoundSyncOutbox:
        """The same for a synchronous session or connection, in whatever thread it is used."""
        return BoundSyncOutbox(self.connection, self._writer(), within)

    def relay(self, *, interval: timedelta = timedelta(seconds=1), batch: int = 100) -> Opening[OutboxRelay]:
        """Publish what is committed until it is closed, in as many processes as you like.

        A record is out at once where the store can wake the relay, and within `interval` in any case. Opening raises
        `TopologyError` where the store's table does not fit; a relay that runs raises nothing.
        """
        check_duration("interval", interval)
        _check_batch("batch", batch)
        relay = OutboxRelay(self.connection, self.store, interval=interval, batch=batch)
        return Opening(
            f"relay of {getattr(self.store, 'name', 'an outbox')}", relay.start, lambda opened: opened.close()
        )

    async def sweep(self, most: int = 100) -> Sweep:
        """One pass now: claim up to `most` records, publish and mark them. Raises what the store raises to a claim."""
        return await Relaying(self.connection, self.store).sweep(_check_batch("most", most))

    def _writer(self) -> OutboxWriter:
        if isinstance(self.store, OutboxWriter):
            return self.store
        raise ConfigurationError(f"{type(self.store).__name__} has no add: it is relayed, and written to by others")


class BoundOutbox:
    """Writes messages down within one transaction. They leave after its commit, or never."""

    def __init__(self, connection: Connection, store: OutboxWriter, within: AsyncWithin) -> None:
        self._connection, self._store, self._within = connection, store, within

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        *,
        key: str | None = None,
        **options: Unpack[PublishOptions],
    ) -> OutboxRecord:
        """Written down, encoded, when it returns; published after the commit, at least once.

        Records of one `key` leave in the order of their commits. Refused are options that a record does not keep:
        `delay`, `timeout`, `mandatory`, `persistent`, `priority`, `expires_in`, `reply_to`, `ordering_key`.
        """
        draft = _drafted(self._connection, exchange, routing_key, payload, key, options)
        chain = self._connection.outbound.chain
        if chain is not None:
            await chain.before(draft)
        try:
            codecs = Codecs.of(draft.codec or self._connection.codecs)
            encoded = await codecs.write_async(draft.payload, options.get("content_type")) if codecs.is_async else None
            record = _recorded(self._connection, draft, key, encoded)
        except Exception as error:
            if chain is not None:
                await chain.told(draft, error)
            raise
        await self._store.add(record, self._within)
        return record

    async def send(
        self, queue: str, payload: object, *, key: str | None = None, **options: Unpack[PublishOptions]
    ) -> OutboxRecord:
        """The same, straight into one queue."""
        return await self.publish("", queue, payload, key=key, **options)


class BoundSyncOutbox:
    """The same where nothing is awaited: no codec that has to be, and a `before_publish` hook is a plain `def`."""

    def __init__(self, connection: Connection, store: OutboxWriter, within: SyncWithin) -> None:
        self._connection, self._store, self._within = connection, store, within

    def publish(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        *,
        key: str | None = None,
        **options: Unpack[PublishOptions],
    ) -> OutboxRecord:
        """As `BoundOutbox.publish`."""
        draft = _drafted(self._connection, exchange, routing_key, payload, key, options)
        chain = self._connection.outbound.chain
        if chain is not None:
            chain.before_now(draft)
        record = _recorded(self._connection, draft, key)
        self._store.add_sync(record, self._within)
        return record

    def send(
        self, queue: str, payload: object, *, key: str | None = None, **options: Unpack[PublishOptions]
    ) -> OutboxRecord:
        """The same, straight into one queue."""
        return self.publish("", queue, payload, key=key, **options)


def _drafted(
    connection: Connection, exchange: str, routing_key: str, payload: object, key: str | None, options: PublishOptions
) -> Draft:
    given = [name for name in _NOT_KEPT if name in options]
    if given:
        raise ConfigurationError(
            f"{given[0]}= is not kept by an outbox record; what is relayed is mandatory, persistent and at once"
        )
    if key is not None:
        check_key("key", key)
    draft = Draft(exchange, routing_key, payload, **options)
    draft.complete(connection.outbound.encoder.envelope, connection.codecs)
    return draft


def _recorded(
    connection: Connection, draft: Draft, key: str | None, encoded: tuple[bytes, str] | None = None
) -> OutboxRecord:
    if not (draft.mandatory and draft.persistent):
        raise ConfigurationError("a hook made the message not mandatory or not persistent; an outbox record is both")
    outgoing: Outgoing = connection.outbound.encoder.encode(
        draft.exchange, draft.routing_key, draft.payload, draft.options(), encoded
    )
    return OutboxRecord.written(
        outgoing.exchange,
        outgoing.routing_key,
        outgoing.body,
        content_type=outgoing.content_type,
        headers={**outgoing.headers, **connection.telemetry.trace_headers()},
        key=key,
        now=connection.clock.now(),
    )


def _check_batch(name: str, most: int) -> int:
    if not 1 <= most <= BATCH_MOST:
        raise ConfigurationError(f"{name}={most} must lie between 1 and {BATCH_MOST:,}")
    return most
