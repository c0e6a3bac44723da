import asyncio
import os

import acemq
from acemq import MemoryIdempotencyStore, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async def send_mail(message: Message[str]) -> None:
        print("mail to", message.payload)

    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("mail"))
        claims = MemoryIdempotencyStore()  # DbIdempotencyStore(engine), where several processes consume
        async with mq.consume("mail", str, send_mail, idempotency=claims, concurrency=1) as consumer:
            await mq.send("mail", "ada@example.org", message_id="welcome-ada")
            await mq.send("mail", "ada@example.org", message_id="welcome-ada")  # the sender could not tell
            while consumer.counters.acked < 2:
                await asyncio.sleep(0.01)
            print("duplicates:", consumer.counters.duplicates)


asyncio.run(main())
