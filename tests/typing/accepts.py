"""What both checkers must let through, with the types that they must see. Imported by `refuses.py`; never run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypedDict, assert_type

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker

from acemq import (
    AceMQ,
    Ack,
    Batch,
    BlockingMQ,
    BlockingPulled,
    Consumer,
    ConsumerGroup,
    DbIdempotencyStore,
    DbOutboxStore,
    Handler,
    Idempotency,
    MemoryIdempotencyStore,
    Message,
    Opening,
    Ordered,
    OrderedConsumer,
    OrderedQueue,
    OutboxRecord,
    OutboxRelay,
    PartitionFailure,
    Pipeline,
    Publisher,
    Pulled,
    Receiving,
    ReplayResult,
    Responder,
    RetryPolicy,
    Saga,
    SagaResult,
    SagaStep,
    Scheduled,
    Scheduler,
    Sweep,
    Unit,
    body_fingerprint,
    one_of,
)


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


async def load(batch: Batch[Order]) -> None:
    batch.settle(batch[0], Ack.accept())


def load_plainly(batch: Batch[Order]) -> Ack:
    return Ack.accept() if all(message.payload.id for message in batch[1:]) else Ack.reject()


def fewer_for_time_outs(message: Message[object], error: BaseException) -> RetryPolicy | None:
    return RetryPolicy.none() if isinstance(error, TimeoutError) else None


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
    mq.consume("orders", Order, note, retry_for=fewer_for_time_outs, exclusive=True)
    assert_type(mq.consume_group("orders", Order, note, size=3), Opening[ConsumerGroup])


def batches(mq: AceMQ) -> None:
    assert_type(mq.consume_batches("orders", Order, load), Opening[Consumer])
    mq.consume_batches("orders", RushOrder, load)
    mq.consume_batches("orders", Order, load_plainly, most=50, within=timedelta(seconds=1), concurrency=2)
    mq.consume_batches("orders", Order, lambda batch: print(batch[0].payload.id, len(batch)))


async def answer(message: Message[Order]) -> Priced:
    return Priced(len(message.payload.id))


async def requests(mq: AceMQ) -> None:
    assert_type(await mq.request("pricing", "quote", Order("o"), Priced), Priced)
    assert_type(await mq.request("pricing", "quote", Order("o"), one_of(Priced, None)), Priced | None)
    assert_type(mq.respond("pricing.quotes", Order, answer, concurrency=4), Opening[Responder])
    mq.respond("pricing.quotes", RushOrder, answer)
    mq.respond("pricing.quotes", Order, lambda message: message.payload.id)


async def schedules(mq: AceMQ) -> None:
    async with mq.scheduler() as later:
        assert_type(later, Scheduler)
        assert_type(
            await later.after(timedelta(hours=4), "", "q", Order("o"), content_type="application/json"), Scheduled
        )


async def charge(order: Order) -> int:
    return 7


async def refund(order: Order, paid: int) -> None: ...
async def refund_anything(order: object, paid: object) -> str:
    return ""


async def sagas(mq: AceMQ) -> None:
    place = Saga("place", Order)
    assert_type(place.step("charge", charge), SagaStep[Order, int])
    assert_type(place.step("charge", charge).undo(refund, attempts=3), Saga[Order])
    place.step("charge", charge).undo(refund_anything).step("again", charge, timeout=timedelta(seconds=1))
    place.step("charge", charge).undo(lambda order, paid: refund(order, paid + 1))
    assert_type(await place.step("charge", charge).reporting_to(mq).run(RushOrder("o")), SagaResult)


async def in_hand(mq: AceMQ) -> None:
    assert_type(await mq.pull("orders", Order), Pulled[Order] | None)
    async with mq.receive("orders", Order, prefetch=5) as receiving:
        assert_type(receiving, Receiving[Order])
        async for pulled in receiving:
            assert_type(pulled, Pulled[Order])
            assert_type(await pulled.accept(), bool)
    publisher = mq.publisher("orders-events", "order.placed", Order)
    assert_type(publisher, Publisher[Order])
    await publisher.publish(RushOrder("o-1", "c"))


async def in_order(mq: AceMQ) -> None:
    described = mq.ordered("ledger", Order).partitions(8).keyed_by(lambda order: order.id)
    assert_type(described, Ordered[Order])
    ledger = await described.on_failure(PartitionFailure.STOP, attempts=3).sharing(4).declare()
    assert_type(ledger, OrderedQueue[Order])
    await ledger.send(Order("1"))
    async with ledger.consume(note) as consumer:
        assert_type(consumer, OrderedConsumer)
        assert_type(await ledger.skip(3), str)


def blocking(mq: BlockingMQ) -> None:
    assert_type(mq.pull("orders", Order), BlockingPulled[Order] | None)
    mq.consume("orders", Order, note_plainly, concurrency=4)
    assert_type(mq.replay("orders.dlq").at_rate(50).where(lambda message: b"o-1" in message.body).run(), ReplayResult)
    assert_type(mq.run(lambda asynchronous: asynchronous.exists("orders")), bool)


async def bill(message: Message[Order], unit: Unit) -> Ack | None:
    unit.session.add(message.payload)
    assert_type(await unit.publish("billing", "invoice.made", message.payload.id, key="k"), OutboxRecord)
    return None


async def outboxes(mq: AceMQ, sessions: async_sessionmaker[AsyncSession], engine: AsyncEngine) -> None:
    store = DbOutboxStore(engine)
    outbox = mq.outbox(store)
    assert_type(outbox.relay(), Opening[OutboxRelay])
    assert_type(await outbox.sweep(), Sweep)
    async with sessions() as session:
        assert_type(await outbox.bind(session).send("orders", Order("o-1")), OutboxRecord)
        assert_type(await store.add(OutboxRecord.of("", "orders", 1), session), bool)
        await session.run_sync(lambda sync: outbox.bind_sync(sync).send("orders", 1))
    async with engine.begin() as connection:
        await store.add(OutboxRecord.of("", "orders", 1), connection)
    once = mq.once(bill, session=sessions, inbox=DbIdempotencyStore(engine), outbox=store)
    assert_type(once, Handler[Order])
    mq.consume("orders", Order, once)
    mq.consume("orders", RushOrder, note, idempotency=MemoryIdempotencyStore())
    claims = Idempotency(store=DbIdempotencyStore(engine), lease=timedelta(minutes=1), fingerprint=body_fingerprint)
    mq.consume("orders", Order, note, idempotency=claims)
