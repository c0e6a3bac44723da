import asyncio
import os
from datetime import timedelta

import acemq
from acemq import ReplayResult, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


def progress(result: ReplayResult) -> None:
    print(result.replayed, "replayed,", result.put_back, "put back,", result.stopped)


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders", dead_letter=True))
        await mq.send_many("orders.dlq", range(50))

        gently = mq.replay("orders.dlq").at_rate(500).until(timedelta(minutes=10))
        await gently.reporting(progress, every=20).run()


asyncio.run(main())
