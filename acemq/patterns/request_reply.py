"""Questions over a broker: an answer for each, or an error within its time (CONTRACT.md section 9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypedDict, TypeVar, cast

import msgspec
from opentelemetry.trace import Span

from acemq import headers as h
from acemq.ack import Ack
from acemq.clock import check_duration, sleep
from acemq.codec import OCTETS, AnyCodec, Codecs, Payload, PayloadType, Reader, media_type
from acemq.connection import Connection
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.consuming.handling import Call, check_handler
from acemq.consuming.options import ConsumeOptions
from acemq.consuming.settling import Decision, reason_of
from acemq.envelope import to_millis, write
from acemq.errors import (
    AcemqError,
    ClaimStoreError,
    ClosedError,
    CodecError,
    ConfigurationError,
    DecodeError,
    FatalError,
    PublishRefusedError,
    RequestTimeoutError,
    ResponderError,
)
from acemq.headers import HeaderValue
from acemq.ids import new_id
from acemq.keywords import check_keywords
from acemq.message import Message, current_message
from acemq.opening import Opening
from acemq.public_errors import made_public
from acemq.publishing.options import PublishOptions
from acemq.retry import RetryPolicy
from acemq.telemetry import REPLY_UNDELIVERED, Diagnostic, end_span, within_span
from acemq.topology import Queue, Topology, check_key
from acemq.transport import ApplyMode, Outgoing, Phase, Published

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = timedelta(seconds=30)
EXPIRES = timedelta(minutes=10)
"""After so long without its consumer RabbitMQ removes a reply queue."""

PREFETCH = 100
MOST_WAITING = 10_000
REMEMBERED = 1_000
"""Addresses of which was said that they are gone, and classes of answers."""

_STEP_BACK = 1.0
"""Seconds before a request goes back whose answer the broker did not take."""

Responding: TypeAlias = Callable[[Message[T]], Awaitable[object] | object]


class RequestOptions(TypedDict, total=False):
    """What may be said about one request; as of a publish, but for what the pattern itself says."""

    headers: Mapping[str, HeaderValue]
    """The application's own."""
    message_id: str
    """A new UUID of version 4; it is the correlation, too."""
    type: str
    """The routing key."""
    version: int
    """1."""
    causation_id: str
    """The id of the message in hand."""
    claim: str
    """The application's own."""
    codec: AnyCodec
    """The connection's; of the answer, too."""
    content_type: str
    """Picks the codec; for bytes it is only the label."""
    persistent: bool
    """True: the request survives a restart of the broker."""
    priority: int
    """0–255, below the levels that the queue was declared with."""
    expires_in: timedelta
    """After it the request is not handled any more."""
    ordering_key: str
    """For queues declared ordered."""


_OPTIONS = frozenset(RequestOptions.__annotations__)


class RequestCounters(msgspec.Struct):
    """Of one connection. All but `waiting` only ever grow."""

    waiting: int = 0
    """Without an answer so far."""
    answered: int = 0
    timed_out: int = 0
    failed: int = 0
    """The request could not be published, the responder failed, or its answer could not be read."""
    unmatched: int = 0
    """Answers that nobody waited for, such as those that came too late."""


# Asking


class Requests:
    """The asking side of one connection: its reply queue, made at the first request, and who waits for what."""

    def __init__(self, connection: Connection) -> None:
        self.counters = RequestCounters()
        self._connection = connection
        self._waiting: dict[str, asyncio.Future[Message[bytes]]] = {}
        self._readers: dict[Any, Reader[Any]] = {}
        self._opening = asyncio.Lock()
        self._queue: Queue | None = None
        self._consumer: Consumer | None = None

    async def ask(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        reply: Payload[R],
        timeout: timedelta,
        options: RequestOptions,
    ) -> R:
        began = time.perf_counter()
        self._check(exchange, routing_key, timeout, options)
        reader = self._reader_of(reply, options)
        identity = options.get("message_id") or new_id()
        if identity in self._waiting:
            raise ConfigurationError(
                f"message_id={identity!r} waits for an answer already; each request has its own id"
            )
        kind = options.get("type", routing_key)
        telemetry = self._connection.telemetry
        span = telemetry.request_span(exchange, routing_key, identity, kind) if telemetry.tracing else None
        outcome = "failed"
        failure: Exception | None = None
        try:
            with within_span(span):
                answer = await self._answer(exchange, routing_key, payload, identity, timeout, options)
                result = await _read(answer, reader)
            outcome = "answered"
            self.counters.answered += 1
            return result
        except RequestTimeoutError as late:
            outcome, failure = "timed_out", late
            self.counters.timed_out += 1
            raise
        except Exception as error:
            failure = error
            self.counters.failed += 1
            raise
        finally:
            telemetry.requested(routing_key, kind, outcome, time.perf_counter() - began)
            if span is not None:
                end_span(span, outcome, failure)

    def _reader_of(self, reply: Payload[R], options: RequestOptions) -> Reader[R]:
        """To make one takes longer than to ask; made once for each class, as long as the codec is the connection's."""
        if "codec" in options:
            return Reader(Codecs.of(options["codec"]), reply)
        reader = self._readers.get(reply)
        if reader is None:
            reader = Reader(self._connection.codecs, reply)
            if len(self._readers) < REMEMBERED:
                self._readers[reply] = reader
        return reader

    def _check(self, exchange: str, routing_key: str, timeout: timedelta, options: RequestOptions) -> None:
        """Before any I/O, of which the reply queue is the first."""
        check_keywords("request", options, _OPTIONS)
        check_duration("timeout", timeout)
        check_key("routing key", routing_key)
        self._connection.outbound.check_options(exchange, routing_key, cast("PublishOptions", options))
        if h.REPLY_TO in options.get("headers", {}):
            raise ConfigurationError(
                f"header {h.REPLY_TO!r} is the address for the answer, which request() writes itself"
            )
        if not self._connection.makes_topology:
            raise ConfigurationError(
                "request() makes a reply queue of its own, and this connection makes nothing; connect with "
                "topology=TopologyMode.CREATE"
            )
        if len(self._waiting) >= MOST_WAITING:
            raise PublishRefusedError(
                f"{MOST_WAITING} requests wait for an answer already; nothing was sent. Ask less at once, or wait less "
                "long for each",
                exchange=exchange,
                routing_key=routing_key,
            )

    async def _answer(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        identity: str,
        timeout: timedelta,
        options: RequestOptions,
    ) -> Message[bytes]:
        connection = self._connection
        # Before the publish: an answer may be quicker than the confirm.
        waiter: asyncio.Future[Message[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[identity] = waiter
        self.counters.waiting = len(self._waiting)
        late = RequestTimeoutError(
            f"no answer to request {identity} within {timeout.total_seconds():g} s; whether the work was done is not "
            "known",
            message_id=identity,
            after=timeout,
        )
        timer = connection.clock.call_later(
            timeout.total_seconds(), lambda: None if waiter.done() else waiter.set_exception(late)
        )
        try:
            try:
                async with asyncio.timeout(timeout.total_seconds()):
                    address = await self._address()
            except TimeoutError:
                raise late from None
            given = self._with_address(address, identity, timeout, options)
            try:
                await connection.publish(exchange, routing_key, payload, **given)
            except AcemqError:
                if not _has_answer(waiter):  # it may have got there all the same, and even been answered
                    raise
            return await waiter
        finally:
            timer.cancel()
            self._waiting.pop(identity, None)
            self.counters.waiting = len(self._waiting)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen, whether or not it is what this ends with

    def _with_address(self, address: str, identity: str, timeout: timedelta, options: RequestOptions) -> PublishOptions:
        outbound, handled = self._connection.outbound, current_message()
        given = cast("PublishOptions", {**options})
        given["headers"] = {**options.get("headers", {}), h.REPLY_TO: address}
        given["reply_to"] = address
        # Its own id: then every library's answer carries it, whichever of the two that library echoes.
        given["message_id"] = given["correlation_id"] = identity
        if handled is not None and outbound.encoder.correlate:
            given.setdefault("causation_id", handled.id)
        given["timeout"] = min(timeout, outbound.timeout)
        return given

    # The reply queue

    async def _address(self) -> str:
        """The name of the queue for answers, which is there and consumed."""
        queue, consumer = self._queue, self._consumer
        if queue is None or consumer is None:
            async with self._opening:
                if self._queue is None or self._consumer is None:
                    await self._open()
                queue, consumer = self._queue, self._consumer
            assert queue is not None
            assert consumer is not None
        elif consumer.state is ConsumerState.RECOVERING and self._connection.state.phase is Phase.CONNECTED:
            await self._declare(queue)  # somebody has deleted it; its consumer goes on when it is back
        return queue.name

    async def _open(self) -> None:
        queue = reply_queue(f"acemq.reply.{new_id()}")
        await self._declare(queue)
        self._consumer = await self._connection.private(queue.name, self._receive, prefetch=PREFETCH)
        self._queue = queue
        self._connection.at_end(self._end)

    async def _declare(self, queue: Queue) -> None:
        # Past `declared()`, which is of what somebody else could make beforehand.
        with made_public():
            await self._connection.transport.apply(Topology(queues=(queue,)), ApplyMode.CREATE)

    async def _receive(self, message: Message[bytes]) -> None:
        waiter = self._waiting.pop(message.correlation_id, None)
        if waiter is None or waiter.done():
            self.counters.unmatched += 1
        else:
            waiter.set_result(message)

    async def _end(self) -> None:
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(ClosedError("the connection was closed before the answer came"))
        # Without a link nobody waits for one: RabbitMQ removes the queue by itself after ten minutes.
        if self._queue is not None and self._connection.state.phase is Phase.CONNECTED:
            with suppress(AcemqError):
                await self._connection.transport.delete(self._queue.name)


def reply_queue(name: str) -> Queue:
    """Durable, so that it outlives the link and answers wait in it for the next one."""
    return Queue(name, type="classic", native={"rabbitmq": {"x-expires": EXPIRES // timedelta(milliseconds=1)}})


def _has_answer(waiter: asyncio.Future[Message[bytes]]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None


async def _read(answer: Message[bytes], reader: Reader[R]) -> R:
    failure = answer.headers.get(h.REPLY_ERROR)
    if failure is not None:
        raise ResponderError(h.text(failure) or "no reason given")
    return await reader.read_async(answer.body, answer.content_type, answer.type)


# Answering


class Responder(Consumer):
    """A consumer whose handler's answers go to whoever asked. Made by `AceMQ.respond()`."""

    def __init__(self, queue: str, *, codecs: Codecs, origin: str, call: Call, **made: Any) -> None:
        super().__init__(queue, call=_Answering(call, self._reply), **made)
        self.answered = 0
        self.unanswerable = 0
        """Requests that named no address."""
        self.failed = 0
        """Requests that failed, or whose address was gone."""
        self._codecs, self._origin = codecs, origin
        self._gone_addresses: dict[str, None] = {}

    async def _reply(self, message: Message[Any], answer: object) -> Ack | None:
        if isinstance(answer, Ack):
            raise FatalError(
                f"{self.handler!r} returned an Ack; a responder returns the answer, and raises if it has none"
            )
        address = message.reply_to
        if address is None:
            self.unanswerable += 1
            return None
        try:
            reply = await self._answer_to(message, address, answer)
        except ClaimStoreError:
            await sleep(self.mover.clock, _STEP_BACK)
            return Ack.release()
        self.answered += 1
        result = await self.mover.outbound.move(reply)
        if result.outcome is Published.ROUTED:
            return None
        self.answered -= 1
        if result.outcome is Published.UNROUTABLE:
            self.failed += 1
            self._report_gone(message, address)
            return None
        await sleep(self.mover.clock, _STEP_BACK)  # or it would be handled again and again while the broker refuses
        return Ack.release()

    async def _settle(self, decision: Decision, message: Message[Any], span: Span | None, began: float) -> bool:
        """Whatever keeps a request from being answered is said to whoever asked, before it is set aside."""
        if decision.row.copy in (".dlq", ".parked") and message.delivery not in self._gone:
            self.failed += 1
            address = message.reply_to
            if address is not None:
                reason = reason_of(decision.error if decision.error is not None else decision.reason or decision.text)
                await self.mover.outbound.move(await self._answer_to(message, address, None, error=reason))
        return await super()._settle(decision, message, span, began)

    async def _answer_to(
        self, message: Message[Any], address: str, answer: object, *, error: str | None = None
    ) -> Outgoing:
        try:
            body, content_type = await self._codecs_of(message.content_type).write_async(answer)
        except CodecError:
            if error is None:
                raise
            body, content_type = b"null", "application/json"
        identity = new_id()
        return Outgoing(
            exchange="",
            routing_key=address,
            body=body,
            headers=write(
                id=identity,
                type=address,
                correlation_id=message.correlation_id,
                causation_id=message.id,
                first_seen_ms=to_millis(self.mover.clock.now()),
                origin=self._origin,
                headers=None if error is None else {h.REPLY_ERROR: error},
            ),
            message_id=identity,
            content_type=content_type,
        )

    def _codecs_of(self, content_type: str | None) -> Codecs:
        """What the request was read with; where that writes nothing but bytes, what this connection writes with."""
        try:
            codec = self._codecs.reader_of(content_type)
        except DecodeError:
            return self._codecs
        return self._codecs if media_type(codec.content_type) == OCTETS else Codecs.of(codec)

    def _report_gone(self, message: Message[Any], address: str) -> None:
        if address in self._gone_addresses:
            return
        if len(self._gone_addresses) >= REMEMBERED:
            del self._gone_addresses[next(iter(self._gone_addresses))]
        self._gone_addresses[address] = None
        text = f"the answer found no queue {address!r}: whoever asked is gone"
        self.mover.report(
            Diagnostic(REPLY_UNDELIVERED, "warning", text, self.queue, address, message.id, message.attempt)
        )


class _Answering(Call):
    """A handler whose answer is sent before the request is accepted."""

    def __init__(self, call: Call, reply: Callable[[Message[Any], object], Awaitable[Ack | None]]) -> None:
        super().__init__(call.handler, call.pool)
        self._reply = reply

    async def __call__(self, given: Any) -> object:
        return await self._reply(given, await super().__call__(given))


def responder(
    connection: Connection, queue: str, payload: Payload[T], handler: Responding[T], options: ConsumeOptions
) -> Opening[Responder]:
    if "retry_for" in options or options.get("retry", RetryPolicy.none()) != RetryPolicy.none():
        raise ConfigurationError(
            "retry= is not for respond(): whoever asked is told of the failure at once, and may ask again"
        )
    check_handler(handler, payload.into if isinstance(payload, PayloadType) else payload)
    codecs = Codecs.of(options["codec"]) if "codec" in options else connection.codecs

    def make(queue: str, **made: Any) -> Responder:
        return Responder(queue, codecs=codecs, origin=connection.origin, **made)

    given: ConsumeOptions = {**options, "retry": RetryPolicy.none()}
    return connection.consumer_of(make, queue, payload, handler, given)
