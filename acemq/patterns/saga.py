"""Steps that change several systems, and their undoing when a later one fails. In this process, on its stack."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import replace
from opentelemetry.trace import Span

from acemq.clock import SYSTEM, Clock, check_duration, sleep
from acemq.connection import Connection
from acemq.consuming.handling import is_async, name_of, resolved
from acemq.errors import ConfigurationError
from acemq.telemetry import SAGA_COMPENSATING, SAGA_UNRESOLVED, Diagnostic, Reporter, SagaSpans, fail_span

S = TypeVar("S")
R = TypeVar("R")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    do: Callable[[Any], Awaitable[Any]]
    timeout: timedelta | None = None
    undo: Callable[[Any, Any], Awaitable[object]] | None = None
    attempts: int = 1
    delay: timedelta = timedelta(seconds=1)
    undo_timeout: timedelta | None = None


class SagaResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. Nothing is raised for a step that failed."""

    saga: str
    succeeded: bool
    failed_step: str | None = None
    error: BaseException | None = None
    completed: tuple[str, ...] = ()
    """Steps that ran to their end."""
    undone: tuple[str, ...] = ()
    """In the order of undoing."""
    unresolved: tuple[str, ...] = ()
    """Their undoing failed: somebody must act."""
    unresolved_errors: Mapping[str, BaseException] = msgspec.field(default_factory=dict[str, BaseException])
    cancelled: bool = False
    """`stop` was set."""

    @property
    def has_unresolved(self) -> bool:
        return bool(self.unresolved)


class Saga(Generic[S]):
    """A saga that is being described; each verb gives a new one. Built at import, it may run many times at once."""

    def __init__(self, name: str, subject: type[S]) -> None:
        self.name, self.subject = _named("saga", name), subject
        self._steps: tuple[Step, ...] = ()
        self._connection: Connection | None = None

    def step(self, name: str, do: Callable[[S], Awaitable[R]], *, timeout: timedelta | None = None) -> SagaStep[S, R]:
        """One more step on the way forward. What `do` returns is given to its `undo`."""
        _named("step", name)
        if any(step.name == name for step in self._steps):
            raise ConfigurationError(f"saga {self.name!r} has a step {name!r} already")
        _check_async("step", name, do)
        if timeout is not None:
            check_duration("timeout", timeout)
        return self._with(SagaStep(self.name, self.subject), (*self._steps, Step(name=name, do=do, timeout=timeout)))

    def reporting_to(self, connection: Connection) -> Saga[S]:
        """Its diagnostics and spans also go where those of this connection go."""
        made = self._with(Saga(self.name, self.subject), self._steps)
        made._connection = connection
        return made

    async def run(self, subject: S, *, stop: asyncio.Event | None = None) -> SagaResult:
        """Run the steps; when one fails, undo those before it, last to first.

        `stop` cancels the running step, and the result says so. When the task is cancelled, the undoing still runs to
        its end, and only then `CancelledError` goes on.
        """
        if not self._steps:
            raise ConfigurationError(f"saga {self.name!r} has no steps; add one with .step(name, function)")
        return await _Run(self.name, self._steps, self._connection, subject, stop).go()

    def _with(self, made: _Made, steps: tuple[Step, ...]) -> _Made:
        made._steps, made._connection = steps, self._connection
        return made


class SagaStep(Saga[S], Generic[S, R]):
    """The same saga, whose last step may still be told how to undo it."""

    def undo(
        self,
        call: Callable[[S, R], Awaitable[object]],
        *,
        attempts: int = 1,
        delay: timedelta = timedelta(seconds=1),
        timeout: timedelta | None = None,
    ) -> Saga[S]:
        """Called with the subject and what the step returned. It is tried `attempts` times, `delay` apart."""
        *before, last = self._steps
        if last.undo is not None:
            raise ConfigurationError(
                f"step {last.name!r} of saga {self.name!r} is undone by {name_of(last.undo)!r} already"
            )
        _check_async("undo of step", last.name, call)
        if attempts < 1:
            raise ConfigurationError(f"attempts={attempts} must be 1 or more")
        check_duration("delay", delay, zero=True)
        if timeout is not None:
            check_duration("timeout", timeout)
        undone = replace(last, undo=call, attempts=attempts, delay=delay, undo_timeout=timeout)
        # A step again, so that a second undo, which both checkers refuse, is refused here by name.
        return self._with(SagaStep[S, R](self.name, self.subject), (*before, undone))


_Made = TypeVar("_Made", bound=Saga[Any])


def _named(what: str, name: str) -> str:
    if not isinstance(name, str) or not name.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{what} name {name!r} must be text that names it")
    return name


def _check_async(what: str, name: str, call: Any) -> None:
    if not callable(call):
        raise ConfigurationError(f"{what} {name!r}: {call!r} is no function")
    gives = resolved(call).get("return", Any)
    # What is not annotated may return an awaitable; it is found out when it runs.
    if not is_async(call) and gives is not Any and not hasattr(gives, "__await__"):
        raise ConfigurationError(f"{what} {name!r}: {name_of(call)!r} must be `async def`")


class _Run:
    """One run over one subject."""

    def __init__(
        self,
        name: str,
        steps: tuple[Step, ...],
        connection: Connection | None,
        subject: Any,
        stop: asyncio.Event | None,
    ) -> None:
        self._name, self._steps, self._subject, self._stop = name, steps, subject, stop
        self._clock: Clock = connection.clock if connection else SYSTEM
        self._report = connection.report if connection else Reporter()
        self._spans = SagaSpans.of(connection.telemetry if connection else None)
        self._done: list[tuple[Step, Any]] = []
        self._failed: str | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._undone: list[str] = []
        self._unresolved: dict[str, BaseException] = {}

    async def go(self) -> SagaResult:
        with self._span("saga", self._name) as span:
            cancelled = await self._forward()
            succeeded = self._failed is None and not self._stopped and cancelled is None
            if not succeeded:
                cancelled = await self._shielded(self._back()) or cancelled
                if span is not None:
                    fail_span(span, self._error)
        if cancelled is not None:
            raise cancelled
        return SagaResult(
            saga=self._name,
            succeeded=succeeded,
            failed_step=self._failed,
            error=self._error,
            completed=tuple([step.name for step, _ in self._done]),
            undone=tuple(self._undone),
            unresolved=tuple(self._unresolved),
            unresolved_errors=self._unresolved,
            cancelled=self._stopped,
        )

    # Forward

    async def _forward(self) -> asyncio.CancelledError | None:
        """The cancellation of this task that has ended the way forward, if one has."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        for step in self._steps:
            if self._stop is not None and self._stop.is_set():
                self._stopped = True
                return None
            try:
                with self._span("step", step.name):
                    given = await self._do(step)
            except asyncio.CancelledError as cancelled:
                self._failed, self._error = step.name, cancelled
                if task.cancelling() > before:
                    return cancelled
                self._stopped = self._stop is not None and self._stop.is_set()
                return None
            except Exception as error:
                self._failed, self._error = step.name, error
                return None
            self._done.append((step, given))
            if task.cancelling() > before:
                # The step has swallowed it and come to its end: it is undone with the others.
                return asyncio.CancelledError()
        return None

    def _do(self, step: Step) -> Awaitable[Any]:
        doing = step.do(self._subject)
        if self._stop is not None:
            doing = _unless_set(self._stop, doing)
        return doing if step.timeout is None else _within(step.timeout, doing)

    # Back

    async def _shielded(self, back: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
        """Run it to its end, whatever this task is told meanwhile; what it was told."""
        undoing = asyncio.ensure_future(back)
        told: asyncio.CancelledError | None = None
        while not undoing.done():
            try:
                await asyncio.shield(undoing)
            except asyncio.CancelledError as cancelled:
                told = cancelled
        undoing.result()
        return told

    async def _back(self) -> None:
        why = f"failed at {self._failed!r}: {self._error!r}" if self._failed is not None else "was told to stop"
        self._tell(
            SAGA_COMPENSATING,
            "warning",
            f"saga {self._name!r} {why}; undoing {len(self._done)} steps before it, where they can be",
            self._error,
        )
        for step, given in reversed(self._done):
            if step.undo is None:
                continue
            error = await self._undo(step, step.undo, given)
            if error is None:
                self._undone.append(step.name)
                continue
            self._unresolved[step.name] = error
            tries = f"{step.attempts} attempts" if step.attempts > 1 else "1 attempt"
            text = (
                f"step {step.name!r} of saga {self._name!r} is not undone after {tries}: {error!r}; somebody must do it"
            )
            self._tell(SAGA_UNRESOLVED, "error", text, error)

    async def _undo(
        self, step: Step, undo: Callable[[Any, Any], Awaitable[object]], given: Any
    ) -> BaseException | None:
        """Why it could not be done, if it could not. A cancellation in here is a failure like any other."""
        for attempt in range(1, step.attempts + 1):
            try:
                if attempt > 1:
                    await sleep(self._clock, step.delay.total_seconds())
                with self._span("undo", step.name):
                    undoing = undo(self._subject, given)
                    await (undoing if step.undo_timeout is None else _within(step.undo_timeout, undoing))
            except (Exception, asyncio.CancelledError) as error:
                if attempt == step.attempts:
                    return error
            else:
                return None
        return None

    def _tell(self, name: str, level: Literal["warning", "error"], text: str, error: BaseException | None) -> None:
        self._report(Diagnostic(name, level, text, failure=error))

    def _span(self, what: str, name: str) -> AbstractContextManager[Span | None]:
        return _NO_SPAN if self._spans is None else self._spans.span(what, name)


async def _unless_set(stop: asyncio.Event, doing: Awaitable[Any]) -> Any:
    """Cancelled when `stop` is set, or when this task is. What it returns all the same is its result."""
    running, stopping = asyncio.ensure_future(doing), asyncio.ensure_future(stop.wait())
    with suppress(asyncio.CancelledError):  # the task counts it, and is asked when the step has ended
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    while not running.done():
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait((running,))
    return running.result()


async def _within(limit: timedelta, doing: Awaitable[Any]) -> Any:
    async with asyncio.timeout(limit.total_seconds()):
        return await doing


_NO_SPAN: AbstractContextManager[None] = nullcontext()
