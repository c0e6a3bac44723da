import asyncio
import tempfile

import acemq


async def main(url: str) -> None:
    async with acemq.connect(url) as mq:
        await mq.declare(acemq.Topology().queue("letters"))
        await mq.send("letters", "written on Monday")

    async with acemq.connect(url) as mq:  # another day, another process
        letter = await mq.pull("letters", str)
        if letter is not None:
            print(letter.payload)
            await letter.accept()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(f"sqlite:///{folder}/messages.db"))
