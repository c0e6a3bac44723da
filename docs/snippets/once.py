import asyncio
import os
import tempfile
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

import acemq
from acemq import Ack, DbIdempotencyStore, DbOutboxStore, Message, Topology, Unit

URL = os.environ.get("ACEMQ_URL", "memory://")


async def bill(message: Message[str], unit: Unit) -> Ack | None:
    order = message.payload
    await unit.session.execute(text("INSERT INTO invoices VALUES (:id)"), {"id": order})
    await unit.send("invoice.made", order)
    if order == "o-2":
        return Ack.reject("no such customer")  # and all of it was never there
    return None


async def main(engine: AsyncEngine) -> None:
    inbox, outbox = DbIdempotencyStore(engine), DbOutboxStore(engine)
    await inbox.create()
    await outbox.create()
    sessions = async_sessionmaker(engine)
    async with sessions() as session, session.begin():
        await session.execute(text("CREATE TABLE invoices (id TEXT)"))

    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("orders").queue("invoice.made"))
        handler = mq.once(bill, session=sessions, inbox=inbox, outbox=outbox)
        async with mq.consume("orders", str, handler, concurrency=1) as consumer, mq.outbox(outbox).relay():
            for order in ("o-1", "o-1", "o-2"):
                await mq.send("orders", order, message_id=order)
            while consumer.counters.acked + consumer.counters.rejected < 3 or await outbox.pending_count():
                await asyncio.sleep(0.01)
            print("duplicates:", consumer.counters.duplicates)
        print("announced:", [each.payload for each in await mq.pull_many("invoice.made", str)])

    async with sessions() as session:
        print("invoices:", list(await session.scalars(text("SELECT id FROM invoices"))))
    await engine.dispose()


with tempfile.TemporaryDirectory() as folder:
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/billing.db")

    @event.listens_for(engine.sync_engine, "connect")  # the two hooks of SQLite; other databases need none
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    asyncio.run(main(engine))
