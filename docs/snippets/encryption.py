import asyncio
import os

import acemq
from acemq import Codecs, EncryptedCodec, JsonCodec, Keyring, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    read: asyncio.Queue[str] = asyncio.Queue()

    async def pay(message: Message[str]) -> None:
        await read.put(f"{message.payload}, encrypted with {EncryptedCodec.key_id_of(message.body)}")

    keys = Keyring({"2027-01": os.urandom(32)}, current="2027-01")  # real keys come from where secrets are kept
    codec = Codecs(EncryptedCodec(JsonCodec(), keys), JsonCodec())  # plain messages are read beside them
    async with acemq.connect(URL, codec=codec) as mq:
        await mq.declare(Topology().queue("salaries"))
        async with mq.consume("salaries", str, pay):
            await mq.send("salaries", "January")
            print(await read.get())
            keys.add("2027-02", os.urandom(32))
            keys.use("2027-02")
            await mq.send("salaries", "February")
            print(await read.get())


asyncio.run(main())
