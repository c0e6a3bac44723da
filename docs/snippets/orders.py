import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import Message, RetryPolicy, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


@dataclass
class Order:
    id: str
    cents: int


TOPOLOGY = (
    Topology()
    .exchange("orders-events", "topic")
    .queue("shipping.orders")
    .bind("shipping.orders", "orders-events", "order.*")
)
POLICY = RetryPolicy.exponential(5, first=timedelta(milliseconds=10), ceiling=timedelta(minutes=1))
shipped = asyncio.Event()


async def ship(message: Message[Order]) -> None:
    if message.attempt < 3:
        raise ConnectionError("the carrier does not answer")  # again, by the policy
    print(f"{message.payload.id} shipped at attempt {message.attempt}")
    shipped.set()  # returning None accepts the message


async def main() -> None:
    async with acemq.connect(URL, name="shipping") as mq:
        await mq.declare(TOPOLOGY)
        async with mq.consume("shipping.orders", Order, ship, concurrency=4, retry=POLICY):
            await mq.publish("orders-events", "order.placed", Order("o-1", 4200))
            await shipped.wait()


asyncio.run(main())
