"""Pipelines and routing slips from outside: cases M-078 … M-085, on both transports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    ConfigurationError,
    ConsumerState,
    FatalError,
    Itinerary,
    Message,
    Pipeline,
    PipelineTypeError,
    RetryPolicy,
    Route,
    RouteError,
    RoutingSlip,
    RunningPipeline,
    SlipForm,
    Topology,
    current_message,
)
from acemq import headers as h
from acemq.transport import Outgoing
from tests.waiting import until, until_async


@dataclass
class Order:
    n: int


@dataclass
class Priced:
    n: int
    cents: int


@dataclass
class Shipped:
    n: int


AT_ONCE = RetryPolicy.fixed(3, timedelta())


class Steps:
    """Three steps that note their runs, and fail as often as they are told to."""

    def __init__(self) -> None:
        self.ran: dict[str, list[int]] = {"a": [], "b": [], "c": []}
        self.fail_b = 0
        self.messages: list[Message[Any]] = []

    def note(self, step: str, n: int) -> None:
        self.ran[step].append(n)
        message = current_message()
        assert message is not None
        self.messages.append(message)

    async def a(self, order: Order) -> Priced | None:
        self.note("a", order.n)
        return Priced(order.n, order.n * 100)

    async def b(self, priced: Priced) -> Shipped | None:
        self.note("b", priced.n)
        if self.fail_b:
            self.fail_b -= 1
            raise ValueError("boom")
        return Shipped(priced.n)

    async def c(self, shipped: Shipped) -> None:
        self.note("c", shipped.n)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
async def pipeline(mq: AceMQ, steps: Steps, name: str) -> AsyncIterator[Pipeline[Order, None]]:
    yield (
        mq.pipeline(name, Order)
        .step("a", steps.a, retry=AT_ONCE)
        .step("b", steps.b, retry=AT_ONCE)
        .step("c", steps.c, retry=AT_ONCE)
    )
    for step in ("a", "b", "c"):
        for suffix in ("", ".dlq", ".parked"):
            await mq.delete(f"{name}.{step}{suffix}")
    await mq.delete(name, "exchange")


async def test_m078_a_step_that_fails_runs_again_alone(pipeline: Pipeline[Order, None], steps: Steps) -> None:
    steps.fail_b = 2
    async with pipeline.start() as running:
        await running.send(Order(1))
        await until(lambda: running.counters.completed == 1)
        assert running.counters == acemq.PipelineCounters(entered=1, completed=1)
    assert {step: len(ran) for step, ran in steps.ran.items()} == {"a": 1, "b": 3, "c": 1}


async def test_m079_none_ends_a_run_early_and_is_no_failure(mq: AceMQ, name: str, steps: Steps) -> None:
    async def only_even(priced: Priced) -> Shipped | None:
        return Shipped(priced.n) if priced.n % 2 == 0 else None

    described = mq.pipeline(name, Order).step("a", steps.a).step("b", only_even).step("c", steps.c)
    async with described.start() as running:
        for n in range(10):
            await running.send(Order(n))
        await until(lambda: running.counters.completed == 5 and running.counters.ended_early == 5)
        assert (running.counters.failed, running.counters.in_flight) == (0, 0)
        assert await running.depths() == {"a": 0, "b": 0, "c": 0}
    assert sorted(steps.ran["c"]) == [0, 2, 4, 6, 8]


async def test_a_thousand_runs_of_which_a_third_is_filtered_add_up(mq: AceMQ, name: str) -> None:
    async def keep(order: Order) -> Order | None:
        return order if order.n % 3 else None

    async def store(order: Order) -> None: ...

    async with mq.pipeline(name, Order).step("keep", keep).step("store", store).start() as running:
        await asyncio.gather(*(running.send(Order(n)) for n in range(1, 1_001)))
        await until(lambda: running.counters.in_flight == 0, within=30)
        assert running.counters == acemq.PipelineCounters(entered=1_000, completed=667, ended_early=333)


async def test_m080_a_dead_letter_resumes_at_the_step_it_had_reached(
    mq: AceMQ, pipeline: Pipeline[Order, None], steps: Steps
) -> None:
    steps.fail_b = 3
    async with pipeline.start() as running:
        receipt = await running.send(Order(1))
        await until(lambda: running.counters.failed == 1)
        stuck = await mq.pull(running.queue_for("b") + ".dlq", Priced)
        assert stuck is not None
        slip = RoutingSlip.of(stuck)
        assert slip is not None
        assert (slip.current, slip.position, stuck.id) == ("b", 1, receipt.message_id)
        await running.resume(stuck.payload, stuck.wire_headers)
        await stuck.accept()
        await until(lambda: running.counters.completed == 1)
    resumed = [m for m in steps.messages if m.queue.endswith(".b")][-1]
    assert (resumed.attempt, resumed.id, resumed.envelope.error) == (1, receipt.message_id, None)
    assert h.FAILED_AS not in resumed.wire_headers
    assert (len(steps.ran["a"]), len(steps.ran["c"])) == (1, 1)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {h.ROUTE: "a,b,c", h.ROUTE_POSITION: 3},
        {h.ROUTE: "a,elsewhere", h.ROUTE_POSITION: 1},
        {h.ROUTING_SLIP: '{"steps":[]}'},
    ],
)
async def test_m080_without_a_slip_that_leads_on_nothing_is_published(
    pipeline: Pipeline[Order, None], headers: dict[str, Any]
) -> None:
    async with pipeline.start(only=()) as running:
        with pytest.raises(RouteError):
            await running.resume(Order(1), headers)
        assert await running.depths() == {"a": 0, "b": 0, "c": 0}


async def test_m081_a_shorter_route_skips_and_a_bare_message_goes_on_from_its_queue(
    mq: AceMQ, pipeline: Pipeline[Order, None], steps: Steps, name: str
) -> None:
    async def ship(priced: Priced) -> Shipped:
        return Shipped(priced.n)

    async with pipeline.start() as running:
        bare = Outgoing(
            exchange="",
            routing_key=running.queue_for("b"),
            body=b'{"n":7,"cents":1}',
            headers={},
            message_id="bare",
            content_type="application/json",
        )
        await mq.outbound.move(bare)
        await until(lambda: running.counters.completed == 1)
        assert (steps.ran["a"], steps.ran["b"], steps.ran["c"]) == ([], [7], [7])
        with pytest.raises(ConfigurationError, match="no step 'x'"):
            await running.send(Order(1), via=("a", "x"))
        with pytest.raises(ConfigurationError, match="only="):
            pipeline.start(only=("x",))


async def test_m081_via_names_the_steps_of_one_run(mq: AceMQ, name: str) -> None:
    ran: list[str] = []

    async def a(order: Order) -> Order:
        ran.append("a")
        return order

    async def b(order: Order) -> Order:
        ran.append("b")
        return order

    async def c(order: Order) -> None:
        ran.append("c")

    async with mq.pipeline(name, Order).step("a", a).step("b", b).step("c", c).start() as running:
        await running.send(Order(1), via=("a", "c"))
        await until(lambda: running.counters.completed == 1)
    assert ran == ["a", "c"]


async def test_m082_a_hop_that_does_not_land_is_a_failure_of_its_step(
    mq: AceMQ, pipeline: Pipeline[Order, None], steps: Steps
) -> None:
    async with pipeline.start(only=("a", "b")) as running:
        await mq.delete(running.queue_for("c"))
        await running.send(Order(1))
        await until(lambda: running.counters.failed == 1)
    assert len(steps.ran["b"]) == 3
    letter = await mq.pull(running.queue_for("b") + ".dlq", Priced)
    assert letter is not None
    assert letter.failure is not None
    assert "reached no queue" in str(letter.failure.text)
    assert letter.payload == Priced(1, 100)


def test_m083_a_step_that_does_not_fit_is_refused_at_the_call_and_named(mq_unopened: AceMQ, steps: Steps) -> None:
    orders = mq_unopened.pipeline("orders", Order)
    with pytest.raises(PipelineTypeError, match="'ship' takes Priced, but the pipeline starts with Order"):
        orders.step("ship", steps.b)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(PipelineTypeError, match="'price' takes Order, but 'first' gives Priced") as refused:
        orders.step("first", steps.a).step("price", steps.a)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert (refused.value.step, refused.value.takes, refused.value.gives) == ("price", "Order", "Priced")
    with pytest.raises(PipelineTypeError, match="gives None alone"):
        orders.step("a", steps.a).step("b", steps.b).step("c", steps.c).step("d", steps.c)
    after = orders.step("a", steps.a).step("b", lambda priced: steps.b(priced)).step("c", steps.c)
    assert [step.name for step in after.steps] == ["a", "b", "c"]
    with pytest.raises(PipelineTypeError, match="'b' takes Priced, but 'fraud' gives Order"):
        orders.elsewhere("fraud", Order).step("b", steps.b)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def _plain(order: Order) -> Priced:
    return Priced(1, 1)


async def _unknown(order):  # type: ignore[no-untyped-def]
    return order


async def _two(order: Order, more: int) -> None: ...


@pytest.mark.parametrize(
    ("describe", "match"),
    [
        (lambda mq: mq.pipeline("or ders", Order), "pipeline 'or ders'"),
        (lambda mq: mq.pipeline("orders", Order).step("a,b", Steps().a), "step 'a,b'"),
        (lambda mq: mq.pipeline("orders", Order).step("a", Steps().a).step("a", Steps().b), "step 'a' already"),
        (lambda mq: mq.pipeline("orders", Order).step("a", _plain), "async def"),
        (lambda mq: mq.pipeline("orders", Order).step("a", _two), "one argument"),
        (lambda mq: mq.pipeline("orders", Order).step("a", 5), "no function"),
        (lambda mq: mq.pipeline("orders", Order).step("a", _unknown).step("b", lambda x: Steps().c(x)), "takes="),
        (lambda mq: mq.pipeline("orders", Order).start(), "no steps"),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused_at_the_call(mq_unopened: AceMQ, describe: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        describe(mq_unopened)


@pytest.fixture
def mq_unopened() -> AceMQ:
    return AceMQ("memory://")


@pytest.mark.parametrize("form", list(SlipForm))
async def test_identity_and_application_headers_travel_with_the_run(
    mq: AceMQ, pipeline: Pipeline[Order, None], steps: Steps, form: SlipForm
) -> None:
    async with pipeline.writing_slip_as(form).start() as running:
        await running.send(
            Order(1), message_id="m-1", correlation_id="c-1", version=3, claim="s3://x", headers={"x-tenant": "acme"}
        )
        await until(lambda: running.counters.completed == 1)
    assert len(steps.messages) == 3
    first = steps.messages[0].envelope
    assert first.type == running.name
    for message in steps.messages:
        envelope = message.envelope
        assert (envelope.id, envelope.correlation_id, envelope.version, envelope.attempt) == ("m-1", "c-1", 3, 1)
        assert (envelope.first_seen, envelope.origin, envelope.claim) == (first.first_seen, first.origin, "s3://x")
        assert message.headers["x-tenant"] == "acme"
        assert (Itinerary.of(message) is not None) == (form is SlipForm.ITINERARY)
        assert (RoutingSlip.of(message) is not None) == (form is SlipForm.DECLARED)


async def test_a_step_that_another_service_runs_is_declared_and_left_alone(mq: AceMQ, name: str, steps: Steps) -> None:
    here = mq.pipeline(name, Order).elsewhere("a", Priced).step("b", steps.b).elsewhere("c", Shipped)
    there = mq.pipeline(name, Order).step("a", steps.a).elsewhere("b", Shipped).step("c", steps.c)
    async with here.start() as ours:
        await ours.send(Order(1))

        async def waits_elsewhere() -> bool:
            return await ours.depths() == {"a": 1, "b": 0, "c": 0}

        await until_async(waits_elsewhere)
        async with there.start() as theirs:
            await until(lambda: theirs.counters.completed == 1)
    assert steps.ran == {"a": [1], "b": [1], "c": [1]}


async def test_m084_a_slip_of_three_stops_is_followed_stop_by_stop(mq: AceMQ, name: str) -> None:
    stops = [f"{name}-{stop}" for stop in ("validate", "price", "ship")]
    visited: list[tuple[str, str]] = []
    for stop in stops:
        await mq.declare(Topology().queue(stop, type="classic"))

    async def follow(message: Message[Order]) -> Ack | None:
        slip = RoutingSlip.of(message)
        if slip is None or slip.current is None:
            return Ack.park("no slip")
        visited.append((slip.current, message.id))
        onward = slip.advance_to(2) if message.payload.n > 100 and slip.position == 0 else slip.advance()
        if not onward.is_finished:
            await mq.forward(onward, message.payload, message.envelope)
        return None

    consumers = [await mq.consume(stop, Order, follow) for stop in stops]
    receipt = await mq.send_along(RoutingSlip.start_of(*stops), Order(1), headers={"x-tenant": "acme"})
    await until(lambda: len(visited) == 3)
    assert visited == [(stop, receipt.message_id) for stop in stops]
    visited.clear()
    await mq.send_along(RoutingSlip.start_of(*stops), Order(101))
    await until(lambda: len(visited) == 2)
    assert [stop for stop, _ in visited] == [stops[0], stops[2]]
    for consumer in consumers:
        await consumer.close()
    with pytest.raises(RouteError, match="finished"):
        await mq.send_along(RoutingSlip.start_of("x").advance(), Order(1))


async def test_an_itinerary_stamps_its_stops_and_carries_them_to_the_last(mq: AceMQ, name: str) -> None:
    topology = Topology().exchange(name, "topic")
    for stop in ("validate", "price", "ship"):
        topology = topology.queue(f"{name}.{stop}", type="classic").bind(f"{name}.{stop}", name, f"order.{stop}")
    await mq.declare(topology)
    last: list[Message[Order]] = []

    async def follow(message: Message[Order]) -> None:
        slip = Itinerary.of(message)
        assert slip is not None
        onward = slip.advance(now=datetime(2026, 2, 3, 4, 5, 6, 999, tzinfo=UTC))
        if onward.is_finished:
            last.append(message)
        else:
            await mq.forward(onward, message.payload, message.envelope)

    for stop in ("validate", "price", "ship"):
        await mq.consume(f"{name}.{stop}", Order, follow)
    slip = Itinerary()
    for stop in ("validate", "price", "ship"):
        slip = slip.then(name, f"order.{stop}", stop)
    await mq.send_along(slip, Order(1))
    await until(lambda: bool(last))
    arrived = Itinerary.of(last[0])
    assert arrived is not None
    assert [(stop.name, stop.completed_at) for stop in arrived.done] == [
        ("validate", "2026-02-03T04:05:06Z"),
        ("price", "2026-02-03T04:05:06Z"),
    ]
    assert last[0].type == "validate"


async def test_m085_a_malformed_itinerary_is_fatal_even_beside_a_good_slip(mq: AceMQ, queue: str) -> None:
    async def follow(message: Message[int]) -> None:
        Route.of(message)

    envelope = acemq.Envelope.of("t", headers={h.ROUTING_SLIP: "[]"}).replace(route="a,b", route_id="r")
    async with mq.consume(queue, int, follow) as consumer:
        await mq.send(queue, 1, envelope=envelope)
        await until(lambda: consumer.counters.dead_lettered == 1)
        assert consumer.counters.retried == 0
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert letter.failure.how == "fatal"


async def test_closing_a_pipeline_drains_its_steps(pipeline: Pipeline[Order, None], steps: Steps) -> None:
    async with pipeline.start() as running:
        await asyncio.gather(*(running.send(Order(n)) for n in range(50)))
    depths = await running.depths()
    done = running.counters.completed
    assert done + sum(depths.values()) == 50


async def sleeps(number: int) -> int:
    await asyncio.sleep(60)
    return number


async def busy_in_every_step(mq: AceMQ) -> RunningPipeline[int, int]:
    running = await mq.pipeline("slow", int).step("a", sleeps).step("b", sleeps).step("c", sleeps).start()
    for step in running.steps:
        await mq.send(running.queue_for(step), 1)
    await until(lambda: sum(consumer.in_flight for consumer in mq.consumers) == 3)
    return running


async def test_the_steps_of_a_pipeline_close_within_one_budget(name: str) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        running = await busy_in_every_step(mq)
        began = time.monotonic()
        drained = await running.close(timedelta(seconds=1))
        assert time.monotonic() - began < 2.5
        assert (drained.finished, drained.abandoned) == (False, 3)
        assert list(mq.consumers) == []


async def test_closing_a_pipeline_cancelled_leaves_no_step_open(name: str) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        running = await busy_in_every_step(mq)
        closing = asyncio.ensure_future(running.close(timedelta(seconds=60)))
        await until(lambda: any(consumer.state is ConsumerState.DRAINING for consumer in mq.consumers))
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert list(mq.consumers) == []
        assert await running.depths() == {"a": 1, "b": 1, "c": 1}


def test_bad_options_of_a_step_are_refused_where_it_is_described(mq_unopened: AceMQ) -> None:
    described = mq_unopened.pipeline("slow", int)
    with pytest.raises(ConfigurationError, match="concurrency=0"):
        described.step("a", sleeps, concurrency=0)
    with pytest.raises(ConfigurationError, match="prefetch=2"):
        described.step("a", sleeps, prefetch=2, concurrency=3)
    with pytest.raises(TypeError, match=r"step\(\) got an unexpected keyword argument 'concurency'"):
        described.step("a", sleeps, concurency=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def test_a_step_that_returns_no_awaitable_is_fatal_and_named(mq: AceMQ, name: str) -> None:
    described: Pipeline[Order, int] = mq.pipeline(name, Order).step("a", lambda order: 5)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    async with described.start() as running:
        await running.send(Order(1))
        await until(lambda: running.counters.failed == 1)
    letter = await mq.pull(f"{name}.a.dlq", Order)
    assert letter is not None
    assert letter.failure is not None
    assert letter.failure.error_type == f"{FatalError.__module__}.FatalError"
    assert "step 'a' returned int" in str(letter.failure.text)
