import asyncio
import os

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    invoiced: asyncio.Queue[Message[str]] = asyncio.Queue()
    async with acemq.connect(URL) as mq:

        async def bill(message: Message[str]) -> None:
            await mq.send("invoices", f"invoice for {message.payload}")

        await mq.declare(Topology().queue("orders").queue("invoices"))
        async with mq.consume("orders", str, bill), mq.consume("invoices", str, invoiced.put):
            order = await mq.send("orders", "o-1", correlation_id="basket-7", headers={"x-tenant": "acme"})
            invoice = await invoiced.get()

    print(invoice.payload)
    print("same correlation:", invoice.correlation_id == "basket-7")
    print("caused by the order:", invoice.envelope.causation_id == order.message_id)
    print("headers of its own:", dict(invoice.headers))


asyncio.run(main())
