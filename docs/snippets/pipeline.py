import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import RetryPolicy

URL = os.environ.get("ACEMQ_URL", "memory://")

stored: asyncio.Queue[str] = asyncio.Queue()


@dataclass
class Order:
    id: str
    cents: int


@dataclass
class Charged:
    order: Order
    receipt: str


async def validate(order: Order) -> Order | None:
    return order if order.cents > 0 else None  # None: the run ends here


async def charge(order: Order) -> Charged:
    return Charged(order, f"receipt for {order.cents}")


async def store(charged: Charged) -> None:
    await stored.put(f"{charged.order.id}: {charged.receipt}")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        orders = (
            mq.pipeline("orders", Order)
            .step("validate", validate)
            .step("charge", charge, concurrency=2, retry=RetryPolicy.fixed(3, timedelta(seconds=5)))
            .step("store", store)
        )
        async with orders.start() as running:
            await running.send(Order("o-1", 0))
            await running.send(Order("o-2", 4200))
            print(await stored.get())
        print(running.counters)


asyncio.run(main())
