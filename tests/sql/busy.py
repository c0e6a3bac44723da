"""Publishes and consumes until it is killed, and says what it did: `python -m tests.sql.busy URL LOG NAME`.

A line a message: `routed ID` after its confirm, `settling ID` before it is told to the database, `settled ID` after.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from typing import Any

import acemq
from acemq import Message
from acemq.transport import Settled
from acemq.transports.sql.port import SqlTransport


async def main(url: str, log: str, name: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(word: str, *ids: str | None) -> None:
        os.write(file, "".join(f"{word} {id}\n" for id in ids).encode())

    settle: Any = SqlTransport.settle

    async def told(self: SqlTransport, batch: Any) -> Any:
        ids = [each.delivery.message_id for each in batch]
        say("settling", *ids)
        answers = await settle(self, batch)
        say("settled", *(id for id, answer in zip(ids, answers, strict=True) if answer is Settled.DONE))
        return answers

    SqlTransport.settle = told  # type: ignore[method-assign]

    async def handle(message: Message[int]) -> None:
        await asyncio.sleep(0)

    async with acemq.connect(url) as mq, mq.consume("q", int, handle):
        for number in itertools.count():
            ids = [f"{name}-{number}-{place}" for place in range(10)]
            await mq.publish_batch(acemq.Draft("", "q", place, message_id=id) for place, id in enumerate(ids))
            say("routed", *ids)
            if number == 0:
                print("ready", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
