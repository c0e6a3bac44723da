import asyncio
import os

import acemq
from acemq import Ack, Message, PublishingPausedError, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


def refuse(message: Message[str]) -> Ack:
    return Ack.reject("not today")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders"))
        await mq.send("orders", "o-1")

        mq.pause_publishing()
        try:
            await mq.send("orders", "o-2")
        except PublishingPausedError as error:
            print("paused, outcome:", error.outcome)

        async with mq.consume("orders", str, refuse) as consumer:
            while not consumer.counters.rejected:
                await asyncio.sleep(0.01)
        print("dead letters:", (await mq.depth("orders.dlq")).ready)

        mq.resume_publishing()
        print("again:", (await mq.send("orders", "o-2")).routed)


asyncio.run(main())
