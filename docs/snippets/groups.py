import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def work(message: Message[int]) -> None:
    await asyncio.sleep(0.001)


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("jobs"))
        async with mq.consume_group("jobs", int, work, size=2, name="worker") as group:
            print([member.name for member in group.consumers])
            await group.scale(3)
            await mq.send_many("jobs", range(100))
            await group.scale(1)  # numbers 3 and 2 finish what they have begun
            while group.counters.acked < 100:
                await asyncio.sleep(0.01)
            print(group.size, "left,", group.counters.acked, "handled")


asyncio.run(main())
