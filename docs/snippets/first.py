import asyncio

import acemq


async def main() -> None:
    greetings: asyncio.Queue[str] = asyncio.Queue()
    async with acemq.connect("memory://") as mq:
        await mq.declare(acemq.Topology().queue("names"))
        async with mq.consume("names", str, lambda message: greetings.put(f"hello {message.payload}")):
            await mq.send("names", "Ada")
            print(await greetings.get())


asyncio.run(main())
