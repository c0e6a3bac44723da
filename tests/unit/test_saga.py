"""Sagas: the way forward, the way back, and what stops either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import acemq
from acemq import ConfigurationError, Diagnostic, MovableClock, Saga, SagaResult
from tests.waiting import until

NOW = timedelta()


class Log:
    """Steps and undos that note their calls, and fail as often as they are told."""

    def __init__(self, *fail: str, times: int = 10_000) -> None:
        self.calls: list[str] = []
        self._fail = dict.fromkeys(fail, times)

    def do(self, name: str) -> Callable[[str], Awaitable[str]]:
        async def do(subject: str) -> str:
            self._note(name)
            return f"{name} of {subject}"

        return do

    def undo(self, name: str) -> Callable[[str, str], Awaitable[None]]:
        async def undo(subject: str, given: str) -> None:
            assert given == f"s{name[1:]} of {subject}"
            self._note(name)

        return undo

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self._fail.get(name, 0) > 0:
            self._fail[name] -= 1
            raise LookupError(f"{name} failed")


def saga(log: Log, steps: int, **undo: Any) -> Saga[str]:
    made = Saga("place-order", str)
    for number in range(1, steps + 1):
        made = made.step(f"s{number}", log.do(f"s{number}")).undo(log.undo(f"u{number}"), delay=NOW, **undo)
    return made


class Told(list[Diagnostic]):
    def names(self) -> list[tuple[str, str]]:
        return [(each.name, each.level) for each in self]


async def reported(made: Saga[str], **run: Any) -> tuple[SagaResult, Told]:
    told = Told()
    async with acemq.connect("memory://", on_diagnostic=told.append) as mq:
        return await made.reporting_to(mq).run("o-1", **run), told


# The way forward and the way back


async def test_steps_run_one_after_the_other_and_nothing_is_undone() -> None:
    log = Log()
    result, told = await reported(saga(log, 3))
    assert log.calls == ["s1", "s2", "s3"]
    assert result == SagaResult(saga="place-order", succeeded=True, completed=("s1", "s2", "s3"))
    assert told == []


async def test_a_failed_step_undoes_those_before_it_last_to_first() -> None:
    log = Log("s3")
    result, told = await reported(saga(log, 3))
    assert log.calls == ["s1", "s2", "s3", "u2", "u1"]
    assert (result.succeeded, result.failed_step, result.cancelled) == (False, "s3", False)
    assert isinstance(result.error, LookupError)
    assert (result.completed, result.undone, result.unresolved) == (("s1", "s2"), ("s2", "s1"), ())
    assert told.names() == [("acemq.saga.compensating", "warning")]


async def test_m103_an_undo_that_fails_is_reported_and_the_others_still_run() -> None:
    log = Log("s4", "u2")
    result, told = await reported(saga(log, 4))
    assert log.calls == ["s1", "s2", "s3", "s4", "u3", "u2", "u1"]
    assert (result.undone, result.unresolved, result.has_unresolved) == (("s3", "s1"), ("s2",), True)
    assert isinstance(result.unresolved_errors["s2"], LookupError)
    assert told.names() == [("acemq.saga.compensating", "warning"), ("acemq.saga.unresolved", "error")]
    assert told[1].failure is result.unresolved_errors["s2"]


async def test_o053_an_undo_that_works_at_its_third_attempt_is_undone() -> None:
    log = Log("s3", "u2", times=2)
    result, told = await reported(saga(log, 3, attempts=3))
    assert log.calls == ["s1", "s2", "s3", "u2", "u2", "u2", "u1"]
    assert (result.undone, result.unresolved) == (("s2", "s1"), ())
    assert told.names() == [("acemq.saga.compensating", "warning")]


async def test_o053_an_undo_that_always_fails_is_unresolved_after_its_attempts() -> None:
    log = Log("s3", "u2")
    result, told = await reported(saga(log, 3, attempts=5))
    assert log.calls == ["s1", "s2", "s3", *["u2"] * 5, "u1"]
    assert (result.undone, result.unresolved) == (("s1",), ("s2",))
    assert told.names().count(("acemq.saga.unresolved", "error")) == 1


async def test_attempts_of_an_undo_are_its_delay_apart() -> None:
    clock, log = MovableClock(), Log("s2", "u1", times=2)
    made = Saga("place-order", str).step("s1", log.do("s1")).undo(log.undo("u1"), attempts=3, delay=timedelta(hours=1))
    async with acemq.connect("memory://", clock=clock) as mq:
        running = asyncio.ensure_future(made.step("s2", log.do("s2")).reporting_to(mq).run("o-1"))
        for expected in (1, 2, 3):
            await clock.rest()
            assert log.calls.count("u1") == expected
            await clock.advance(timedelta(hours=1))
        assert (await running).undone == ("s1",)


async def test_a_step_without_an_undo_is_skipped_in_silence() -> None:
    log = Log("s3")
    made = Saga("mail", str).step("s1", log.do("s1")).undo(log.undo("u1")).step("s2", log.do("s2"))
    result, told = await reported(made.step("s3", log.do("s3")))
    assert log.calls == ["s1", "s2", "s3", "u1"]
    assert (result.undone, result.unresolved) == (("s1",), ())
    assert told.names() == [("acemq.saga.compensating", "warning")]


async def test_a_step_and_an_undo_that_take_too_long_fail() -> None:
    log, forever = Log(), asyncio.Event()

    async def hang(*given: object) -> None:
        await forever.wait()

    made = (
        Saga("slow", str)
        .step("s1", log.do("s1"))
        .undo(hang, timeout=timedelta(milliseconds=10))
        .step("s2", hang, timeout=timedelta(milliseconds=10))
    )
    result = await made.run("o-1")
    assert isinstance(result.error, TimeoutError)
    assert isinstance(result.unresolved_errors["s1"], TimeoutError)


async def test_one_saga_runs_many_times_at_once() -> None:
    log = Log()
    made = saga(log, 3)
    results = await asyncio.gather(*(made.run(f"o-{number}") for number in range(50)))
    assert all(result.succeeded for result in results)
    assert log.calls.count("s2") == 50


async def test_what_is_not_awaitable_fails_its_step() -> None:
    result = await any_saga().step("s1", lambda subject: subject).run("o-1")
    assert (result.failed_step, type(result.error)) == ("s1", TypeError)


# Cancelling: the way forward only


class Held:
    """A saga of three steps, held in its third, whose second undo waits, too."""

    def __init__(self) -> None:
        self.log = Log()
        self.began, self.undoing, self.undo = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.swallows = False

    def saga(self) -> Saga[str]:
        log = self.log
        made = Saga("held", str).step("s1", log.do("s1")).undo(log.undo("u1"))
        return made.step("s2", log.do("s2")).undo(self.undo_slowly).step("s3", self.hold).undo(log.undo("u3"))

    async def hold(self, subject: str) -> str:
        self.log.calls.append("s3")
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self.swallows:
                raise
        return f"s3 of {subject}"

    async def undo_slowly(self, subject: str, given: str) -> None:
        self.undoing.set()
        await self.undo.wait()
        self.log.calls.append("u2")


async def test_m104_a_cancelled_task_undoes_to_the_end_and_only_then_is_cancelled() -> None:
    held, told = Held(), Told()
    async with acemq.connect("memory://", on_diagnostic=told.append) as mq:
        running = asyncio.ensure_future(held.saga().reporting_to(mq).run("o-1"))
        await held.began.wait()
        running.cancel()
        await held.undoing.wait()
        for _ in range(3):
            running.cancel()  # nothing reaches the way back
            await asyncio.sleep(0)
        assert not running.done()
        held.undo.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert held.log.calls == ["s1", "s2", "s3", "u2", "u1"]
    assert told.names() == [("acemq.saga.compensating", "warning")]


async def test_a_task_cancelled_while_it_undoes_ends_undone_and_then_cancelled() -> None:
    held = Held()
    log = Log("s3")
    made = Saga("held", str).step("s2", log.do("s2")).undo(held.undo_slowly).step("s3", log.do("s3"))
    running = asyncio.ensure_future(made.run("o-1"))
    await held.undoing.wait()
    running.cancel()
    await asyncio.sleep(0)
    held.undo.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert held.log.calls == ["u2"]


async def test_stop_cancels_the_running_step_and_gives_a_result() -> None:
    held, stop = Held(), asyncio.Event()
    held.undo.set()
    running = asyncio.ensure_future(reported(held.saga(), stop=stop))
    await held.began.wait()
    stop.set()
    result, told = await running
    assert held.log.calls == ["s1", "s2", "s3", "u2", "u1"]
    assert (result.cancelled, result.succeeded, result.failed_step) == (True, False, "s3")
    assert isinstance(result.error, asyncio.CancelledError)
    assert told.names() == [("acemq.saga.compensating", "warning")]


async def test_stop_that_is_set_already_does_nothing_at_all() -> None:
    log, stop = Log(), asyncio.Event()
    stop.set()
    result = await saga(log, 3).run("o-1", stop=stop)
    assert log.calls == []
    assert (result.cancelled, result.succeeded, result.failed_step, result.completed) == (True, False, None, ())


async def test_stop_between_two_steps_undoes_what_is_done() -> None:
    log, stop = Log(), asyncio.Event()

    async def last(subject: str) -> str:
        stop.set()
        return f"s1 of {subject}"

    made = Saga("place-order", str).step("s1", last).undo(log.undo("u1")).step("s2", log.do("s2"))
    result = await made.run("o-1", stop=stop)
    assert log.calls == ["u1"]
    assert (result.cancelled, result.failed_step, result.completed, result.undone) == (True, None, ("s1",), ("s1",))


async def test_stop_that_comes_when_all_is_done_changes_nothing() -> None:
    log, stop = Log(), asyncio.Event()

    async def last(subject: str) -> None:
        stop.set()

    result = await saga(log, 2).step("last", last).run("o-1", stop=stop)
    assert result.succeeded
    assert not result.cancelled


@pytest.mark.parametrize("with_stop", [True, False])
async def test_a_step_that_swallows_its_cancellation_has_a_result_and_is_undone(with_stop: bool) -> None:
    held = Held()
    held.swallows = True
    held.undo.set()
    running = asyncio.ensure_future(held.saga().run("o-1", stop=asyncio.Event() if with_stop else None))
    await held.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert held.log.calls == ["s1", "s2", "s3", "u3", "u2", "u1"]


async def test_a_step_that_is_cancelled_by_its_own_doing_has_failed() -> None:
    log = Log()

    async def cancelled(subject: str) -> None:
        raise asyncio.CancelledError

    result = await saga(log, 1).step("s2", cancelled).run("o-1")
    assert log.calls == ["s1", "u1"]
    assert (result.failed_step, result.cancelled) == ("s2", False)


async def test_cancelling_leaves_no_task_behind() -> None:
    held = Held()
    held.undo.set()
    before = asyncio.all_tasks()
    running = asyncio.ensure_future(held.saga().run("o-1", stop=asyncio.Event()))
    await held.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: asyncio.all_tasks() == before)


# Bad input


async def nothing(*given: object) -> None: ...
def plain(*given: object) -> int:
    return 1


def any_saga() -> Any:
    """One that the checkers do not look at."""
    return Saga("s", str)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Saga("", str), "saga name"),
        (lambda: any_saga().step(" ", nothing), "step name"),
        (lambda: any_saga().step("a", nothing).step("a", nothing), "'a' already"),
        (lambda: any_saga().step("a", nothing).undo(nothing).undo(nothing), "undone by 'nothing' already"),
        (lambda: any_saga().step("a", plain), "async def"),
        (lambda: any_saga().step("a", nothing).undo(plain), "async def"),
        (lambda: any_saga().step("a", 3), "no function"),
        (lambda: any_saga().step("a", nothing, timeout=timedelta()), "timeout"),
        (lambda: any_saga().step("a", nothing).undo(nothing, attempts=0), "attempts"),
        (lambda: any_saga().step("a", nothing).undo(nothing, delay=timedelta(seconds=-1)), "delay"),
        (lambda: any_saga().step("a", nothing).undo(nothing, timeout=3), "timeout"),
    ],
)
def test_bad_input_is_refused_when_it_is_described(build: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        build()


async def test_a_saga_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no steps"):
        await Saga("empty", str).run("o-1")


# Spans


async def test_a_run_has_one_span_with_a_child_for_each_step_and_undo() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with patch.object(trace, "get_tracer_provider", lambda: provider):
        await saga(Log("s3", "u1"), 3).run("o-1")
        async with acemq.connect("memory://") as mq:
            await saga(Log(), 1).reporting_to(mq).run("o-2")
    spans = {span.name: span for span in exporter.get_finished_spans()[:6]}
    whole = spans["saga place-order"]
    assert spans.keys() == {"saga place-order", "step s1", "step s2", "step s3", "undo s2", "undo s1"}
    assert all(span.parent == whole.context for name, span in spans.items() if span is not whole)
    failed = {name for name, span in spans.items() if span.status.status_code is StatusCode.ERROR}
    assert failed == {"saga place-order", "step s3", "undo s1"}
    assert [span.name for span in exporter.get_finished_spans()[6:]] == ["step s1", "saga place-order"]
