"""The unit of work: claim, writes and announcements are one commit, or nothing was ever there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from acemq import (
    AceMQ,
    Ack,
    ConfigurationError,
    DbIdempotencyStore,
    DbOutboxStore,
    Handler,
    HandlerTypeError,
    Message,
    RetryPolicy,
    Topology,
    Unit,
)
from tests.stores.places import Sql
from tests.waiting import until, until_async

AT_ONCE = RetryPolicy.fixed(3, timedelta())
Work = Callable[[Message[int], Unit], Any]


class Shop:
    """A table of invoices, an inbox and an outbox in one database."""

    def __init__(self, place: Sql, mq: AceMQ) -> None:
        self.place, self.mq = place, mq
        self.inbox, self.outbox = DbIdempotencyStore(place.engine), DbOutboxStore(place.engine)
        self.sessions = async_sessionmaker(place.engine)

    async def open(self) -> None:
        await self.inbox.create()
        await self.outbox.create()
        await self.place.execute("CREATE TABLE invoice (n INTEGER)")
        await self.mq.declare(Topology().queue("orders").queue("invoices"))

    def once(self, work: Work) -> Handler[int]:
        return self.mq.once(work, session=self.sessions, inbox=self.inbox, outbox=self.outbox)

    async def found(self) -> tuple[int, int]:
        """Invoices and records."""
        ((rows,),) = await self.place.execute("SELECT count(*) FROM invoice")
        return rows, await self.outbox.pending_count()


@pytest.fixture
async def shop(place: Sql, mq: AceMQ) -> Shop:
    shop = Shop(place, mq)
    await shop.open()
    return shop


async def bill(message: Message[int], unit: Unit) -> Ack | None:
    await unit.session.execute(text("INSERT INTO invoice VALUES (:n)"), {"n": message.payload})
    await unit.send("invoices", message.payload)
    assert unit.token > 0
    return None


async def test_a_second_delivery_changes_nothing(shop: Shop) -> None:
    mq = shop.mq
    async with mq.consume("orders", int, shop.once(bill), retry=AT_ONCE) as consumer:
        for _ in range(3):
            await mq.send("orders", 7, message_id="m-7")
        await until(lambda: consumer.counters.acked == 3, within=30)
        assert consumer.counters.duplicates == 2
    assert await shop.found() == (1, 1)
    await mq.outbox(shop.outbox).sweep()
    (made,) = await mq.pull_many("invoices", int)
    assert made.payload == 7
    assert made.envelope.causation_id == "m-7"


@pytest.mark.parametrize(
    "answer", [Ack.reject("no"), Ack.park("look"), Ack.retry("later"), ValueError("boom"), "nonsense"]
)
async def test_whatever_is_not_accepted_leaves_nothing(shop: Shop, answer: Any) -> None:
    async def write_and_think_again(message: Message[int], unit: Unit) -> Ack | None:
        await bill(message, unit)
        if isinstance(answer, Exception):
            raise answer
        decision: Ack = answer
        return decision

    mq = shop.mq
    handler = shop.once(write_and_think_again)
    async with mq.consume("orders", int, handler, retry=RetryPolicy.none()) as consumer:
        await mq.send("orders", 7, message_id="m-7")
        ended = consumer.counters
        await until(lambda: ended.rejected + ended.parked + ended.dead_lettered == 1)
    assert await shop.found() == (0, 0)
    # And its key is free: after the repair, the same message is handled.
    async with mq.consume("orders", int, shop.once(bill)) as consumer:
        await mq.send("orders", 7, message_id="m-7")
        await until(lambda: consumer.counters.acked == 1)
    assert await shop.found() == (1, 1)


async def test_a_retry_is_a_whole_new_unit(shop: Shop) -> None:
    async def fails_twice(message: Message[int], unit: Unit) -> None:
        await bill(message, unit)
        if message.attempt < 3:
            raise ValueError("boom")

    async with shop.mq.consume("orders", int, shop.once(fails_twice), retry=AT_ONCE) as consumer:
        await shop.mq.send("orders", 7)
        await until(lambda: consumer.counters.acked == 1)
    assert await shop.found() == (1, 1)


@pytest.mark.parametrize("how", ["commit", "commit, and hide it", "rollback and go on"])
async def test_a_handler_that_ends_its_transaction_is_dead_lettered_with_nothing_written(shop: Shop, how: str) -> None:
    async def meddle(message: Message[int], unit: Unit) -> None:
        await bill(message, unit)
        match how:
            case "commit":
                await unit.session.commit()
            case "rollback and go on":
                await unit.session.rollback()
                await bill(message, unit)
            case _:
                try:
                    await unit.session.commit()
                except Exception:
                    await asyncio.sleep(0)

    mq = shop.mq
    async with mq.consume("orders", int, shop.once(meddle), retry=AT_ONCE) as consumer:
        await mq.send("orders", 7)
        await until(lambda: consumer.counters.dead_lettered == 1)
    assert await shop.found() == (0, 0)
    dead = await mq.pull("orders.dlq", int)
    assert dead is not None
    assert dead.failure is not None
    assert "ended the transaction of its unit by itself" in dead.failure.text


async def test_savepoints_are_the_handlers_own(shop: Shop) -> None:
    async def with_savepoints(message: Message[int], unit: Unit) -> None:
        async with unit.session.begin_nested():
            await bill(message, unit)
        savepoint = await unit.session.begin_nested()
        await bill(message, unit)
        await savepoint.rollback()

    async with shop.mq.consume("orders", int, shop.once(with_savepoints)) as consumer:
        await shop.mq.send("orders", 7)
        await until(lambda: consumer.counters.acked == 1)
    assert await shop.found() == (1, 1)


async def test_a_stop_in_the_middle_leaves_nothing_and_the_next_delivery_does_it(shop: Shop) -> None:
    began = asyncio.Event()

    async def hang(message: Message[int], unit: Unit) -> None:
        await bill(message, unit)
        began.set()
        await asyncio.Event().wait()

    mq = shop.mq
    consumer = await mq.consume("orders", int, shop.once(hang))
    await mq.send("orders", 7, message_id="m-7")
    await began.wait()
    await consumer.drain(timedelta())
    assert await shop.found() == (0, 0)
    async with mq.consume("orders", int, shop.once(bill)) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    assert await shop.found() == (1, 1)


@pytest.mark.parametrize("place", ["postgresql", "mariadb"], indirect=True)
async def test_two_at_once_are_one_run_and_the_other_waits_outside(shop: Shop) -> None:
    gate, runs = asyncio.Event(), list[str]()

    async def slow(message: Message[int], unit: Unit) -> None:
        runs.append(message.id)
        await bill(message, unit)
        await gate.wait()

    mq = shop.mq
    async with mq.consume("orders", int, shop.once(slow)) as consumer:
        for _ in range(4):
            await mq.send("orders", 7, message_id="m-7")

        async def three_wait() -> bool:
            return consumer.counters.in_progress == 3

        await until_async(three_wait, within=20)
        assert runs == ["m-7"]
        gate.set()
        await until(lambda: consumer.counters.acked == 4, within=20)
        assert consumer.counters.duplicates == 3
    assert await shop.found() == (1, 1)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_what_does_not_go_together_is_refused(shop: Shop, tmp_path: Path) -> None:
    def plain(message: Message[int], unit: Unit) -> None: ...

    at_once: Any = plain
    elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
    mq = shop.mq
    with pytest.raises(ConfigurationError, match=r"session= is on .*elsewhere.*one transaction cannot be on both"):
        mq.once(bill, session=async_sessionmaker(elsewhere), inbox=shop.inbox)
    with pytest.raises(ConfigurationError, match="inbox= is on"):
        mq.once(bill, session=shop.sessions, inbox=shop.inbox, outbox=DbOutboxStore(elsewhere))
    with pytest.raises(ConfigurationError, match="retention="):
        mq.once(bill, session=shop.sessions, inbox=shop.inbox, retention=timedelta())
    with pytest.raises(HandlerTypeError, match="async def"):
        mq.once(at_once, session=shop.sessions, inbox=shop.inbox)
    without = mq.once(bill, session=shop.sessions, inbox=shop.inbox)
    async with mq.consume("orders", int, without, retry=RetryPolicy.none()) as consumer:
        await mq.send("orders", 1)
        await until(lambda: consumer.counters.dead_lettered == 1)
    dead = await mq.pull("orders.dlq", int)
    assert dead is not None
    assert dead.failure is not None
    assert "no outbox" in dead.failure.text
    assert await shop.found() == (0, 0)
    await elsewhere.dispose()


async def test_a_session_of_another_database_found_late_leaves_nothing(shop: Shop, tmp_path: Path) -> None:
    elsewhere = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'elsewhere.db'}")
    sessions: Any = async_sessionmaker()  # bound later, so that nothing can be said when once() is called

    handler = shop.mq.once(bill, session=sessions, inbox=shop.inbox)
    sessions.configure(bind=elsewhere)
    async with shop.mq.consume("orders", int, handler, retry=RetryPolicy.none()) as consumer:
        await shop.mq.send("orders", 1)
        await until(lambda: consumer.counters.dead_lettered == 1)
    assert await shop.found() == (0, 0)
    await elsewhere.dispose()
