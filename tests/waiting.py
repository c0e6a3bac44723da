"""Waiting for a named condition, and never for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from acemq import Backoff

QUICK = Backoff(first=timedelta(milliseconds=50), ceiling=timedelta(milliseconds=100))
"""For `reconnect=`, where what is shown comes after a reconnect."""


async def until(condition: Callable[[], bool], *, within: float = 10) -> None:
    """Return as soon as `condition` holds; fail, naming it, when it does not within so many seconds."""
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {condition.__qualname__}")
        await asyncio.sleep(0.005)


async def until_async(condition: Callable[[], Awaitable[bool]], *, within: float = 10) -> None:
    """The same for a condition that asks the broker."""
    end = time.monotonic() + within
    while not await condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {condition.__qualname__}")
        await asyncio.sleep(0.02)
