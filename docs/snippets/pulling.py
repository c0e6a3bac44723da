import asyncio
import os
from datetime import timedelta

import acemq
from acemq import DecodeError, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("tickets", dead_letter=True))
        await mq.send_many("tickets", [1, 2, "three"])

        while (ticket := await mq.pull("tickets", int, wait=timedelta(milliseconds=200))) is not None:
            try:
                print("ticket", ticket.payload)  # decoded here, at its first use
                await ticket.accept()
            except DecodeError as error:
                await ticket.park(str(error))

        print((await mq.depth("tickets.parked")).ready, "parked")


asyncio.run(main())
