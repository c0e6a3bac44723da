"""From a payload to a confirmed message: encode, take a permit, hand it to the transport, say how it ended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, cast

import msgspec
from opentelemetry.trace import Span

from acemq import delays
from acemq import headers as h
from acemq import transport as port
from acemq.clock import SYSTEM, Clock, check_duration
from acemq.codec import Codecs
from acemq.delays import Way
from acemq.errors import (
    AcemqError,
    BatchPublishError,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    LoopError,
    PublishingPausedError,
    PublishRefusedError,
)
from acemq.headers import HeaderValue
from acemq.message import CURRENT, IN_BATCH
from acemq.public_errors import publish_error
from acemq.publishing.draft import Draft, draft_of
from acemq.publishing.encoding import Encoder, check_place, check_priority
from acemq.publishing.gate import PAUSED, Gate, WhenBlocked
from acemq.publishing.lanes import KnownLanes
from acemq.publishing.options import PublishOptions
from acemq.publishing.passing import Passing
from acemq.publishing.permits import Permits
from acemq.telemetry import Telemetry, end_span
from acemq.transport import Outgoing, Published, PublishResult, Transport

if TYPE_CHECKING:
    from acemq.interceptors import PublishChain

WINDOW = 500
"""Messages of one batch handed to a transport at a time."""

ANOTHER_LOOP = (
    "this connection belongs to another event loop; make one connection for each loop, "
    "or call the connection's `blocking` from a thread without one"
)

NAMES = 10_000
"""Queues whose sends are counted; beyond it the one that was sent to first is forgotten."""


class Receipt(msgspec.Struct, frozen=True):
    """The broker has the message: confirmed and, unless `mandatory=False`, routed."""

    message_id: str
    exchange: str
    routing_key: str
    routed: bool | None
    """True; `None` with `mandatory=False`: not asked."""
    took: timedelta
    """From the write to the confirm, so without what was waited for before it, such as a permit."""


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
        lay_ladder: Callable[[], Awaitable[None]],
        max_outstanding: int = 1_000,
        correlate: bool = True,
        when_blocked: WhenBlocked = WhenBlocked.REFUSE,
        clock: Clock = SYSTEM,
    ) -> None:
        """`lay_ladder` sees to the queues over which delayed publishes go where the broker cannot delay."""
        self._transport, self._telemetry = transport, telemetry
        self.encoder = Encoder(transport, codecs=codecs, origin=origin, correlate=correlate, clock=clock)
        self._lay_ladder, self._has_ladder = lay_ladder, False
        self.lanes = KnownLanes(transport.exists, clock)
        self.timeout = timeout
        self.permits = Permits(max_outstanding, lambda: transport.state.outstanding)
        self.gate = Gate(when_blocked, clock)
        self.chain: PublishChain | None = None
        """Hooks round what the application publishes; the library's own copies pass beside it."""
        self.sent: dict[str, int] = {}
        """Confirmed sends of the application, by queue."""
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
        self.gate.close()

    # For the application

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        options: PublishOptions | None = None,
        *,
        own: bool = False,
    ) -> Receipt:
        """`own`: a hop of the library's, which goes on while the application has paused publishing."""
        self._check_usable()
        within = options.get("timeout", self.timeout) if options else self.timeout
        transaction = self._transaction(options) if options and "transaction" in options else None
        if self.chain is not None or self.encoder.codecs_of(options).is_async:
            check_duration("timeout", within)
            draft = draft_of(exchange, routing_key, payload, options)
            return await self._publish_draft(draft, within, own, transaction)
        if options and "priority" in options:
            began = time.perf_counter()
            routing_key, options = await self._into_lane(exchange, routing_key, options, within)
            within = _left(within, began)
        outgoing = self.encoder.encode(exchange, routing_key, payload, options)
        if options and "delay" in options and not self._has_ladder:
            await self._see_to_ladder(outgoing)
        telemetry = self._telemetry
        span = self._open_span(outgoing) if telemetry.tracing else None
        result, took = await self._through(outgoing, within, span, own, transaction)
        error = None if result.outcome is Published.ROUTED else publish_error(result, outgoing)
        if span is not None or telemetry.metering:
            self._count(outgoing, error.outcome if error else "confirmed", took, span, error)
        if error is not None:
            raise error
        if not exchange:
            self._sent(routing_key)
        return _receipt(outgoing, timedelta(seconds=took))

    async def publish_many(
        self, exchange: str, routing_key: str, payloads: Iterable[object], options: PublishOptions | None = None
    ) -> list[Receipt]:
        """All of them, in windows; receipts in the order of the payloads.

        Every message is tried and its end awaited. If any did not get through: `BatchPublishError` with all results.
        """
        self._check_usable()
        if self.gate.is_paused:
            raise PublishingPausedError(PAUSED, exchange=exchange, routing_key=routing_key)
        if options and (options.keys() & {"message_id", "envelope"}):
            raise ConfigurationError(
                "message_id and envelope belong to one message; publish_many gives each its own id"
            )
        within = options.get("timeout", self.timeout) if options else self.timeout
        if options and "transaction" in options:
            return await self._publish_many_in(self._transaction(options), exchange, routing_key, payloads, options)
        if self.chain is not None or self.encoder.codecs_of(options).is_async:
            check_place(exchange, routing_key)
            self.encoder.check_options(exchange, *await self._into_lane(exchange, routing_key, options or {}, within))
            return await self.publish_batch(
                (draft_of(exchange, routing_key, payload, options) for payload in payloads), within
            )
        if options and "priority" in options:
            routing_key, options = await self._into_lane(exchange, routing_key, options, within)
        if options and options.get("delay"):
            way = self.encoder.check_options(exchange, routing_key, options)
            if way in (Way.LADDER, Way.HOPS):
                await self._lay_ladder()
        results: list[Receipt | Exception] = []
        drafts = self.encoder.encode_many(exchange, routing_key, payloads, options)
        while True:
            # The permits come first: no payload is taken from the caller's iterable before there is room for it.
            taken, refusal = await self._room(WINDOW, within)
            try:
                window = list(islice(drafts, taken or WINDOW))
                if not window:
                    break
                results.extend(
                    await self._publish_window(window, within) if refusal is None else self._refuse(window, refusal)
                )
            finally:
                self.permits.give(taken)
            # A transport that answers without waiting must not keep the loop to itself for the whole batch.
            await asyncio.sleep(0)
        return all_through(results)

    async def _see_to_ladder(self, outgoing: Outgoing) -> None:
        if delays.is_on_its_way(outgoing):
            await self._lay_ladder()
            self._has_ladder = True

    async def _publish_many_in(
        self,
        transaction: object,
        exchange: str,
        routing_key: str,
        payloads: Iterable[object],
        options: PublishOptions,
    ) -> list[Receipt]:
        """In the caller's transaction, so many rows a statement; one by one where hooks or the codec want each."""
        results: list[Receipt | Exception] = []
        if self.chain is not None or self.encoder.codecs_of(options).is_async:
            for payload in payloads:
                try:
                    results.append(await self.publish(exchange, routing_key, payload, options))
                except AcemqError as error:
                    results.append(error)
            return all_through(results)
        within = options.get("timeout", self.timeout)
        routing_key, options = await self._into_lane(exchange, routing_key, options, within)
        drafts = self.encoder.encode_many(exchange, routing_key, payloads, options)
        while window := list(islice(drafts, WINDOW)):
            results.extend(await self._publish_window(window, within, transaction=transaction))
        return all_through(results)

    def check_options(self, exchange: str, routing_key: str, options: PublishOptions) -> None:
        """As far as it can be told without I/O: a queue that is not known here may have lanes for its priority."""
        if options.get("priority") is not None and not exchange:
            known = self.lanes.known(routing_key)
            if known:
                routing_key, options = self.encoder.into_lane(routing_key, options)
            elif known is None:
                check_priority(options)
                options = cast("PublishOptions", {name: value for name, value in options.items() if name != "priority"})
        self.encoder.check_options(exchange, routing_key, options)

    async def _into_lane(
        self, exchange: str, routing_key: str, options: PublishOptions, within: timedelta
    ) -> tuple[str, PublishOptions]:
        """The same, but for a priority that names one of the lanes of a queue."""
        priority = options.get("priority")
        if exchange or priority is None:
            return routing_key, options
        check_place(exchange, routing_key)
        check_priority(options)
        try:
            async with asyncio.timeout(within.total_seconds()):
                has_lanes = await self.lanes.has(routing_key)
        except (port.TransportError, TimeoutError) as error:
            raise PublishRefusedError(
                f"whether queue {routing_key!r} has lanes for priority={priority} could not be seen, and "
                f"nothing was written: {error or f'no answer within {within}'}",
                routing_key=routing_key,
            ) from error
        return self.encoder.into_lane(routing_key, options) if has_lanes else (routing_key, options)

    def _transaction(self, options: PublishOptions) -> object:
        transaction = options.get("transaction")
        if transaction is None:
            raise ConfigurationError("transaction=None is no transaction; leave the option out to send without one")
        can = self._transport.capabilities
        if not can.transactions:
            raise CapabilityError(can.transport, "transactions with a database", "transaction", "Use the outbox")
        return transaction

    async def _room(self, most: int, within: timedelta) -> tuple[int, AcemqError | None]:
        """Permits for some of a batch, at most so many; without any, why the rest is refused."""
        refusal = await self.gate.refusal(within.total_seconds()) if self.gate.is_shut else None
        if refusal is not None:
            return 0, refusal
        taken = await self.permits.take_some(most, within)
        return taken, None if taken else port.TimedOut(self.permits.shortage(within))

    def _refuse(self, window: Sequence[Outgoing | Exception], why: AcemqError) -> list[Receipt | Exception]:
        refused = PublishResult(Published.REFUSED, why)
        for draft in window:
            if isinstance(draft, Outgoing):
                self._count(draft, "refused", 0.0, None, None)
        return [draft if isinstance(draft, Exception) else publish_error(refused, draft) for draft in window]

    async def _publish_window(
        self,
        window: Sequence[Outgoing | Exception],
        within: timedelta,
        *,
        traced: bool = False,
        transaction: object | None = None,
    ) -> list[Receipt | Exception]:
        began = time.perf_counter()
        batch = [draft for draft in window if isinstance(draft, Outgoing)]
        opens = self._telemetry.tracing and not traced
        spans = {id(outgoing): self._open_span(outgoing) for outgoing in batch} if opens else {}
        try:
            results = await self._transport.publish(batch, within=within, transaction=transaction)
            answers = iter(await self._once_freed(batch, results, _left(within, began)) if self.gate.waits else results)
        except BaseException:
            if transaction is None:
                self.permits.owe(len(window))
                self.permits.give(-len(window))  # publish_many gives back what it has taken
            for span in spans.values():
                end_span(span, "failed")
            raise
        took = time.perf_counter() - began
        lasted, watched = timedelta(seconds=took), self._telemetry.metering or bool(spans)
        ended: list[Receipt | Exception] = []
        for draft in window:
            if isinstance(draft, Exception):
                ended.append(draft)
                continue
            answer = next(answers)
            error = None if answer.outcome is Published.ROUTED else publish_error(answer, draft)
            if watched:
                self._count(draft, error.outcome if error else "confirmed", took, spans.get(id(draft)), error)
            if error is None and not draft.exchange:
                self._sent(draft.routing_key)
            ended.append(error or _receipt(draft, lasted))
        return ended

    # Drafts: what passes through hooks, and batches of mixed destinations

    async def publish_batch(self, messages: Iterable[Draft], timeout: timedelta | None = None) -> list[Receipt]:
        """As `publish_many`, of drafts. What a hook or the codec refuses ends its message, and not the batch."""
        self._check_usable()
        if self.gate.is_paused:
            raise PublishingPausedError(PAUSED)
        within = self.timeout if timeout is None else check_duration("timeout", timeout)
        results: list[Receipt | Exception] = []
        drafts = iter(messages)
        while True:
            room = await self.permits.take_some(WINDOW, within)
            # Given back before the hooks, which may publish themselves and would wait for what this batch holds.
            self.permits.give(room)
            window = list(islice(drafts, room or WINDOW))
            if not window:
                break
            results.extend(await self._publish_drafts(window, within))
            await asyncio.sleep(0)
        return all_through(results)

    async def _publish_drafts(self, window: Sequence[Draft], within: timedelta) -> list[Receipt | Exception]:
        passing = [Passing(draft, self.chain) for draft in window]
        results: list[Receipt | Exception] = []
        try:
            ready = [await self._encoded_or_refused(each, within) for each in passing]
            while len(results) < len(ready):
                rest = ready[len(results) :]
                taken, refusal = await self._room(len(rest), within)
                part = rest[: taken or len(rest)]
                try:
                    ended = (
                        await self._publish_window(part, within, traced=True)
                        if refusal is None
                        else self._refuse(part, refusal)
                    )
                finally:
                    self.permits.give(taken)
                for each, result in zip(passing[len(results) :], ended, strict=False):
                    await each.tell(result)
                results.extend(ended)
        except BaseException as error:
            for each in passing:
                await each.tell(error, "failed")
            raise
        return results

    async def _publish_draft(self, draft: Draft, within: timedelta, own: bool, transaction: object | None) -> Receipt:
        passing = Passing(draft, self.chain)
        outgoing = await self._encode(passing, within)
        try:
            result, took = await self._through(outgoing, within, passing.span, own, transaction)
        except BaseException as raised:
            passing.span = None  # `_through` has closed it: it knows whether something was written
            await passing.tell(raised)
            raise
        error = None if result.outcome is Published.ROUTED else publish_error(result, outgoing)
        self._count(outgoing, error.outcome if error else "confirmed", took, None, error)
        if error is not None:
            await passing.tell(error)
            raise error
        if not outgoing.exchange:
            self._sent(outgoing.routing_key)
        receipt = _receipt(outgoing, timedelta(seconds=took))
        await passing.tell(receipt)
        return receipt

    async def _encoded_or_refused(self, passing: Passing, within: timedelta) -> Outgoing | Exception:
        try:
            return await self._encode(passing, within)
        except Exception as error:
            return error

    async def _encode(self, passing: Passing, within: timedelta) -> Outgoing:
        """Open the span, ask the hooks, and only then encode. What is refused here is counted as refused."""
        draft, telemetry = passing.draft, self._telemetry
        began, trace_headers = time.perf_counter(), dict[str, HeaderValue]()
        check_place(draft.exchange, draft.routing_key)
        lane, given = await self._into_lane(draft.exchange, draft.routing_key, draft.given, within)
        self.encoder.check_options(draft.exchange, lane, given)
        draft.complete(self.encoder.envelope, self.encoder.codecs)
        where = draft.exchange, draft.routing_key
        if telemetry.tracing:
            passing.span, trace_headers = telemetry.draft_span(*where, draft.envelope)
        try:
            await passing.before()
            climbs = self.encoder.way(draft.exchange, draft.routing_key, draft.delay) is Way.LADDER
            options = draft.options_without_envelope() if climbs else draft.options()
            lane, options = await self._into_lane(draft.exchange, draft.routing_key, options, within)
            codecs, encoded = self.encoder.codecs_of(options), None
            if codecs.is_async:
                # What is wrong with the rest is found before a store is asked.
                check_place(draft.exchange, draft.routing_key)
                self.encoder.check_options(draft.exchange, lane, options)
                encoded = await codecs.write_async(draft.payload, options.get("content_type"))
            outgoing = self.encoder.encode(draft.exchange, lane, draft.payload, options, encoded)
            if "delay" in options:
                await self._see_to_ladder(outgoing)
        except BaseException as error:
            if telemetry.metering:
                took = time.perf_counter() - began
                telemetry.published(draft.exchange, draft.routing_key, draft.envelope.type, "refused", took)
            await passing.tell(error)
            raise
        if passing.span is not None:
            assert isinstance(outgoing.headers, dict)
            outgoing.headers.update(trace_headers)
            if where != (draft.exchange, lane):
                telemetry.redirected(passing.span, draft.exchange, lane)
        return outgoing

    # For the library's own copies, replies and hops

    async def move(self, outgoing: Outgoing) -> PublishResult:
        """A copy, confirmed and mandatory, also while the connection closes. How it ended is a value, never raised."""
        (result,) = await self.move_some((outgoing,), self.timeout)
        return result

    async def move_some(self, batch: Sequence[Outgoing], within: timedelta) -> Sequence[PublishResult]:
        """The same for as many of them as there is room for, the first ones and one at least: a result each, in order.

        `within` bounds all of it.
        """
        began = time.perf_counter()
        taken = await self.permits.take_some(len(batch), within)
        if not taken:
            return [PublishResult(Published.REFUSED, port.TimedOut(self.permits.shortage(within)))]
        try:
            results = await self._transport.publish(batch[:taken], within=_left(within, began))
        except AcemqError as error:
            self.permits.give(taken)
            outcome = Published.REFUSED if isinstance(error, ClosedError) else Published.FAILED
            return [PublishResult(outcome, error)] * taken
        except BaseException:
            self.permits.owe(taken)
            raise
        self.permits.give(taken)
        return results

    # One publish

    async def _through(
        self, outgoing: Outgoing, within: timedelta, span: Span | None, own: bool, transaction: object | None = None
    ) -> tuple[PublishResult, float]:
        """How it ended, and the seconds from the write to that; of what was not written, all of them."""
        permits, limit = self.permits, within
        began = written = time.perf_counter()
        if transaction is not None:
            # Without a permit: it is the caller's connection that writes, and the caller's to be slow.
            (result,) = await self._transport.publish((outgoing,), within=within, transaction=transaction)
            return result, time.perf_counter() - began
        try:
            if self.gate.is_shut:
                refusal = await self.gate.refusal(within.total_seconds(), own=own)
                if refusal is not None:
                    return PublishResult(Published.REFUSED, refusal), time.perf_counter() - began
                within, written = _left(limit, began), time.perf_counter()
            if not permits.take_now():
                if not await permits.take_some(1, within):
                    shortage = port.TimedOut(permits.shortage(within))
                    return PublishResult(Published.REFUSED, shortage), time.perf_counter() - began
                within, written = _left(limit, began), time.perf_counter()
        except asyncio.CancelledError:
            self._count(outgoing, "refused", time.perf_counter() - began, span, None)
            raise
        try:
            (result,) = await self._transport.publish((outgoing,), within=within)
            if self.gate.waits and result.error is not None:
                (result,) = await self._once_freed((outgoing,), (result,), _left(limit, began))
        except BaseException:
            # The message may be out: its permit comes back when the broker has answered, or the link is gone.
            permits.owe(1)
            self._count(outgoing, "failed", time.perf_counter() - began, span, None)
            raise
        permits.give(1)
        return result, time.perf_counter() - written

    async def _once_freed(
        self, batch: Sequence[Outgoing], results: Sequence[PublishResult], within: timedelta
    ) -> Sequence[PublishResult]:
        """With `WhenBlocked.WAIT`: what met an alarm that the gate had not heard of yet is tried again behind it."""
        began = time.perf_counter()
        ended = list(results)
        while self.gate.waits:
            held = [at for at, result in enumerate(ended) if isinstance(result.error, port.Blocked)]
            left = (within - timedelta(seconds=time.perf_counter() - began)).total_seconds()
            if not held or left <= 0:
                break
            self.gate.told(self._transport.state.blocked)
            await asyncio.sleep(0)  # between two alarms nothing else might make the loop turn
            if await self.gate.refusal(left, own=True) is None:
                again = await self._transport.publish([batch[at] for at in held], within=_left(within, began))
                for at, result in zip(held, again, strict=True):
                    ended[at] = result
        return ended

    def _check_usable(self) -> None:
        if self._closed or (self._draining and CURRENT.get() is None and IN_BATCH.get() is None):
            raise ClosedError("the connection is closed, or not open yet; publish inside `async with acemq.connect(…)`")
        # A thread runs one loop at a time, so ours is the one; asking for the running one is a system call on 3.11.
        loop = self._loop
        if threading.get_ident() != self._thread or loop is None or not loop.is_running():
            raise LoopError(ANOTHER_LOOP)

    def _sent(self, queue: str) -> None:
        sent = self.sent
        if queue not in sent and len(sent) >= NAMES:
            del sent[next(iter(sent))]
        sent[queue] = sent.get(queue, 0) + 1

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


def _left(limit: timedelta, began: float) -> timedelta:
    """Of a time limit; a millisecond where nothing is, as a transport takes no less."""
    return max(limit - timedelta(seconds=time.perf_counter() - began), timedelta(milliseconds=1))


def all_through(results: list[Receipt | Exception]) -> list[Receipt]:
    """The receipts of a batch; `BatchPublishError` where one has none."""
    failures = [result for result in results if isinstance(result, Exception)]
    if failures:
        raise BatchPublishError(results) from failures[0]
    return [result for result in results if isinstance(result, Receipt)]


def _receipt(outgoing: Outgoing, took: timedelta) -> Receipt:
    return Receipt(
        outgoing.message_id,
        outgoing.exchange,
        outgoing.routing_key,
        True if outgoing.mandatory else None,
        took,
    )
