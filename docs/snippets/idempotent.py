import asyncio
import os
import sqlite3
from contextlib import closing

import acemq
from acemq import Message, Topology

URL = os.environ.get("ACEMQ_URL", "memory://")


async def main() -> None:
    settled: asyncio.Queue[str] = asyncio.Queue()
    with closing(sqlite3.connect(":memory:", check_same_thread=False)) as db:
        db.execute("CREATE TABLE account (cents INTEGER)")
        db.execute("INSERT INTO account VALUES (100)")
        db.execute("CREATE TABLE handled (id TEXT PRIMARY KEY)")

        def charge(message: Message[int]) -> None:
            message.when_settled(lambda handled: settled.put_nowait(handled.outcome))
            with db:  # the claim and the work stand or fall together
                claimed = db.execute("INSERT OR IGNORE INTO handled VALUES (?)", (message.id,)).rowcount
                if claimed:
                    db.execute("UPDATE account SET cents = cents - ?", (message.payload,))

        async with acemq.connect(URL) as mq:
            await mq.declare(Topology().queue("charges"))
            async with mq.consume("charges", int, charge, concurrency=1):
                await mq.send("charges", 30, message_id="charge-1")
                await mq.send("charges", 30, message_id="charge-1")  # the sender could not tell, and sent it again
                print(await settled.get(), await settled.get())

        print("left:", db.execute("SELECT cents FROM account").fetchone()[0])


asyncio.run(main())
