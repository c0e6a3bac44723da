"""Work that has a moment by which it must be over."""

from __future__ import annotations

import asyncio
import time

import pytest

from acemq.stopping import until


async def test_it_says_whether_it_was_over_in_time() -> None:
    assert await until(time.monotonic() + 5, asyncio.sleep(0))
    assert not await until(time.monotonic() + 0.05, asyncio.sleep(5))


async def test_work_that_needs_no_waiting_is_done_though_there_is_no_time() -> None:
    done = False

    async def work() -> None:
        nonlocal done
        done = True

    assert await until(time.monotonic() - 1, work())
    assert done


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost(turns: int) -> None:
    over = asyncio.Event()
    stopping = asyncio.create_task(until(time.monotonic() + 5, over.wait()))
    await asyncio.sleep(0.01)
    over.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    if stopping.cancel():  # else it was over before
        with pytest.raises(asyncio.CancelledError):
            await stopping
