"""`python -m examples.shop.checkout`: each order is priced, paid, reserved and sent, or all of it is undone.

Prices and the bank answer over the broker. A step of the saga fails for some orders; what was done before it is put
right. Of what was sent, a reminder comes later, and the scan of the delivery note travels by claim check. Exit code 1
if a sum is not what it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import hashlib
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import msgspec

import acemq
from acemq import (
    AceMQ,
    ClaimCheckCodec,
    FileClaimStore,
    JsonCodec,
    Message,
    ResponderError,
    Saga,
    SagaResult,
    Scheduler,
    Topology,
)

DATA = Path(__file__).parent / "data" / "orders.csv"
PRICES, BANK, REMINDERS, SCANS = "shop.prices", "shop.bank", "shop.reminders", "shop.scans"
QUEUES = (PRICES, BANK, REMINDERS, SCANS)
AT_ONCE = 8
"""Orders under way."""
REMINDED_AFTER = timedelta(seconds=2)
PATIENCE = 60.0
"""Seconds for the reminders and scans, after which it is given up."""


class Order(msgspec.Struct, frozen=True):
    id: str
    customer: str
    item: str
    in_stock: bool
    has_courier: bool

    @staticmethod
    def of(row: dict[str, str]) -> Order:
        number = int(row["id"].removeprefix("o-"))
        # Every eleventh lives where no courier goes.
        return Order(row["id"], row["customer"], row["item"], row["in_stock"] == "yes", number % 11 != 0)


class PriceWanted(msgspec.Struct):
    item: str


class Price(msgspec.Struct):
    item: str
    cents: int


class Transfer(msgspec.Struct):
    order: str
    cents: int
    """Negative: back to the customer."""


class Booked(msgspec.Struct):
    number: int


class Reminder(msgspec.Struct):
    order: str
    sent: float


class Scan(msgspec.Struct):
    order: str
    sha256: str
    page: str


class NotInStock(Exception):
    pass


class NoCourier(Exception):
    pass


class Bank:
    """The other side of the payments: it books each transfer, and is out of order now and then."""

    def __init__(self) -> None:
        self.booked: list[Transfer] = []
        self.outages = 0
        self._refunds_tried: Counter[str] = Counter()

    async def transfer(self, message: Message[Transfer]) -> Booked:
        wanted = message.payload
        if wanted.cents < 0:
            self._refunds_tried[wanted.order] += 1
            if self._refunds_tried[wanted.order] == 1 and wanted.order.endswith("2"):
                self.outages += 1
                raise ConnectionError("the bank is out of order, try again")
        self.booked.append(wanted)
        return Booked(len(self.booked))


class Shop:
    """What the steps of the saga change, each thing by itself: nothing is one transaction here."""

    def __init__(self, mq: AceMQ, shelves: Counter[str]) -> None:
        self._mq, self.shelves = mq, shelves
        self.couriers: list[str] = []
        self.place = (
            Saga("place-order", Order)
            .reporting_to(mq)
            .step("take-payment", self.charge)
            .undo(self.refund, attempts=3, delay=timedelta(milliseconds=50))
            .step("reserve-stock", self.reserve)
            .undo(self.release)
            .step("book-courier", self.book)  # nothing after it can fail: it needs no undo
        )

    async def charge(self, order: Order) -> int:
        price = await self._mq.request("", PRICES, PriceWanted(order.item), Price)
        await self._mq.request("", BANK, Transfer(order.id, price.cents), Booked)
        return price.cents

    async def refund(self, order: Order, cents: int) -> None:
        await self._mq.request("", BANK, Transfer(order.id, -cents), Booked)

    async def reserve(self, order: Order) -> str:
        if not order.in_stock:
            raise NotInStock(order.item)
        self.shelves[order.item] -= 1
        return order.item

    async def release(self, order: Order, item: str) -> None:
        self.shelves[item] += 1

    async def book(self, order: Order) -> None:
        if not order.has_courier:
            raise NoCourier(order.id)
        self.couriers.append(order.id)


class Arrived:
    """What came by the scheduler and by claim check, and what was wrong with it."""

    def __init__(self) -> None:
        self.reminded: Counter[str] = Counter()
        self.scanned: Counter[str] = Counter()
        self.problems: list[str] = []

    async def remind(self, message: Message[Reminder]) -> None:
        reminder, waited = message.payload, time.time() - message.payload.sent
        self.reminded[reminder.order] += 1
        # The ladder of RabbitMQ does not wait out the last second.
        if waited < REMINDED_AFTER.total_seconds() - 1:
            self.problems.append(f"the reminder of {reminder.order} came after {waited:.2f} s")

    async def file(self, message: Message[Scan]) -> None:
        scan = message.payload
        self.scanned[scan.order] += 1
        if hashlib.sha256(scan.page.encode()).hexdigest() != scan.sha256:
            self.problems.append(f"the scan of {scan.order} is not what was sent")
        if len(message.body) > 100:
            self.problems.append(f"the scan of {scan.order} went through the broker: {len(message.body)} bytes")


async def place_all(
    orders: list[Order], shop: Shop, mq: AceMQ, later: Scheduler, codec: ClaimCheckCodec
) -> dict[str, SagaResult]:
    """Each order by itself, several at once; for what was sent, a reminder and the scan of the delivery note."""
    results: dict[str, SagaResult] = {}
    turn = asyncio.Semaphore(AT_ONCE)

    async def place(order: Order) -> None:
        async with turn:
            result = results[order.id] = await shop.place.run(order)
            if not result.succeeded:
                return
            await later.after(REMINDED_AFTER, "", REMINDERS, Reminder(order.id, time.time()))
            if order.id.endswith("0"):
                page = os.urandom(100_000).hex()
                scan = Scan(order.id, hashlib.sha256(page.encode()).hexdigest(), page)
                await mq.send(SCANS, scan, codec=codec)

    async with asyncio.TaskGroup() as placing:
        for order in orders:
            placing.create_task(place(order))
    return results


def proof(
    orders: list[Order], cents: dict[str, int], results: dict[str, SagaResult], shop: Shop, bank: Bank, arrived: Arrived
) -> list[str]:
    """What is not as it should be: the money, the shelves, the couriers, the reminders and the scans, by their sums."""
    sent = {order.id: order for order in orders if order.in_stock and order.has_courier}
    problems = list(arrived.problems)
    for order in orders:
        expected = None if order.id in sent else "book-courier" if order.in_stock else "reserve-stock"
        result = results[order.id]
        if result.failed_step != expected or result.has_unresolved:
            problems.append(f"order {order.id}: {result}")
    taken = sum(transfer.cents for transfer in bank.booked)
    owed = sum(cents[order.item] for order in sent.values())
    if taken != owed:
        problems.append(f"the bank holds {taken} cents, and what was sent costs {owed}")
    by_order: Counter[str] = Counter()
    for transfer in bank.booked:
        by_order[transfer.order] += transfer.cents
    problems += [
        f"order {order.id} has paid {by_order[order.id]} cents"
        for order in orders
        if by_order[order.id] != (cents[order.item] if order.id in sent else 0)
    ]
    left = Counter({item: len(orders) for item in cents})
    left.subtract(order.item for order in sent.values())
    if shop.shelves != left:
        problems.append(f"on the shelves is {shop.shelves}, and should be {left}")
    if sorted(shop.couriers) != sorted(sent):
        problems.append(f"{len(shop.couriers)} couriers were booked for {len(sent)} orders")
    if arrived.reminded.keys() != sent.keys():
        problems.append(f"{len(arrived.reminded)} reminders came for {len(sent)} orders")
    if arrived.scanned.keys() != {id for id in sent if id.endswith("0")}:
        problems.append(f"{len(arrived.scanned)} scans were filed")
    print(
        f"{len(sent)} orders sent for {owed / 100:.2f}, {len(orders) - len(sent)} undone, {bank.outages} refunds late."
    )
    print(f"{len(arrived.reminded)} reminders, {len(arrived.scanned)} scans by claim check.")
    return problems


async def story(broker: str, folder: str) -> int:
    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    orders, cents = [Order.of(row) for row in rows], {row["item"]: int(row["cents"]) for row in rows}
    bank, arrived = Bank(), Arrived()

    async def price(message: Message[PriceWanted]) -> Price:
        item = message.payload.item
        if item not in cents:
            raise LookupError(f"we have no {item}")
        return Price(item, cents[item])

    codec = ClaimCheckCodec(JsonCodec(), FileClaimStore(folder))
    async with acemq.connect(broker, name="checkout") as mq, AsyncExitStack() as open_now:
        for queue in QUEUES:
            await mq.delete(queue)
            await mq.declare(Topology().queue(queue, type="classic"))
        await open_now.enter_async_context(mq.respond(PRICES, PriceWanted, price))
        await open_now.enter_async_context(mq.respond(BANK, Transfer, bank.transfer))
        await open_now.enter_async_context(mq.consume(REMINDERS, Reminder, arrived.remind))
        await open_now.enter_async_context(mq.consume(SCANS, Scan, arrived.file, codec=codec))
        later = await open_now.enter_async_context(mq.scheduler())
        try:
            await mq.request("", PRICES, PriceWanted("unicorn"), Price)
            arrived.problems.append("a unicorn had a price")
        except ResponderError as refused:
            print(f"Asked for a unicorn: {refused.reason}.")
        shop = Shop(mq, Counter({item: len(orders) for item in cents}))
        results = await place_all(orders, shop, mq, later, codec)
        sent = sum(result.succeeded for result in results.values())
        async with asyncio.timeout(PATIENCE):
            while len(arrived.reminded) < sent or (await mq.depth(SCANS)).ready:
                await asyncio.sleep(0.1)
    problems = proof(orders, cents, results, shop, bank, arrived)
    for problem in problems:
        print(f"WRONG: {problem}")
    print("All sums are right." if not problems else "That is a bug.")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.shop.checkout", description=__doc__)
    parser.add_argument("--broker", default=os.environ.get("ACEMQ_URL", "memory://"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(story(given.broker, folder))


if __name__ == "__main__":
    sys.exit(main())
