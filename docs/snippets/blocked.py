import asyncio
from datetime import timedelta

import acemq
from acemq import BlockedError, Topology, WhenBlocked
from acemq.transports.memory import MemoryBroker


async def main() -> None:
    broker = MemoryBroker.named("shop")  # a broker in memory, to play the alarm
    async with (
        acemq.connect("memory://shop") as mq,
        acemq.connect("memory://shop", when_blocked=WhenBlocked.WAIT) as patient,
    ):
        await mq.declare(Topology().queue("orders"))
        broker.block("low on disk space")

        try:
            await mq.send("orders", "o-1")
        except BlockedError as error:
            print("refused at once:", error.reason)

        waiting = asyncio.create_task(patient.send("orders", "o-2", timeout=timedelta(seconds=30)))
        await asyncio.sleep(0.1)
        print("the patient one waits:", not waiting.done())
        broker.unblock()
        print("and is through:", (await waiting).routed)


asyncio.run(main())
