"""The same for programs without an event loop: scripts, other threads, handlers that are plain functions.

    with acemq.blocking.connect(url) as mq:
        print(mq.replay("orders.dlq").run(limit=100))

It is the asynchronous connection, on a loop in a thread of its own; nothing is built twice. Every method may be called
from any thread, except one in which an event loop runs: there it is a `LoopError`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime, timedelta
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

from acemq.ack import Ack
from acemq.clock import Clock
from acemq.codec import Codec, Payload
from acemq.connect_options import ConnectOptions
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.consuming.options import ConsumeOptions
from acemq.consuming.pulling import Pulled
from acemq.consuming.settling import ConsumerCounters
from acemq.crossing import Crossing, LoopThread
from acemq.errors import ClosedError, LoopError
from acemq.health import Health
from acemq.interceptors import ConsumeInterceptor, PublishInterceptor
from acemq.message import Message
from acemq.mq import AceMQ
from acemq.patterns.replay import HOLD, Replay, ReplayResult
from acemq.patterns.request_reply import TIMEOUT, RequestOptions
from acemq.plan import Plan
from acemq.publishing.draft import Draft
from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import Receipt
from acemq.stats import QueueStats
from acemq.stopping import Drained
from acemq.topology import Topology
from acemq.transport import ApplyMode, Capabilities, Depth, Kind, TransportState

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


def connect(url: str, **options: Unpack[ConnectOptions]) -> BlockingMQ:
    """A connection that is opened by `with`, or by `open()`. A bad URL or option is refused here, before any I/O."""
    return BlockingMQ(AceMQ(url, **options))


class BlockingMQ:
    """A connection whose methods wait. They do and raise what those of `AceMQ` of the same name do.

    A `KeyboardInterrupt` in a waiting call cancels that call, lets it clean up, and leaves the connection usable.
    """

    def __init__(self, mq: AceMQ, *, loop_of: Crossing | None = None) -> None:
        """`loop_of`: the loop on which `mq` is open already; it is closed there and not here."""
        self._mq, self._crossing, self._is_ours = mq, loop_of, loop_of is None
        self._thread = LoopThread(f"{mq.name} loop")
        self._drained: Drained | None = None

    def open(self) -> Self:
        """Connect; what `connect()` says of it holds. A connection is opened once."""
        if self._crossing is not None:
            raise ClosedError(f"{self!r} was opened already; make a new one")
        crossing = self._crossing = Crossing(self._thread.start(), repr(self))

        async def open() -> None:
            await self._mq.opening()

        try:
            crossing.call(open)
        except BaseException:
            self._thread.stop()
            raise
        return self

    def close(self, timeout: timedelta | None = None) -> Drained:
        """As `AceMQ.close`, and idempotent like it. A handler thread that does not end is left behind."""
        if not self._is_ours:
            raise LoopError(f"{self!r} belongs to the event loop that opened it, and is closed there")
        if self._crossing is None:
            return Drained()
        if self._drained is None:
            try:
                self._drained = self._call(lambda mq: mq.close(timeout))
            finally:
                self._thread.stop()
        return self._drained

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._mq.origin} to {self._mq.state.endpoint}>"

    def run(self, work: Callable[[AceMQ], Awaitable[T]]) -> T:
        """Everything else: await what `work` makes of the asynchronous connection, on its loop."""
        return self._call(work)

    def _call(self, work: Callable[[AceMQ], Awaitable[T]]) -> T:
        if self._crossing is None:
            raise ClosedError("the connection is not open yet; use `with acemq.blocking.connect(…) as mq:`")
        return self._crossing.call(lambda: work(self._mq))

    def _do(self, act: Callable[[AceMQ], None]) -> None:
        async def done(mq: AceMQ) -> None:
            act(mq)

        self._call(done)

    @property
    def state(self) -> TransportState:
        """How the link is; no I/O."""
        return self._mq.state

    @property
    def capabilities(self) -> Capabilities:
        return self._mq.capabilities

    # Publishing

    def publish(self, exchange: str, routing_key: str, payload: object, **options: Unpack[PublishOptions]) -> Receipt:
        return self._call(lambda mq: mq.publish(exchange, routing_key, payload, **options))

    def send(self, queue: str, payload: object, **options: Unpack[PublishOptions]) -> Receipt:
        return self._call(lambda mq: mq.send(queue, payload, **options))

    def publish_many(
        self, exchange: str, routing_key: str, payloads: Iterable[object], **options: Unpack[PublishOptions]
    ) -> list[Receipt]:
        """`payloads` is read on the loop: it must not block, or call this connection."""
        return self._call(lambda mq: mq.publish_many(exchange, routing_key, payloads, **options))

    def send_many(self, queue: str, payloads: Iterable[object], **options: Unpack[PublishOptions]) -> list[Receipt]:
        """`payloads` is read on the loop: it must not block, or call this connection."""
        return self._call(lambda mq: mq.send_many(queue, payloads, **options))

    def publish_batch(self, messages: Iterable[Draft], *, timeout: timedelta | None = None) -> list[Receipt]:
        return self._call(lambda mq: mq.publish_batch(messages, timeout=timeout))

    def pause_publishing(self) -> None:
        self._do(lambda mq: mq.pause_publishing())

    def resume_publishing(self) -> None:
        self._do(lambda mq: mq.resume_publishing())

    def intercept(self, *interceptors: PublishInterceptor | ConsumeInterceptor) -> None:
        self._do(lambda mq: mq.intercept(*interceptors))

    # Consuming

    def consume(
        self,
        queue: str,
        payload: Payload[T],
        handler: Callable[[Message[T]], Ack | None],
        **options: Unpack[ConsumeOptions],
    ) -> BlockingConsumer:
        """Started when it returns. The handler runs in the pool, so it may block, and call this connection."""

        async def consume(mq: AceMQ) -> Consumer:
            return await mq.consume(queue, payload, handler, **options)

        return BlockingConsumer(self, self._call(consume))

    def pull(
        self, queue: str, payload: Payload[T], *, wait: timedelta = timedelta(0), codec: Codec | None = None
    ) -> BlockingPulled[T] | None:
        pulled = self._call(lambda mq: mq.pull(queue, payload, wait=wait, codec=codec))
        return None if pulled is None else BlockingPulled(self, pulled, self._mq.clock)

    def pull_many(
        self,
        queue: str,
        payload: Payload[T],
        *,
        most: int = 10,
        wait: timedelta = timedelta(0),
        codec: Codec | None = None,
    ) -> list[BlockingPulled[T]]:
        pulled = self._call(lambda mq: mq.pull_many(queue, payload, most=most, wait=wait, codec=codec))
        return [BlockingPulled(self, each, self._mq.clock) for each in pulled]

    def replay(self, queue: str) -> BlockingReplay:
        return BlockingReplay(self, self._mq.replay(queue))

    # Asking

    def request(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        reply: Payload[T],
        *,
        timeout: timedelta = TIMEOUT,
        **options: Unpack[RequestOptions],
    ) -> T:
        """Who answers may be a handler of this connection: it runs elsewhere."""
        return self._call(lambda mq: mq.request(exchange, routing_key, payload, reply, timeout=timeout, **options))

    # Topology and watching

    def declare(self, topology: Topology, *, mode: ApplyMode = ApplyMode.CREATE) -> Plan:
        return self._call(lambda mq: mq.declare(topology, mode=mode))

    def plan(self, topology: Topology) -> Plan:
        return self._call(lambda mq: mq.plan(topology))

    def declared(self) -> Topology:
        return self._mq.declared()

    def exists(self, name: str, kind: Kind = "queue") -> bool:
        return self._call(lambda mq: mq.exists(name, kind))

    def depth(self, queue: str) -> Depth:
        return self._call(lambda mq: mq.depth(queue))

    def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        return self._call(lambda mq: mq.delete(name, kind, only_if_empty=only_if_empty))

    def purge(self, queue: str) -> int | None:
        return self._call(lambda mq: mq.purge(queue))

    def stats(self, queue: str) -> QueueStats:
        return self._call(lambda mq: mq.stats(queue))

    def health(self, *, timeout: timedelta = timedelta(seconds=5)) -> Health:
        return self._call(lambda mq: mq.health(timeout=timeout))


class BlockingPulled(Message[T_co], Generic[T_co]):
    """A held message whose verbs wait; they do what those of `Pulled` do."""

    __slots__ = ("_mq", "_pulled")

    def __init__(self, mq: BlockingMQ, pulled: Pulled[T_co], clock: Clock) -> None:
        super().__init__(None, pulled.delivery, clock)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        self._mq, self._pulled = mq, pulled

    @property
    def payload(self) -> T_co:
        return self._pulled.payload

    def accept(self) -> bool:
        return self._mq.run(lambda _: self._pulled.accept())

    def retry(self, error: BaseException | str | None = None, *, delay: timedelta | None = None) -> bool:
        return self._mq.run(lambda _: self._pulled.retry(error, delay=delay))

    def reject(self, reason: str | None = None) -> bool:
        return self._mq.run(lambda _: self._pulled.reject(reason))

    def park(self, reason: str | None = None) -> bool:
        return self._mq.run(lambda _: self._pulled.park(reason))

    def release(self) -> bool:
        return self._mq.run(lambda _: self._pulled.release())


class BlockingConsumer:
    """A consumer that runs until it is closed; leaving its `with` block closes it."""

    def __init__(self, mq: BlockingMQ, consumer: Consumer) -> None:
        self._mq, self._consumer = mq, consumer

    @property
    def queue(self) -> str:
        return self._consumer.queue

    @property
    def name(self) -> str:
        return self._consumer.name

    @property
    def state(self) -> ConsumerState:
        return self._consumer.state

    @property
    def counters(self) -> ConsumerCounters:
        """Of now; they go on counting."""
        return self._consumer.counters

    def pause(self) -> None:
        self._do(self._consumer.pause)

    def resume(self) -> None:
        self._do(self._consumer.resume)

    def drain(self, timeout: timedelta | None = None) -> Drained:
        return self._mq.run(lambda _: self._consumer.drain(timeout))

    def close(self) -> Drained:
        return self._mq.run(lambda _: self._consumer.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, act: Callable[[], None]) -> None:
        async def done(_: AceMQ) -> None:
            act()

        self._mq.run(done)


class BlockingReplay:
    """A replay that is being described; `pending`, `run` and `dry_run` wait. The verbs are those of `Replay`."""

    def __init__(self, mq: BlockingMQ, replay: Replay) -> None:
        self._mq, self._replay = mq, replay

    def into(self, queue: str) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.into(queue))

    def where(self, accepts: Callable[[Message[bytes]], bool], *, hold: int = HOLD) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.where(accepts, hold=hold))

    def keeping_attempts(self) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.keeping_attempts())

    def at_rate(self, per_second: float) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.at_rate(per_second))

    def until(self, deadline: datetime | timedelta) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.until(deadline))

    def reporting(self, progress: Callable[[ReplayResult], None], *, every: int = 100) -> BlockingReplay:
        """`progress` is called on the loop: it must not block, or call this connection."""
        return BlockingReplay(self._mq, self._replay.reporting(progress, every=every))

    def in_batches(self, most: int) -> BlockingReplay:
        return BlockingReplay(self._mq, self._replay.in_batches(most))

    def pending(self) -> int:
        return self._call(self._replay.pending)

    def run(self, limit: int | None = None) -> ReplayResult:
        return self._call(lambda: self._replay.run(limit))

    def dry_run(self, limit: int | None = None) -> ReplayResult:
        return self._call(lambda: self._replay.dry_run(limit))

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        return self._mq.run(lambda _: work())
