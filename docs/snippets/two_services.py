import asyncio

import acemq
from acemq import Message, Topology


async def main() -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def ship(message: Message[str]) -> None:
        await seen.put(f"{message.payload} from {message.envelope.origin}".partition("@")[0])

    # Two connections, one broker of this process, because both name it.
    async with acemq.connect("memory://shop", name="web") as web, acemq.connect("memory://shop", name="shipping") as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship):
            await web.send("orders", "o-1")
            print(await seen.get())


asyncio.run(main())
