"""Steps that each have a queue of their own, with types that are checked before anything runs."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Generic, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin

import msgspec
from msgspec.structs import replace

from acemq.ack import Ack
from acemq.connection import Connection
from acemq.consuming.consumer import Consumer
from acemq.consuming.handling import fits, is_async, name_of, resolved, shown
from acemq.consuming.options import ConsumeOptions
from acemq.envelope import Envelope
from acemq.errors import ConfigurationError, FatalError, PipelineTypeError, RouteError
from acemq.headers import HeaderValue
from acemq.ids import new_id
from acemq.keywords import check_keywords
from acemq.message import Message
from acemq.opening import Opening
from acemq.patterns.routing_slip import Itinerary, Route, RoutingSlip, Stop, address_of
from acemq.publishing.options import PublishOptions, carrying
from acemq.publishing.outbound import Receipt
from acemq.retry import RetryPolicy
from acemq.stopping import Drained
from acemq.stores import Idempotency, IdempotencyStore
from acemq.topology import Topology

In = TypeVar("In")
Out = TypeVar("Out", covariant=True)
Next = TypeVar("Next")
T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


class SlipForm(StrEnum):
    """In which form a run's routing slip is written; either is read."""

    DECLARED = "declared"
    ITINERARY = "itinerary"


class StepOptions(TypedDict, total=False):
    """As those of a consumer, for the queue of one step."""

    concurrency: int
    prefetch: int
    retry: RetryPolicy
    handler_timeout: timedelta
    idempotency: IdempotencyStore | Idempotency
    """Keyed by step and message, so that one store serves all steps."""
    takes: type[Any]
    """Only for functions without annotations."""


def of_step(step: str, idempotency: Idempotency) -> Idempotency:
    """Its keys are `{step}:{key}` (CONTRACT.md section 13): a message keeps its id from step to step."""
    key = idempotency.key

    def of_this_step(message: Message[Any]) -> str:
        return f"{step}:{key(message)}"

    return replace(idempotency, key=of_this_step)


class Step(msgspec.Struct, frozen=True):
    name: str
    call: Callable[[Any], Awaitable[Any]] | None
    """`None`: another service runs it."""
    takes: Any
    """The payload class of its queue."""
    gives: Any
    """Without `None`; `None` alone when it gives nothing, `Any` when that is not known."""
    options: ConsumeOptions = msgspec.field(default_factory=ConsumeOptions)


class PipelineCounters(msgspec.Struct, frozen=True):
    """What this process has seen."""

    entered: int = 0
    completed: int = 0
    ended_early: int = 0
    failed: int = 0
    """Runs that lie in the dead letters of a step, or are parked there."""

    @property
    def in_flight(self) -> int:
        """What is left. Below the truth where steps run elsewhere, and after a replay or `resume`: a run that comes
        back was counted as failed, and is counted again when it ends."""
        return max(self.entered - self.completed - self.ended_early - self.failed, 0)


class Pipeline(Generic[In, Out]):
    """A pipeline that is being described; each verb gives a new one, and nothing happens before `start`."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        entry: type[In],
        steps: tuple[Step, ...] = (),
        form: SlipForm = SlipForm.DECLARED,
    ) -> None:
        self.connection, self.name, self.entry, self.steps, self.form = (
            connection,
            check_short_name("pipeline", name),
            entry,
            steps,
            form,
        )

    def step(
        self: Pipeline[In, T | None], name: str, call: Callable[[T], Awaitable[Next]], **options: Unpack[StepOptions]
    ) -> Pipeline[In, Next]:
        """A function that takes what the step before it gives; `None` from it ends a run early.

        Refused by both checkers, and here as `PipelineTypeError`, when it does not fit.
        """
        self._check_new(name)
        check_keywords("step", options, StepOptions.__annotations__)
        annotations = resolved(call)
        takes, gives = _first_parameter(call, annotations, name), annotations.get("return", Any)
        if not is_async(call) and gives is not Any and not _is_awaitable(gives):
            raise ConfigurationError(f"step {name!r}: {name_of(call)!r} must be `async def`")
        before = self._before(name)
        asked = options.get("takes", takes)
        if asked is not None and before is not Any and not fits(before, asked):
            giver = f"{self.steps[-1].name!r} gives" if self.steps else "the pipeline starts with"
            raise PipelineTypeError(
                name, shown(asked), shown(before), f"{name!r} takes {shown(asked)}, but {giver} {shown(before)}"
            )
        payload: Any = before if before is not Any else asked
        if payload is None or payload is Any:
            raise ConfigurationError(f"step {name!r}: what it takes is not known; annotate it, or give takes=")
        consuming = cast("ConsumeOptions", {option: value for option, value in options.items() if option != "takes"})
        if "idempotency" in consuming:
            consuming["idempotency"] = of_step(name, Idempotency.of(consuming["idempotency"]))
        # Made and not opened: it refuses here what is wrong with the options.
        self.connection.consumer_of(Consumer, queue_for(self.name, name), payload, call, consuming)
        return self._and(Step(name, call, payload, _without_none(gives), consuming))

    def elsewhere(self, name: str, gives: type[Next]) -> Pipeline[In, Next]:
        """A step that another service runs: its queue is declared, nothing is consumed here."""
        self._check_new(name)
        return self._and(Step(name, None, self._before(name), gives))

    def writing_slip_as(self, form: SlipForm) -> Pipeline[In, Out]:
        """The form in which `send` starts a run. Either form is read, whatever is chosen here."""
        return Pipeline(self.connection, self.name, self.entry, self.steps, SlipForm(form))

    def start(self, *, only: Collection[str] | None = None) -> Opening[RunningPipeline[In, Out]]:
        """Declare the queues of all steps, and consume those that have a function, or `only` these; `()` none.

        Where the connection only verifies, whatever is missing for any step is one `TopologyError` before the first
        is consumed.
        """
        if not self.steps:
            raise ConfigurationError(f"pipeline {self.name!r} has no steps; add one with .step(name, function)")
        here = [step.name for step in self.steps if step.call is not None]
        unknown = [name for name in only or () if name not in here]
        if unknown:
            raise ConfigurationError(
                f"only= names {unknown[0]!r}; steps with a function are {', '.join(here) or 'none'}"
            )
        running: RunningPipeline[In, Out] = RunningPipeline(self)
        names = here if only is None else only

        async def open_pipeline() -> RunningPipeline[In, Out]:
            await running.open_steps([step for step in self.steps if step.name in names])
            return running

        return Opening(f"pipeline {self.name!r}", open_pipeline, lambda opened: opened.close())

    def topology(self) -> Topology:
        """The queues of all steps, and the exchange over which libraries in other languages address them."""
        whole = Topology().exchange(self.name)
        for step in self.steps:
            queue = queue_for(self.name, step.name)
            whole = whole.queue(queue).bind(queue, self.name, step.name)
        return whole

    def _before(self, name: str) -> Any:
        if not self.steps:
            return self.entry
        gives = self.steps[-1].gives
        if gives is None:
            raise PipelineTypeError(
                name, "something", "None", f"{name!r} never runs: {self.steps[-1].name!r} before it gives None alone"
            )
        return gives

    def _check_new(self, name: str) -> None:
        check_short_name("step", name)
        if any(step.name == name for step in self.steps):
            raise ConfigurationError(f"pipeline {self.name!r} has a step {name!r} already")

    def _and(self, step: Step) -> Pipeline[In, Any]:
        return Pipeline(self.connection, self.name, self.entry, (*self.steps, step), self.form)


class RunningPipeline(Generic[In, Out]):
    """A started pipeline: the way in, and its steps' consumers."""

    def __init__(self, described: Pipeline[In, Out]) -> None:
        self.name = described.name
        self.steps = tuple(step.name for step in described.steps)
        self._described, self._connection = described, described.connection
        self._consumers: list[Consumer] = []
        self._counted = PipelineCounters()

    @property
    def counters(self) -> PipelineCounters:
        seen = [consumer.counters for consumer in self._consumers]
        return replace(self._counted, failed=sum(c.dead_lettered + c.parked + c.rejected for c in seen))

    def queue_for(self, step: str) -> str:
        if step not in self.steps:
            raise ConfigurationError(f"pipeline {self.name!r} has no step {step!r}; it has {', '.join(self.steps)}")
        return queue_for(self.name, step)

    async def send(
        self, payload: In, *, via: Sequence[str] | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        """Start a run: over all steps, or over those of `via` in that order, whose first must take `payload`."""
        if "envelope" in options:
            raise ConfigurationError("envelope= starts no new run; use resume() for a message that has one")
        for step in via or ():
            self.queue_for(step)
        slip = start_slip(self.name, self.steps if via is None else via, self._described.form)
        envelope = slip.on(self._connection.outbound.encoder.envelope(self.name, options))
        receipt = await self._publish(slip, payload, envelope, options)
        self._counted = replace(self._counted, entered=self._counted.entered + 1)
        return receipt

    async def resume(self, payload: object, wire_headers: Mapping[str, HeaderValue]) -> Receipt:
        """Put a message back at the step it had reached, with a first attempt ahead, the same id and no error.

        `wire_headers` are the message's raw ones. `RouteError`, and nothing published, without a slip, with a finished
        one, or at a step that this pipeline does not have.
        """
        slip = resumed(self.name, self.steps, wire_headers)
        envelope = Envelope.from_headers(
            wire_headers, routing_key=self.name, message_id=None, now=self._connection.clock.now()
        )
        return await self._publish(slip, payload, envelope.replace(attempt=1, error=None))

    async def depths(self) -> dict[str, int]:
        """How many wait at each step, by the broker's word."""
        return {step: (await self._connection.depth(self.queue_for(step))).ready for step in self.steps}

    async def close(self, timeout: timedelta | None = None) -> Drained:
        """Drain the steps, first to last, within one budget; a step that uses it up leaves none to those behind it.

        Cancelling it stops all of them at once.
        """
        budget = self._connection.time_left() if timeout is None else timeout
        end, drained = time.monotonic() + budget.total_seconds(), Drained()
        try:
            for consumer in self._consumers:
                drained += await consumer.drain(timedelta(seconds=max(end - time.monotonic(), 0)))
        except BaseException:
            await asyncio.gather(*(consumer.drain(timedelta()) for consumer in self._consumers))
            raise
        return drained

    async def open_steps(self, steps: Sequence[Step]) -> None:
        whole = self._described.topology()
        whole.validate()
        for step in steps:
            whole |= self._connection.beside(self.queue_for(step.name), step.options.get("retry"))
        await self._connection.provide(whole)
        try:
            for step in steps:
                queue, options = self.queue_for(step.name), step.options.copy()
                options["declare"] = False  # it has been seen to above, before the first step takes a message
                opening = self._connection.consume(queue, step.takes, self._handler_of(step), **options)
                self._consumers.append(await opening)
        except BaseException:
            await self.close(timedelta())
            raise

    def _handler_of(self, step: Step) -> Callable[[Message[Any]], Awaitable[Ack | None]]:
        async def handle(message: Message[Any]) -> None:
            assert step.call is not None
            slip = Route.from_headers(message.wire_headers)  # before the work: a slip that cannot be followed is fatal
            answer = step.call(message.payload)
            if not inspect.isawaitable(answer):
                raise FatalError(f"step {step.name!r} returned {type(answer).__name__}, not an awaitable")
            output = await answer
            onward = advanced(slip, step.name, self.steps, now=self._connection.clock.now())
            if onward.is_finished:
                self._finished(message, step.name, "completed")
            elif output is None:
                self._finished(message, step.name, "ended_early")
            else:
                # Confirmed and routed first; only then does returning accept the input.
                await self._publish(onward, output, message.envelope.replace(attempt=1, error=None), own=True)

        handle.__name__ = step.name
        return handle

    async def _publish(
        self,
        slip: RoutingSlip | Itinerary,
        payload: object,
        envelope: Envelope,
        options: PublishOptions | None = None,
        *,
        own: bool = False,
    ) -> Receipt:
        stop = address(self.name, self.steps, slip)
        return await self._connection.outbound.publish(
            stop.exchange, stop.routing_key, payload, carrying(slip.on(envelope), options), own=own
        )

    def _finished(self, message: Message[Any], step: str, outcome: str) -> None:
        self._counted = replace(self._counted, **{outcome: getattr(self._counted, outcome) + 1})
        age = message.age or timedelta()
        self._connection.telemetry.run_finished(self.name, step, outcome, age.total_seconds())


# How a slip moves through a pipeline (CONTRACT.md section 3)


def queue_for(pipeline: str, step: str) -> str:
    return f"{pipeline}.{step}"


def start_slip(pipeline: str, steps: Sequence[str], form: SlipForm) -> RoutingSlip | Itinerary:
    if form is SlipForm.DECLARED:
        return RoutingSlip.start_of(*steps)
    return Itinerary(tuple(Stop("", queue_for(pipeline, step), step) for step in steps))


def advanced(
    slip: RoutingSlip | Itinerary | None, at: str, steps: Sequence[str], *, now: datetime
) -> RoutingSlip | Itinerary:
    """The slip after the step `at`. Without one, a message is on the full route, at the step of its queue."""
    match slip:
        case Itinerary():
            return slip.advance(now=now)
        case None:
            return RoutingSlip(tuple(steps), steps.index(at), new_id()).advance()
        case RoutingSlip():
            # The queue knows better than the slip where the message is.
            here = slip if slip.current == at or at not in slip.steps else slip.advance_to(slip.steps.index(at))
            return here.advance()


def address(pipeline: str, steps: Sequence[str], slip: RoutingSlip | Itinerary) -> Stop:
    """Where the slip's current step is: a step of this pipeline in its queue, any other name as it stands."""
    stop = address_of(slip)
    if isinstance(slip, RoutingSlip) and stop.name in steps:
        return Stop("", queue_for(pipeline, stop.name), stop.name)
    return stop


def resumed(pipeline: str, steps: Sequence[str], wire_headers: Mapping[str, HeaderValue]) -> RoutingSlip | Itinerary:
    """The slip of a message that is to go on where it had got to; `RouteError` when that is nowhere here."""
    slip = Route.from_headers(wire_headers)
    if slip is None:
        raise RouteError(f"the message carries no routing slip; start a new run of {pipeline!r} with send()")
    if address(pipeline, steps, slip).routing_key not in {queue_for(pipeline, step) for step in steps}:
        raise RouteError(f"the message is at {slip.current!r}, which is no step of {pipeline!r}: {', '.join(steps)}")
    return slip


def idempotency_key(step: str, identity: str) -> str:
    """A hop keeps the id, so a step's key names the step too (CONTRACT.md section 13)."""
    return f"{step}:{identity}"


def check_short_name(kind: str, name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{kind} {name!r} must have 1 to 100 letters, digits, '-', '_' or '.'")
    return name


# Types


def _first_parameter(call: Any, annotations: Mapping[str, Any], step: str) -> Any:
    if not callable(call):
        raise ConfigurationError(f"step {step!r}: {call!r} is no function")
    try:
        signature = inspect.signature(call)
        signature.bind(None)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"step {step!r}: {name_of(call)!r} must take one argument, the payload: {error}"
        ) from None
    return annotations.get(next(iter(signature.parameters)))


def _without_none(gives: Any) -> Any:
    if gives is type(None) or gives is None:
        return None
    if get_origin(gives) is None:
        return gives
    rest = [kind for kind in get_args(gives) if kind is not type(None)]
    if len(rest) == len(get_args(gives)) or type(None) not in get_args(gives):
        return gives
    return Union[tuple(rest)]  # noqa: UP007 - made at run time


def _is_awaitable(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, Awaitable)
