import asyncio
import os

import acemq
from acemq import BatchPublishError

URL = os.environ.get("ACEMQ_URL", "memory://")


def account_of(entry: dict[str, str]) -> str:
    return entry["account"]


async def main() -> None:
    async with acemq.connect(URL) as mq:
        ledger = await mq.ordered("ledger", dict[str, str]).keyed_by(account_of).declare()
        try:
            await ledger.send_many([{"account": "acct-7"}, {"amount": "100"}, {"account": "acct-7"}])
        except BatchPublishError as error:
            print(error.confirmed, "sent;", error.results[1])
        print(sum((await ledger.depths()).values()), "wait")


asyncio.run(main())
