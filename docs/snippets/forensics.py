import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Message, RetryPolicy, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def ship(message: Message[str]) -> None:
    raise TimeoutError("the carrier does not answer")


async def main() -> None:
    async with acemq.connect(URL, name="shipping") as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship, retry=RetryPolicy.fixed(2, timedelta(milliseconds=10))):
            await mq.send("orders", "o-1")
            letter = await mq.pull("orders.dlq", str, wait=timedelta(seconds=10))

            if letter and letter.failure:
                why = letter.failure
                print(f"{letter.payload} from {why.queue}, attempt {letter.attempt}")
                print(why.how, why.error_type, why.text, sep=" | ")
                print("written by shipping:", (why.by or "").startswith("shipping@"))
                await letter.accept()  # looked into and done with; `replay` would put it back


asyncio.run(main())
