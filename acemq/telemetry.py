"""What the library tells of itself: metrics and spans by the names of CONTRACT.md section 14, and diagnostics.

Only `opentelemetry-api` is needed. Without an SDK nothing is computed: whether there is one is looked up once, when a
connection is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Literal, TypeAlias
from weakref import WeakKeyDictionary

import msgspec
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider, Observation
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from acemq import headers as h
from acemq.envelope import Envelope
from acemq.headers import Headers, HeaderValue
from acemq.message import CURRENT
from acemq.transport import Depth

SCOPE = "org.acemq.amqp"
log = logging.getLogger("acemq")

_W3C = TraceContextTextMapPropagator()
_FAILED = Status(StatusCode.ERROR)
_SYSTEMS = {"memory": "acemq_memory", "sql": "acemq_sql", "aws": "aws_sqs"}
_BAD_OUTCOMES = frozenset({"unroutable", "failed", "dead_lettered", "parked", "timed_out"})


class Diagnostic(msgspec.Struct, frozen=True):
    """Something that a person should know about. `attempt` 0: none."""

    name: str
    level: Literal["info", "warning", "error"]
    message: str
    queue: str | None = None
    destination: str | None = None
    message_id: str | None = None
    attempt: int = 0
    failure: BaseException | None = None


MOVE_FAILED = "acemq.move.failed"
DEAD_LETTERED = "acemq.message.dead.lettered"
PARKED = "acemq.message.parked"
RUNG_MISSING = "acemq.retry.rung.missing"
CONNECTION_LOST = "acemq.connection.lost"
CONNECTION_RECOVERED = "acemq.connection.recovered"
CONSUMER_LOST = "acemq.consumer.lost"
SETTLE_STALE = "acemq.settle.stale"
HANDLER_STUCK = "acemq.handler.stuck"
WORKER_ENDED = "acemq.worker.ended"
LISTENER_FAILED = "acemq.interceptor.failed"
REPLAY_STOPPED = "acemq.replay.stopped"
PARTITION_HALTED = "acemq.partition.halted"
OWNER_CHANGED = "acemq.partition.owner.changed"
REPLY_UNDELIVERED = "acemq.reply.undelivered"
SAGA_COMPENSATING = "acemq.saga.compensating"
SAGA_UNRESOLVED = "acemq.saga.unresolved"
SCHEDULE_FOREIGN = "acemq.schedule.foreign.message"
LEASE_LOST = "acemq.lease.lost"
CLAIM_FAILED = "acemq.idempotency.failed"
OUTBOX_RETIRED = "acemq.outbox.retired"
OUTBOX_FAILED = "acemq.outbox.failed"

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Reporter:
    """Hands diagnostics to the application's sink and to the logger `acemq`. A sink that raises is ignored."""

    def __init__(self, sink: Callable[[Diagnostic], None] | None = None) -> None:
        self._sink = sink

    def __call__(self, diagnostic: Diagnostic) -> None:
        level = _LEVELS[diagnostic.level]
        if log.isEnabledFor(level):
            log.log(level, "%s: %s", diagnostic.name, diagnostic.message, extra={"acemq": diagnostic})
        if self._sink is not None:
            try:
                self._sink(diagnostic)
            except Exception:
                log.exception("the on_diagnostic sink raised")


class Telemetry:
    """The instruments of one connection. Ask `tracing` and `metering` before computing anything for them."""

    def __init__(self, transport: str) -> None:
        tracer_provider, meter_provider = trace.get_tracer_provider(), metrics.get_meter_provider()
        self.tracing = _is_sdk(tracer_provider)
        self.metering = _is_sdk(meter_provider)
        self._system = _SYSTEMS.get(transport, transport)
        self.tracer = tracer_provider.get_tracer(SCOPE)
        self.meter_provider = meter_provider
        meter = meter_provider.get_meter(SCOPE)
        self._publish_duration = meter.create_histogram("acemq.publish.duration", "s")
        self._publish_total = meter.create_counter("acemq.publish.total")
        self._consume_duration = meter.create_histogram("acemq.consume.duration", "s")
        self._consume_total = meter.create_counter("acemq.consume.total")
        self._consume_attempts = meter.create_histogram("acemq.consume.attempts")
        self._in_flight = meter.create_up_down_counter("acemq.consume.in.flight")
        self._retried = meter.create_counter("acemq.messages.retried.total")
        self._dead_lettered = meter.create_counter("acemq.messages.dead.lettered.total")
        self._set_aside_failed = meter.create_counter("acemq.messages.set.aside.failed")
        self._rung_missing = meter.create_counter("acemq.retry.rung.missing")
        self._run_duration = meter.create_histogram("acemq.pipeline.run.duration", "s")
        self._run_total = meter.create_counter("acemq.pipeline.run.total")
        self._replays = meter.create_counter("acemq.replay.total")
        self._request_duration = meter.create_histogram("acemq.request.duration", "s")
        self._request_total = meter.create_counter("acemq.request.total")
        self._schedules = meter.create_counter("acemq.schedule.total")
        self._settled = meter.create_counter("acemq.settle.total")
        self._claims = meter.create_counter("acemq.idempotency.total")
        self._renewals = meter.create_counter("acemq.lease.renewals.total")
        self._leases_lost = meter.create_counter("acemq.lease.lost.total")
        self._outbox_lag = meter.create_histogram("acemq.outbox.lag", "s")
        self._outbox_total = meter.create_counter("acemq.outbox.total")
        self.outbox_oldest: dict[object, float] = {}
        """Seconds, by relay, as it last asked its store; for the gauge."""
        self._transport = transport

    # Publishing

    def publish_span(self, exchange: str, routing_key: str, headers: dict[str, HeaderValue]) -> Span:
        """Open the producer's span and write its trace context into `headers`."""
        span = self.tracer.start_span(
            f"{exchange or routing_key} publish",
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": self._system,
                "messaging.destination.name": exchange or routing_key,
                "messaging.operation": "publish",
                "messaging.message.id": str(headers[h.ID]),
                "messaging.message.conversation_id": str(headers[h.CORRELATION]),
                "messaging.rabbitmq.destination.routing_key": routing_key,
                "messaging.acemq.message_type": str(headers[h.TYPE]),
            },
        )
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, trace.set_span_in_context(span))
        headers.update(carrier)
        return span

    def draft_span(self, exchange: str, routing_key: str, envelope: Envelope) -> tuple[Span, dict[str, HeaderValue]]:
        """The same for what has no headers yet: the span, and the trace context for the headers to come."""
        said: dict[str, HeaderValue] = {
            h.ID: envelope.id,
            h.CORRELATION: envelope.correlation_id,
            h.TYPE: envelope.type,
        }
        span = self.publish_span(exchange, routing_key, said)
        return span, {name: value for name, value in said.items() if not name.startswith(h.RESERVED)}

    def redirected(self, span: Span, exchange: str, routing_key: str) -> None:
        """The message goes elsewhere than its span was opened for."""
        span.update_name(f"{exchange or routing_key} publish")
        span.set_attribute("messaging.destination.name", exchange or routing_key)
        span.set_attribute("messaging.rabbitmq.destination.routing_key", routing_key)

    def published(self, exchange: str, routing_key: str, type: str, outcome: str, seconds: float) -> None:
        tags = {"exchange": exchange, "routing.key": routing_key, "message.type": type, "outcome": outcome}
        self._publish_duration.record(seconds, tags)
        self._publish_total.add(1, tags)

    # Consuming

    def process_span(self, queue: str, envelope: Envelope, headers: Headers) -> Span:
        """Open the consumer's span, child of the publish that the headers name."""
        return self.tracer.start_span(
            f"{queue} process",
            context=_context_in(headers),
            kind=SpanKind.CONSUMER,
            attributes={
                "messaging.system": self._system,
                "messaging.destination.name": queue,
                "messaging.operation": "process",
                "messaging.message.id": envelope.id,
                "messaging.message.conversation_id": envelope.correlation_id,
                "messaging.acemq.message_type": envelope.type,
                "messaging.acemq.attempt": envelope.attempt,
            },
        )

    def batch_span(self, queue: str, of: Sequence[Span]) -> Span:
        """Open the span of a handler that is given many messages: a trace of its own, linked to the spans of each."""
        return self.tracer.start_span(
            f"{queue} process batch",
            context=Context(),
            kind=SpanKind.CONSUMER,
            links=[trace.Link(span.get_span_context()) for span in of],
            attributes={
                "messaging.system": self._system,
                "messaging.destination.name": queue,
                "messaging.operation": "process",
                "messaging.batch.message_count": len(of),
            },
        )

    def started(self, count: int = 1) -> None:
        self._in_flight.add(count)

    def ended(self, count: int = 1) -> None:
        self._in_flight.add(-count)

    def consumed(self, queue: str, type: str, outcome: str, attempt: int, seconds: float) -> None:
        tags = {"queue": queue, "message.type": type, "outcome": outcome}
        self._consume_duration.record(seconds, tags)
        self._consume_total.add(1, tags)
        self._consume_attempts.record(attempt, tags)

    def retried(self, queue: str, type: str) -> None:
        self._retried.add(1, {"queue": queue, "message.type": type})

    def dead_lettered(self, queue: str, type: str, outcome: str) -> None:
        self._dead_lettered.add(1, {"queue": queue, "message.type": type, "outcome": outcome})

    def set_aside_failed(self, queue: str, target: str) -> None:
        self._set_aside_failed.add(1, {"queue": queue, "target": target})

    def settled(self, queue: str, verb: str, outcome: str) -> None:
        self._settled.add(1, {"queue": queue, "verb": verb, "outcome": outcome, "transport": self._transport})

    def rung_missing(self, queue: str, rung: str) -> None:
        self._rung_missing.add(1, {"queue": queue, "rung": rung})

    def claimed(self, queue: str, answer: str) -> None:
        self._claims.add(1, {"queue": queue, "answer": answer})

    def claim_lost(self, queue: str) -> None:
        self._leases_lost.add(1, {"queue": queue, "of": "claim", "transport": self._transport})

    def leases_lost(self, queue: str, count: int) -> None:
        self._leases_lost.add(count, {"queue": queue, "of": "delivery", "transport": self._transport})

    def leases_renewed(self, outcome: str, count: int) -> None:
        self._renewals.add(count, {"outcome": outcome, "transport": self._transport})

    # Patterns

    def relay_span(self, exchange: str, routing_key: str, headers: Headers) -> Span:
        """Open the span of a relayed message: a trace of its own, linked to the one in which it was written down."""
        return self.tracer.start_span(
            f"{exchange or routing_key} publish",
            context=Context(),
            kind=SpanKind.PRODUCER,
            links=[trace.Link(written)] if (written := _written_in(headers)).is_valid else None,
            attributes={
                "messaging.system": self._system,
                "messaging.destination.name": exchange or routing_key,
                "messaging.operation": "publish",
                "messaging.message.id": h.text(headers.get(h.ID)) or "",
                "messaging.message.conversation_id": h.text(headers.get(h.CORRELATION)) or "",
                "messaging.rabbitmq.destination.routing_key": routing_key,
                "messaging.acemq.message_type": h.text(headers.get(h.TYPE)) or "",
            },
        )

    def relayed(
        self, exchange: str, routing_key: str, lag: float | None, span: Span | None, failure: BaseException | None
    ) -> None:
        """How one publish of a relay ended; `lag` is that of a record which is out."""
        outcome = "failed" if lag is None else "published"
        if self.metering:
            tags = {"exchange": exchange, "routing.key": routing_key}
            self._outbox_total.add(1, {**tags, "outcome": outcome})
            if lag is not None:
                self._outbox_lag.record(max(lag, 0.0), tags)
        if span is not None:
            if lag is None:
                said = {
                    "messaging.destination.name": exchange or routing_key,
                    "messaging.acemq.reason": str(failure or ""),
                }
                span.add_event("outbox.publish_failed", said)
            end_span(span, outcome, failure)

    def trace_headers(self) -> dict[str, HeaderValue]:
        """The trace that is current, for a message that will be published out of it."""
        carrier: dict[str, str] = {}
        if self.tracing:
            _W3C.inject(carrier)
        return {**carrier}

    def run_finished(self, pipeline: str, step: str, outcome: str, age_seconds: float) -> None:
        if self.metering:
            tags = {"pipeline": pipeline, "step": step, "outcome": outcome}
            self._run_duration.record(age_seconds, tags)
            self._run_total.add(1, tags)
        if self.tracing:
            trace.get_current_span().add_event(
                "pipeline.run_finished",
                {
                    "pipeline": pipeline,
                    "step": step,
                    "outcome": outcome,
                    "messaging.acemq.run_age_ms": round(age_seconds * 1000),
                },
            )

    def replayed(self, queue: str, target: str, outcome: str, count: int) -> None:
        if self.metering and count:
            self._replays.add(count, {"queue": queue, "target": target, "outcome": outcome})

    def request_span(self, exchange: str, routing_key: str, identity: str, type: str) -> Span:
        """Open the span of a request, parent of its publish; its correlation is its own id."""
        return self.tracer.start_span(
            f"{exchange or routing_key} request",
            kind=SpanKind.CLIENT,
            attributes={
                "messaging.system": self._system,
                "messaging.destination.name": exchange or routing_key,
                "messaging.operation": "request",
                "messaging.message.id": identity,
                "messaging.message.conversation_id": identity,
                "messaging.acemq.message_type": type,
            },
        )

    def requested(self, routing_key: str, type: str, outcome: str, seconds: float) -> None:
        if self.metering:
            tags = {"routing.key": routing_key, "message.type": type, "outcome": outcome}
            self._request_duration.record(seconds, tags)
            self._request_total.add(1, tags)

    def scheduled(self, outcome: str) -> None:
        if self.metering:
            self._schedules.add(1, {"outcome": outcome})


class SagaSpans:
    """The spans of a saga, which needs no connection and has its process's tracer then."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    @staticmethod
    def of(telemetry: Telemetry | None) -> SagaSpans | None:
        """`None` without an SDK."""
        if telemetry is not None:
            return SagaSpans(telemetry.tracer) if telemetry.tracing else None
        provider = trace.get_tracer_provider()
        return SagaSpans(provider.get_tracer(SCOPE)) if _is_sdk(provider) else None

    def span(self, what: str, name: str) -> AbstractContextManager[Span]:
        """`saga place-order`, `step take-payment`, `undo take-payment`; an error that leaves it is recorded on it."""
        return self._tracer.start_as_current_span(f"{what} {name}")


def _context_in(headers: Headers) -> Context:
    carrier = {name: value for name in ("traceparent", "tracestate") if (value := h.text(headers.get(name)))}
    return _W3C.extract(carrier, Context())


def _written_in(headers: Headers) -> SpanContext:
    return trace.get_current_span(_context_in(headers)).get_span_context()


class Reading(msgspec.Struct, frozen=True):
    """What the gauges show of one connection: read from memory, in whatever thread an exporter asks."""

    transport: str
    connected: bool
    blocked: bool
    outstanding: int
    depths: Mapping[str, Depth]
    halted: Mapping[str, bool]
    """The partition queues that are consumed here."""
    oldest: float | None = None
    """Seconds that the oldest record of an outbox has waited; `None`: nothing is relayed here."""


Source: TypeAlias = Callable[[], Reading]


class Gauges:
    """The gauges of a meter provider, over all connections that are open in this process.

    The SDK keeps the callback of a gauge for ever and takes one for each name: so it is asked once, here, and what it
    reads are the connections that are open at that moment.
    """

    _of: ClassVar[WeakKeyDictionary[MeterProvider, Gauges]] = WeakKeyDictionary()

    def __init__(self, provider: MeterProvider) -> None:
        self._sources: dict[object, Source] = {}
        meter = provider.get_meter(SCOPE)
        meter.create_observable_gauge("acemq.transport.connected", [lambda _: self._each(min, "connected")])
        meter.create_observable_gauge("acemq.transport.blocked", [lambda _: self._each(max, "blocked")])
        meter.create_observable_gauge("acemq.publish.outstanding", [lambda _: self._each(sum, "outstanding")])
        meter.create_observable_gauge("acemq.queue.depth", [lambda _: self._depths()])
        meter.create_observable_gauge("acemq.ordered.halted", [lambda _: self._halted()])
        meter.create_observable_gauge("acemq.outbox.oldest", [lambda _: self._oldest()], "s")

    @classmethod
    def show(cls, provider: MeterProvider, key: object, source: Source) -> None:
        """From now on, until `hide(key)`."""
        if provider not in cls._of:
            cls._of[provider] = cls(provider)
        cls._of[provider]._sources[key] = source

    @classmethod
    def hide(cls, key: object) -> None:
        for gauges in tuple(cls._of.values()):
            gauges._sources.pop(key, None)

    def _read(self) -> dict[str, list[Reading]]:
        by_transport: dict[str, list[Reading]] = {}
        for source in tuple(self._sources.values()):
            reading = source()
            by_transport.setdefault(reading.transport, []).append(reading)
        return by_transport

    def _each(self, over: Callable[[Iterable[int]], int], what: str) -> Iterator[Observation]:
        """Of several connections to one kind of broker: one that is lost or blocked shows."""
        for transport, readings in self._read().items():
            yield Observation(over(int(getattr(each, what)) for each in readings), {"transport": transport})

    def _oldest(self) -> Iterator[Observation]:
        known = [source().oldest for source in tuple(self._sources.values())]
        waited = [oldest for oldest in known if oldest is not None]
        if waited:
            yield Observation(max(waited))

    def _depths(self) -> Iterator[Observation]:
        for transport, readings in self._read().items():
            latest: dict[str, Depth] = {}
            for queue, depth in (pair for each in readings for pair in each.depths.items()):
                if queue not in latest or depth.at > latest[queue].at:
                    latest[queue] = depth
            for queue, depth in latest.items():
                for state, count in (("ready", depth.ready), ("held", depth.held), ("delayed", depth.delayed)):
                    if count is not None:
                        yield Observation(count, {"queue": queue, "state": state, "transport": transport})

    def _halted(self) -> Iterator[Observation]:
        halted: dict[str, bool] = {}
        for reading in (each for readings in self._read().values() for each in readings):
            for queue, is_halted in reading.halted.items():
                halted[queue] = halted.get(queue, False) or is_halted
        for queue, is_halted in halted.items():
            yield Observation(int(is_halted), {"queue": queue})


class LogContext(logging.Filter):
    """Puts `message_id`, `correlation_id`, `queue` and `attempt` of the message in hand on each log record.

    Add it to a handler of `logging`, since a filter of a logger does not see what the loggers below it write. Outside
    of a message handler the texts are empty and the attempt is 0, so that one format fits both. It formats nothing, and
    a record that names one of these itself keeps it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        message = CURRENT.get()
        given = record.__dict__
        if message is None:
            for name, nothing in _NO_MESSAGE.items():
                given.setdefault(name, nothing)
            return True
        envelope = message.envelope
        given.setdefault("message_id", envelope.id)
        given.setdefault("correlation_id", envelope.correlation_id)
        given.setdefault("queue", message.queue)
        given.setdefault("attempt", envelope.attempt)
        return True


_NO_MESSAGE: Mapping[str, object] = {"message_id": "", "correlation_id": "", "queue": "", "attempt": 0}


def end_span(span: Span, outcome: str, error: BaseException | None = None) -> None:
    """The outcome is the engine's word, and the last one."""
    span.set_attribute("messaging.acemq.outcome", outcome)
    if error is not None:
        span.record_exception(error)
    if outcome in _BAD_OUTCOMES:
        span.set_status(_FAILED)
    span.end()


def within_span(span: Span | None) -> AbstractContextManager[object]:
    """Make it current, and leave how it ended to the engine."""
    if span is None:
        return nullcontext()
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def fail_span(span: Span, error: BaseException | None) -> None:
    """It went wrong, whatever it returns."""
    if error is not None:
        span.record_exception(error)
    span.set_status(_FAILED)


def end_batch_span(span: Span, answer: object) -> None:
    if isinstance(answer, BaseException):
        fail_span(span, answer)
    span.end()


def _is_sdk(provider: object) -> bool:
    # What the API puts there by itself lives in the API's own packages, whatever the class is called.
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
