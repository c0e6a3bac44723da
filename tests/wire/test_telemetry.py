"""CONTRACT.md section 14: names of metrics, spans and diagnostics, as a program at work gives them to an exporter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Metric, Sum
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from acemq import Claim, ConsumeOptions, Idempotency, MemoryIdempotencyStore, errors, telemetry
from acemq import topology as t
from acemq.ack import Ack
from acemq.clock import MovableClock
from acemq.consuming.settling import TABLE, ConsumerCounters
from acemq.interceptors import ConsumeInterceptor
from acemq.message import Message
from acemq.patterns.saga import Saga
from acemq.retry import RetryPolicy
from acemq.topology import SCHEDULE_QUEUE
from tests.stores.places import Place
from tests.wire.broker import Bench, bench
from tests.wire.suite import Suite, Values

TELEMETRY = Suite(
    "telemetry",
    not_yet={},
)


@TELEMETRY.parametrize
async def test_telemetry(case: str) -> None:
    await TELEMETRY.check(case)


# A program at work, with an SDK


@dataclass
class Watched:
    at: Bench
    reader: InMemoryMetricReader
    exporter: InMemorySpanExporter
    _seen: dict[str, Metric] = field(default_factory=dict[str, Metric])

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self._metrics() if metric.name == name), None)

    def _metrics(self) -> Iterator[Metric]:
        data = self.reader.get_metrics_data()
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                assert scope.scope.name == "org.acemq.amqp"
                yield from scope.metrics

    def outcomes(self, name: str) -> list[Any]:
        metric = self.metric(name)
        return list(dict.fromkeys(dict(point.attributes or {})["outcome"] for point in _points(metric)))

    def spans(self, operation: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name.endswith(f" {operation}")]


def _points(metric: Metric | None) -> list[Any]:
    return list(metric.data.data_points) if metric is not None else []


@asynccontextmanager
async def _watched() -> AsyncIterator[Watched]:
    reader, exporter, tracers = InMemoryMetricReader(), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    meters = MeterProvider([reader], shutdown_on_exit=False)
    with (
        patch.object(metrics, "get_meter_provider", lambda: meters),
        patch.object(trace, "get_tracer_provider", lambda: tracers),
    ):
        async with bench() as at:
            yield Watched(at, reader, exporter)


class _Refuses(ConsumeInterceptor):
    def before_handle(self, message: Message[Any]) -> None:
        raise PermissionError("blocked")


AGAIN = RetryPolicy.fixed(2, timedelta())
_ANSWERS: dict[str, tuple[Ack | None, RetryPolicy]] = {
    "accept": (Ack.accept(), AGAIN),
    "retry": (Ack.retry("why"), AGAIN),
    "retry_out_of_attempts": (Ack.retry("why"), RetryPolicy.none()),
    "handler_rejects": (Ack.reject("why"), AGAIN),
    "release": (Ack.release(), AGAIN),
    "park": (Ack.park("why"), AGAIN),
    "undecodable": (None, AGAIN),
    "interceptor_refuses": (None, AGAIN),
    "claim_in_progress": (None, AGAIN),
}


async def _handled(seen: Watched, situation: str, *, first_only: bool = True) -> None:
    """One message from `orders`, to which this happens; a second attempt, if there is one, is accepted."""
    answer, policy = _ANSWERS[situation]
    answers = iter([answer])

    async def handle(message: Message[Any]) -> Ack | None:
        return next(answers, None)

    around = [_Refuses()] if situation == "interceptor_refuses" else []
    await seen.at.declare("orders")
    await seen.at.mq.send("orders", b"{", content_type="application/json") if situation == "undecodable" else (
        await seen.at.mq.send("orders", {"a": 1})
    )
    options: ConsumeOptions = {"retry": policy, "interceptors": around}
    if situation == "claim_in_progress":
        options["idempotency"] = Idempotency(store=_Claimed(), put_back_after=timedelta())
    async with seen.at.mq.consume("orders", dict, handle, **options):
        await seen.at.clock.advance(timedelta(seconds=1))


async def _all_that_there_is(seen: Watched) -> None:
    """Every kind of thing that is counted, once."""
    mq, clock = seen.at.mq, seen.at.clock
    for situation in _ANSWERS:
        await _handled(seen, situation)

    async def ended(n: int) -> int | None:
        return n or None

    async def last(n: int) -> None: ...

    async with mq.pipeline("p", int).step("first", ended).step("last", last).start() as running:
        for n in (1, 0):
            await running.send(n)
            await clock.advance(timedelta())
    await _no_copy(seen)
    await _no_rung(seen)
    await _requests(seen)
    await _saga(seen)
    await _foreign(seen)


async def _requests(seen: Watched) -> None:
    """One that is answered, one that is not, and one that fails, in the order in which the contract has them."""
    mq, clock = seen.at.mq, seen.at.clock
    await seen.at.declare("asked", "unheard")

    async def answer(message: Message[int]) -> int:
        return 10 // message.payload

    async with mq.respond("asked", int, answer):
        await _ended(mq.request("", "asked", 1, int), clock)
        await _ended(mq.request("", "unheard", 1, int), clock)
        await _ended(mq.request("", "asked", 0, int), clock)


async def _ended(asking: Coroutine[Any, Any, int], clock: MovableClock) -> None:
    task = asyncio.ensure_future(asking)
    await clock.advance(timedelta(seconds=30))
    with suppress(errors.RequestTimeoutError, errors.ResponderError):
        await task


async def _saga(seen: Watched) -> None:
    async def done(n: int) -> int:
        return n

    async def fail(n: int, given: int = 0) -> int:
        raise LookupError("no")

    await Saga("s", int).step("done", done).undo(fail).step("fails", fail).reporting_to(seen.at.mq).run(1)


async def _foreign(seen: Watched) -> None:
    async with seen.at.mq.scheduler():
        await seen.at.put(SCHEDULE_QUEUE)
        await seen.at.clock.rest()
    await _relayed(seen)


async def _relayed(seen: Watched) -> None:
    """A record that goes out, and one that nothing is bound for."""
    store = await Place().outbox()
    await seen.at.declare("announced")
    outbox = seen.at.mq.outbox(store)
    for queue in ("announced", "nowhere"):
        await outbox.bind(cast("Any", None)).send(queue, 1)
        await outbox.sweep()


class _Claimed(MemoryIdempotencyStore):
    """Every key is in the hands of another."""

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        return Claim("in_progress")


async def _no_copy(seen: Watched) -> None:
    await seen.at.declare("homeless")
    await seen.at.mq.send("homeless", 1)
    async with seen.at.mq.consume("homeless", int, lambda message: Ack.reject("bad"), declare=False):
        await seen.at.clock.advance(timedelta())


async def _no_rung(seen: Watched) -> None:
    policy = RetryPolicy.fixed(2, timedelta(minutes=1))
    answers = iter([Ack.retry("later")])
    await seen.at.declare("rungless")
    async with seen.at.mq.consume("rungless", int, lambda message: next(answers, None), retry=policy):
        await seen.at.mq.delete(t.rung_of("rungless", policy.first))
        await seen.at.mq.send("rungless", 1)
        await seen.at.clock.advance(timedelta(minutes=2))


# The ops


@TELEMETRY.op("metric")
async def metric(given: Values) -> Values:
    async with _watched() as seen:
        await _all_that_there_is(seen)
        found = seen.metric(given["name"])
        if found is None:
            return {}
        (tags, *others) = [list(dict(point.attributes or {})) for point in _points(found)]
        assert all(other == tags for other in others), "tags differ from point to point"
        return {"kind": _kind(found), "tags": tags}


def _kind(metric: Metric) -> str:
    match metric.data:
        case Histogram():
            return f"histogram {metric.unit}".strip()
        case Sum(is_monotonic=True):
            return "counter"
        case _:  # a sum that falls, too, is what others call a gauge, and an exporter writes as one
            return "gauge"


@TELEMETRY.op("outcomes")
async def outcomes(given: Values) -> Values:
    async with _watched() as seen:
        match given["of"]:
            case "consume":
                counted = {row.counted for row in TABLE.values()}
                return {"values": [word for word in ConsumerCounters.__struct_fields__ if word in counted]}
            case "publish":
                kinds = (errors.UnroutableError, errors.PublishFailedError, errors.PublishRefusedError)
                await _handled(seen, "accept")
                return {"values": [*seen.outcomes("acemq.publish.total"), *(kind.outcome for kind in kinds)]}
            case of:
                await _all_that_there_is(seen)
                return {"values": seen.outcomes(f"acemq.{of}.run.total") or seen.outcomes(f"acemq.{of}.total")}


@TELEMETRY.op("span")
async def span(given: Values) -> Values:
    async with _watched() as seen:
        await _handled(seen, "accept")
        await seen.at.declare("orders")
        await _ended(seen.at.mq.request("", "orders", 1, int), seen.at.clock)
        assert given["destination"] == "orders"
        found = [span.name for span in seen.spans(given["operation"])]
        return {"name": found[0]} if found else {}


@TELEMETRY.op("outcome_of")
async def outcome_of(given: Values) -> Values:
    if given["situation"] not in _ANSWERS:
        return {}
    async with _watched() as seen:
        await _handled(seen, given["situation"])
        first = seen.outcomes("acemq.consume.total")[0]
        assert (seen.spans("process")[0].attributes or {})["messaging.acemq.outcome"] == first
        return {
            "outcome": first,
            "counts_dead_lettered_total": seen.metric("acemq.messages.dead.lettered.total") is not None,
            "counts_retried_total": seen.metric("acemq.messages.retried.total") is not None,
        }


@TELEMETRY.op("span_attribute")
async def span_attribute(given: Values) -> Values:
    async with _watched() as seen:
        await _requests(seen)
        kinds = ("publish", "process", "request")
        on = [
            kind
            for kind in kinds
            if all(given["name"] in (span.attributes or {}) for span in seen.spans(kind)) and seen.spans(kind)
        ]
        return {"on": "every" if on == list(kinds) else on[0]}


@TELEMETRY.op("span_event")
async def span_event(given: Values) -> Values:
    async with _watched() as seen:
        await _all_that_there_is(seen)
        events = [event for span in seen.exporter.get_finished_spans() for event in span.events]
        found = [list(event.attributes or {}) for event in events if event.name == given["name"]]
        return {"attributes": found[0]} if found else {}


@TELEMETRY.op("diagnostic")
async def diagnostic(given: Values) -> Values:
    async with _watched() as seen:
        await _all_that_there_is(seen)
        assert telemetry.DEAD_LETTERED in {told.name for told in seen.at.told}
        found = [told.level for told in seen.at.told if told.name == given["name"]]
        return {"level": found[0]} if found else {}
