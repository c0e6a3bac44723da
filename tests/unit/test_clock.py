"""The clock that tests move, and the few rules about time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.clock import SYSTEM, Clock, MovableClock, Pauses, check_duration, whole_seconds
from acemq.errors import ConfigurationError

SECOND = timedelta(seconds=1)


async def test_timers_come_in_the_order_of_their_instants_then_of_asking() -> None:
    clock, rang = MovableClock(), list[str]()
    for delay, name in [(2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b"), (0.0, "at once")]:
        clock.call_later(delay, partial(rang.append, name))
    await clock.advance(2 * SECOND)
    assert rang == ["at once", "a", "b", "c", "d"]


async def test_the_clock_stops_at_each_timer_on_the_way() -> None:
    clock, seen = MovableClock(), list[tuple[float, datetime]]()
    began = clock.now()
    for delay in (1.0, 2.5, 3_600.0):
        clock.call_later(delay, lambda: seen.append((clock.monotonic(), clock.now())))
    await clock.advance(timedelta(hours=2))
    assert seen == [(at, began + timedelta(seconds=at)) for at in (1.0, 2.5, 3_600.0)]
    assert clock.now() == began + timedelta(hours=2)


async def test_a_timer_set_on_the_way_still_comes_in_its_turn() -> None:
    clock, rang = MovableClock(), list[float]()

    def again() -> None:
        rang.append(clock.monotonic())
        clock.call_later(1, again)

    clock.call_later(1, again)
    await clock.advance(5 * SECOND)
    assert rang == [1, 2, 3, 4, 5]


async def test_what_waits_for_a_timer_runs_before_the_next_timer() -> None:
    clock, story = MovableClock(), list[str]()

    async def wait(delay: float, name: str) -> None:
        done = asyncio.Event()
        clock.call_later(delay, done.set)
        await done.wait()
        story.append(f"{name} at {clock.monotonic():g}")

    waiting = [asyncio.create_task(wait(delay, name)) for delay, name in ((2, "second"), (1, "first"))]
    await clock.advance(10 * SECOND)
    assert story == ["first at 1", "second at 2"]
    await asyncio.gather(*waiting)


def test_a_loop_that_does_not_show_what_is_ready_is_given_its_turns() -> None:
    def call_later(loop: asyncio.SelectorEventLoop, callback: Any, *arguments: Any, context: Any = None) -> Any:
        return loop.call_later(0, callback, *arguments, context=context)

    Elsewhere: Any = type("Elsewhere", (asyncio.SelectorEventLoop,), {"call_soon": call_later})

    async def steps() -> list[int]:
        taken: list[int] = []

        async def take() -> None:
            for step in range(10):
                await asyncio.sleep(0)
                taken.append(step)

        taking = asyncio.create_task(take())
        await MovableClock().rest()
        assert taking.done()
        return taken

    with asyncio.Runner(loop_factory=Elsewhere) as runner:
        assert runner.run(steps()) == list(range(10))


async def test_a_cancelled_timer_never_rings() -> None:
    clock, rang = MovableClock(), list[str]()
    clock.call_later(1, partial(rang.append, "no")).cancel()
    clock.call_later(1, partial(rang.append, "yes"))
    await clock.advance(SECOND)
    assert rang == ["yes"]


async def test_a_timer_is_not_early() -> None:
    clock, rang = MovableClock(), list[str]()
    clock.call_later(1, partial(rang.append, "now"))
    await clock.advance(timedelta(seconds=0.999))
    assert rang == []
    await clock.advance(timedelta(seconds=0.001))
    assert rang == ["now"]


async def test_it_only_moves_on() -> None:
    with pytest.raises(ConfigurationError, match="negative"):
        await MovableClock().advance(-SECOND)


def test_it_starts_at_an_aware_instant_and_tells_utc() -> None:
    with pytest.raises(ConfigurationError, match="naive"):
        MovableClock(datetime(2027, 1, 1))
    at = datetime(2027, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    assert MovableClock(at).now() == at
    assert MovableClock(at).now().tzinfo is UTC


async def test_the_system_clock_is_aware_and_rings_on_the_loop() -> None:
    clock: Clock = SYSTEM
    assert clock.now().utcoffset() == timedelta()
    assert clock.monotonic() <= clock.monotonic()
    rang = asyncio.Event()
    clock.call_later(0, rang.set)
    await asyncio.wait_for(rang.wait(), 5)


@pytest.mark.parametrize("value", [5, 0.5, "5s", None])
def test_a_duration_is_a_timedelta(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"grace=.* must be a timedelta"):
        check_duration("grace", value)


def test_a_duration_of_zero_is_refused_unless_it_means_something() -> None:
    assert check_duration("grace", timedelta(), zero=True) == timedelta()
    for value in (timedelta(), -SECOND):
        with pytest.raises(ConfigurationError, match="more than zero"):
            check_duration("grace", value)
    with pytest.raises(ConfigurationError, match="zero or more"):
        check_duration("grace", -SECOND, zero=True)


@given(st.datetimes(datetime(1970, 1, 3), datetime(9999, 12, 28), timezones=st.timezones()))
def test_a_stamp_is_utc_and_truncated_to_seconds(moment: datetime) -> None:
    stamp = whole_seconds(moment)
    assert len(stamp) == len("2026-02-03T04:05:06Z")
    assert datetime.fromisoformat(stamp) == moment.astimezone(UTC).replace(microsecond=0)


def test_a_stamp_of_a_naive_moment_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="naive"):
        whole_seconds(datetime(2027, 1, 1))


async def test_to_the_next_timer_and_no_further() -> None:
    clock, rung = MovableClock(), list[float]()
    clock.call_later(0.5, lambda: rung.append(clock.monotonic())).cancel()
    for delay in (60.0, 1.0):
        clock.call_later(delay, lambda: rung.append(clock.monotonic()))
    assert await clock.advance_to_next()
    assert rung == [1.0]
    assert await clock.advance_to_next()
    assert rung == [1.0, 60.0]
    assert not await clock.advance_to_next()


# Pauses


async def test_pauses_take_their_time_or_are_ended_together() -> None:
    clock, over = MovableClock(), list[str]()
    pauses = Pauses(clock)

    async def take(name: str, seconds: float) -> None:
        await pauses.pause(seconds)
        over.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(take("none", 0))
        for name, seconds in (("short", 1), ("long", 60), ("longer", 3_600)):
            group.create_task(take(name, seconds))
        await clock.advance(SECOND)
        assert over == ["none", "short"]
        pauses.end()
        await clock.rest()
        assert sorted(over[2:]) == ["long", "longer"]
        later = group.create_task(take("later", 5))
        await clock.rest()
        assert not later.done(), "ended are those that are under way"
        await clock.advance(5 * SECOND)
    assert over[-1] == "later"
    assert clock.next() is None, "no timer is left behind"


async def test_a_pause_that_is_cancelled_leaves_nothing_behind() -> None:
    clock = MovableClock()
    pauses = Pauses(clock)
    pause = asyncio.ensure_future(pauses.pause(60))
    await clock.rest()
    pause.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pause
    pauses.end()
    assert clock.next() is None
