import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Pulled, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("renders"))
        await mq.send_many("renders", ["front", "side", "top"])

        at_work: dict[str, Pulled[str]] = {}
        async with mq.receive("renders", str, prefetch=3) as receiving:
            async for render in receiving:
                at_work[render.payload] = render  # handed to a farm that reports back when it is done
                if len(at_work) == 3:
                    break
            for done in ("top", "front"):
                print(done, "done:", await at_work[done].accept())
        # What was left open went back when the block was left.
        back = await mq.pull("renders", str, wait=timedelta(seconds=5))
        assert back is not None
        print(back.payload, "came back:", await back.accept())


asyncio.run(main())
