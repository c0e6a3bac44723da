import asyncio
import os
from uuid import uuid4

import acemq
from acemq import AceMQ, PublishFailedError, PublishRefusedError, Topology, UnroutableError

URL = os.environ.get("ACEMQ_URL", "memory://")


async def place(mq: AceMQ, order: str) -> str:
    identity = str(uuid4())  # chosen once, so that a second copy can be told from a second order
    for _ in range(3):
        try:
            await mq.publish("orders-events", "order.placed", order, message_id=identity)
            return "the broker has it"
        except PublishRefusedError:
            await asyncio.sleep(1)  # nothing was written: trying again is safe
        except PublishFailedError:
            await asyncio.sleep(1)  # it may be there: trying again may make a second copy with the same id
        except UnroutableError:
            return "no queue is bound for it"
    return "not confirmed"


async def main() -> None:
    async with acemq.connect(URL) as mq:
        events = Topology().exchange("orders-events", "topic")
        await mq.declare(events)
        print(await place(mq, "o-1"))

        await mq.declare(events.queue("orders").bind("orders", "orders-events", "order.*"))
        print(await place(mq, "o-1"))


asyncio.run(main())
