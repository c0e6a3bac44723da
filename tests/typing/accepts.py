"""What both checkers must let through, with the types that they must see. Imported by `refuses.py`; never run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict, assert_type

from acemq import AceMQ, Ack, Message, Pipeline, Publisher, Pulled, one_of


@dataclass
class Order:
    id: str


@dataclass
class RushOrder(Order):
    courier: str = ""


@dataclass
class Priced:
    cents: int


@dataclass
class Shipped:
    tracking: str


class Row(TypedDict):
    id: str


async def price(order: Order) -> Priced:
    return Priced(1)


async def maybe(order: Order) -> Priced | None:
    return None


async def ship(priced: Priced) -> Shipped:
    return Shipped("t")


async def audit(anything: object) -> Shipped:
    return Shipped("t")


async def note(message: Message[Order]) -> Ack | None:
    return None


def note_plainly(message: Message[Order]) -> None: ...


async def note_rows(message: Message[Row]) -> None: ...


async def note_either(message: Message[Order | Priced]) -> None: ...


def chains(mq: AceMQ) -> None:
    orders = mq.pipeline("orders", Order)
    assert_type(orders, Pipeline[Order, Order])
    assert_type(orders.step("price", price), Pipeline[Order, Priced])
    assert_type(orders.step("price", price).step("ship", ship), Pipeline[Order, Shipped])
    assert_type(orders.step("price", price).step("audit", audit), Pipeline[Order, Shipped])
    assert_type(orders.step("maybe", maybe).step("ship", ship), Pipeline[Order, Shipped])
    assert_type(orders.elsewhere("fraud", Priced).step("ship", ship), Pipeline[Order, Shipped])
    assert_type(mq.pipeline("rush", RushOrder).step("price", price), Pipeline[RushOrder, Priced])
    assert_type(
        orders.step("price", price, concurrency=2).step("ship", lambda priced: ship(priced)), Pipeline[Order, Shipped]
    )


def consumers(mq: AceMQ) -> None:
    mq.consume("orders", Order, note)
    mq.consume("orders", RushOrder, note)
    mq.consume("orders", Order, note_plainly)
    mq.consume("orders", Row, note_rows)
    mq.consume("orders", one_of(Order, Priced, names={"order": Order, "priced": Priced}), note_either)
    mq.consume("orders", Order, lambda message: print(message.payload.id))
    mq.consume("orders", Order, note, concurrency=4, handler_timeout=timedelta(minutes=1))


async def in_hand(mq: AceMQ) -> None:
    assert_type(await mq.pull("orders", Order), Pulled[Order] | None)
    publisher = mq.publisher("orders-events", "order.placed", Order)
    assert_type(publisher, Publisher[Order])
    await publisher.publish(RushOrder("o-1", "c"))
