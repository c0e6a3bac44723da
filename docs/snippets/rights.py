import asyncio
import os

import acemq
from acemq import AceMQ, Message, Topology, TopologyError, TopologyMode

URL = os.environ.get("ACEMQ_URL", "memory://shop")


async def validate(order: str) -> str:
    return order


def ship(message: Message[str]) -> None:
    pass


async def start(mq: AceMQ) -> None:
    async with mq.consume("shipping", str, ship), mq.pipeline("orders", str).step("validate", validate).start():
        print("started")


async def main() -> None:
    async with acemq.connect(URL) as admin, acemq.connect(URL, topology=TopologyMode.VERIFY) as service:
        await admin.declare(Topology().queue("shipping", type="classic"))
        try:
            await start(service)
        except TopologyError as error:
            print(*error.problems, sep="\n")

        await start(admin)  # once, where the rights are
        print(admin.declared())
        await start(service)


asyncio.run(main())
