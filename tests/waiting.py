"""Waiting for a named condition, and never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

import pytest

from acemq import Backoff

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

QUICK = Backoff(first=timedelta(milliseconds=50), ceiling=timedelta(milliseconds=100))
"""For `reconnect=`, where what is shown comes after a reconnect."""


async def until(condition: Callable[[], bool], *, within: float = 30) -> None:
    """Return as soon as `condition` holds; fail, naming it, when it does not within so many seconds."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {condition.__qualname__}")
        await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[bool]], *, within: float = 30) -> None:
    """The same for a condition that asks the broker."""
    end = time.monotonic() + within
    while not await condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {condition.__qualname__}")
        await asyncio.sleep(0.02)


async def at_once(act: Callable[[], Awaitable[T]]) -> T:
    """What `act` answers within 50 ms at one of three times, and within a second at each.

    The machine may have been busy with others at one of them.
    """
    took: list[float] = []
    while len(took) < 3:
        began = time.perf_counter()
        answer = await act()
        took.append(time.perf_counter() - began)
        if took[-1] < 0.05:
            return answer
        if took[-1] > 1:
            break
    raise AssertionError(f"not at once: {', '.join(f'{seconds:.3f} s' for seconds in took)}")


async def refused_at_once(act: Callable[[], Awaitable[object]], error: type[E]) -> E:
    """The error that `act` raises at once, in the same sense."""

    async def refused() -> E:
        with pytest.raises(error) as raised:
            await act()
        return raised.value

    return await at_once(refused)
