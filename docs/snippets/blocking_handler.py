import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders").queue("mails"))

        def ship(message: Message[str]) -> None:  # a plain function: it runs in a thread
            mq.blocking.send("mails", f"{message.payload} is on its way")

        async with mq.consume("orders", str, ship):
            await mq.send("orders", "o-1")
            while not (mail := await mq.pull("mails", str)):
                await asyncio.sleep(0.05)
            print(mail.payload, "| caused by the order:", mail.envelope.causation_id is not None)
            await mail.accept()


asyncio.run(main())
