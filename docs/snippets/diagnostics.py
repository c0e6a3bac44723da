import asyncio
import os

import acemq
from acemq import Ack, Diagnostic, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

told: asyncio.Queue[Diagnostic] = asyncio.Queue()


async def ship(message: Message[str]) -> Ack:
    return Ack.reject("there is no such street")


async def main() -> None:
    async with acemq.connect(URL, on_diagnostic=told.put_nowait) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship):
            await mq.send("orders", "o-1")
            diagnostic = await told.get()
            print(diagnostic.level, diagnostic.name, diagnostic.queue, diagnostic.destination)
            print(diagnostic.message)


asyncio.run(main())
