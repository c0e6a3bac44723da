import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import Ack, Batch, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

accounts: dict[str, int] = {}


@dataclass
class Booking:
    account: str
    cents: int


async def load(batch: Batch[Booking]) -> None:
    for message in batch:
        booking = message.payload
        if not booking.account:
            batch.settle(message, Ack.reject("no such account"))
        else:
            accounts[booking.account] = accounts.get(booking.account, 0) + booking.cents
    print("one insert for", len(batch), "rows")  # returning accepts all that have no outcome of their own


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("bookings", dead_letter=True))
        bookings = [Booking("acct-1", 100), Booking("", 7), Booking("acct-2", 250), Booking("acct-1", 50)]
        await mq.send_many("bookings", bookings)

        async with mq.consume_batches("bookings", Booking, load, most=4, within=timedelta(seconds=5)) as consumer:
            while consumer.counters.acked < 3 or consumer.counters.rejected < 1:
                await asyncio.sleep(0.01)
        print(accounts, "rejected:", consumer.counters.rejected)


asyncio.run(main())
