"""What both checkers must refuse, line by line: an ignore that is no longer needed fails the build."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from acemq import AceMQ, Batch, BlockingMQ, DbIdempotencyStore, DbOutboxStore, Message, Saga
from tests.typing.accepts import Order, Priced, Shipped, bill, charge, load, maybe, note, price, refund, ship


async def wants_shipped(shipped: Shipped) -> None: ...
async def of_priced(message: Message[Priced]) -> None: ...
async def batch_of_priced(batch: Batch[Priced]) -> None: ...
def key_of_priced(priced: Priced) -> str:
    return str(priced.cents)


async def wrong_refund(order: Order, paid: str) -> None: ...
async def refund_of_priced(priced: Priced, paid: int) -> None: ...
async def gives_text(message: Message[Order]) -> str:
    return ""


def chains(mq: AceMQ) -> None:
    orders = mq.pipeline("orders", Order)
    orders.step("ship", ship)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.step("price", price).step("price", price)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.step("price", price).step("done", wants_shipped)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.step("maybe", maybe).step("done", wants_shipped)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.elsewhere("fraud", Shipped).step("ship", ship)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    orders.step("price", price, concurency=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    orders.step("price", price, retry=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def consumers(mq: AceMQ) -> None:
    mq.consume("o", Order, of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume("o", Order, gives_text)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume("o", Priced, note)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume("o", Order, lambda message: message.payload.idd)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownLambdaType]
    mq.consume("o", Order, note, concurrency="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume("o", Order, note, prefech=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mq.consume("o", Order, note, retry_for=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume_group("o", Order, note)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mq.consume_group("o", Order, of_priced, size=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def batches(mq: AceMQ) -> None:
    mq.consume_batches("o", Order, batch_of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume_batches("o", Priced, load)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume_batches("o", Order, note)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume_batches("o", Order, load, within=0.2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def settled(batch: Batch[Order]) -> None:
    batch.settle(batch[0], "accept")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for message in batch:
        cents: int = message.payload  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(cents)


async def in_hand(mq: AceMQ) -> None:
    publisher = mq.publisher("orders-events", "order.placed", Order)
    await publisher.publish(Priced(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await mq.send("o", Order("1"), delay=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    async with mq.receive("o", Order) as receiving:
        priced: Priced = (await anext(receiving)).payload  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(priced)
    pulled = await mq.pull("o", Order)
    if pulled:
        cents: int = pulled.payload  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(cents)


async def in_order(mq: AceMQ) -> None:
    described = mq.ordered("ledger", Order)
    described.keyed_by(key_of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    described.keyed_by(lambda order: 7)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    described.on_failure("stop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    described.sharing(at_most=4, take_over_after=15)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ledger = await described.declare()
    await ledger.send(Priced(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await ledger.send(Order("1"), key=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    ledger.consume(of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def blocking(mq: BlockingMQ) -> None:
    mq.consume("o", Order, note)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.replay("o.dlq").until(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.send("o", Order("1"), delay=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pulled = mq.pull("o", Order)
    if pulled:
        cents: int = pulled.payload  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
        print(cents)


async def requests(mq: AceMQ) -> None:
    cents: int = await mq.request("pricing", "quote", Order("o"), Priced)  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    print(cents)
    await mq.request("pricing", "quote", Order("o"), Priced, timeout=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await mq.request("pricing", "quote", Order("o"), Priced, reply_to="q")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mq.respond("pricing.quotes", Order, of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def schedules(mq: AceMQ) -> None:
    async with mq.scheduler() as later:
        await later.after(5, "", "q", 1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await later.after(timedelta(hours=1), "", "q", 1, priority=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def sagas(mq: AceMQ) -> None:
    place = Saga("place", Order)
    place.step("charge", charge).undo(wrong_refund)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    place.step("charge", charge).undo(refund_of_priced)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    place.step("charge", charge).undo(refund).undo(refund)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    place.undo(refund)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    place.step("ship", ship)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    place.step("charge", charge).undo(refund, attempts="3")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await place.step("charge", charge).run(Priced(1))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def outboxes(mq: AceMQ, sessions: async_sessionmaker[AsyncSession], store: DbOutboxStore) -> None:
    async with sessions() as session:
        mq.outbox(store).bind_sync(session)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        await store.add(Order("1"), session)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.outbox(session)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.consume("o", Order, note, idempotency=store)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def units(mq: AceMQ, sessions: async_sessionmaker[AsyncSession], inbox: DbIdempotencyStore) -> None:
    once = mq.once(bill, session=sessions, inbox=inbox)
    mq.consume("o", Priced, once)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    mq.once(note, session=sessions, inbox=inbox)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
