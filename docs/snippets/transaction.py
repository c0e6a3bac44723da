import asyncio
import tempfile
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import acemq


async def main(folder: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/shop.db")
    async with acemq.connect(f"sqlite:///{folder}/shop.db") as mq:
        await mq.declare(acemq.Topology().queue("shipping"))
        async with AsyncSession(engine) as session:
            await session.execute(text("CREATE TABLE orders (id TEXT)"))
            await session.commit()

            await session.execute(text("INSERT INTO orders VALUES ('o-1')"))
            await mq.send("shipping", "o-1", transaction=session)
            await session.commit()

            await session.execute(text("INSERT INTO orders VALUES ('o-2')"))
            await mq.send("shipping", "o-2", transaction=session)
            await session.rollback()

            orders = (await session.scalars(text("SELECT id FROM orders"))).all()
        print("orders:", orders)
        print("messages:", [message.payload for message in await mq.pull_many("shipping", str)])
    await engine.dispose()


with tempfile.TemporaryDirectory() as folder:
    asyncio.run(main(Path(folder)))
