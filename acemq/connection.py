"""The connection in hand: publish, send, consume, pull, declare, close."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Self, TypeVar, Unpack

from msgspec.structs import replace

from acemq.ack import Ack
from acemq.clock import SYSTEM, Clock, check_duration
from acemq.codec import AnyCodec, Codecs, Payload, PayloadType, Reader
from acemq.connect_options import ConnectOptions, check_connect
from acemq.consuming import private
from acemq.consuming.batching import Batch, BatchConsumer, BatchHandler, check_batches
from acemq.consuming.consumer import Consumer
from acemq.consuming.groups import ConsumerGroup, check_size
from acemq.consuming.handling import Call, check_handler
from acemq.consuming.lanes import Lanes, check_share, lanes_for
from acemq.consuming.leasing import Leases
from acemq.consuming.moving import Mover
from acemq.consuming.options import ConsumeOptions, check_options, check_policy, check_prefetch, warn_of_limit
from acemq.consuming.private import PrivateConsumer
from acemq.consuming.pulling import Pulled, Pulling, fetch
from acemq.consuming.receiving import Receiving
from acemq.consuming.registry import Consumers
from acemq.errors import (
    ClosedError,
    ConfigurationError,
    ConnectionFailedError,
    DriftError,
    LoopError,
    TopologyError,
)
from acemq.health import Checks, Health, HealthPart
from acemq.interceptors import ConsumeInterceptor, Interceptors, PublishInterceptor
from acemq.lacking import refuse_lacking
from acemq.message import Handler, Message
from acemq.opening import Opening, transport_for
from acemq.plan import Plan
from acemq.public_errors import made_public
from acemq.publishing.draft import Draft
from acemq.publishing.gate import WhenBlocked
from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import ANOTHER_LOOP, Outbound, Receipt
from acemq.publishing.publisher import Publisher
from acemq.retry import DEFAULT, RetryPolicy
from acemq.stats import Depths, QueueStats
from acemq.stopping import Drained, StopOnce, until
from acemq.stores import Idempotency
from acemq.telemetry import CONNECTION_LOST, CONNECTION_RECOVERED, Diagnostic, Gauges, Reading, Reporter, Telemetry
from acemq.topology import (
    CONTROL,
    SCHEDULE,
    Topology,
    TopologyMode,
    aside_of,
    check_name,
    dead_letters_of,
    lanes_of,
    latest,
    parked_of,
    rungs,
)
from acemq.transport import Adviser, ApplyMode, Capabilities, Depth, Kind, Phase, Transport, TransportState

log = logging.getLogger("acemq")

T = TypeVar("T")
C = TypeVar("C", bound=Consumer)

KNOWN_FOR = timedelta(seconds=60)
"""An older depth is not shown by a gauge."""
SAMPLED_EVERY = timedelta(seconds=15)

_THE_TRANSPORTS = ("clock", "reconnect", "credentials", "tls", "engine")
_PULL_MOST = 1_000
_VERIFIED = "This connection makes nothing (topology=VERIFY); apply what declared() of one that may has printed"


class Connection:
    """A broker in hand. Belongs to the event loop that opened it; patterns stand on it."""

    def __init__(self, url: str, **options: Unpack[ConnectOptions]) -> None:
        check_connect(options)
        self.name = options.get("name", "acemq")
        self.origin = f"{self.name}@{socket.gethostname() or 'unknown'}"
        self.clock: Clock = options.get("clock", SYSTEM)
        given: dict[str, object] = dict(options)
        passed_on = {option: given[option] for option in _THE_TRANSPORTS if option in given}
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
            lay_ladder=self.lay_ladder,
            max_outstanding=options.get("max_outstanding", 1_000),
            correlate=options.get("correlate", True),
            when_blocked=options.get("when_blocked", WhenBlocked.REFUSE),
            clock=self.clock,
        )
        self._depths = Depths(self.transport.depth, self.clock)
        self.consumers = Consumers(self.origin)
        terms = self.transport.capabilities.lease
        self._leases = None
        if terms is not None and terms.renewable:
            self._leases = Leases(self.transport, self.clock, self.telemetry)
        self._checks = Checks(self.transport, self._depths, self.clock, self.consumers)
        self._loops: set[asyncio.Task[None]] = set()
        self._attached: dict[object, Callable[[timedelta], Awaitable[object]]] = {}
        self._interceptors = Interceptors(self.report)
        self.intercept(*options.get("interceptors", ()))
        self._pool = ThreadPoolExecutor(options.get("threads", 32), thread_name_prefix=f"{self.name} handler")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost = False
        self._topology = options.get("topology", TopologyMode.CREATE)
        self._declared = Topology()
        self._laying, self._has_ladder = asyncio.Lock(), False
        self._pulled = self.mover(self.retry)
        """Of whatever is pulled, for as long as the connection is open."""
        self._pulling = Pulling(self._pulled, self.outbound.lanes)
        self._endings: list[Callable[[], Awaitable[object]]] = [self._pulled.at_rest]
        self._stop = StopOnce()
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
            with made_public():
                await self.transport.open(within=self._connect_timeout)
        except ConnectionFailedError as error:
            error.hosts = error.hosts or tuple(self.state.endpoint.split(","))
            raise
        self._loop = asyncio.get_running_loop()
        self.outbound.open()
        if self.telemetry.metering:
            Gauges.show(self.telemetry.meter_provider, self, self._reading)
            self.keep(self._sample(), "asks for depths")

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

    async def publish_batch(self, messages: Iterable[Draft], *, timeout: timedelta | None = None) -> list[Receipt]:
        """The same for messages of mixed destinations and options, one `Draft` each.

        `timeout` is for each message, the connection's `publish_timeout` unless given.
        """
        return await self.outbound.publish_batch(messages, timeout)

    def publisher(
        self, exchange: str, routing_key: str, payload: Payload[T], **options: Unpack[PublishOptions]
    ) -> Publisher[T]:
        """A publisher of one payload class to one place; the checkers refuse any other payload."""
        self.outbound.check_options(exchange, routing_key, options)
        return Publisher(self.outbound, exchange, routing_key, options)

    def pause_publishing(self) -> None:
        """From now on the application's publishes raise `PublishingPausedError`, in handlers too.

        What is under way ends as it would, and the library's own copies and the hops of its patterns go on, so that
        a service that drains can finish what it has.
        """
        self.outbound.gate.pause()

    def resume_publishing(self) -> None:
        self.outbound.gate.resume()

    @property
    def publishing_paused(self) -> bool:
        return self.outbound.gate.is_paused

    def intercept(self, *interceptors: PublishInterceptor | ConsumeInterceptor) -> None:
        """Put these round every publish and every handler that starts from now on, behind those that are there.

        Retries, dead letters, parking and replays are the library's own copies, and pass beside them.
        """
        self._interceptors.add(interceptors)
        self.outbound.chain = self._interceptors.publishing

    # Consuming

    def consume(
        self, queue: str, payload: Payload[T], handler: Handler[T], **options: Unpack[ConsumeOptions]
    ) -> Opening[Consumer]:
        """Put each message of `queue` through `handler`, `concurrency` at once.

        `None` or `Ack.accept()` accepts, an exception retries by the policy; the table in the documentation has the
        rest. Opening returns when the broker has accepted the subscription; `TopologyError` when there is no such
        queue. It declares `{queue}.dlq`, `{queue}.parked` and the rungs of its policy, never the queue itself.
        """
        check_handler(handler, _class_of(payload))
        return self.consumer_of(Consumer, queue, payload, handler, options)

    def consume_batches(
        self,
        queue: str,
        payload: Payload[T],
        handler: BatchHandler[T],
        *,
        most: int = 100,
        within: timedelta = timedelta(milliseconds=200),
        **options: Unpack[ConsumeOptions],
    ) -> Opening[Consumer]:
        """Put the messages of `queue` through `handler` many at a time, for work that is cheaper together.

        A batch is handed over when `most` messages are there, or `within` after its first. What the handler returns or
        raises is the outcome of every message that it did not `settle`, each with its own attempt. `concurrency` counts
        batches and is 1; `prefetch` is raised to `most` times that; `handler_timeout` is the batch's.
        """
        check_handler(handler, _class_of(payload), Batch)
        check_duration("within", within)
        if "idempotency" in options:
            raise ConfigurationError("idempotency= claims one message at a time; use consume()")
        options = {"concurrency": 1, **options}
        fewest = check_batches(most, options["concurrency"])
        if "prefetch" in options:
            options["prefetch"] = max(check_prefetch(options["prefetch"]), fewest)
        make = functools.partial(BatchConsumer, most=most, within=within)
        return self.consumer_of(make, queue, payload, handler, options, fewest=fewest)

    def consume_group(
        self, queue: str, payload: Payload[T], handler: Handler[T], *, size: int, **options: Unpack[ConsumeOptions]
    ) -> Opening[ConsumerGroup]:
        """`size` consumers of `queue` with a channel and a prefetch each, named by number and stopped in one budget.

        If one cannot start, those already started are closed and its error is raised.
        """
        check_size(size)
        base = options.get("name") or self.consumers.name(queue)

        def member(number: int, prefetch: int | None) -> Opening[Consumer]:
            own: ConsumeOptions = {**options, "name": f"{base}/{number}"}
            if prefetch is not None:
                own["prefetch"] = prefetch
            return self.consume(queue, payload, handler, **own)

        async def open_group() -> ConsumerGroup:
            group = ConsumerGroup(queue, member, drain_timeout=self.time_left)
            await group.scale(size)
            return group

        member(1, None)  # refuses here what is wrong with any of them
        return Opening(f"{size} consumers of {queue!r}", open_group, lambda group: group.close())

    def receive(
        self, queue: str, payload: Payload[T], *, prefetch: int = 20, codec: AnyCodec | None = None
    ) -> Opening[Receiving[T]]:
        """Messages of `queue` as they come, at most `prefetch` unsettled, each held until it is settled by hand.

        For handing work on to something that reports back. Nothing is declared: `reject` and `park` need the queue's
        dead letters. `TopologyError` when there is no such queue.
        """
        check_name("queue", queue)
        check_prefetch(prefetch)
        known = self.outbound.lanes
        if known.known(queue):
            check_share(queue, prefetch)
        reader: Reader[T] = Reader(Codecs.of(codec) if codec else self.codecs, payload)

        async def open_receiving() -> Receiving[T]:
            self._check_usable()
            with made_public():
                has_lanes = await known.has(queue)
            receiving = Receiving(
                queue,
                name=self.consumers.name(queue),
                reader=reader,
                mover=self.mover(self.retry),
                prefetch=prefetch,
                drain_timeout=self.time_left,
                ended=self.consumers.forget,
                lanes=Lanes(queue, check_share(queue, prefetch)) if has_lanes else None,
            )
            return await self.consumers.start(receiving)

        return Opening(f"receiving from {queue!r}", open_receiving, lambda receiving: receiving.close())

    async def pull(
        self, queue: str, payload: Payload[T], *, wait: timedelta = timedelta(0), codec: AnyCodec | None = None
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
        codec: AnyCodec | None = None,
    ) -> list[Pulled[T]]:
        """Up to `most` (1–1,000) held messages: what is there when the first has come, after at most `wait`.

        Of a queue with lanes the high ones first. What has expired goes to `{queue}.dlq` and is not among them.
        """
        self._check_usable()
        check_name("queue", queue)
        check_duration("wait", wait, zero=True)
        if not 1 <= most <= _PULL_MOST:
            raise ConfigurationError(f"most={most} must lie between 1 and {_PULL_MOST}")
        reader = Reader(Codecs.of(codec) if codec else self.codecs, payload)
        with made_public():
            deliveries = await self._pulling.pull(queue, most, wait)
        pulled = [Pulled(delivery, reader, self._pulled, self.clock) for delivery in deliveries]
        if reader.is_async:
            await fetch(pulled)
        return pulled

    # Topology

    async def declare(self, topology: Topology, *, mode: ApplyMode = ApplyMode.CREATE) -> Plan:
        """Make what is missing; what was found, object by object. Never deletes, changes or replaces anything.

        Applying twice changes nothing, also from many processes at once. Before any I/O it raises `CapabilityError`
        for an option that the transport lacks and `TopologyError` with every other problem; before anything is made,
        `DriftError` when the broker has an object with other arguments. `VERIFY` makes nothing and raises
        `TopologyError` for what is missing too; `REPORT` makes nothing and raises nothing that it finds.
        """
        self._check_usable()
        refuse_lacking(topology, self.transport.capabilities)
        topology.validate()
        return await self._apply(topology, mode)

    async def plan(self, topology: Topology) -> Plan:
        """What the broker has of it, what it lacks and what differs, argument by argument. Changes nothing."""
        return await self.declare(topology, mode=ApplyMode.REPORT)

    def declared(self) -> Topology:
        """Everything this connection has declared so far, by itself and when told, each as it was declared last.

        Print it where the rights are, and have it applied where they are not.
        """
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

    # Watching

    async def health(self, *, timeout: timedelta = timedelta(seconds=5)) -> Health:
        """How the connection, its consumers and what `add_health` has named are; never raises for what it finds.

        Parts are asked in parallel, each within `timeout`. It creates nothing on the broker.
        """
        return await self._checks.ask(check_duration("timeout", timeout))

    def add_health(self, name: str, check: Callable[[], Awaitable[HealthPart] | HealthPart]) -> None:
        """A part of the application's own. A `def` runs on the loop and must not block; raising is down."""
        self._checks.add(name, check)

    async def stats(self, queue: str) -> QueueStats:
        """What this connection has counted of a queue, and its depth, at most 5 s old; `TopologyError`: not there."""
        check_name("queue", queue)
        with made_public():
            lanes = lanes_of(queue) if await self.outbound.lanes.has(queue) else ()
        depth, dead, parked, depths = None, None, None, dict[str, Depth]()
        if self.capabilities.depth != "none":
            names = (queue, dead_letters_of(queue), parked_of(queue))
            depth, dead, parked = [await self._ask(self._depths.of(name)) for name in names]
            if depth is None:
                self._depths.forget(queue)
                raise TopologyError(f"there is no queue {queue!r}; declare it first")
            asked = {lane: await self._ask(self._depths.of(lane)) for lane in lanes}
            depths = {lane: depth for lane, depth in asked.items() if depth is not None}
        return QueueStats(
            queue=queue,
            counters=self.consumers.counted(queue),
            published=sum(self.outbound.sent.get(each, 0) for each in lanes or (queue,)),
            depth=depth,
            dead=dead,
            parked=parked,
            lanes=depths,
        )

    def _reading(self) -> Reading:
        state = self.state
        return Reading(
            self.capabilities.transport,
            state.phase is Phase.CONNECTED,
            state.blocked is not None,
            state.outstanding,
            self._depths.known(KNOWN_FOR),
            {each.queue: each.halted is not None for each in self.consumers if each.halts},
            max(self.telemetry.outbox_oldest.values(), default=None),
        )

    async def _sample(self) -> None:
        """Keep the depths of consumed queues fresh enough for the gauges. Runs only where an SDK reads them."""
        while True:
            await self._depths.refresh({queue for consumer in self.consumers for queue in consumer.queues})
            await asyncio.sleep(SAMPLED_EVERY.total_seconds())

    # Closing

    async def close(self, timeout: timedelta | None = None) -> Drained:
        """Stop fetching, wait for handlers, cancel what is left, give back, hang up: within one budget.

        Idempotent: every caller gets the same answer. `timeout` is `close_timeout` unless given. Cancelling it
        cancels the handlers and still releases the connection.
        """
        if timeout is not None:
            check_duration("timeout", timeout, zero=True)
        self.consumers.excuse_caller()
        return await self._stop.once(lambda: self._close(self._close_timeout if timeout is None else timeout))

    async def _close(self, budget: timedelta) -> Drained:
        self._close_by = time.monotonic() + budget.total_seconds()
        self.outbound.drain()
        self._pulled.stop_waiting()
        for loop in self._loops:
            loop.cancel()
        closing = [asyncio.ensure_future(close(budget)) for close in tuple(self._attached.values())]
        try:
            try:
                drained = await self.consumers.drain(budget)
                await asyncio.gather(*closing, return_exceptions=True)
                return drained
            finally:
                for ending in self._endings:
                    await until(self._close_by, ending())
        finally:
            for each in closing:
                each.cancel()
            self.outbound.close()
            Gauges.hide(self)
            self._depths.close()
            if self._loops:
                await asyncio.wait(self._loops)
            self._pool.shutdown(wait=False, cancel_futures=True)
            if self._leases is not None:
                self._leases.close()
            await self.transport.close(self.time_left())

    # For patterns, which stand on a connection

    def keep(self, loop: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run what goes on for as long as the connection is open, or until its task is cancelled."""
        task = asyncio.create_task(loop, name=f"{self.name} {what}")
        self._loops.add(task)
        task.add_done_callback(self._loop_ended)
        return task

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        self._loops.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s: ended by a mistake of ours", task.get_name(), exc_info=error)

    def consumer_of(
        self,
        make: Callable[..., C],
        queue: str,
        payload: Payload[Any],
        handler: Callable[[Any], Any],
        options: ConsumeOptions,
        *,
        fewest: int = 1,
        in_place: bool = False,
        in_lanes: bool = True,
    ) -> Opening[C]:
        """A consumer of a kind of its own. `fewest`: the least prefetch; `in_place`: see `Mover`.

        `in_lanes`: if the queue has lanes, all three are consumed. What works in place cannot do that.
        """
        check_name("queue", queue)
        codecs = Codecs.of(options["codec"]) if "codec" in options else self.codecs
        reader: Reader[Any] = Reader(codecs, payload)
        policy, can = options.get("retry", self.retry), self.transport.capabilities_of("queue", queue)
        prefetch = max(check_options(options, can, self._prefetch), fewest)
        check_policy(policy, can)
        known, in_hand = self.outbound.lanes, max(options.get("concurrency", 10), fewest)

        def lanes_if(there: bool | None) -> Lanes | None:
            return lanes_for(queue, there, options, prefetch, in_hand=in_hand, in_place=in_place)

        lanes_if(known.known(queue))  # refuses here what can be seen here
        if "idempotency" in options:
            options["idempotency"] = Idempotency.of(options["idempotency"])
        around = self._interceptors.around(options.get("interceptors", ()))

        async def open_consumer() -> C:
            self._check_usable()
            if self._topology is not TopologyMode.NONE and not await self.exists(queue):
                # Looked up first: a mistyped name must not leave its dead-letter queues behind.
                raise TopologyError(f"there is no queue {queue!r}; declare it before it is consumed")
            with made_public():
                lanes = lanes_if(await known.has(queue) if in_lanes and not in_place else known.known(queue))
            queues = (queue,) if lanes is None else await self._all_there(lanes)
            if options.get("declare", True):
                home, beside = options.get("set_aside"), Topology()
                for each in queues:
                    beside |= self.beside(each, policy, home=home)
                await self.provide(beside)
            consumer = make(
                queue,
                name=options.get("name") or self.consumers.name(queue),
                call=Call(handler, self._pool),
                reader=reader,
                mover=self.mover(policy, options.get("set_aside"), in_place=in_place),
                around=around,
                options=options,
                prefetch=prefetch,
                drain_timeout=self.time_left,
                ended=self.consumers.forget,
                lanes=lanes,
            )
            warn_of_limit(queue, options, can)
            return await self.consumers.start(consumer)

        return Opening(f"consumer of {queue!r}", open_consumer, lambda consumer: consumer.close())

    async def _all_there(self, lanes: Lanes) -> tuple[str, ...]:
        if self._topology is not TopologyMode.NONE:
            for lane in lanes.highest_first:
                if not await self.exists(lane):
                    raise TopologyError(
                        f"there is no queue {lane!r}, and by its others {lanes.queue!r} has lanes; declare all three "
                        "with priorities='lanes'"
                    )
        return lanes.highest_first

    def attach(self, what: object, close: Callable[[timedelta], Awaitable[object]]) -> None:
        """Have it closed beside the consumers, within the time given, unless it is detached before."""
        self._check_usable()
        self._attached[what] = close

    def detach(self, what: object) -> None:
        self._attached.pop(what, None)

    def has_health(self, name: str) -> bool:
        return self._checks.has(name)

    def drop_health(self, name: str) -> None:
        """What `add_health` has named is no part any more."""
        self._checks.drop(name)

    def mover(self, policy: RetryPolicy, home: str | None = None, *, in_place: bool = False) -> Mover:
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
            in_place=in_place,
            leases=self._leases,
        )

    def beside(self, queue: str, policy: RetryPolicy | None = None, *, home: str | None = None) -> Topology:
        """What a consumer of `queue` needs, without the queue itself: its dead letters, its parked ones, its rungs.

        `home` has the first two instead, where it is given; `policy` is the connection's, unless it is given.
        """
        routes = self.transport.capabilities_of("queue", queue).dead_letter_routes
        beside = aside_of(home or queue, exchanges=routes)
        return beside | rungs(queue, (policy or self.retry).rungs()) if routes else beside

    def private(
        self,
        queue: str,
        handler: Callable[[Message[bytes]], Awaitable[Ack | None]],
        *,
        prefetch: int,
        concurrency: int = 1,
    ) -> Opening[Consumer]:
        """Whatever comes to a queue of the library's own, as bytes. Nothing is declared, and nothing is set aside."""
        options = private.options(prefetch, concurrency)
        return self.consumer_of(PrivateConsumer, queue, bytes, handler, options, in_lanes=False)

    @property
    def makes_topology(self) -> bool:
        """False: what the library needs by itself is somebody else's to make."""
        return self._topology is TopologyMode.CREATE

    def at_end(self, ending: Callable[[], Awaitable[object]]) -> None:
        """Call this when the consumers have stopped and the link is still there; bounded by what is left of a close."""
        self._endings.append(ending)

    async def lay_ladder(self) -> None:
        """See to the queues over which messages go that are delayed by more than the broker can; once."""
        if not self._has_ladder:
            async with self._laying:
                if not self._has_ladder:
                    await self.provide(SCHEDULE if self.capabilities.dead_letter_routes else CONTROL)
                    self._has_ladder = True

    async def provide(self, topology: Topology) -> tuple[str, ...]:
        """See to what the library needs by itself, in the way that the connection's `topology=` says; gives the advice.

        Whoever needs several objects asks for all of them before the first is used, so that what is missing is one
        `TopologyError`, and nothing has begun.
        """
        if self._topology is TopologyMode.CREATE:
            return (await self._apply(topology, ApplyMode.CREATE)).advice
        if self._topology is TopologyMode.VERIFY:
            try:
                return (await self._apply(topology, ApplyMode.VERIFY)).advice
            except DriftError:
                raise
            except TopologyError as missing:
                raise TopologyError(*missing.problems, advice=_VERIFIED) from missing
        return ()

    async def _apply(self, topology: Topology, mode: ApplyMode) -> Plan:
        # A transport keeps queues, exchanges and bindings; what lanes are is the engine's affair.
        topology = topology.in_lanes()
        advice = tuple(self.transport.advice(topology)) if isinstance(self.transport, Adviser) else ()
        try:
            found = await self._ask(self.transport.apply(topology, mode))
        except DriftError as drift:
            raise DriftError(replace(drift.plan, advice=advice), *drift.problems) from drift
        if mode is not ApplyMode.REPORT:
            self.outbound.lanes.applied(topology.spelled_out())
        if mode is ApplyMode.CREATE:
            # With its rungs spelled out: described again without them, the queue still has them.
            whole = topology.spelled_out() if self.capabilities.dead_letter_routes else topology
            self._declared = latest(self._declared, whole)
        return Plan(tuple(found), advice)

    async def _ask(self, answer: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_usable()
        except BaseException:
            answer.close()
            raise
        with made_public():
            return await answer

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that opened it, and on which it is used."""
        if self._loop is None:
            raise ClosedError("the connection is not open yet; use `async with acemq.connect(…) as mq:`")
        return self._loop

    def _check_usable(self) -> None:
        loop = self.loop
        if self._stop.is_asked:
            raise ClosedError("the connection is closed; connect again")
        if asyncio.get_running_loop() is not loop:
            raise LoopError(ANOTHER_LOOP)

    def time_left(self) -> timedelta:
        """For a stop that is given no time: the `close_timeout`, or what is left of it once the connection closes."""
        if self._close_by is None:
            return self._close_timeout
        return timedelta(seconds=max(self._close_by - time.monotonic(), 0))

    def _transport_changed(self, state: TransportState) -> None:
        self.outbound.gate.told(state.blocked)
        if state.phase is Phase.RECONNECTING and not self._lost:
            self._lost = True
            text = f"lost {state.endpoint}: {state.last_error}; dialling again"
            self.report(Diagnostic(CONNECTION_LOST, "warning", text))
        elif state.phase is Phase.CONNECTED and self._lost:
            self._lost = False
            self.report(Diagnostic(CONNECTION_RECOVERED, "info", f"connected to {state.endpoint} again"))


def _class_of(payload: Payload[Any]) -> Any:
    return payload.into if isinstance(payload, PayloadType) else payload
