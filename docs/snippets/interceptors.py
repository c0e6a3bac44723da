import asyncio
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import acemq
from acemq import ConsumeInterceptor, Draft, Handled, Message, PublishInterceptor, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

ended: asyncio.Queue[Handled] = asyncio.Queue()


class Tenant(PublishInterceptor, ConsumeInterceptor):
    """Each message names a tenant, and a tenant that we do not know is refused."""

    def __init__(self, name: str, known: Mapping[str, int]) -> None:
        self._name, self._known = name, known

    async def before_publish(self, draft: Draft) -> None:
        draft.envelope = draft.envelope.replace(headers={"x-tenant": self._name, **draft.envelope.headers})

    async def before_handle(self, message: Message[Any]) -> None:
        tenant = str(message.headers.get("x-tenant"))
        if tenant not in self._known:
            raise PermissionError(f"no tenant {tenant!r}")
        message.state["account"] = self._known[tenant]

    def when_settled(self, message: Message[Any], handled: Handled) -> None:
        ended.put_nowait(handled)


async def ship(message: Message[str]) -> None:
    print("shipping", message.payload, "on account", message.state["account"])


async def main() -> None:
    async with acemq.connect(URL, interceptors=[Tenant("acme", {"acme": 7})]) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship):
            await mq.send("orders", "o-1")
            print((await ended.get()).outcome)
            await mq.send("orders", "o-2", headers={"x-tenant": "nobody"})
            letter = await mq.pull("orders.dlq", str, wait=timedelta(seconds=10))
            if letter and letter.failure:
                print(letter.payload, "in the dead letters:", letter.failure.text)
                await letter.accept()


asyncio.run(main())
