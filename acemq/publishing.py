"""From a payload to a confirmed message: encode, take a permit, hand it to the transport, say how it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import Generic, TypedDict, TypeVar, Unpack

import msgspec
from opentelemetry.trace import Span

from acemq import headers as h
from acemq import transport as port
from acemq.clock import SYSTEM, Clock, check_duration
from acemq.codec import Codec, Codecs
from acemq.envelope import Envelope, to_millis, write
from acemq.errors import (
    AcemqError,
    BatchPublishError,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    EncodeError,
    LoopError,
)
from acemq.headers import HeaderValue
from acemq.ids import new_id
from acemq.mapping import publish_error
from acemq.message import CURRENT, IN_BATCH
from acemq.permits import Permits
from acemq.telemetry import Telemetry, end_span
from acemq.topology import check_key, check_name
from acemq.transport import Outgoing, Published, PublishResult, Transport

T_contra = TypeVar("T_contra", contravariant=True)

WINDOW = 500
"""Messages of one batch handed to a transport at a time."""


class PublishOptions(TypedDict, total=False):
    """What may be said about one publish; all of it optional."""

    headers: Mapping[str, HeaderValue]
    """The application's own; names beginning with `x-acemq-` are refused."""
    message_id: str
    """A new UUID of version 4."""
    type: str
    """The routing key."""
    version: int
    """1; of the payload's shape, for readers that look at it."""
    correlation_id: str
    """That of the message in hand, else the id."""
    causation_id: str
    """The id of the message in hand."""
    claim: str
    """The application's own word about where a body lies; the library never reads it."""
    envelope: Envelope
    """Instead of the seven above; together they are refused."""
    codec: Codec
    """The connection's."""
    content_type: str
    """Picks the codec; for bytes it is only the label."""
    persistent: bool
    """True: the message survives a restart of the broker."""
    mandatory: bool
    """True: a message that no queue takes is an error."""
    priority: int
    """0–255, below the levels that the queue was declared with."""
    expires_in: timedelta
    """After it the message is not handled any more."""
    delay: timedelta
    """Not before; needs the capability."""
    reply_to: str
    """The queue that an answer goes to."""
    ordering_key: str
    """For queues declared ordered."""
    timeout: timedelta
    """For permit, connection and confirm together; the connection's `publish_timeout`."""


_OPTIONS = frozenset(PublishOptions.__annotations__)
_SAID_BY_ENVELOPE = ("headers", "message_id", "type", "version", "correlation_id", "causation_id", "claim")
ENVELOPE_OPTIONS = (*_SAID_BY_ENVELOPE, "envelope")
"""The options that become an envelope."""


class Receipt(msgspec.Struct, frozen=True):
    """The broker has the message: confirmed and, unless `mandatory=False`, routed."""

    message_id: str
    exchange: str
    routing_key: str
    routed: bool | None
    """True; `None` with `mandatory=False`: not asked."""
    took: timedelta
    """From the write to the confirm."""


class Publisher(Generic[T_contra]):
    """An exchange, a routing key and a payload class, named once. No I/O to make, holds nothing, shared freely."""

    def __init__(self, outbound: Outbound, exchange: str, routing_key: str, options: PublishOptions) -> None:
        self._outbound, self._exchange, self._routing_key, self._options = outbound, exchange, routing_key, options

    async def publish(
        self, payload: T_contra, *, routing_key: str | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        return await self._outbound.publish(self._exchange, self._key(routing_key), payload, self._with(options))

    async def publish_many(
        self, payloads: Iterable[T_contra], *, routing_key: str | None = None, **options: Unpack[PublishOptions]
    ) -> list[Receipt]:
        return await self._outbound.publish_many(self._exchange, self._key(routing_key), payloads, self._with(options))

    def _key(self, routing_key: str | None) -> str:
        return self._routing_key if routing_key is None else routing_key

    def _with(self, options: PublishOptions) -> PublishOptions:
        return {**self._options, **options} if options else self._options


class Outbound:
    """The one way out of a connection: for what the application publishes and for the library's own copies."""

    def __init__(
        self,
        transport: Transport,
        *,
        codecs: Codecs,
        telemetry: Telemetry,
        origin: str,
        timeout: timedelta,
        max_outstanding: int = 1_000,
        correlate: bool = True,
        clock: Clock = SYSTEM,
    ) -> None:
        self._transport, self._codecs, self._telemetry, self._clock = transport, codecs, telemetry, clock
        self._origin, self._timeout, self._correlate = origin, timeout, correlate
        self.permits = Permits(max_outstanding, lambda: transport.state.outstanding)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._closed, self._draining = True, False

    def open(self) -> None:
        self._loop, self._thread, self._closed = asyncio.get_running_loop(), threading.get_ident(), False

    def drain(self) -> None:
        """From now on only handlers that still run may publish, so that they can finish, and the library itself."""
        self._draining = True

    def close(self) -> None:
        """Refuse whatever the application publishes from now on."""
        self._closed = True

    # For the application

    async def publish(
        self, exchange: str, routing_key: str, payload: object, options: PublishOptions | None = None
    ) -> Receipt:
        self._check_usable()
        outgoing = self.draft(exchange, routing_key, payload, options)
        within = options.get("timeout", self._timeout) if options else self._timeout
        telemetry = self._telemetry
        span = self._open_span(outgoing) if telemetry.tracing else None
        began = time.perf_counter()
        result = await self._through(outgoing, within, span, began)
        took = time.perf_counter() - began
        error = None if result.outcome is Published.ROUTED else publish_error(result, outgoing)
        if span is not None or telemetry.metering:
            self._count(outgoing, error.outcome if error else "confirmed", took, span, error)
        if error is not None:
            raise error
        return _receipt(outgoing, took)

    async def publish_many(
        self, exchange: str, routing_key: str, payloads: Iterable[object], options: PublishOptions | None = None
    ) -> list[Receipt]:
        """All of them, in windows; receipts in the order of the payloads.

        Every message is tried and its end awaited. If any did not get through: `BatchPublishError` with all results.
        """
        self._check_usable()
        if options and (options.keys() & {"message_id", "envelope"}):
            raise ConfigurationError(
                "message_id and envelope belong to one message; publish_many gives each its own id"
            )
        within = options.get("timeout", self._timeout) if options else self._timeout
        results: list[Receipt | Exception] = []
        drafts = self._drafts(exchange, routing_key, payloads, options)
        while True:
            # The permits come first: no payload is taken from the caller's iterable before there is room for it.
            taken = await self.permits.take_some(WINDOW, within)
            window = list(islice(drafts, taken or WINDOW))
            if not window:
                self.permits.give(taken)
                break
            results.extend(await self._publish_window(window, within) if taken else self._refuse(window, within))
            self.permits.give(taken)
            # A transport that answers without waiting must not keep the loop to itself for the whole batch.
            await asyncio.sleep(0)
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:
            raise BatchPublishError(results) from failures[0]
        return [result for result in results if isinstance(result, Receipt)]

    def _drafts(
        self, exchange: str, routing_key: str, payloads: Iterable[object], options: PublishOptions | None
    ) -> Iterator[Outgoing | EncodeError]:
        for payload in payloads:
            try:
                yield self.draft(exchange, routing_key, payload, options)
            except EncodeError as error:
                yield error  # it ends this message, and not the batch

    def _refuse(self, window: Sequence[Outgoing | EncodeError], within: timedelta) -> list[Receipt | Exception]:
        refused = PublishResult(Published.REFUSED, port.TimedOut(self.permits.shortage(within)))
        return [draft if isinstance(draft, EncodeError) else publish_error(refused, draft) for draft in window]

    async def _publish_window(
        self, window: Sequence[Outgoing | EncodeError], within: timedelta
    ) -> list[Receipt | Exception]:
        began = time.perf_counter()
        batch = [draft for draft in window if isinstance(draft, Outgoing)]
        spans = {id(outgoing): self._open_span(outgoing) for outgoing in batch} if self._telemetry.tracing else {}
        try:
            answers = iter(await self._transport.publish(batch, within=within))
        except BaseException:
            self.permits.owe(len(window))
            self.permits.give(-len(window))  # publish_many gives back what it has taken
            for span in spans.values():
                end_span(span, "failed")
            raise
        took = time.perf_counter() - began
        results: list[Receipt | Exception] = []
        for draft in window:
            if isinstance(draft, EncodeError):
                results.append(draft)
                continue
            answer = next(answers)
            error = None if answer.outcome is Published.ROUTED else publish_error(answer, draft)
            self._count(draft, error.outcome if error else "confirmed", took, spans.get(id(draft)), error)
            results.append(error or _receipt(draft, took))
        return results

    # For the library's own copies, replies and hops

    async def move(self, outgoing: Outgoing) -> PublishResult:
        """A copy, confirmed and mandatory, also while the connection closes. How it ended is a value, never raised."""
        if not self.permits.take_now() and not await self.permits.take_some(1, self._timeout):
            return PublishResult(Published.REFUSED, port.TimedOut(self.permits.shortage(self._timeout)))
        try:
            (result,) = await self._transport.publish((outgoing,), within=self._timeout)
        except AcemqError as error:
            self.permits.give(1)
            return PublishResult(Published.REFUSED if isinstance(error, ClosedError) else Published.FAILED, error)
        except BaseException:
            self.permits.owe(1)
            raise
        self.permits.give(1)
        return result

    # Encoding

    def draft(
        self, exchange: str, routing_key: str, payload: object, options: PublishOptions | None = None
    ) -> Outgoing:
        """The message as it will stand on the wire. Refuses bad arguments and what cannot be encoded; no I/O."""
        check_key("routing key", routing_key)
        if exchange:
            check_name("exchange", exchange)
        elif not routing_key:
            raise ConfigurationError("the queue name is empty; send() names the queue that takes the message")
        if options:
            return self._draft_with(exchange, routing_key, payload, options)
        body, content_type = self._codecs.write(payload)
        identity = new_id()
        correlation, causation = identity, None
        handled = CURRENT.get() if self._correlate else None
        if handled is not None:
            correlation, causation = handled.correlation_id, handled.id
        return Outgoing(
            exchange=exchange,
            routing_key=routing_key,
            body=body,
            headers=write(
                id=identity,
                type=routing_key,
                correlation_id=correlation,
                causation_id=causation,
                first_seen_ms=self._now_ms(),
                origin=self._origin,
            ),
            message_id=identity,
            content_type=content_type,
        )

    def _draft_with(self, exchange: str, routing_key: str, payload: object, options: PublishOptions) -> Outgoing:
        self.check_options(exchange, routing_key, options)
        headers = self._headers_with(routing_key, options)
        codecs = Codecs.of(options["codec"]) if "codec" in options else self._codecs
        body, content_type = codecs.write(payload, options.get("content_type"))
        expires_in = options.get("expires_in")
        if expires_in is not None and not self._transport.capabilities.expiry:
            headers[h.EXPIRES_AT] = self._now_ms() + expires_in // timedelta(milliseconds=1)
            expires_in = None
        return Outgoing(
            exchange=exchange,
            routing_key=routing_key,
            body=body,
            headers=headers,
            message_id=str(headers[h.ID]),
            content_type=content_type,
            reply_to=options.get("reply_to"),
            mandatory=options.get("mandatory", True),
            persistent=options.get("persistent", True),
            delay=options.get("delay") or None,
            expires_in=expires_in,
            priority=options.get("priority"),
            ordering_key=options.get("ordering_key"),
        )

    def envelope(self, type: str, options: PublishOptions) -> Envelope:
        """What a publish with these options would carry, `type` unless they name one; for slips, which add to it."""
        headers = self._headers_with(type, options)
        return Envelope.from_headers(headers, routing_key=type, message_id=None, now=self._clock.now())

    def _headers_with(self, routing_key: str, options: PublishOptions) -> dict[str, HeaderValue]:
        envelope = options.get("envelope")
        if envelope is not None:
            given = [name for name in _SAID_BY_ENVELOPE if name in options]
            if given:
                raise ConfigurationError(
                    f"envelope= says it all: leave out {', '.join(given)}, or use envelope.replace()"
                )
            return (envelope if envelope.origin else envelope.replace(origin=self._origin)).to_headers()
        application = h.check_application(options["headers"]) if "headers" in options else None
        identity = options.get("message_id") or new_id()
        correlation, causation = options.get("correlation_id"), options.get("causation_id")
        handled = CURRENT.get() if self._correlate and correlation is None and causation is None else None
        if handled is not None:
            correlation, causation = handled.correlation_id, handled.id
        return write(
            id=check_key("message_id", identity),
            type=check_key("type", options.get("type", routing_key)),
            version=options.get("version", 1),
            correlation_id=correlation or identity,
            causation_id=causation,
            first_seen_ms=self._now_ms(),
            origin=self._origin,
            claim=options.get("claim"),
            headers=application,
        )

    def check_options(self, exchange: str, routing_key: str, options: PublishOptions) -> None:
        """Refuse options that are unknown, bad, or beyond what the target can do; no I/O."""
        unknown = options.keys() - _OPTIONS
        if unknown:
            raise TypeError(f"unexpected keyword argument {min(unknown)!r}; known: {', '.join(sorted(_OPTIONS))}")
        can = self._transport.capabilities_of("exchange", exchange) if exchange else self._can_queue(routing_key)
        if options.get("version", 1) < 1:
            raise ConfigurationError(f"version={options.get('version')} must be 1 or more")
        priority = options.get("priority")
        if priority is not None:
            if not 0 <= priority <= 255:
                raise ConfigurationError(f"priority={priority} must lie between 0 and 255")
            if priority >= max(can.priorities, 1) and not (exchange and can.priorities):
                levels = f"{priority + 1} priority levels"
                advice = "" if exchange else f"Declare it with .queue({routing_key!r}, priorities={priority + 1})"
                where = can.transport if exchange else f"queue {routing_key!r} on {can.transport}"
                raise CapabilityError(where, levels, f"priority={priority}", advice)
        if "timeout" in options:
            check_duration("timeout", options["timeout"])
        if "expires_in" in options:
            check_duration("expires_in", options["expires_in"])
        delay = check_duration("delay", options["delay"], zero=True) if "delay" in options else None
        if delay and (can.publish_delay is None or delay > can.publish_delay):
            raise CapabilityError(can.transport, "delayed publishes of this length", f"delay={delay}")
        if not options.get("mandatory", True) or can.unroutable != "unknown" or not exchange:
            return
        raise CapabilityError(
            can.transport, "a word about unroutable messages", "mandatory=True", "Publish with mandatory=False"
        )

    def _can_queue(self, queue: str) -> port.Capabilities:
        return self._transport.capabilities_of("queue", queue)

    # One publish

    async def _through(self, outgoing: Outgoing, within: timedelta, span: Span | None, began: float) -> PublishResult:
        permits = self.permits
        try:
            if not permits.take_now():
                if not await permits.take_some(1, within):
                    return PublishResult(Published.REFUSED, port.TimedOut(permits.shortage(within)))
                within = max(within - timedelta(seconds=time.perf_counter() - began), timedelta(milliseconds=1))
        except asyncio.CancelledError:
            self._count(outgoing, "refused", time.perf_counter() - began, span, None)
            raise
        try:
            (result,) = await self._transport.publish((outgoing,), within=within)
        except BaseException:
            # The message may be out: its permit comes back when the broker has answered, or the link is gone.
            permits.owe(1)
            self._count(outgoing, "failed", time.perf_counter() - began, span, None)
            raise
        permits.give(1)
        return result

    def _check_usable(self) -> None:
        if self._closed or (self._draining and CURRENT.get() is None and IN_BATCH.get() is None):
            raise ClosedError("the connection is closed, or not open yet; publish inside `async with acemq.connect(…)`")
        # A thread runs one loop at a time, so ours is the one; asking for the running one is a system call on 3.11.
        loop = self._loop
        if threading.get_ident() != self._thread or loop is None or not loop.is_running():
            raise LoopError("this connection belongs to another event loop; make one connection for each loop")

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self._clock is SYSTEM else to_millis(self._clock.now())

    def _open_span(self, outgoing: Outgoing) -> Span:
        headers = outgoing.headers
        assert isinstance(headers, dict)
        return self._telemetry.publish_span(outgoing.exchange, outgoing.routing_key, headers)

    def _count(
        self, outgoing: Outgoing, outcome: str, took: float, span: Span | None, error: BaseException | None
    ) -> None:
        if self._telemetry.metering:
            kind = str(outgoing.headers[h.TYPE])
            self._telemetry.published(outgoing.exchange, outgoing.routing_key, kind, outcome, took)
        if span is not None:
            end_span(span, outcome, error)


def _receipt(outgoing: Outgoing, took: float) -> Receipt:
    return Receipt(
        outgoing.message_id,
        outgoing.exchange,
        outgoing.routing_key,
        True if outgoing.mandatory else None,
        timedelta(seconds=took),
    )
