import asyncio
import os

import acemq
from acemq import DriftError, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")
TOPOLOGY = Topology().queue("invoices").queue("orders", type="classic", max_length=20_000)


async def main() -> None:
    async with acemq.connect(URL) as mq:
        # Somebody has made the queue already, with another length.
        await mq.declare(Topology().queue("orders", type="classic", max_length=10_000))

        plan = await mq.plan(TOPOLOGY)
        print(plan)
        print("drifted:", plan.drifted, "missing:", plan.missing)

        try:
            await mq.declare(TOPOLOGY)
        except DriftError as error:
            print(error)
        print("invoices made:", await mq.exists("invoices"))


asyncio.run(main())
