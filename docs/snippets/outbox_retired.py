import asyncio
import warnings

import acemq
from acemq import InMemoryOutboxStore, OutboxRecord, Topology

warnings.filterwarnings("ignore", message="InMemoryOutboxStore is no outbox")


async def main() -> None:
    store = InMemoryOutboxStore(max_attempts=3)
    await store.add(OutboxRecord.of("", "billing", "o-1"))  # nobody has declared it
    async with acemq.connect("memory://") as mq:
        outbox = mq.outbox(store)
        for _ in range(5):
            sweep = await outbox.sweep()
            print("published", sweep.published, "failed", sweep.failed)

        (stuck,) = await store.retired()
        print(stuck.attempts, stuck.last_error is not None)
        await mq.declare(Topology().queue("billing"))
        await store.release(stuck.id)
        print("published", (await outbox.sweep()).published)


asyncio.run(main())
