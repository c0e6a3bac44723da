import asyncio
import os
import tempfile
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

import acemq
from acemq import DbOutboxStore, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


def engine_of(url: str) -> AsyncEngine:
    engine = create_async_engine(url)

    @event.listens_for(engine.sync_engine, "connect")  # SQLite only: let SQLAlchemy begin transactions, ...
    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")  # ... so that savepoints are part of them
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine


async def main(folder: str) -> None:
    engine = engine_of(f"sqlite+aiosqlite:///{folder}/shop.db")
    store = DbOutboxStore(engine)
    await store.create()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY)"))

    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("order.placed"))
        outbox = mq.outbox(store)

        async def place(order: str, session: AsyncSession) -> None:
            await session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})
            await outbox.bind(session).send("order.placed", order, key=order)

        async with AsyncSession(engine) as session, session.begin():
            await place("o-1", session)
        async with AsyncSession(engine) as session:
            await place("o-2", session)
            await session.rollback()

        async with outbox.relay():
            while await store.pending_count():
                await asyncio.sleep(0.01)
        print("announced:", [each.payload for each in await mq.pull_many("order.placed", str)])
    await engine.dispose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(folder))
