import asyncio
import os

import acemq
from acemq import BatchPublishError, Receipt, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("numbers"))
        receipts = await mq.send_many("numbers", range(1_000))
        print(len(receipts), "confirmed,", (await mq.depth("numbers")).ready, "in the queue")

        try:
            await mq.send_many("numbers", [1, object(), 3])  # the second cannot be written as JSON
        except BatchPublishError as error:
            print(error.confirmed, "confirmed,", error.failed, "failed; safe to send again:", error.safe_to_resend)
            print([type(result).__name__ for result in error.results if not isinstance(result, Receipt)])


asyncio.run(main())
