"""Deadlocks, lost serialisation and busy files, again and again: they are met by doing it again. Case T-025."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from itertools import count, cycle
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event, exc

import acemq
from acemq import AceMQ, Message
from acemq.transport import Phase
from acemq.transports.sql import link
from acemq.transports.sql.database import Database, File, Server, Work
from tests.waiting import until

WORKERS, TOTAL = 4, 1_000


class Told(Exception):
    """As each driver raises it: asyncpg's with a state, asyncmy's with a number, SQLite's with a code."""

    def __init__(self, code: str | int, database: str) -> None:
        super().__init__(*((code, "told so") if database == "mariadb" else (f"{code}, told so",)))
        if database == "postgresql":
            self.sqlstate = code
        elif database == "sqlite":
            self.sqlite_errorcode = code


CODES: dict[str, tuple[str | int, ...]] = {
    "postgresql": ("40001", "40P01"),
    "mariadb": (1213, 1205),
    "sqlite": (sqlite3.SQLITE_BUSY,),
}
EVERY = 5
AT_MOST = 3
"""Failures of one piece of work in a row: the fifth would be reported, as it should be."""


@contextmanager
def failing(database: str) -> Iterator[Counter[object]]:
    """Of every fifth try of anything the first statement, the second or the third is answered with what goes by."""
    failed, numbers, places, codes = Counter[object](), count(1), cycle((1, 2, 3)), cycle(CODES[database])
    tried = Counter[object]()

    def troubled(original: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(self: Database, work: Work[Any], **how: bool) -> Any:
            def worked(connection: sa.Connection) -> Any:
                tried[work] += 1
                is_next = next(numbers) % EVERY == 0 and tried[work] <= AT_MOST
                connection.info["fails in"] = next(places) if is_next else 0
                try:
                    return work(connection)
                finally:
                    connection.info["fails in"] = 0

            return await original(self, worked, **how)

        return run

    def fail(connection: sa.Connection, cursor: Any, statement: str, *_: Any) -> None:
        left = connection.info["fails in"] = connection.info.get("fails in", 0) - 1
        if left == 0:
            code = next(codes)
            failed[code] += 1
            raise exc.OperationalError(statement, None, Told(code, database))

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Server, File):
            patch.setattr(kind, "run", troubled(kind.run))
        event.listen(sa.Engine, "before_cursor_execute", fail)
        try:
            yield failed
        finally:
            event.remove(sa.Engine, "before_cursor_execute", fail)


async def test_t025_what_goes_by_is_done_again_and_reaches_nobody(
    mq: AceMQ, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "acemq")
    database, handled = url.partition(":")[0], list[int]()

    async def take(message: Message[int]) -> None:
        handled.append(message.payload)

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(acemq.connect(url)) for _ in range(WORKERS)]
        consumers = [await stack.enter_async_context(worker.consume("q", int, take)) for worker in workers]
        failed = stack.enter_context(failing(database))
        for first in range(0, TOTAL, 20):  # so few at a time, for enough transactions
            await mq.send_many("q", range(first, first + 20))
        await until(lambda: len(handled) >= TOTAL, within=40)
        await until(lambda: sum(consumer.counters.acked for consumer in consumers) == TOTAL)
        assert [consumer.state for consumer in consumers] == ["running"] * WORKERS
        assert sum(consumer.counters.stale for consumer in consumers) == 0
    assert Counter(handled) == dict.fromkeys(range(TOTAL), 1)
    assert set(failed) == set(CODES[database])
    assert failed.total() > 10
    said = [record for record in caplog.records if "done again" in record.getMessage()]
    assert 1 <= len(said) <= WORKERS + 1  # of each connection once in half a minute
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_t025_a_file_that_another_holds_for_three_seconds_delays_and_does_not_fail(mq: AceMQ, url: str) -> None:
    handled: list[int] = []

    async def take(message: Message[int]) -> None:
        handled.append(message.payload)

    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
    async with mq.consume("q", int, take), acemq.connect(url) as second, second.consume("q", int, take):
        await mq.send_many("q", range(100))
        await until(lambda: len(handled) > 10)
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(3, other.execute, "COMMIT")
        await mq.send_many("q", range(100, 200))
        await until(lambda: len(handled) == 200)
    other.close()
    assert Counter(handled) == dict.fromkeys(range(200), 1)


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_a_file_that_another_holds_is_waited_for_and_not_taken_for_lost(
    mq: AceMQ, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "QUIET", 0.1)
    monkeypatch.setattr(link, "SILENCE", 0.2)
    impatient = await acemq.connect(url)
    other = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    asyncio.get_running_loop().call_later(1.5, other.execute, "COMMIT")
    receipt = await impatient.send("q", 1)
    other.close()
    assert receipt.took > timedelta(seconds=1)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert impatient.transport.state.phase is Phase.CONNECTED
    await impatient.close()
