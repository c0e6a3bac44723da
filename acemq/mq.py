"""`connect()`, and what it gives: a connection with a door to each pattern."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from acemq.connect_options import ConnectOptions
from acemq.connection import Connection
from acemq.envelope import Envelope
from acemq.message import Handler, Message
from acemq.opening import Opening
from acemq.patterns import routing_slip
from acemq.patterns.once import Once, UnitHandler
from acemq.patterns.outbox import Outbox
from acemq.patterns.pipeline import Pipeline
from acemq.patterns.replay import Replay
from acemq.patterns.routing_slip import Itinerary, RoutingSlip
from acemq.publish_options import PublishOptions
from acemq.publishing import Receipt
from acemq.stores import RETENTION, OutboxStore, envelope_id
from acemq.topology import check_name

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

    from acemq.adapters.sql import DbIdempotencyStore, DbOutboxStore

T = TypeVar("T")


class AceMQ(Connection):
    """A connection with a door to each pattern."""

    def pipeline(self, name: str, payload: type[T]) -> Pipeline[T, T]:
        """A pipeline that begins with `payload`; describe its steps, then start it."""
        return Pipeline(self, name, payload)

    async def send_along(
        self, slip: RoutingSlip | Itinerary, payload: object, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Send a message on the route that it carries. Refused: a finished slip (`RouteError`)."""
        return await routing_slip.send_along(self, slip, payload, options)

    async def forward(self, slip: RoutingSlip | Itinerary, payload: object, envelope: Envelope) -> Receipt:
        """Send the message in hand on to the slip's current stop. It does not advance the slip and settles nothing."""
        return await routing_slip.forward(self, slip, payload, envelope)

    def outbox(self, store: OutboxStore) -> Outbox:
        """Messages written down in your own transactions, and the relay that publishes them here once committed."""
        return Outbox(self, store)

    def once(
        self,
        handler: UnitHandler[T],
        *,
        session: async_sessionmaker[AsyncSession],
        inbox: DbIdempotencyStore,
        outbox: DbOutboxStore | None = None,
        key: Callable[[Message[Any]], str] = envelope_id,
        retention: timedelta = RETENTION,
    ) -> Handler[T]:
        """A handler for `consume`: claim, writes and announcements of `handler` are one commit, and then it accepts.

        Any decision but to accept, and any exception, rolls back all of it. A second delivery within `retention` is
        accepted without a run. Refused: a session, an inbox and an outbox that are not on one database.
        """
        if outbox is not None:
            outbox.check_same(inbox.engine, "inbox= is on")
        bound = None if outbox is None else self.outbox(outbox)
        return Once(handler, session=session, inbox=inbox, outbox=bound, key=key, retention=retention)

    def replay(self, queue: str) -> Replay:
        """Put the messages of a dead-letter or parked queue back where they came from; describe how, then run it."""
        return Replay(self, check_name("queue", queue))


def connect(url: str, **options: Unpack[ConnectOptions]) -> Opening[AceMQ]:
    """A connection to `memory://name` or `amqp://user:password@host/vhost`, about to be opened.

    Refuses a bad URL or option here, before any I/O. Opening tries every host until `connect_timeout`, then raises
    `ConnectionFailedError`; refused credentials end it at once as `AuthenticationError`, a certificate that cannot be
    trusted or used as `SecurityError`. Once it has opened, the connection recovers by itself for ever. Leaving its
    block drains the consumers and closes it.
    """
    return AceMQ(url, **options).opening()
