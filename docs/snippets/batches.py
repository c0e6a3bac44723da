import asyncio
import os
from datetime import timedelta

import acemq
from acemq import Ack, Batch, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

accounts: dict[str, int] = {}


async def load(batch: Batch[tuple[str, int]]) -> None:
    for message in batch:
        account, cents = message.payload
        if not account:
            batch.settle(message, Ack.reject("no such account"))
        else:
            accounts[account] = accounts.get(account, 0) + cents
    print("one insert for", len(batch), "rows")  # returning accepts all that have no outcome of their own


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("bookings", dead_letter=True))
        await mq.send_many("bookings", [("acct-1", 100), ("", 7), ("acct-2", 250), ("acct-1", 50)])

        kind = tuple[str, int]
        async with mq.consume_batches("bookings", kind, load, most=4, within=timedelta(seconds=5)) as consumer:
            while consumer.counters.acked < 3 or consumer.counters.rejected < 1:
                await asyncio.sleep(0.01)
        print(accounts, "rejected:", consumer.counters.rejected)


asyncio.run(main())
