import asyncio
import os

import acemq
from acemq import Ack, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    settled: asyncio.Queue[str] = asyncio.Queue()
    repaired = False

    async def ship(message: Message[str]) -> Ack | None:
        message.when_settled(lambda handled: settled.put_nowait(f"{message.payload} {handled.outcome}"))
        return Ack.accept() if repaired else Ack.reject("there is no such street")

    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship, concurrency=1):
            await mq.send_many("orders", ["o-1", "o-2", "o-3"])
            print(sorted([await settled.get() for _ in range(3)]))

            repaired = True
            result = await mq.replay("orders.dlq").run()
            print(result.replayed, "replayed into", result.target, "until", result.stopped)
            print(sorted([await settled.get() for _ in range(3)]))


asyncio.run(main())
