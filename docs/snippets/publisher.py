import asyncio
import os
from dataclasses import dataclass

import acemq
from acemq import Publisher, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


@dataclass
class Order:
    id: str


async def check_out(orders: Publisher[Order], basket: str) -> None:
    await orders.publish(Order(basket), headers={"x-tenant": "acme"})  # another payload class is a type error


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders"))
        await check_out(mq.publisher("", "orders", Order), "b-7")
        print((await mq.depth("orders")).ready, "waiting")


asyncio.run(main())
