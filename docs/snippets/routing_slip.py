import asyncio
import os
from dataclasses import dataclass

import acemq
from acemq import Ack, Message, RoutingSlip, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

shipped: asyncio.Queue[str] = asyncio.Queue()


@dataclass
class Order:
    id: str
    cents: int


async def main() -> None:
    async with acemq.connect(URL) as mq:

        async def check(message: Message[Order]) -> Ack | None:
            slip = RoutingSlip.of(message)
            if slip is None:
                return Ack.park("it carries no slip")
            small = message.payload.cents < 10_00
            onward = slip.advance_to(slip.steps.index("ship")) if small else slip.advance()
            print(f"{message.payload.id}: {slip.current}, then {onward.current}")
            await mq.forward(onward, message.payload, message.envelope)
            return Ack.accept()

        async def approve(message: Message[Order]) -> Ack | None:
            if (slip := RoutingSlip.of(message)) is None:
                return Ack.park("it carries no slip")
            await mq.forward(slip.advance(), message.payload, message.envelope)
            return Ack.accept()

        async def ship(message: Message[Order]) -> None:
            await shipped.put(message.payload.id)

        await mq.declare(Topology().queue("check").queue("approve").queue("ship"))
        async with (
            mq.consume("check", Order, check),
            mq.consume("approve", Order, approve),
            mq.consume("ship", Order, ship),
        ):
            for order in (Order("o-1", 5_00), Order("o-2", 80_00)):
                await mq.send_along(RoutingSlip.start_of("check", "approve", "ship"), order)
                print(await shipped.get(), "shipped")


asyncio.run(main())
