import asyncio
import os

import acemq
from acemq import AceMQ, Message, Ordered

URL = os.environ.get("ACEMQ_URL", "memory://ledger")


def described(mq: AceMQ) -> Ordered[str]:
    return mq.ordered("ledger", str).partitions(8).keyed_by(lambda account: account).sharing(at_most=4)


async def apply(message: Message[str]) -> None:
    print(message.payload, "is applied")


async def main() -> None:
    # Two processes in one program: what counts is the connection.
    async with acemq.connect(URL) as one, acemq.connect(URL) as other:
        first, second = await described(one).declare(), await described(other).declare()
        async with first.consume(apply), second.consume(apply):
            print(len(first.owned_partitions), "and", len(second.owned_partitions))
            await first.send("acct-7")
            while first.counters.handled + second.counters.handled < 1:
                await asyncio.sleep(0.01)


asyncio.run(main())
