import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


def of_acme(message: Message[bytes]) -> bool:
    return message.headers.get("x-tenant") == "acme"


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders", dead_letter=True).queue("repair"))
        for number, tenant in enumerate(("acme", "other", "acme")):
            await mq.send("orders", f"o-{number}", headers={"x-tenant": tenant})
            pulled = await mq.pull("orders", str)
            if pulled:
                await pulled.reject("the street is closed")

        letters = mq.replay("orders.dlq").where(of_acme).into("repair")
        print(await letters.pending(), "waiting")
        dry = await letters.dry_run()
        print(dry.replayed, "would go,", dry.put_back, "would stay")

        result = await letters.run(limit=1)
        print(result.replayed, "went;", result.stopped)
        again = await mq.pull("repair", str)
        if again:
            print(again.payload, "attempt", again.attempt, dict(again.headers)["acemq-replayed-from"])
            await again.accept()


asyncio.run(main())
