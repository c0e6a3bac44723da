"""What the library tells of itself: metrics and spans by the names of CONTRACT.md section 14, and diagnostics.

Only `opentelemetry-api` is needed. Without an SDK nothing is computed: whether there is one is looked up once, when a
connection is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from acemq import headers as h
from acemq.envelope import Envelope
from acemq.headers import Headers, HeaderValue

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
LISTENER_FAILED = "acemq.interceptor.failed"
REPLAY_STOPPED = "acemq.replay.stopped"

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
        self._tracer = tracer_provider.get_tracer(SCOPE)
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

    # Publishing

    def publish_span(self, exchange: str, routing_key: str, headers: dict[str, HeaderValue]) -> Span:
        """Open the producer's span and write its trace context into `headers`."""
        span = self._tracer.start_span(
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

    def published(self, exchange: str, routing_key: str, type: str, outcome: str, seconds: float) -> None:
        tags = {"exchange": exchange, "routing.key": routing_key, "message.type": type, "outcome": outcome}
        self._publish_duration.record(seconds, tags)
        self._publish_total.add(1, tags)

    # Consuming

    def process_span(self, queue: str, envelope: Envelope, headers: Headers) -> Span:
        """Open the consumer's span, child of the publish that the headers name."""
        carrier = {name: value for name in ("traceparent", "tracestate") if (value := h.text(headers.get(name)))}
        return self._tracer.start_span(
            f"{queue} process",
            context=_W3C.extract(carrier),
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
        return self._tracer.start_span(
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

    def rung_missing(self, queue: str, rung: str) -> None:
        self._rung_missing.add(1, {"queue": queue, "rung": rung})

    # Patterns

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


def end_span(span: Span, outcome: str, error: BaseException | None = None) -> None:
    """The outcome is the engine's word, and the last one."""
    span.set_attribute("messaging.acemq.outcome", outcome)
    if error is not None:
        span.record_exception(error)
    if outcome in _BAD_OUTCOMES:
        span.set_status(_FAILED)
    span.end()


def end_batch_span(span: Span, answer: object) -> None:
    if isinstance(answer, BaseException):
        span.record_exception(answer)
        span.set_status(_FAILED)
    span.end()


def span_event(span: Span, name: str, attributes: Mapping[str, str | int]) -> None:
    span.add_event(name, attributes)


def _is_sdk(provider: object) -> bool:
    # What the API puts there by itself lives in the API's own packages, whatever the class is called.
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))
