"""Runs one scenario on an event loop of its own, and says how it ended."""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import sys
import time
import warnings
from contextlib import suppress
from typing import Any, Literal

import msgspec
import pytest

from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.hooks import Hooks, Impossible, NotSupplied
from acemq.testing.conformance.scenario import Body, Scenario
from acemq.testing.conformance.timing import time_factor
from acemq.transport import Capabilities

LIMIT = 60.0
"""Seconds for one scenario, × the time factor."""
LEFT_WITHIN = 2.0
"""Seconds in which the tasks of a closed transport have to end."""

Outcome = Literal["passed", "failed", "skipped", "gap"]


class Result(msgspec.Struct, kw_only=True):
    """How a scenario ended."""

    id: str
    title: str
    label: str = ""
    version: str = ""
    server: str = ""
    outcome: Outcome = "passed"
    reason: str = ""
    seconds: float = 0.0
    measured: dict[str, float | int | str] = msgspec.field(default_factory=dict[str, float | int | str])
    capabilities: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    required: bool = False
    """Skipped for the want of a hook that `ACEMQ_REQUIRE_SERVICES=1` asks for."""
    error: BaseException | None = None

    def told(self) -> dict[str, Any]:
        """For the report of the test, which may travel to another process."""
        return {field: getattr(self, field) for field in _TOLD}

    def conclude(self) -> None:
        """As pytest is told."""
        __tracebackhide__ = True
        match self.outcome:
            case "skipped":
                pytest.skip(self.reason)
            case "gap":
                pytest.xfail(f"known gap {self.id}: {self.reason}")
            case "failed":
                raise self.error or AssertionError(self.reason)
            case "passed":
                pass


_TOLD = ("id", "title", "label", "version", "server", "outcome", "reason", "seconds", "measured", "capabilities")


def execute(suite: Hooks, which: Scenario, body: Body) -> Result:
    """Never raises what the scenario raises."""
    result = Result(id=which.id, title=which.title, label=suite.label, version=suite.version)
    began = time.perf_counter()
    try:
        _run(suite, which, body, result)
    except _Undeclared as missing:
        result.outcome, result.reason = "skipped", f"not declared: {missing}"
    except NotSupplied as missing:
        required = os.environ.get("ACEMQ_REQUIRE_SERVICES") == "1" and not isinstance(missing, Impossible)
        result.outcome, result.reason, result.error = "failed" if required else "skipped", str(missing), missing
    except (Exception, pytest.fail.Exception) as error:
        result.outcome, result.error = "failed", error
        result.reason = f"{type(error).__name__}: {error}"[:500]
    result.seconds = round(time.perf_counter() - began, 3)
    gap = suite.known_gaps.get(which.id)
    if gap is not None and result.outcome == "failed":
        result.outcome, result.reason = "gap", gap
    elif gap is not None and result.outcome == "passed":
        result.outcome, result.reason = "failed", f"{which.id} passes: take it out of known_gaps"
    return result


class _Undeclared(Exception):
    pass


def _run(suite: Hooks, which: Scenario, body: Body, result: Result) -> None:
    unraised: list[str] = []
    before = sys.unraisablehook
    root = logging.getLogger()
    level = root.level
    bench = Bench(suite, which)
    result.server = suite.server()  # before there is a link, which would fall silent while a program is asked
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sys.unraisablehook = lambda what: unraised.append(f"{what.exc_value!r} in {what.object!r}")
        root.addHandler(bench.logs)
        root.setLevel(min(level, logging.INFO))
        logging.getLogger("asyncio").setLevel(logging.WARNING)
        try:
            with asyncio.Runner(debug=True) as runner:
                runner.get_loop().slow_callback_duration = 5.0
                runner.get_loop().set_exception_handler(lambda _, context: unraised.append(_said(context)))
                runner.run(_play(bench, body, result))
            if result.seconds > 1 or which.group in "JK":
                gc.collect()  # what was dropped unread says so now
        finally:
            root.removeHandler(bench.logs)
            root.setLevel(level)
            sys.unraisablehook = before
    slips = [*unraised, *(slip for sink in bench.sinks for slip in sink.slips)]
    assert not slips, "; ".join(slips)


async def _play(bench: Bench, body: Body, result: Result) -> None:
    me = asyncio.current_task()
    driver = asyncio.create_task(bench.pace.drive(), name="moves the clock")
    limit = asyncio.timeout(LIMIT * time_factor())
    try:
        async with limit:
            try:
                bench.t = await bench.open()
                _describe(bench, result)
                missing = bench.which.undeclared(bench.can)
                if missing:
                    raise _Undeclared(", ".join(missing))
                await body(bench.suite, bench)
            except asyncio.CancelledError:
                if limit.expired():
                    sys.stderr.write(_stacks())
                raise
    except TimeoutError:
        if limit.expired():
            raise AssertionError(f"{bench.which.id} hangs: not done within {LIMIT * time_factor():g} s") from None
        raise
    finally:
        await bench.close()
        driver.cancel()
        with suppress(asyncio.CancelledError):
            await driver
        result.measured = bench.measured
    left = await _tasks_left(me)
    assert not left, f"tasks left behind: {left}"


def _describe(bench: Bench, result: Result) -> None:
    can = bench.can
    result.label = result.label or can.transport
    result.capabilities = plain(can)


def plain(can: Capabilities) -> dict[str, Any]:
    """Capabilities as JSON holds them: lengths of time in seconds, and "any" for `FOREVER`."""
    out: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(can))
    for field in ("publish_delay", "requeue_delay", "hold_limit"):
        length = getattr(can, field)
        out[field] = None if length is None else "any" if length.days > 100_000_000 else length.total_seconds()
    if can.lease is not None:
        lengths = {name: getattr(can.lease, name) for name in ("default", "shortest", "longest", "step")}
        out["lease"] = {
            **{name: "any" if each.days > 100_000_000 else each.total_seconds() for name, each in lengths.items()},
            "renewable": can.lease.renewable,
        }
    return out


async def _tasks_left(me: asyncio.Task[Any] | None) -> set[asyncio.Task[Any]]:
    end = time.monotonic() + LEFT_WITHIN
    while (left := {task for task in asyncio.all_tasks() if task is not me}) and time.monotonic() < end:
        await asyncio.sleep(0.005)
    return left


def _said(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context['message']}{f': {error!r}' if error else ''}"


def _stacks() -> str:
    told = io.StringIO()
    for task in asyncio.all_tasks():
        told.write(f"\n{task!r}\n")
        task.print_stack(file=told)
    return told.getvalue()
