"""`python -m examples.shop`: the whole story; exit code 1 if anything is lost or double.

It needs no server: broker and database are two files. `--broker amqp://localhost` is the same on RabbitMQ, `--database
postgresql+asyncpg://…` on PostgreSQL.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from sqlalchemy import func, select

import acemq
from acemq import AceMQ
from examples.shop.tables import LEASE, Invoice, Order, Shop
from examples.shop.work import INVOICES, ORDERS, InvoiceMade, OrderPlaced, topology, work

DATA = Path(__file__).parent / "data" / "orders.csv"
ROLES = ("relay", "billing")
PATIENCE = 120.0
"""Seconds without an end, after which it is given up."""


class Deaths(Counter[str]):
    """By role."""


async def place_all(shop: Shop, mq: AceMQ, rows: list[dict[str, str]]) -> set[str]:
    """Each order in a transaction of its own; what is not in stock is rolled back after it was written down."""
    outbox, committed = mq.outbox(shop.outbox), set[str]()
    for row in rows:
        async with shop.session() as session:
            order = Order(id=row["id"], customer=row["customer"], cents=int(row["cents"]))
            session.add(order)
            placed = OrderPlaced(order.id, order.customer, order.cents)
            await outbox.bind(session).send(ORDERS, placed, message_id=row["id"], key=row["customer"])
            if row["in_stock"] == "yes":
                await session.commit()
                committed.add(row["id"])
            else:
                await session.rollback()
    return committed


async def keep_alive(role: str, arguments: list[str], deaths: Deaths, most: int) -> None:
    """Start it again whenever it has died; after `most` deaths it is let live, so that the story has an end."""
    while True:
        odds = "0.08" if deaths[role] < most else "0"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.shop", *arguments, "--role", role, "--odds", odds)
        )
        try:
            if await process.wait() != -9:
                raise RuntimeError(f"{role} ended by itself with {process.returncode}")
            deaths[role] += 1
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def until_all_is_done(shop: Shop, orders: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await shop.outbox.pending_count() or await invoices(shop) < orders:
            await asyncio.sleep(0.2)


async def invoices(shop: Shop) -> int:
    async with shop.session() as session:
        return await session.scalar(select(func.count()).select_from(Invoice)) or 0


async def proof(shop: Shop, mq: AceMQ, committed: set[str]) -> list[str]:
    """What is not as it should be, from the tables and from the queues themselves."""
    problems: list[str] = []
    async with shop.session() as session:
        orders = set(await session.scalars(select(Order.id)))
        billed = Counter(await session.scalars(select(Invoice.order_id)))
    announced: Counter[str] = Counter()
    while batch := await mq.pull_many(INVOICES, InvoiceMade, most=100):
        announced.update(message.payload.order for message in batch)
        for message in batch:
            await message.accept()
    problems += [f"order {id} was committed and is not there" for id in committed - orders]
    problems += [f"order {id} was rolled back and is there" for id in orders - committed]
    problems += [f"order {id} has {billed[id]} invoices" for id in committed | billed.keys() if billed[id] != 1]
    problems += [f"invoice of {id} was never announced" for id in committed - announced.keys()]
    problems += [f"order {id} was announced and never committed" for id in announced.keys() - committed]
    twice = sum(times > 1 for times in announced.values())
    print(f"{len(orders)} orders, {sum(billed.values())} invoices, {len(announced)} announced, {twice} of them twice.")
    return problems


async def story(broker: str, database: str, most_deaths: int) -> int:
    shop, deaths = Shop(database), Deaths()
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    await shop.create()
    arguments = ["--broker", broker, "--database", database]
    async with acemq.connect(broker, name="shop") as mq:
        for queue in (ORDERS, INVOICES):
            await mq.delete(queue)
        await mq.declare(topology())
        keepers = [asyncio.ensure_future(keep_alive(role, arguments, deaths, most_deaths)) for role in ROLES]
        try:
            committed = await place_all(shop, mq, rows)
            print(f"{len(rows)} orders placed, {len(rows) - len(committed)} of them rolled back.")
            done = asyncio.ensure_future(until_all_is_done(shop, len(committed)))
            await asyncio.wait({done, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            for ended in (done, *keepers):
                if ended.done():
                    ended.result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
        print(f"Killed on the way: relay {deaths['relay']} times, billing {deaths['billing']} times.")
        problems = await proof(shop, mq, committed)
    await shop.engine.dispose()
    for problem in problems:
        print(f"WRONG: {problem}")
    print("Every order that was committed is billed once, and nothing else is." if not problems else "That is a bug.")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.shop", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--broker", default=os.environ.get("ACEMQ_URL"), help="its URL, for example amqp://localhost; a file of SQLite"
    )
    parser.add_argument("--database", help="an SQLAlchemy URL, for example postgresql+asyncpg://…; a file of SQLite")
    parser.add_argument("--deaths", type=int, default=5, help="of each process, at most")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--odds", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    random.seed()
    if given.role:
        asyncio.run(work(given.role, given.broker, given.database, given.odds))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        broker = given.broker or f"sqlite:///{folder}/broker.db?lease={LEASE.total_seconds():g}"
        database = given.database or f"sqlite+aiosqlite:///{folder}/shop.db"
        return asyncio.run(story(broker, database, given.deaths))


if __name__ == "__main__":
    sys.exit(main())
