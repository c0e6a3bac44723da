import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

import acemq
from acemq import AceMQ, DbOutboxStore, Topology

URL = os.environ.get("ACEMQ_URL", "memory://fastapi")
folder = tempfile.TemporaryDirectory()
engine = create_async_engine(f"sqlite+aiosqlite:///{folder.name}/shop.db")
sessions = async_sessionmaker(engine)
store = DbOutboxStore(engine)


@event.listens_for(engine.sync_engine, "connect")  # the two hooks of SQLite; other databases need none
def connected(connection: Any, _: object) -> None:
    connection.isolation_level = None


@event.listens_for(engine.sync_engine, "begin")
def begun(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    await store.create()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY)"))
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("fastapi.placed"))
        async with mq.outbox(store).relay():
            app.state.mq = mq
            yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


async def transaction() -> AsyncIterator[AsyncSession]:
    async with sessions() as session, session.begin():  # committed when the request is done, unless it raised
        yield session


@app.post("/orders/{order}")
async def place(order: str, session: Annotated[AsyncSession, Depends(transaction, scope="function")]) -> str:
    mq: AceMQ = app.state.mq
    await session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})
    await mq.outbox(store).bind(session).send("fastapi.placed", order)
    if order == "o-2":
        raise HTTPException(409, "sold out")
    return order


async def main() -> None:
    async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        for order in ("o-1", "o-2"):
            print((await client.post(f"/orders/{order}")).status_code)
        while await store.pending_count():
            await asyncio.sleep(0.01)
        print([each.payload for each in await app.state.mq.pull_many("fastapi.placed", str)])
    folder.cleanup()


asyncio.run(main())
