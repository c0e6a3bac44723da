import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

done = asyncio.Event()


async def work(message: Message[int]) -> None:
    await done.wait()


async def main() -> None:
    mq = await acemq.connect(URL, close_timeout=timedelta(seconds=5))
    await mq.declare(Topology().queue("jobs"))
    await mq.send_many("jobs", range(10))
    consumer = await mq.consume("jobs", int, work, concurrency=2, prefetch=10)
    while consumer.held < 8:  # two are being handled, eight are fetched and wait
        await asyncio.sleep(0.01)

    asyncio.get_running_loop().call_later(0.1, done.set)  # the work takes a moment longer
    drained = await mq.close()  # what leaving `async with` does
    print("finished:", drained.finished, "handled:", drained.handled, "abandoned:", drained.abandoned)
    print("given back:", drained.given_back)


asyncio.run(main())
