import asyncio
import os

import acemq
from acemq import Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

TOPOLOGY = (
    Topology()
    .exchange("orders-events", "topic")
    .queue("shipping.orders")
    .queue("billing.orders")
    .bind("shipping.orders", "orders-events", "order.*")
    .bind("billing.orders", "orders-events", "order.placed")
)


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(TOPOLOGY)
        await mq.publish("orders-events", "order.placed", {"id": "o-1"})  # news: both queues get a copy
        await mq.publish("orders-events", "order.cancelled", {"id": "o-1"})  # news that only shipping asked for
        await mq.send("billing.orders", {"id": "o-2"})  # an order: this queue and no other

        for queue in ("shipping.orders", "billing.orders"):
            for message in await mq.pull_many(queue, dict[str, str]):
                print(f"{queue}: {message.type} {message.payload['id']}")
                await message.accept()


asyncio.run(main())
