import asyncio
import os
import tempfile
from typing import Any

from flask import Flask, abort
from sqlalchemy import create_engine, event, text
from sqlalchemy.orm import sessionmaker

import acemq
from acemq import DbOutboxStore, OutboxRecord, Topology

URL = os.environ.get("ACEMQ_URL", "memory://flask")
folder = tempfile.TemporaryDirectory()
engine = create_engine(f"sqlite:///{folder.name}/shop.db")
sessions = sessionmaker(engine)
store = DbOutboxStore(engine)
app = Flask(__name__)


@event.listens_for(engine, "connect")  # the two hooks of SQLite; other databases need none
def connected(connection: Any, _: object) -> None:
    connection.isolation_level = None


@event.listens_for(engine, "begin")
def begun(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN")


@app.post("/orders/<order>")
def place(order: str) -> str:  # no event loop here, and no connection to a broker: only the database
    with sessions.begin() as session:
        session.execute(text("INSERT INTO orders VALUES (:id)"), {"id": order})
        store.add_sync(OutboxRecord.of("", "flask.placed", order), session)
        if order == "o-2":
            abort(409)
    return order


async def relay() -> None:  # a process of its own: the web server's workers need not run it
    async with acemq.connect(URL) as mq:
        await mq.declare(Topology().queue("flask.placed"))
        async with mq.outbox(store).relay():
            while await store.pending_count():
                await asyncio.sleep(0.01)
        print([each.payload for each in await mq.pull_many("flask.placed", str)])


asyncio.run(store.create())
with engine.begin() as connection:
    connection.execute(text("CREATE TABLE orders (id TEXT PRIMARY KEY)"))
client = app.test_client()
for order in ("o-1", "o-2"):
    print(client.post(f"/orders/{order}").status_code)
asyncio.run(relay())
engine.dispose()
folder.cleanup()
