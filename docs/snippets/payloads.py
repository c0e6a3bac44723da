import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import Message, MsgpackCodec, Topology, one_of

URL = os.environ.get("ACEMQ_URL", "memory://")


@dataclass
class Placed:
    id: str
    cents: int


@dataclass
class Cancelled:
    id: str
    reason: str


EVENTS = one_of(Placed, Cancelled, names={"order.placed": Placed, "order.cancelled": Cancelled})


async def main() -> None:
    events: asyncio.Queue[Message[Placed | Cancelled]] = asyncio.Queue()
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", EVENTS, events.put, concurrency=1):
            await mq.send("orders", Placed("o-1", 4200), type="order.placed")
            await mq.send("orders", Cancelled("o-1", "too dear"), type="order.cancelled", codec=MsgpackCodec())
            await mq.send("orders", b'{"id": "o-2"}', type="order.placed", content_type="application/json")
            for _ in range(2):
                message = await events.get()
                print(message.content_type, message.payload)

            parked = await mq.pull("orders.parked", bytes, wait=timedelta(seconds=10))
            if parked and parked.failure:
                print(parked.failure.text)
                await parked.accept()


asyncio.run(main())
