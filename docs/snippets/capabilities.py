import asyncio
import os
from datetime import timedelta

import acemq
from acemq import CapabilityError, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("reminders"))
        try:
            await mq.send("reminders", "call the carrier", delay=timedelta(minutes=5), headers={"tenant": "acme"})
            print("there in five minutes")
        except CapabilityError as error:
            print(error)


asyncio.run(main())
