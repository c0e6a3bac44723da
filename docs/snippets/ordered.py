import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import Message, PartitionFailure

URL = os.environ.get("ACEMQ_URL", "memory://")


@dataclass
class Entry:
    account: str
    cents: int


async def main() -> None:
    applied: asyncio.Queue[str] = asyncio.Queue()
    closed = {"acct-7"}

    async def apply(message: Message[Entry]) -> None:
        entry = message.payload
        if entry.account in closed:
            raise ValueError(f"{entry.account} is closed")
        applied.put_nowait(f"{entry.account} {entry.cents:+}")

    async with acemq.connect(URL) as mq:
        ledger = await (
            mq.ordered("ledger", Entry)
            .partitions(8)
            .keyed_by(lambda entry: entry.account)
            .on_failure(PartitionFailure.STOP, attempts=3, delay=timedelta(milliseconds=50))
            .declare()
        )
        async with ledger.consume(apply):
            for cents in (100, -30, -70):
                await ledger.send(Entry("acct-7", cents))
                await ledger.send(Entry("acct-1", cents))
            print([await applied.get() for _ in range(3)])

            while not ledger.halted_partitions:
                await asyncio.sleep(0.01)
            for partition, halt in ledger.halted_partitions.items():
                print(f"partition {partition} stands after {halt.attempts} tries: {halt.error}")

            closed.clear()
            ledger.resume(6)
            print([await applied.get() for _ in range(3)])


asyncio.run(main())
