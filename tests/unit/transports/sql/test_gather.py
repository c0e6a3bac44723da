"""Calls that share a trip, each with a time limit of its own on one timer of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from acemq.transports.sql.gather import Gathering


async def test_each_call_is_given_up_when_its_own_time_is_over_and_no_other() -> None:
    release = asyncio.Event()

    async def act(items: list[int]) -> Sequence[int]:
        await release.wait()
        return [10 * item for item in items]

    gathering: Gathering[int, int] = Gathering(act, at_once=1, most=10, may=lambda: True)

    async def ask(item: int, within: float) -> tuple[Sequence[int] | None, float]:
        began = time.monotonic()
        try:
            return await gathering.answers(gathering.ask([item], within)), time.monotonic() - began
        except TimeoutError:
            return None, time.monotonic() - began

    async with asyncio.timeout(5):
        long, short, middle, soon = (asyncio.create_task(ask(*each)) for each in ((1, 30), (2, 0.2), (3, 0.4), (4, 0)))
        for task, limit in ((soon, 0), (short, 0.2), (middle, 0.4)):
            answer, took = await task
            assert answer is None
            assert limit <= took < 3
        assert not long.done()
        release.set()
        answer, _ = await long
        assert answer == [10]
        # Nothing is under way any more, and the next is watched over as the first was.
        release.clear()
        answer, took = await ask(5, 0.1)
        assert answer is None
        assert 0.1 <= took < 3
        release.set()
        await gathering.idle()
    assert gathering.outstanding == 0


async def test_who_is_cancelled_only_stops_waiting() -> None:
    done: list[int] = []

    async def act(items: list[int]) -> Sequence[None]:
        await asyncio.sleep(0.05)
        done.extend(items)
        return [None] * len(items)

    gathering: Gathering[int, None] = Gathering(act, at_once=1, most=10, may=lambda: True)
    asked = gathering.ask([1, 2], 5)
    waiting = asyncio.create_task(gathering.answers(asked))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await gathering.idle()
    assert done == [1, 2]
