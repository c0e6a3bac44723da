"""Calls that come while others are under way are done together: what one trip costs, many share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Ask(Generic[Item, Answer]):
    """Some items of one caller, and where their answers go."""

    __slots__ = ("answer", "items", "left", "until")

    def __init__(self, items: Sequence[Item], answer: asyncio.Future[Sequence[Answer]], until: float) -> None:
        self.items, self.answer, self.until = items, answer, until
        self.left = False
        """It is on its way to the database, and can no more be withdrawn."""

    def give_up(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(TimeoutError())

    def refuse(self, answer: Answer) -> None:
        """The same answer to everything that was asked."""
        if not self.answer.done():
            self.answer.set_result([answer] * len(self.items))


class Gathering(Generic[Item, Answer]):
    """Hands everything that waits to `act`, so many times at once at most."""

    def __init__(
        self,
        act: Callable[[list[Item]], Coroutine[Any, Any, Sequence[Answer]]],
        *,
        at_once: int,
        most: int,
        may: Callable[[], bool],
    ) -> None:
        """`may`: whether anything may leave now; once it may again, somebody calls `go_on`."""
        self._act, self._at_once, self._most, self._may = act, at_once, most, may
        self._waiting: deque[Ask[Item, Answer]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._soon = False
        self._unanswered: dict[Ask[Item, Answer], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        """One for all of them: each its own would cost as much as the rest of a settlement here."""
        self.outstanding = 0
        """Items without an answer."""

    def ask(self, items: Sequence[Item], within: float) -> Ask[Item, Answer]:
        loop = asyncio.get_running_loop()
        asked: Ask[Item, Answer] = Ask(items, loop.create_future(), loop.time() + within)
        self._waiting.append(asked)
        self._unanswered[asked] = None
        if self._timer is None or asked.until < self._timer.when():
            self._watch(asked.until)
        self.outstanding += len(items)
        self._start()
        return asked

    async def answers(self, asked: Ask[Item, Answer]) -> Sequence[Answer]:
        """Raises `TimeoutError` once its time is up. Who is cancelled, or out of time, only stops waiting.

        What is cut off is the answer, which is nobody else's, and not the trip.
        """
        try:
            return await asked.answer
        finally:
            del self._unanswered[asked]

    def _watch(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        assert self._timer is not None
        # A timer may come a little before its time, and on a busy loop long after it.
        now, self._timer = max(self._timer.when(), asyncio.get_running_loop().time()), None
        for asked in self._unanswered:
            if asked.until <= now:
                asked.give_up()
        later = [asked.until for asked in self._unanswered if asked.until > now]
        if later:
            self._watch(min(later))

    def withdraw(self, asked: Ask[Item, Answer]) -> bool:
        """Whether it had not left yet: then it never will."""
        if asked.left or asked not in self._waiting:
            return False
        self._waiting.remove(asked)
        self.outstanding -= len(asked.items)
        return True

    def withdraw_all(self) -> list[Ask[Item, Answer]]:
        waiting = list(self._waiting)
        for asked in waiting:
            self.withdraw(asked)
        return waiting

    def go_on(self) -> None:
        self._start()

    def end(self) -> None:
        """It is not used any more: leave nothing in the event loop. Whoever still waits is out of time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for asked in self._unanswered:
            asked.give_up()

    async def idle(self) -> None:
        """Return when nothing is under way."""
        while self._running or self._waiting:
            if self._running:
                await asyncio.wait(set(self._running))
            else:
                await asyncio.sleep(0)

    def _start(self) -> None:
        # At the end of this turn of the loop, so that all who ask in it share the trip.
        if not self._soon and len(self._running) < self._at_once:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._go)

    def _go(self) -> None:
        self._soon = False
        if not self._waiting or len(self._running) >= self._at_once or not self._may():
            return
        together: list[Ask[Item, Answer]] = []
        count = 0
        while self._waiting and (not together or count + len(self._waiting[0].items) <= self._most):
            asked = self._waiting.popleft()
            asked.left = True
            count += len(asked.items)
            together.append(asked)
        task = asyncio.create_task(self._do(together))
        self._running.add(task)
        task.add_done_callback(self._done)
        if self._waiting:
            self._start()

    async def _do(self, together: list[Ask[Item, Answer]]) -> None:
        items = [item for asked in together for item in asked.items]
        try:
            answers = await self._act(items)
        except BaseException as error:
            self.outstanding -= len(items)
            for asked in together:
                if not asked.answer.done():
                    asked.answer.set_exception(error)
                    asked.answer.exception()  # read, should nobody wait for it any more
            if not isinstance(error, Exception):
                raise
            return
        self.outstanding -= len(items)
        at = 0
        for asked in together:
            if not asked.answer.done():
                asked.answer.set_result(answers[at : at + len(asked.items)])
            at += len(asked.items)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()
        if self._waiting:
            self._start()
