import asyncio
import os

import acemq
from acemq import Draft, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders").queue("invoices"))
        receipts = await mq.publish_batch(
            [
                Draft("", "orders", {"id": "o-1"}, headers={"x-tenant": "acme"}),
                Draft("", "invoices", {"order": "o-1", "cents": 990}, message_id="invoice-o-1"),
            ]
        )
        print([receipt.routing_key for receipt in receipts])


asyncio.run(main())
