import asyncio
import os
from datetime import UTC, datetime, timedelta

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    came: asyncio.Queue[str] = asyncio.Queue()

    async def remind(message: Message[str]) -> None:
        await came.put(message.payload)

    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("reminders"))
        async with mq.scheduler() as later, mq.consume("reminders", str, remind):
            await later.after(timedelta(seconds=3), "", "reminders", "pay the invoice")
            await later.at(datetime.now(UTC) + timedelta(seconds=1.5), "", "reminders", "open the invoice")
            await mq.send("reminders", "here is an invoice")
            for _ in range(3):
                print(await came.get())


asyncio.run(main())
