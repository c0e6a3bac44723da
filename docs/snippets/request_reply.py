import asyncio
import os
from dataclasses import dataclass
from datetime import timedelta

import acemq
from acemq import Message, ResponderError, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")
PRICES = {"coffee": 350, "tea": 220}


@dataclass
class Wanted:
    sku: str


@dataclass
class Quote:
    sku: str
    cents: int


async def quote(message: Message[Wanted]) -> Quote:
    sku = message.payload.sku
    if sku not in PRICES:
        raise LookupError(f"no such sku: {sku}")
    return Quote(sku, PRICES[sku])


async def main() -> None:
    async with acemq.connect(URL) as mq:
        await mq.declare(
            Topology()
            .exchange("pricing", "topic")
            .queue("pricing.quotes")
            .bind("pricing.quotes", "pricing", "quote.requested")
        )
        async with mq.respond("pricing.quotes", Wanted, quote, concurrency=8):
            answer = await mq.request(
                "pricing", "quote.requested", Wanted("coffee"), Quote, timeout=timedelta(seconds=2)
            )
            print(answer.cents)
            try:
                await mq.request("pricing", "quote.requested", Wanted("gold"), Quote)
            except ResponderError as error:
                print(error.reason)
        print(mq.requests.answered, "answered,", mq.requests.failed, "failed,", mq.requests.waiting, "waiting")


asyncio.run(main())
