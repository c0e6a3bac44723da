"""A consumer as a process of its own: `python -m tests.sql.worker URL RECORD [POINT NTH] [HOLD] [exclusive]`.

It writes each message it has handled into RECORD, a line each. At POINT, for the NTH time, it kills itself. Asked on
its standard input for its `state` it tells it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import acemq
from acemq import Consumer, Message
from acemq.transports.sql.running import Running

POINTS = ("taken", "delivered", "handled", "settled")
PREFETCH = 20


class Bomb:
    def __init__(self, point: str, nth: int) -> None:
        self._point, self._left = point, nth

    def at(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def after(bomb: Bomb, point: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def called(*arguments: Any, **options: Any) -> Any:
        result = await call(*arguments, **options)
        if not hasattr(result, "rows") or result.rows:
            bomb.at(point)
        return result

    return called


def answer(consumer: Consumer) -> None:
    """Until there are no more questions."""
    for _ in sys.stdin:
        assert consumer._subscription is not None
        print(consumer._subscription.state.phase, flush=True)


async def main(url: str, record: str, point: str = "", nth: str = "0", hold: str = "0", exclusive: str = "") -> None:
    bomb = Bomb(point, int(nth))
    running: Any = Running
    running.take = after(bomb, "taken", running.take)
    running._settle = after(bomb, "settled", running._settle)
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    concurrency, prefetch = (1, 2) if exclusive else (5, PREFETCH)

    async def handle(message: Message[int]) -> None:
        bomb.at("delivered")
        await asyncio.sleep(float(hold))
        os.write(file, f"{message.payload} {os.getpid()}\n".encode())
        bomb.at("handled")

    async with acemq.connect(url, close_timeout=timedelta(seconds=5)) as mq:
        async with mq.consume(
            "q", int, handle, concurrency=concurrency, prefetch=prefetch, exclusive=bool(exclusive)
        ) as consumer:
            print("ready", flush=True)
            await asyncio.get_running_loop().run_in_executor(None, answer, consumer)
        print(consumer.counters.acked, consumer.counters.stale, flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
