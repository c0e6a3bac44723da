"""Sent on a connection of the driver itself, in a transaction that its user begins and ends. Case T-017."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

import acemq
from acemq import AceMQ, Message, PublishRefusedError, Topology
from tests.sql.conftest import url_in
from tests.waiting import until

DATABASE_OF = {
    "asyncpg": "postgresql",
    "psycopg": "postgresql",
    "psycopg, synchronous": "postgresql",
    "aiosqlite": "sqlite",
    "sqlite3": "sqlite",
    "asyncmy": "mariadb",
}
"""Of each driver whose connections are taken."""


class Handle:
    """One connection, whatever its driver calls things."""

    def __init__(self, driver: str, raw: Any) -> None:
        self.driver, self.raw = driver, raw

    async def say(self, sql: str) -> None:
        if self.driver == "asyncmy":
            async with self.raw.cursor() as cursor:
                await cursor.execute(sql)
            return
        done = self.raw.execute(sql)
        if inspect.isawaitable(done):
            await done

    async def close(self) -> None:
        done = self.raw.close()
        if inspect.isawaitable(done):
            await done


async def dial(driver: str, url: str) -> Any:
    plain = url.partition("?")[0]
    match driver:
        case "asyncpg":
            return await import_module("asyncpg").connect(plain)
        case "psycopg":
            rows = import_module("psycopg.rows")
            return await import_module("psycopg").AsyncConnection.connect(
                plain, autocommit=True, row_factory=rows.dict_row
            )
        case "psycopg, synchronous":
            return import_module("psycopg").connect(plain, autocommit=True)
        case "aiosqlite":
            raw = await import_module("aiosqlite").connect(plain.removeprefix("sqlite:///"), isolation_level=None)
            raw.row_factory = sqlite3.Row
            return raw
        case "sqlite3":
            return sqlite3.connect(plain.removeprefix("sqlite:///"), isolation_level=None)
        case _:
            parts = make_url(plain)
            return await import_module("asyncmy").connect(
                host=parts.host, port=parts.port, user=parts.username, database=parts.database, autocommit=True
            )


@pytest.fixture(params=DATABASE_OF)
def driver(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(request: pytest.FixtureRequest, driver: str, tmp_path: Path) -> str:
    return url_in(DATABASE_OF[driver], request, tmp_path)


@pytest.fixture
async def handle(driver: str, url: str, mq: AceMQ) -> AsyncIterator[Handle]:
    handle = Handle(driver, await dial(driver, url))
    await handle.say("CREATE TABLE business (n INT)")
    yield handle
    await handle.close()


async def bodies(mq: AceMQ, queue: str) -> list[int]:
    return [each.payload for each in await mq.pull_many(queue, int, most=100)]


async def test_t017_row_and_message_are_both_there_or_both_not(mq: AceMQ, handle: Handle, url: str) -> None:
    async def both(number: int) -> None:
        await handle.say(f"INSERT INTO business VALUES ({number})")
        await mq.send_many("q", [number, number * 10], transaction=handle.raw)

    for number, end in ((1, "COMMIT"), (2, "ROLLBACK")):
        await handle.say("BEGIN")
        await both(number)
        await handle.say(end)
    await handle.say("BEGIN")
    await both(3)
    await handle.say("SAVEPOINT inner_one")
    await both(4)
    await handle.say("ROLLBACK TO SAVEPOINT inner_one")
    await mq.publish("x", "any", 5, transaction=handle.raw)
    await handle.say("COMMIT")
    assert await bodies(mq, "q") == [1, 10, 3, 30, 5]
    assert await bodies(mq, "r") == [5]
    reader = Handle(handle.driver, await dial(handle.driver, url))
    try:
        await reader.say("BEGIN")
        await mq.send("q", 6, transaction=reader.raw)
    finally:
        await reader.close()  # with its transaction open
    assert await bodies(mq, "q") == []


async def test_a_consumer_is_woken_by_the_commit(mq: AceMQ, handle: Handle) -> None:
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with mq.consume("q", int, take):
        await handle.say("BEGIN")
        await mq.send("q", 1, transaction=handle.raw)
        await handle.say("COMMIT")
        await until(lambda: got == [1])


async def test_a_queue_that_this_process_has_not_heard_of_is_found(mq: AceMQ, handle: Handle, url: str) -> None:
    async with acemq.connect(url) as other:
        await other.declare(Topology().queue("new"))
        await handle.say("BEGIN")
        await mq.send("new", 1, transaction=handle.raw)
        await handle.say("COMMIT")
        assert await bodies(other, "new") == [1]


async def test_without_a_transaction_it_is_refused_and_nothing_is_written(mq: AceMQ, handle: Handle) -> None:
    with pytest.raises(PublishRefusedError, match="no transaction is in progress"):
        await mq.send("q", 1, transaction=handle.raw)
    assert await bodies(mq, "q") == []


@pytest.mark.parametrize("driver", ["asyncpg"], indirect=True)
async def test_a_pool_or_a_cursor_is_no_transaction(mq: AceMQ, url: str) -> None:
    pool = await import_module("asyncpg").create_pool(url.partition("?")[0], min_size=1)
    with pytest.raises(PublishRefusedError, match="a transaction that is a Pool"):
        await mq.send("q", 1, transaction=pool)
    async with pool.acquire() as lent, lent.transaction():
        await mq.send("q", 2, transaction=lent)
    await pool.close()
    assert await bodies(mq, "q") == [2]


async def test_one_on_another_database_is_refused_and_says_so(mq: AceMQ) -> None:
    foreign = sqlite3.connect(":memory:", isolation_level=None)
    foreign.execute("BEGIN")
    with pytest.raises(acemq.PublishError, match=r"same database|another database"):
        await mq.send("q", 1, transaction=foreign)
    foreign.close()


@pytest.mark.parametrize("driver", ["asyncpg", "aiosqlite"], indirect=True)
async def test_nothing_is_begun_or_ended_on_it(mq: AceMQ, handle: Handle) -> None:
    said: list[str] = []
    await handle.say("BEGIN")
    if handle.driver == "asyncpg":
        with handle.raw.query_logger(lambda record: said.append(record.query)):
            await mq.send("q", 1, transaction=handle.raw)
    else:
        await handle.raw.set_trace_callback(said.append)
        await mq.send("q", 1, transaction=handle.raw)
        await handle.raw.set_trace_callback(None)
    words = {sql.split(None, 1)[0].upper() for sql in said}
    assert words
    assert not words & {"BEGIN", "COMMIT", "ROLLBACK", "SET", "SAVEPOINT"}
    await handle.say("ROLLBACK")


@pytest.mark.parametrize("driver", ["psycopg, synchronous", "sqlite3"], indirect=True)
async def test_t017_a_program_without_an_event_loop_sends_on_it(mq: AceMQ, handle: Handle, url: str) -> None:
    def program() -> None:
        if handle.driver == "sqlite3":
            path = url.removeprefix("sqlite:///")
            raw: Any = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        else:
            raw = import_module("psycopg").connect(url.partition("?")[0], autocommit=True)
        with acemq.blocking.connect(url) as blocking:
            for number, end in ((1, "COMMIT"), (2, "ROLLBACK"), (3, "COMMIT")):
                raw.execute("BEGIN")
                raw.execute(f"INSERT INTO business VALUES ({number})")
                blocking.send("q", number, transaction=raw)
                raw.execute(end)
        assert [row[0] for row in raw.execute("SELECT n FROM business ORDER BY n").fetchall()] == [1, 3]
        raw.close()

    await asyncio.to_thread(program)
    assert await bodies(mq, "q") == [1, 3]
