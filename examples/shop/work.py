"""The two processes that are killed: `relay` announces what was committed, `billing` makes an invoice of each order."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import async_sessionmaker

import acemq
from acemq import AceMQ, Message, Topology, Unit
from examples.shop.tables import Invoice, Shop

ORDERS, INVOICES = "shop.orders", "shop.invoices"


class OrderPlaced(msgspec.Struct):
    id: str
    customer: str
    cents: int


class InvoiceMade(msgspec.Struct):
    order: str
    cents: int


def topology() -> Topology:
    return Topology().queue(ORDERS, type="classic").queue(INVOICES, type="classic")


def perhaps_die(odds: float) -> None:
    """No cleaning up, no goodbye: what a power cut leaves."""
    if random.random() < odds:
        os.kill(os.getpid(), signal.SIGKILL)


async def work(role: str, broker: str, database: str, odds: float) -> None:
    shop = Shop(database)
    async with acemq.connect(broker, name=f"shop-{role}") as mq:
        if role == "relay":
            _die_between_steps(mq, shop, odds)
            async with mq.outbox(shop.outbox).relay(interval=timedelta(milliseconds=100), batch=20):
                await asyncio.Event().wait()
        else:
            handler = mq.once(
                billing(odds), session=async_sessionmaker(shop.engine), inbox=shop.inbox, outbox=shop.outbox
            )
            async with mq.consume(ORDERS, OrderPlaced, handler, concurrency=2):
                await asyncio.Event().wait()


def billing(odds: float) -> Any:
    async def bill(message: Message[OrderPlaced], unit: Unit) -> None:
        order = message.payload
        unit.session.add(Invoice(order_id=order.id, cents=order.cents))
        perhaps_die(odds)
        await unit.send(
            INVOICES, InvoiceMade(order.id, order.cents), message_id=f"invoice-{order.id}", key=order.customer
        )
        await unit.session.flush()
        perhaps_die(odds)

    return bill


def _die_between_steps(mq: AceMQ, shop: Shop, odds: float) -> None:
    """A relay claims, publishes and marks: die after each of them now and then."""
    steps: list[tuple[Any, str]] = [(shop.outbox, "claim"), (mq.transport, "publish"), (shop.outbox, "published")]
    for owner, name in steps:
        setattr(owner, name, _then_perhaps_die(getattr(owner, name), odds))


def _then_perhaps_die(step: Any, odds: float) -> Any:
    async def done(*given: Any, **options: Any) -> Any:
        answer = await step(*given, **options)
        if getattr(answer, "records", True):  # an idle relay may live
            perhaps_die(odds)
        return answer

    return done
