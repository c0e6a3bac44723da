import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")
LOW, NORMAL, HIGH = range(3)

packed: asyncio.Queue[str] = asyncio.Queue()


async def pack(message: Message[str]) -> None:
    packed.put_nowait(f"{message.payload}, from {message.queue}")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("parcels", priorities="lanes"))
        await mq.send_many("parcels", ["catalogue 1", "catalogue 2"], priority=LOW)
        await mq.send("parcels", "order 1")
        await mq.send_many("parcels", ["express 1", "express 2"], priority=HIGH)

        async with mq.consume("parcels", str, pack, concurrency=1):
            for _ in range(5):
                print(await packed.get())


asyncio.run(main())
