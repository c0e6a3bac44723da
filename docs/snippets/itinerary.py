import asyncio
import os

import acemq
from acemq import Ack, Itinerary, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

TOPOLOGY = (
    Topology()
    .exchange("offices", "direct")
    .queue("hamburg")
    .queue("porto")
    .bind("hamburg", "offices", "north")
    .bind("porto", "offices", "south")
)
arrived = asyncio.Event()


async def main() -> None:
    async with acemq.connect(URL) as mq:

        async def stamp(message: Message[str]) -> Ack | None:
            if (slip := Itinerary.of(message)) is None:
                return Ack.park("it carries no itinerary")
            onward = slip.advance(now=mq.clock.now())
            if not onward.is_finished:
                await mq.forward(onward, message.payload, message.envelope)
                return Ack.accept()
            print(message.payload, "has been at", *(stop.name for stop in onward.done))
            arrived.set()
            return Ack.accept()

        await mq.declare(TOPOLOGY)
        async with mq.consume("hamburg", str, stamp), mq.consume("porto", str, stamp):
            route = Itinerary().then("offices", "north", "Hamburg").then("offices", "south", "Porto")
            await mq.send_along(route, "the letter")
            await arrived.wait()


asyncio.run(main())
