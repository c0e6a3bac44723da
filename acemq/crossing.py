"""From a thread to the event loop of a connection and back: a call that waits, and may be interrupted."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

from acemq.errors import ClosedError, LoopError

T = TypeVar("T")

_LOOKS_AGAIN = 1.0
"""Seconds after which a waiting call sees whether its loop is still there."""
_ENDS_WITHIN = 5.0
"""Seconds for what is left on a loop that is stopped."""


class Crossing:
    """Carries calls of any thread onto one loop, which runs in another."""

    def __init__(self, loop: asyncio.AbstractEventLoop, what: str) -> None:
        self._loop, self._what, self._process = loop, what, os.getpid()

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns or raises. A `KeyboardInterrupt` cancels it, and is raised once it has ended.

        `work` runs in the context of the caller: in a handler, what it publishes is correlated with the message.
        """
        self._check()
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        async def run() -> T:
            return await work()

        def start() -> None:
            task = self._loop.create_task(run())
            tasks.append(task)
            task.add_done_callback(lambda task: self._hand_over(task, done))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(start)  # in the context of this thread
        except RuntimeError:
            raise self._closed() from None
        try:
            return self._result_of(done)
        except KeyboardInterrupt:
            # A second one leaves without waiting.
            self._loop.call_soon_threadsafe(cancel)
            done.exception()
            raise

    def _result_of(self, done: Future[T]) -> T:
        while True:
            try:
                done.exception(_LOOKS_AGAIN)
            except TimeoutError:
                # A loop that has ended meanwhile leaves nobody who would answer.
                if self._loop.is_closed():
                    raise self._closed() from None
            else:
                return done.result()

    def _hand_over(self, task: asyncio.Task[T], done: Future[T]) -> None:
        if task.cancelled():
            done.set_exception(self._closed())
        elif (error := task.exception()) is not None:
            done.set_exception(error)
        else:
            done.set_result(task.result())

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise LoopError(f"{self._what} was opened before this process was forked; connect again after the fork")
        if _is_in_a_loop():
            raise LoopError(
                f"a blocking call of {self._what} inside a running event loop would stop that loop; "
                "await the asynchronous connection there, or make the call in a thread: asyncio.to_thread(…)"
            )
        if not self._loop.is_running():
            raise self._closed()

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self._what} is closed; connect again")


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class LoopThread:
    """An event loop in a thread of its own, from `start` to `stop`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._over: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    def start(self) -> asyncio.AbstractEventLoop:
        """The loop, running."""
        running: Future[None] = Future()
        # Not waited for at the end of the program: who forgets to close does not hang.
        self._thread = threading.Thread(target=self._serve, args=(running,), name=self._name, daemon=True)
        self._thread.start()
        running.result()
        return self._loop

    def _serve(self, running: Future[None]) -> None:
        async def until_over() -> None:
            self._over, self._loop = asyncio.Event(), asyncio.get_running_loop()
            running.set_result(None)
            await self._over.wait()

        asyncio.run(until_over())

    def stop(self) -> None:
        """Cancel what is left on the loop. Bounded; idempotent."""
        if self._thread is not None and self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_ENDS_WITHIN)
