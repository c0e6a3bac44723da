import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Ack, FatalError, Message, RetryPolicy, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

settled: asyncio.Queue[str] = asyncio.Queue()


async def ship(message: Message[str]) -> Ack | None:
    message.when_settled(lambda handled: settled.put_nowait(f"{message.payload}: {handled.outcome}"))
    match message.payload:
        case "cancelled":
            return Ack.reject("the customer has cancelled it")
        case "hazardous":
            return Ack.park("a person has to sign for it")
        case "nameless":
            raise FatalError("there is no address, and never will be")
        case "heavy" if message.attempt == 1:
            return Ack.retry(delay=timedelta(milliseconds=10))  # the policy's limits, but this wait
        case "remote":
            raise TimeoutError("the carrier does not answer")
        case _:
            return None  # accepted


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("parcels"))
        policy = RetryPolicy.fixed(2, timedelta(milliseconds=50))
        async with mq.consume("parcels", str, ship, concurrency=1, retry=policy):
            for parcel in ("small", "cancelled", "hazardous", "nameless", "heavy", "remote"):
                await mq.send("parcels", parcel)
            print(*sorted([await settled.get() for _ in range(8)]), sep="\n")


asyncio.run(main())
