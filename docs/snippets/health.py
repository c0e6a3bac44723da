import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Ack, HealthPart, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def ship(message: Message[str]) -> Ack | None:
    return Ack.reject("there is no such street") if message.payload == "o-2" else None


async def database() -> HealthPart:
    return HealthPart("database", "degraded", "the replica is 40 s behind")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders", type="classic"))
        mq.add_health("database", database)
        async with mq.consume("orders", str, ship, name="shipping") as consumer:
            health = await mq.health(timeout=timedelta(seconds=2))
            print(health.status)
            for part in health.parts:
                print(f"- {part.name}: {part.status}" + (f", {part.detail}" if part.detail else ""))

            await mq.send_many("orders", ["o-1", "o-2"])
            letter = await mq.pull("orders.dlq", str, wait=timedelta(seconds=10))
            await consumer.drain()
            stats = await mq.stats("orders")
            print(stats.published, "sent,", stats.counters.acked, "acked,", stats.counters.rejected, "rejected")
            if letter:
                await letter.accept()


asyncio.run(main())
