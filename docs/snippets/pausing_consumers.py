import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def book(message: Message[int]) -> None: ...


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("bookings"))
        async with mq.consume("bookings", int, book) as consumer:
            consumer.pause()  # the carrier's interface is down for maintenance
            await mq.send_many("bookings", range(5))
            print(consumer.state, "handled:", consumer.counters.acked)
            consumer.resume()
            while consumer.counters.acked < 5:
                await asyncio.sleep(0.01)
            print("handled:", consumer.counters.acked)


asyncio.run(main())
