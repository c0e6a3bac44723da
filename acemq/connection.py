"""The connection in hand: publish, send, consume, pull, declare, close."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self, TypedDict, TypeVar, Unpack

from acemq.clock import SYSTEM, Clock, check_duration
from acemq.codec import Codec, Codecs, Payload, PayloadType, Reader
from acemq.consuming import ConsumeOptions, Consumer, Drained, check_options, check_policy
from acemq.errors import AcemqError, ClosedError, ConfigurationError, LoopError, TopologyError
from acemq.handling import Call, check_handler
from acemq.mapping import public_error
from acemq.message import Handler
from acemq.moving import Mover
from acemq.opening import Opening, transport_for
from acemq.publishing import Outbound, Publisher, PublishOptions, Receipt
from acemq.pulling import Pulled
from acemq.retry import DEFAULT, Backoff, RetryPolicy
from acemq.telemetry import CONNECTION_LOST, CONNECTION_RECOVERED, Diagnostic, Reporter, Telemetry
from acemq.topology import Topology, check_name, rungs, set_aside
from acemq.transport import ApplyMode, Capabilities, Depth, Finding, Kind, Phase, Transport, TransportState

T = TypeVar("T")


class ConnectOptions(TypedDict, total=False):
    """How a connection behaves; all of it optional."""

    name: str
    """acemq; the first half of the origin, `{name}@{host}`."""
    codec: Codec
    """`Codecs.default()`."""
    retry: RetryPolicy
    """Five attempts after waits of 1, 2, 4 and 8 s."""
    prefetch: int
    """20; deliveries that a consumer holds unsettled."""
    correlate: bool
    """True: what a handler publishes carries the correlation of the message in hand."""
    max_outstanding: int
    """1,000; publishes without an answer, over every path."""
    publish_timeout: timedelta
    """10 s."""
    connect_timeout: timedelta
    """30 s."""
    close_timeout: timedelta
    """20 s; one budget for the whole connection."""
    reconnect: Backoff
    """Pauses between dials: from 0.25 s, doubling to 30 s, with full jitter."""
    threads: int
    """32; the pool for handlers that are plain functions."""
    on_diagnostic: Callable[[Diagnostic], None]
    """Told what a person should know about; the logger `acemq` has it too."""
    clock: Clock
    """The system's; a `MovableClock` in tests on memory."""


_OPTIONS = frozenset(ConnectOptions.__annotations__)
_PULL_MOST = 1_000


class Connection:
    """A broker in hand. Belongs to the event loop that opened it; patterns stand on it."""

    def __init__(self, url: str, **options: Unpack[ConnectOptions]) -> None:
        _check(options)
        self.name = options.get("name", "acemq")
        self.origin = f"{self.name}@{socket.gethostname() or 'unknown'}"
        self.clock: Clock = options.get("clock", SYSTEM)
        given: dict[str, object] = dict(options)
        passed_on = {option: given[option] for option in ("clock", "reconnect") if option in given}
        self.transport = self.make_transport(url, name=self.origin, on_change=self._transport_changed, **passed_on)
        self.codecs = Codecs.of(options["codec"]) if "codec" in options else Codecs.default()
        self.report = Reporter(options.get("on_diagnostic"))
        self.telemetry = Telemetry(self.transport.capabilities.transport)
        self.retry = options.get("retry", DEFAULT)
        self._prefetch = options.get("prefetch", 20)
        self._connect_timeout = options.get("connect_timeout", timedelta(seconds=30))
        self._close_timeout = options.get("close_timeout", timedelta(seconds=20))
        self.outbound = Outbound(
            self.transport,
            codecs=self.codecs,
            telemetry=self.telemetry,
            origin=self.origin,
            timeout=options.get("publish_timeout", timedelta(seconds=10)),
            max_outstanding=options.get("max_outstanding", 1_000),
            correlate=options.get("correlate", True),
            clock=self.clock,
        )
        self._pool = ThreadPoolExecutor(options.get("threads", 32), thread_name_prefix=f"{self.name} handler")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = False
        self._declared = Topology()
        self._consumers: dict[Consumer, None] = {}
        self._numbers = itertools.count(1)
        self._closing: asyncio.Future[Drained] | None = None
        self._close_by: float | None = None

    def make_transport(self, url: str, **options: object) -> Transport:
        """What this connection stands on. The conformance kit puts the transport under test in its place."""
        return transport_for(url, **options)

    def opening(self) -> Opening[Self]:
        """What `connect()` returns."""

        async def open_connection() -> Self:
            await self._open()
            return self

        return Opening(f"connection to {self.state.endpoint}", open_connection, lambda opened: opened.close())

    async def _open(self) -> None:
        try:
            await self.transport.open(within=self._connect_timeout)
        except AcemqError as error:
            raise public_error(error) from error
        self._loop = asyncio.get_running_loop()
        self.outbound.open()

    @property
    def state(self) -> TransportState:
        """How the link is; no I/O."""
        return self.transport.state

    @property
    def capabilities(self) -> Capabilities:
        return self.transport.capabilities

    def __repr__(self) -> str:
        state = self.state
        return f"<{type(self).__name__} {self.origin} to {state.endpoint}, {state.phase}>"

    # Publishing

    async def publish(
        self, exchange: str, routing_key: str, payload: object, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Return once the broker has confirmed and routed the message.

        Raises `UnroutableError` when no queue took it, `PublishRefusedError` when nothing was written (safe to send
        again), `PublishFailedError` when it may be there, `EncodeError` and `ConfigurationError` before any I/O.
        """
        return await self.outbound.publish(exchange, routing_key, payload, options)

    async def send(self, queue: str, payload: object, **options: Unpack[PublishOptions]) -> Receipt:
        """The same, straight into one queue."""
        return await self.outbound.publish("", queue, payload, options)

    async def publish_many(
        self, exchange: str, routing_key: str, payloads: Iterable[object], **options: Unpack[PublishOptions]
    ) -> list[Receipt]:
        """Return once each message has been confirmed and routed; receipts in the order of the payloads.

        Not atomic: `BatchPublishError` holds the result of every message if any did not get through. `payloads` is
        read as there is room, never more than `max_outstanding` ahead.
        """
        return await self.outbound.publish_many(exchange, routing_key, payloads, options)

    async def send_many(
        self, queue: str, payloads: Iterable[object], **options: Unpack[PublishOptions]
    ) -> list[Receipt]:
        """The same, straight into one queue, in order."""
        return await self.outbound.publish_many("", queue, payloads, options)

    def publisher(
        self, exchange: str, routing_key: str, payload: Payload[T], **options: Unpack[PublishOptions]
    ) -> Publisher[T]:
        """A publisher of one payload class to one place; the checkers refuse any other payload."""
        self.outbound.check_options(exchange, routing_key, options)
        return Publisher(self.outbound, exchange, routing_key, options)

    # Consuming

    def consume(
        self, queue: str, payload: Payload[T], handler: Handler[T], **options: Unpack[ConsumeOptions]
    ) -> Opening[Consumer]:
        """Put each message of `queue` through `handler`, `concurrency` at once.

        `None` or `Ack.accept()` accepts, an exception retries by the policy; the table in the documentation has the
        rest. Opening returns when the broker has accepted the subscription; `TopologyError` when there is no such
        queue. It declares `{queue}.dlq`, `{queue}.parked` and the rungs of its policy, never the queue itself.
        """
        check_name("queue", queue)
        check_handler(handler, payload.into if isinstance(payload, PayloadType) else payload)
        codecs = Codecs.of(options["codec"]) if "codec" in options else self.codecs
        reader: Reader[Any] = Reader(codecs, payload)
        policy, can = options.get("retry", self.retry), self.transport.capabilities_of("queue", queue)
        prefetch = check_options(options, can, self._prefetch)
        check_policy(policy, can)

        def make() -> Consumer:
            return Consumer(
                queue,
                name=options.get("name") or f"{self.origin}/{queue}/{next(self._numbers)}",
                call=Call(handler, self._pool),
                reader=reader,
                mover=self.mover(policy, options.get("set_aside")),
                options=options,
                prefetch=prefetch,
                drain_timeout=self._time_left,
            )

        async def open_consumer() -> Consumer:
            self._check_usable()
            if not await self.exists(queue):
                # Looked up first: a mistyped name must not leave its dead-letter queues behind.
                raise TopologyError(f"there is no queue {queue!r}; declare it before it is consumed")
            if options.get("declare", True):
                await self._declare_beside(options.get("set_aside", queue), queue, policy)
            consumer = make()
            self._consumers[consumer] = None
            try:
                return await consumer.start()
            except BaseException:
                del self._consumers[consumer]
                raise

        async def close_consumer(consumer: Consumer) -> Drained:
            drained = await consumer.drain()
            self._consumers.pop(consumer, None)
            return drained

        return Opening(f"consumer of {queue!r}", open_consumer, close_consumer)

    async def pull(
        self, queue: str, payload: Payload[T], *, wait: timedelta = timedelta(0), codec: Codec | None = None
    ) -> Pulled[T] | None:
        """One message, held until one of its verbs settles it; `None` when none came within `wait`.

        `wait` is time of the connection's clock: a test that stands on a `MovableClock` has to move it.
        """
        pulled = await self.pull_many(queue, payload, most=1, wait=wait, codec=codec)
        return pulled[0] if pulled else None

    async def pull_many(
        self,
        queue: str,
        payload: Payload[T],
        *,
        most: int = 10,
        wait: timedelta = timedelta(0),
        codec: Codec | None = None,
    ) -> list[Pulled[T]]:
        """Up to `most` (1–1,000) held messages: what is there when the first has come, after at most `wait`."""
        self._check_usable()
        check_name("queue", queue)
        check_duration("wait", wait, zero=True)
        if not 1 <= most <= _PULL_MOST:
            raise ConfigurationError(f"most={most} must lie between 1 and {_PULL_MOST}")
        reader = Reader(Codecs.of(codec) if codec else self.codecs, payload)
        mover = self.mover(self.retry)
        try:
            deliveries = await self.transport.pull(queue, most=most, wait=wait)
        except AcemqError as error:
            raise public_error(error) from error
        return [Pulled(delivery, reader, mover, self.clock) for delivery in deliveries]

    # Topology

    async def declare(self, topology: Topology, *, mode: ApplyMode = ApplyMode.CREATE) -> tuple[Finding, ...]:
        """Make what is missing; what was found, object by object.

        Applying twice changes nothing. Raises `TopologyError` with every problem that can be seen without a broker,
        and `DriftError`, before anything is made, when the broker has an object with other arguments.
        """
        self._check_usable()
        topology.validate()
        return await self._apply(topology, mode)

    def declared(self) -> Topology:
        """Everything this connection has declared so far, by itself and when told."""
        return self._declared

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        return await self._ask(self.transport.exists(name, kind))

    async def depth(self, queue: str) -> Depth:
        """How much is in a queue, by the broker's own word; `TopologyError` when it is not there."""
        return await self._ask(self.transport.depth(queue))

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        """False: it was not there, or not empty."""
        return await self._ask(self.transport.delete(name, kind, only_if_empty=only_if_empty))

    async def purge(self, queue: str) -> int | None:
        """Remove what is ready, and say how much that was; `None`: this broker does not say."""
        return await self._ask(self.transport.purge(queue))

    # Closing

    async def close(self, timeout: timedelta | None = None) -> Drained:
        """Stop fetching, wait for handlers, cancel what is left, give back, hang up: within one budget.

        Idempotent: every caller gets the same answer. `timeout` is `close_timeout` unless given. Cancelling it
        cancels the handlers and still releases the connection.
        """
        if self._closing is not None:
            return await asyncio.shield(self._closing)
        if timeout is not None:
            check_duration("timeout", timeout, zero=True)
        self._closing = asyncio.get_running_loop().create_future()
        drained = Drained()
        try:
            drained = await self._close(self._close_timeout if timeout is None else timeout)
        finally:
            self._closing.set_result(drained)
        return drained

    async def _close(self, budget: timedelta) -> Drained:
        self._close_by = time.monotonic() + budget.total_seconds()
        self.outbound.drain()
        drained = Drained()
        try:
            # One that fails while closing does not keep the others open.
            stops = [asyncio.ensure_future(consumer.drain(budget)) for consumer in list(self._consumers)]
            try:
                results = await asyncio.gather(*stops, return_exceptions=True)
            except asyncio.CancelledError:
                await asyncio.wait(stops, timeout=1) if stops else None
                raise
            for result in results:
                drained = drained + (result if isinstance(result, Drained) else Drained(finished=False))
        finally:
            self.outbound.close()
            self._consumers.clear()
            self._pool.shutdown(wait=False, cancel_futures=True)
            await self.transport.close(self._time_left())
        return drained

    # For patterns, which stand on a connection

    def mover(self, policy: RetryPolicy, home: str | None = None) -> Mover:
        """What carries out decisions about deliveries of this connection."""
        return Mover(
            transport=self.transport,
            outbound=self.outbound,
            telemetry=self.telemetry,
            report=self.report,
            clock=self.clock,
            origin=self.origin,
            policy=policy,
            home=home,
        )

    async def _declare_beside(self, home: str, queue: str, policy: RetryPolicy) -> None:
        can = self.transport.capabilities_of("queue", queue)
        beside = set_aside(home, exchanges=can.dead_letter_routes)
        if can.dead_letter_routes:
            beside |= rungs(queue, policy.rungs())
        await self._apply(beside, ApplyMode.CREATE)

    async def _apply(self, topology: Topology, mode: ApplyMode) -> tuple[Finding, ...]:
        found = tuple(await self._ask(self.transport.apply(topology, mode)))
        if mode is ApplyMode.CREATE:
            self._declared |= topology
        return found

    async def _ask(self, answer: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_usable()
        except BaseException:
            answer.close()
            raise
        try:
            return await answer
        except AcemqError as error:
            public = public_error(error)
            if public is error:
                raise
            raise public from error

    def _check_usable(self) -> None:
        if self._loop is None:
            raise ClosedError("the connection is not open yet; use `async with acemq.connect(…) as mq:`")
        if self._closing is not None:
            raise ClosedError("the connection is closed; connect again")
        if asyncio.get_running_loop() is not self._loop:
            raise LoopError("this connection belongs to another event loop; make one connection for each loop")

    def _time_left(self) -> timedelta:
        if self._close_by is None:
            return self._close_timeout
        return timedelta(seconds=max(self._close_by - time.monotonic(), 0))

    def _transport_changed(self, state: TransportState) -> None:
        if state.phase is Phase.RECONNECTING and not self._lost:
            self._lost = True
            text = f"lost {state.endpoint}: {state.last_error}; dialling again"
            self.report(Diagnostic(CONNECTION_LOST, "warning", text))
        elif state.phase is Phase.CONNECTED and self._lost:
            self._lost = False
            self.report(Diagnostic(CONNECTION_RECOVERED, "info", f"connected to {state.endpoint} again"))


def _check(options: ConnectOptions) -> None:
    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(
            f"connect() got an unexpected keyword argument {min(unknown)!r}; known: {', '.join(sorted(_OPTIONS))}"
        )
    given: dict[str, Any] = dict(options)
    for option in ("publish_timeout", "connect_timeout"):
        if option in given:
            check_duration(option, given[option])
    if "close_timeout" in options:
        check_duration("close_timeout", options["close_timeout"], zero=True)
    for option, most in (("prefetch", 65_535), ("max_outstanding", 1_000_000), ("threads", 1_000)):
        if option in given and not 1 <= given[option] <= most:
            raise ConfigurationError(f"{option}={given[option]} must lie between 1 and {most:,}")
    name = options.get("name", "acemq")
    if not name or "@" in name or len(name.encode()) > 100:
        raise ConfigurationError(f"name={name!r} must have 1 to 100 bytes and no '@'")
