import asyncio
import os
from tempfile import TemporaryDirectory

import acemq
from acemq import ClaimCheckCodec, FileClaimStore, JsonCodec, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main(folder: str) -> None:
    read: asyncio.Queue[str] = asyncio.Queue()

    async def index(message: Message[str]) -> None:
        await read.put(f"{len(message.payload):,} characters from a body of {len(message.body)} bytes")

    codec = ClaimCheckCodec(JsonCodec(), FileClaimStore(folder))
    async with acemq.connect(URL, codec=codec) as mq:
        await mq.declare(Topology().queue("scans"))
        async with mq.consume("scans", str, index):
            await mq.send("scans", "a page of text")
            print(await read.get())
            await mq.send("scans", "a book " * 200_000)
            print(await read.get())
    print(len(os.listdir(folder)), "payload in the store")


with TemporaryDirectory() as folder:
    asyncio.run(main(folder))
