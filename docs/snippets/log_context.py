import asyncio
import logging
import os
import sys

import acemq
from acemq import LogContext, Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

log = logging.getLogger("shipping")
shipped = asyncio.Event()


def set_up() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(LogContext())
    handler.setFormatter(logging.Formatter("%(message)s [%(queue)s %(message_id)s attempt %(attempt)d]"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)


async def ship(message: Message[str]) -> None:
    log.info("shipping %s", message.payload)
    shipped.set()


async def main() -> None:
    set_up()
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship):
            await mq.send("orders", "o-1", message_id="m-1")
            await shipped.wait()


asyncio.run(main())
