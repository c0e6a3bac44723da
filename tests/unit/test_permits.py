"""The bound on publishes without an answer: whoever waits has its permit in turn, and none is ever lost."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from acemq.publishing.permits import Permits

LONG = timedelta(seconds=30)


def permits(limit: int) -> Permits:
    return Permits(limit, lambda: 0)


async def all_taken(limit: int) -> Permits:
    taken = permits(limit)
    assert await taken.take_some(limit, LONG) == limit
    return taken


async def test_everybody_who_waits_has_a_permit_in_turn_however_many_there_are() -> None:
    two, order = permits(2), list[int]()

    async def publish(number: int) -> int:
        taken = await two.take_some(1, LONG)
        order.append(number)
        await asyncio.sleep(0)
        two.give(taken)
        return taken

    assert await asyncio.gather(*(publish(number) for number in range(20))) == [1] * 20
    assert order == list(range(20))
    assert two.in_use == 0


async def test_one_answer_for_many_wakes_as_many_as_it_has_room_for() -> None:
    five = await all_taken(5)
    waiting = [asyncio.ensure_future(five.take_some(most, LONG)) for most in (2, 2, 3)]
    await asyncio.sleep(0)
    five.give(5)
    assert await asyncio.gather(*waiting) == [2, 2, 1]
    assert five.in_use == 5


async def test_one_that_is_cancelled_with_its_permit_handed_over_passes_it_on() -> None:
    one = await all_taken(1)
    first, second = (asyncio.ensure_future(one.take_some(1, LONG)) for _ in range(2))
    await asyncio.sleep(0)
    one.give(1)
    first.cancel()
    assert await second == 1
    with pytest.raises(asyncio.CancelledError):
        await first
    one.give(1)
    assert one.in_use == 0


async def test_one_that_gave_up_holds_up_nobody_behind_it() -> None:
    one = await all_taken(1)
    first, second = (asyncio.ensure_future(one.take_some(1, LONG)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    one.give(1)
    assert await second == 1


async def test_none_in_time_is_zero_and_takes_nothing() -> None:
    one = await all_taken(1)
    assert await one.take_some(1, timedelta()) == 0
    one.give(1)
    assert one.in_use == 0
