"""`connect()`, and what it gives: a connection with a door to each pattern."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from acemq.codec import Payload
from acemq.connect_options import ConnectOptions
from acemq.connection import Connection
from acemq.consuming.options import ConsumeOptions
from acemq.crossing import Crossing
from acemq.envelope import Envelope
from acemq.message import Handler, Message
from acemq.opening import Opening
from acemq.patterns import request_reply, routing_slip
from acemq.patterns.once import Once, UnitHandler
from acemq.patterns.ordered.described import Ordered
from acemq.patterns.outbox import Outbox
from acemq.patterns.pipeline import Pipeline
from acemq.patterns.replay import Replay
from acemq.patterns.request_reply import RequestCounters, RequestOptions, Requests, Responder, Responding
from acemq.patterns.routing_slip import Itinerary, RoutingSlip
from acemq.patterns.scheduler import Scheduler
from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import Receipt
from acemq.stores import RETENTION, OutboxStore, envelope_id
from acemq.topology import check_name

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

    from acemq.adapters.sql import DbIdempotencyStore, DbOutboxStore
    from acemq.blocking import BlockingMQ

T = TypeVar("T")
R = TypeVar("R")


class AceMQ(Connection):
    """A connection with a door to each pattern."""

    def __init__(self, url: str, **options: Unpack[ConnectOptions]) -> None:
        super().__init__(url, **options)
        self._requests = Requests(self)

    def ordered(self, name: str, payload: Payload[T]) -> Ordered[T]:
        """A queue whose messages are in order by key, over many processes; describe it, then declare it."""
        return Ordered(self, check_name("ordered queue", name), payload)

    @property
    def blocking(self) -> BlockingMQ:
        """The same connection for other threads, and for handlers that are plain functions: its methods wait.

        Closing stays the business of the loop that opened it. `ClosedError` before it is open.
        """
        from acemq.blocking import BlockingMQ  # which stands on this file

        return BlockingMQ(self, loop_of=Crossing(self.loop, repr(self)))

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

    def scheduler(self) -> Opening[Scheduler]:
        """Deliver messages later. On RabbitMQ it also moves on what is due, for every service of the broker.

        Opening declares the ladder there: `DriftError` when the broker has one of its queues with other arguments.
        """
        return Scheduler(self).opening()

    async def request(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        reply: Payload[R],
        *,
        timeout: timedelta = request_reply.TIMEOUT,
        **options: Unpack[RequestOptions],
    ) -> R:
        """Ask, and return the answer as a `reply`.

        `RequestTimeoutError` after `timeout` says nothing about whether the work was done; `ResponderError` has the
        text of what went wrong over there; `DecodeError`: the answer is no `reply`. What cannot be published raises as
        a publish does, at once when no queue takes it.
        """
        return await self._requests.ask(exchange, routing_key, payload, reply, timeout, options)

    def respond(
        self, queue: str, payload: Payload[T], handler: Responding[T], **options: Unpack[ConsumeOptions]
    ) -> Opening[Responder]:
        """Answer each request of `queue` with what `handler` returns; options as of a consumer, but for `retry`.

        An exception is told to whoever asked, and its request goes to the dead letters after this one attempt.
        """
        return request_reply.responder(self, queue, payload, handler, options)

    @property
    def requests(self) -> RequestCounters:
        """What has become of the requests of this connection."""
        return self._requests.counters


def connect(url: str, **options: Unpack[ConnectOptions]) -> Opening[AceMQ]:
    """A connection to `memory://name` or `amqp://user:password@host/vhost`, about to be opened.

    Refuses a bad URL or option here, before any I/O. Opening tries every host until `connect_timeout`, then raises
    `ConnectionFailedError`; refused credentials end it at once as `AuthenticationError`, a certificate that cannot be
    trusted or used as `SecurityError`. Once it has opened, the connection recovers by itself for ever. Leaving its
    block drains the consumers and closes it.
    """
    return AceMQ(url, **options).opening()
