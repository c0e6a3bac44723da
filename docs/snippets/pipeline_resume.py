import asyncio
import os
from datetime import timedelta

import acemq
from acemq import RetryPolicy

URL = os.environ.get("ACEMQ_URL", "memory://")

bank_is_open = asyncio.Event()
stored = asyncio.Event()


async def validate(order: str) -> str:
    print("validate", order)
    return order


async def charge(order: str) -> str:
    if not bank_is_open.is_set():
        raise ConnectionError("the bank is closed")
    print("charge", order)
    return order


async def store(order: str) -> None:
    print("store", order)
    stored.set()


async def main() -> None:
    async with acemq.connect(URL) as mq:
        orders = (
            mq.pipeline("orders", str)
            .step("validate", validate)
            .step("charge", charge, retry=RetryPolicy.none())
            .step("store", store)
        )
        async with orders.start() as running:
            await running.send("o-1")
            stuck = await mq.pull(running.queue_for("charge") + ".dlq", str, wait=timedelta(seconds=10))

            bank_is_open.set()  # later, after the repair
            if stuck:
                await running.resume(stuck.payload, stuck.wire_headers)  # at the step it had reached
                await stuck.accept()
            await stored.wait()


asyncio.run(main())
