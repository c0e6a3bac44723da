"""Spans and metrics by the contract's names, and nothing of them where no SDK is installed."""

from __future__ import annotations

import asyncio
import io
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import acemq
from acemq import (
    AceMQ,
    Ack,
    Batch,
    BatchPublishError,
    Draft,
    Handled,
    Message,
    MovableClock,
    PublishInterceptor,
    Receipt,
    RetryPolicy,
    Topology,
    UnroutableError,
    connection,
)
from acemq.telemetry import Telemetry
from acemq.transport import Outgoing
from acemq.transports.memory import MemoryBroker
from tests.secret import assert_unprinted
from tests.waiting import until


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    for span in exporter.get_finished_spans():
        assert_unprinted(span.to_json(), f"the span {span.name}")
    provider.shutdown()


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    yield reader
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, list[tuple[Mapping[str, Any], Any]]]:
    """Tags and value (a histogram's count) of each point, by metric."""
    out: dict[str, list[tuple[Mapping[str, Any], Any]]] = {}
    data = reader.get_metrics_data()
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            assert scope.scope.name == "org.acemq.amqp"
            for metric in scope.metrics:
                out[metric.name] = [
                    (dict(point.attributes or {}), getattr(point, "value", None) or getattr(point, "count", 0))
                    for point in metric.data.data_points
                ]
    return out


def seconds(reader: InMemoryMetricReader, metric: str) -> list[float]:
    """The sum of each point of a histogram."""
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    found = [each for scope in scopes for each in scope.metrics if each.name == metric]
    return [getattr(point, "sum", 0.0) for each in found for point in each.data.data_points]


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    found: Sequence[ReadableSpan] = [span for span in spans.get_finished_spans() if span.name == name]
    assert len(found) == 1, [span.name for span in spans.get_finished_spans()]
    return found[0]


async def test_one_trace_leads_from_a_publish_over_its_handler_to_what_that_publishes(
    spans: InMemorySpanExporter, mq: AceMQ, queue: str
) -> None:
    async def answer(message: Message[str]) -> None:
        if message.payload == "A":
            await mq.send(queue, "B", message_id="b")

    async with mq.consume(queue, str, answer) as consumer:
        await mq.send(queue, "A", message_id="a", correlation_id="c")
        await until(lambda: consumer.counters.acked == 2)
    finished = spans.get_finished_spans()
    assert len({span.context.trace_id for span in finished if span.context}) == 1
    by_id = {(span.name, (span.attributes or {})["messaging.message.id"]): span for span in finished}
    publish_a, process_a = by_id[f"{queue} publish", "a"], by_id[f"{queue} process", "a"]
    publish_b, process_b = by_id[f"{queue} publish", "b"], by_id[f"{queue} process", "b"]
    for child, parent in ((process_a, publish_a), (publish_b, process_a), (process_b, publish_b)):
        assert child.parent is not None
        assert parent.context is not None
        assert child.parent.span_id == parent.context.span_id
    assert (publish_a.kind, process_a.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    system = {"memory": "acemq_memory", "rabbitmq": "rabbitmq"}[mq.capabilities.transport]
    assert dict(publish_a.attributes or {}) == {
        "messaging.system": system,
        "messaging.destination.name": queue,
        "messaging.operation": "publish",
        "messaging.message.id": "a",
        "messaging.message.conversation_id": "c",
        "messaging.rabbitmq.destination.routing_key": queue,
        "messaging.acemq.message_type": queue,
        "messaging.acemq.outcome": "confirmed",
    }
    assert dict(process_a.attributes or {}) == {
        "messaging.system": system,
        "messaging.destination.name": queue,
        "messaging.operation": "process",
        "messaging.message.id": "a",
        "messaging.message.conversation_id": "c",
        "messaging.acemq.message_type": queue,
        "messaging.acemq.attempt": 1,
        "messaging.acemq.outcome": "acked",
    }


async def test_a_request_over_http_a_publish_and_two_handlers_are_one_trace(
    spans: InMemorySpanExporter, mq: AceMQ, queue: str
) -> None:
    class Notes(PublishInterceptor):
        """With a hook, too: the trace is written inside the publish's span."""

        def after_publish(self, draft: Draft, receipt: Receipt) -> None:
            inside.append(trace.get_current_span())

    inside: list[trace.Span] = []
    mq.intercept(Notes())

    async def answer(message: Message[str]) -> None:
        if message.payload == "A":
            await mq.send(queue, "B")

    async with mq.consume(queue, str, answer) as consumer:
        with trace.get_tracer_provider().get_tracer("http").start_as_current_span("POST /orders"):
            await mq.send(queue, "A")
        await until(lambda: consumer.counters.acked == 2)
    chain = {span.context.span_id: span for span in spans.get_finished_spans() if span.context}
    (last,) = [span for span in chain.values() if span.context and not _children(span, chain.values())]
    names = []
    while True:
        names.append(last.name)
        if last.parent is None:
            break
        last = chain[last.parent.span_id]
    assert names[::-1] == ["POST /orders", *[f"{queue} publish", f"{queue} process"] * 2]
    assert {span.get_span_context().span_id for span in inside} == {
        span.context.span_id for span in chain.values() if span.context and span.name.endswith("publish")
    }


def _children(parent: ReadableSpan, spans: Iterable[ReadableSpan]) -> list[ReadableSpan]:
    assert parent.context is not None
    return [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]


async def test_a_publish_that_a_hook_stops_is_counted_as_refused_once_and_ends_its_span_so(
    spans: InMemorySpanExporter, reader: InMemoryMetricReader, mq: AceMQ, queue: str
) -> None:
    class Stops(PublishInterceptor):
        def before_publish(self, draft: Draft) -> None:
            if draft.payload == 2:
                raise RuntimeError("no tenant")

    mq.intercept(Stops())
    with pytest.raises(RuntimeError):
        await mq.send(queue, 2)
    with pytest.raises(BatchPublishError):
        await mq.send_many(queue, [1, 2, 3])
    ended = [(span.attributes or {})["messaging.acemq.outcome"] for span in spans.get_finished_spans()]
    assert sorted(map(str, ended)) == ["confirmed", "confirmed", "refused", "refused"]
    totals = {tags["outcome"]: count for tags, count in points(reader)["acemq.publish.total"]}
    assert totals == {"confirmed": 2, "refused": 2}
    assert len(await mq.pull_many(queue, int)) == 2


async def test_a_hook_that_redirects_redirects_the_span(
    spans: InMemorySpanExporter, reader: InMemoryMetricReader, mq: AceMQ, queue: str
) -> None:
    class Redirects(PublishInterceptor):
        def before_publish(self, draft: Draft) -> None:
            draft.routing_key = queue

    mq.intercept(Redirects())
    await mq.send("elsewhere", 1)
    span = named(spans, f"{queue} publish")
    assert (span.attributes or {})["messaging.destination.name"] == queue
    ((tags, _),) = points(reader)["acemq.publish.total"]
    assert (tags["routing.key"], tags["message.type"]) == (queue, "elsewhere")


async def test_gauges_read_memory_and_are_those_of_open_connections(
    reader: InMemoryMetricReader, url: str, name: str
) -> None:
    async with acemq.connect(url) as mq:
        transport = mq.capabilities.transport
        await mq.declare(Topology().queue(name, type="classic"))
        await mq.send_many(name, [1, 2])
        await mq.stats(name)
        async with acemq.connect(url), mq.consume(f"{name}", int, lambda message: None) as consumer:
            seen = points(reader)
            assert seen["acemq.transport.connected"] == [({"transport": transport}, 1)]
            assert seen["acemq.transport.blocked"] == [({"transport": transport}, 0)]
            assert seen["acemq.publish.outstanding"] == [({"transport": transport}, 0)]
            ready = {"queue": name, "state": "ready", "transport": transport}
            assert (ready, 2) in seen["acemq.queue.depth"]
            await until(lambda: consumer.counters.acked == 2)
        settled = {tags["outcome"]: (tags, count) for tags, count in points(reader)["acemq.settle.total"]}
        assert settled == {
            "done": ({"queue": name, "verb": "accept", "outcome": "done", "transport": transport}, 2),
        }
        for each in (name, f"{name}.dlq", f"{name}.parked"):
            await mq.delete(each)
    seen = points(reader)
    assert not {"acemq.transport.connected", "acemq.publish.outstanding", "acemq.queue.depth"} & {
        metric for metric, found in seen.items() if found
    }


async def test_depths_of_consumed_queues_are_asked_for_by_themselves(
    reader: InMemoryMetricReader, mq: AceMQ, monkeypatch: pytest.MonkeyPatch, url: str, queue: str
) -> None:
    monkeypatch.setattr(connection, "SAMPLED_EVERY", timedelta(milliseconds=10))
    async with acemq.connect(url) as watched, watched.consume(queue, int, lambda message: None):
        await until(lambda: any(tags["queue"] == queue for tags, _ in points(reader).get("acemq.queue.depth", [])))


@pytest.mark.parametrize("threaded", [False, True], ids=["async def", "def"])
async def test_log_context_puts_the_message_on_what_its_handler_logs(mq: AceMQ, queue: str, threaded: bool) -> None:
    written = io.StringIO()
    to = logging.StreamHandler(written)
    to.setFormatter(logging.Formatter("%(message)s|%(message_id)s|%(correlation_id)s|%(queue)s|%(attempt)d"))
    to.addFilter(acemq.LogContext())
    log = logging.getLogger(f"test.{queue}")
    log.addHandler(to)
    log.setLevel(logging.INFO)

    class Never:
        def __str__(self) -> str:
            raise AssertionError("formatted for a level that is off")

    def plainly(message: Message[int]) -> None:
        log.info("shipped")
        log.debug("%s", Never())
        log.info("of another queue", extra={"queue": "mine"})

    async def on_the_loop(message: Message[int]) -> None:
        plainly(message)

    async with mq.consume(queue, int, plainly if threaded else on_the_loop) as consumer:
        await mq.send(queue, 1, message_id="m-1", correlation_id="c-1")
        await until(lambda: consumer.counters.acked == 1)
    log.info("outside")
    assert written.getvalue().splitlines() == [
        f"shipped|m-1|c-1|{queue}|1",
        "of another queue|m-1|c-1|mine|1",
        "outside||||0",
    ]


async def test_a_span_says_how_it_really_ended(spans: InMemorySpanExporter, mq: AceMQ, queue: str) -> None:
    async with mq.consume(
        queue, int, lambda message: Ack.retry("not yet"), retry=RetryPolicy.fixed(2, timedelta())
    ) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.dead_lettered == 1)
    first, last = [span for span in spans.get_finished_spans() if span.name.endswith("process")]
    assert (first.attributes or {})["messaging.acemq.outcome"] == "retried"
    assert first.status.status_code is StatusCode.UNSET
    (event,) = first.events
    assert event.name == "message.retried"
    assert dict(event.attributes or {}) == {
        "messaging.destination.name": queue,
        "messaging.acemq.retry_delay_ms": 0,
        "messaging.acemq.reason": "not yet",
    }
    assert (last.attributes or {})["messaging.acemq.outcome"] == "dead_lettered"
    assert last.status.status_code is StatusCode.ERROR
    (event,) = last.events
    assert event.name == "message.dead_lettered"
    assert dict(event.attributes or {}) == {
        "messaging.destination.name": f"{queue}.dlq",
        "messaging.acemq.reason": "not yet",
    }


async def test_a_body_that_cannot_be_decoded_has_its_span_too(
    spans: InMemorySpanExporter, mq: AceMQ, queue: str
) -> None:
    async with mq.consume(queue, dict, lambda message: None) as consumer:
        await mq.send(queue, b"{", content_type="application/json")
        await until(lambda: consumer.counters.parked == 1)
    span = named(spans, f"{queue} process")
    assert (span.attributes or {})["messaging.acemq.outcome"] == "parked"
    assert span.status.status_code is StatusCode.ERROR


async def test_an_unroutable_publish_ends_its_span_as_an_error(
    spans: InMemorySpanExporter, mq: AceMQ, name: str
) -> None:
    await mq.declare(Topology().exchange(name))
    with pytest.raises(UnroutableError):
        await mq.publish(name, "k", 1)
    span = named(spans, f"{name} publish")
    assert (span.attributes or {})["messaging.acemq.outcome"] == "unroutable"
    assert span.status.status_code is StatusCode.ERROR


async def test_metrics_have_the_contracts_names_and_tags(reader: InMemoryMetricReader, mq: AceMQ, queue: str) -> None:
    answers: dict[str, Any] = {"ok": None, "park": Ack.park("p"), "reject": Ack.reject("r"), "retry": Ack.retry("t")}

    async def handle(message: Message[str]) -> Ack | None:
        answer: Ack | None = answers[message.payload]
        return answer

    async with mq.consume(queue, str, handle, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        for payload in answers:
            await mq.send(queue, payload, type="order.placed")
        await mq.send(queue, b"{", content_type="application/json", type="order.placed")
        with pytest.raises(UnroutableError):
            await mq.send(f"nowhere-{queue}", 1)
        await until(lambda: consumer.counters.dead_lettered + consumer.counters.parked == 3)
        await until(lambda: consumer.counters.acked + consumer.counters.rejected == 2)
    seen = points(reader)
    publish = {"exchange": "", "routing.key": queue, "message.type": "order.placed", "outcome": "confirmed"}
    nowhere = f"nowhere-{queue}"
    assert seen["acemq.publish.total"] == [
        (publish, 5),
        ({"exchange": "", "routing.key": nowhere, "message.type": nowhere, "outcome": "unroutable"}, 1),
    ]
    assert [tags for tags, _ in seen["acemq.publish.duration"]] == [tags for tags, _ in seen["acemq.publish.total"]]

    def consumed(outcome: str) -> dict[str, str]:
        return {"queue": queue, "message.type": "order.placed", "outcome": outcome}

    totals = {tags["outcome"]: (tags, value) for tags, value in seen["acemq.consume.total"]}
    assert totals == {
        "acked": (consumed("acked"), 1),
        "parked": (consumed("parked"), 2),
        "rejected": (consumed("rejected"), 1),
        "retried": (consumed("retried"), 1),
        "dead_lettered": (consumed("dead_lettered"), 1),
    }
    assert len(seen["acemq.consume.duration"]) == len(seen["acemq.consume.attempts"]) == 5
    assert seen["acemq.messages.retried.total"] == [({"queue": queue, "message.type": "order.placed"}, 1)]
    dead = {tags["outcome"]: value for tags, value in seen["acemq.messages.dead.lettered.total"]}
    assert dead == {"parked": 2, "dead_lettered": 1}
    assert seen["acemq.consume.in.flight"] == [({}, 0)]


async def test_a_move_that_fails_is_counted_by_queue_and_target_and_not_as_a_dead_letter(
    reader: InMemoryMetricReader, mq: AceMQ, queue: str
) -> None:
    async with mq.consume(queue, int, lambda message: Ack.reject("bad")) as consumer:
        await mq.delete(f"{queue}.dlq")
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.move_failed >= 1)
    seen = points(reader)
    ((tags, count),) = seen["acemq.messages.set.aside.failed"]
    assert tags == {"queue": queue, "target": f"{queue}.dlq"}
    assert count >= 1
    assert "acemq.messages.dead.lettered.total" not in seen


async def test_pipeline_runs_are_counted_by_how_they_ended(
    reader: InMemoryMetricReader, spans: InMemorySpanExporter, mq: AceMQ, name: str
) -> None:
    async def halve(n: int) -> int | None:
        return n // 2 if n % 2 == 0 else None

    async def note(n: int) -> None: ...

    async with mq.pipeline(name, int).step("halve", halve).step("note", note).start() as running:
        for n in range(4):
            await running.send(n)
        await until(lambda: running.counters.completed == 2 and running.counters.ended_early == 2)
    totals = {tags["outcome"]: (tags, value) for tags, value in points(reader)["acemq.pipeline.run.total"]}
    assert totals == {
        "ended_early": ({"pipeline": name, "step": "halve", "outcome": "ended_early"}, 2),
        "completed": ({"pipeline": name, "step": "note", "outcome": "completed"}, 2),
    }
    events = [event for span in spans.get_finished_spans() for event in span.events]
    assert {event.name for event in events} == {"pipeline.run_finished"}
    assert set(events[0].attributes or {}) == {"pipeline", "step", "outcome", "messaging.acemq.run_age_ms"}


async def test_without_an_sdk_no_span_is_made_and_no_instrument_called(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str
) -> None:
    def never(*_: object, **__: object) -> Any:
        raise AssertionError("called without an SDK")

    for method in ("publish_span", "published", "process_span", "consumed", "started", "ended", "retried", "settled"):
        monkeypatch.setattr(Telemetry, method, never)
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        async with mq.consume(name, int, lambda message: None) as consumer:
            receipt = await mq.send(name, 1)
            await until(lambda: consumer.counters.acked == 1)
        assert receipt.routed
        assert not [task for task in asyncio.all_tasks() if "asks for depths" in task.get_name()]
        await mq.delete(name)


async def test_a_batch_has_a_span_for_each_message_and_one_for_its_handler_linked_to_them(
    spans: InMemorySpanExporter, reader: InMemoryMetricReader, name: str
) -> None:
    inside: list[int] = []

    async def load(batch: Batch[int]) -> None:
        inside.append(trace.get_current_span().get_span_context().span_id)
        batch.settle(batch[2], Ack.park("why"))

    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send_many("q", [1, 2, 3])
        async with mq.consume_batches("q", int, load, most=3) as consumer:
            await until(lambda: consumer.counters.acked == 2 and consumer.counters.parked == 1)
    whole = named(spans, "q process batch")
    assert whole.context is not None
    assert inside == [whole.context.span_id]
    assert whole.parent is None
    each = [span for span in spans.get_finished_spans() if span.name == "q process"]
    assert {link.context.span_id for link in whole.links} == {span.context.span_id for span in each if span.context}
    assert sorted(str((span.attributes or {})["messaging.acemq.outcome"]) for span in each) == [
        *("acked", "acked", "parked")
    ]
    published = {
        span.context.span_id for span in spans.get_finished_spans() if span.name == "q publish" and span.context
    }
    assert {span.parent.span_id for span in each if span.parent} == published
    counted = {tags["outcome"]: count for tags, count in points(reader)["acemq.consume.total"]}
    assert counted == {"acked": 2, "parked": 1}
    assert sum(count for _, count in points(reader)["acemq.consume.in.flight"]) == 0


async def test_m112_counter_span_and_listener_say_the_same_word_and_a_retry_the_delay_that_it_waited(
    reader: InMemoryMetricReader, spans: InMemorySpanExporter, mq: AceMQ, queue: str
) -> None:
    heard: list[Handled] = []
    answers = {1: Ack.retry("t"), 2: Ack.reject("r"), 3: Ack.park("p"), 4: Ack.retry(ValueError("boom"))}

    async def handle(message: Message[int]) -> Ack | None:
        message.when_settled(heard.append)
        return answers[message.payload] if message.attempt == 1 or message.payload == 4 else None

    policy = RetryPolicy.fixed(2, timedelta(milliseconds=100))  # with its jitter
    async with mq.consume(queue, int, handle, retry=policy):
        await mq.send_many(queue, answers)
        await until(lambda: len(heard) == 6)
    told = Counter(handled.outcome for handled in heard)
    assert told == {"retried": 2, "acked": 1, "rejected": 1, "parked": 1, "dead_lettered": 1}
    ended = [span for span in spans.get_finished_spans() if span.name.endswith("process")]
    assert Counter((span.attributes or {})["messaging.acemq.outcome"] for span in ended) == told
    assert {tags["outcome"]: count for tags, count in points(reader)["acemq.consume.total"]} == told
    delays = [handled.delay for handled in heard if handled.outcome == "retried"]
    events = [event for span in ended for event in span.events if event.name == "message.retried"]
    waited = [(event.attributes or {})["messaging.acemq.retry_delay_ms"] for event in events]
    assert sorted(map(str, waited)) == sorted(
        str(round(delay / timedelta(milliseconds=1))) for delay in delays if delay
    )
    assert all(80 <= int(str(each)) <= 120 for each in waited)


async def test_o50_two_handlers_at_once_never_share_a_context_and_a_foreign_message_starts_a_trace(
    spans: InMemorySpanExporter, mq: AceMQ, queue: str
) -> None:
    both = asyncio.Barrier(3)
    seen: dict[str, int] = {}

    async def handle(message: Message[str]) -> None:
        await both.wait()
        seen[message.payload] = trace.get_current_span().get_span_context().trace_id

    async with mq.consume(queue, str, handle) as consumer:
        tracer = trace.get_tracer_provider().get_tracer("t")
        sent: dict[str, int] = {}
        for payload in ("a", "b"):
            with tracer.start_as_current_span(payload) as span:
                sent[payload] = span.get_span_context().trace_id
                await mq.send(queue, payload)
        foreign = Outgoing(
            exchange="", routing_key=queue, body=b'"c"', headers={}, message_id="c", content_type="application/json"
        )
        await mq.outbound.move(foreign)
        await until(lambda: consumer.counters.acked == 3)
    assert sent.items() <= seen.items()
    assert len(set(seen.values())) == 3
    (process,) = [span for span in spans.get_finished_spans() if span.context and span.context.trace_id == seen["c"]]
    assert (process.name, process.parent) == (f"{queue} process", None)


async def test_leases_are_counted_as_they_are_renewed_and_lost(reader: InMemoryMetricReader, name: str) -> None:
    lease, clock, gate = timedelta(seconds=30), MovableClock(), asyncio.Event()
    broker = MemoryBroker.named(name, clock=clock, lease=lease)

    async def slow(message: Message[int]) -> None:
        await gate.wait()

    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send_many("q", range(3))
        async with mq.consume("q", int, slow, concurrency=3) as consumer:
            await until(lambda: consumer.in_flight == 3)
            await clock.advance(lease)
            renewed = points(reader)["acemq.lease.renewals.total"]
            assert [tags for tags, _ in renewed] == [{"outcome": "renewed", "transport": "memory"}]
            assert renewed[0][1] % 3 == 0
            assert "acemq.lease.lost.total" not in points(reader)
            broker.lapse("q")
            gate.set()
            await until(lambda: consumer.counters.acked == 3)
    assert points(reader)["acemq.lease.lost.total"] == [({"queue": "q", "of": "delivery", "transport": "memory"}, 3)]


async def test_a_lease_that_nobody_could_renew_is_counted_as_lost_once(reader: InMemoryMetricReader, name: str) -> None:
    lease, clock = timedelta(seconds=30), MovableClock()
    broker = MemoryBroker.named(name, clock=clock, lease=lease)

    async def endless(message: Message[int]) -> None:
        await asyncio.Event().wait()

    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send_many("q", range(2))
        async with mq.consume("q", int, endless, concurrency=1) as consumer:
            await until(lambda: consumer.in_flight == 1)
            assert await mq.pull("q", int) is None
            broker.stall("renew")
            await clock.advance(lease)
            await until(lambda: "acemq.lease.lost.total" in points(reader))
            broker.release("renew")
            found = points(reader)
    assert found["acemq.lease.lost.total"] == [({"queue": "q", "of": "delivery", "transport": "memory"}, 2)]
    assert {tags["outcome"] for tags, _ in found["acemq.lease.renewals.total"]} <= {"failed", "lost", "renewed"}
