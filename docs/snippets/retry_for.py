import asyncio
import os
from datetime import timedelta
from typing import Any

import acemq
from acemq import Message, RetryPolicy, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

SOON = RetryPolicy.fixed(2, timedelta(milliseconds=10))


async def quote(message: Message[str]) -> None:
    raise TimeoutError("no answer") if message.payload == "slow" else ValueError("no such part")


def one_more_for_time_outs(message: Message[Any], error: BaseException) -> RetryPolicy | None:
    return SOON if isinstance(error, TimeoutError) else None  # None: as the consumer's policy has it


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("quotes", dead_letter=True))
        await mq.send_many("quotes", ["slow", "wrong"])
        policy = RetryPolicy.none()
        async with mq.consume("quotes", str, quote, retry=policy, retry_for=one_more_for_time_outs) as consumer:
            while consumer.counters.dead_lettered < 2:
                await asyncio.sleep(0.01)
        for letter in sorted(await mq.pull_many("quotes.dlq", str), key=lambda letter: letter.payload):
            print(letter.payload, letter.failure.text if letter.failure else "")
            await letter.accept()


asyncio.run(main())
