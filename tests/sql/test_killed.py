"""Processes that are killed, stopped and waken up, and a server that is killed: nothing is lost, nothing settled twice.

Cases T-022, T-024, T-029, T-030, T-031, O-34, O-44; the crash windows.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

import acemq
from acemq import AceMQ, Backoff, Message, PublishError, Topology
from acemq.testing.conformance import TcpFaults
from tests.services import Database, MariaDB, PostgreSQL
from tests.sql.worker import POINTS, PREFETCH
from tests.sql.workers import Record, Worker, discarded
from tests.waiting import until, until_async

pytestmark = pytest.mark.timeout(240)

LEASE = 2
QUICK = Backoff(first=timedelta(milliseconds=50), ceiling=timedelta(milliseconds=200))


def with_lease(url: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}lease={LEASE}"


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "handled")


@pytest.mark.slow
async def test_t022_a_consumer_killed_at_each_step_loses_nothing(mq: AceMQ, url: str, record: Record) -> None:
    """Killed twice at each; what it had in hand comes again, and nothing else does."""
    total, kills, workers = 1_000, 2 * len(POINTS), list[Worker]()
    await mq.send_many("q", range(total))
    points = itertools.cycle(POINTS)
    fell, point_of = Counter[str](), dict[int, str]()
    chance = random.Random(22)
    with discarded(workers):

        def start() -> None:
            point = next(points) if fell.total() < kills else ""
            # A claim or a settlement is of 20 at most: the messages last for every bomb.
            workers.append(Worker(with_lease(url), record.path, point=point, nth=chance.randint(2, 5)))
            point_of[workers[-1].pid] = point

        start()
        start()

        def is_through() -> bool:
            for worker in tuple(workers):
                if not worker.is_running():
                    workers.remove(worker)
                    worker.discard()
                    fell[point_of[worker.pid]] += 1
                    start()
            return len(record.counts()) == total and fell.total() >= kills

        async def is_empty() -> bool:
            depth = await mq.depth("q")
            return (depth.ready, depth.held, depth.delayed) == (0, 0, 0)

        await until(is_through, within=180)
        await until_async(is_empty, within=10)  # nothing is held by the dead
        for worker in workers:
            if worker.is_running():
                await asyncio.to_thread(worker.end)
    assert set(fell) == set(POINTS)
    counts = record.counts()
    assert set(counts) == set(range(total))
    assert counts.total() - total <= PREFETCH * fell.total()


async def test_t024_a_consumer_asleep_through_its_lease_settles_nothing(mq: AceMQ, url: str, record: Record) -> None:
    await mq.send_many("q", range(5))
    hold = 6.0  # long enough to be stopped within, on a machine as busy as it may be
    sleeper = Worker(with_lease(url), record.path, hold=hold)
    others: list[Worker] = []
    with discarded([sleeper, *others]):
        await asyncio.to_thread(sleeper.await_ready)

        async def has_all() -> bool:
            return (await mq.depth("q")).held == 5

        await until_async(has_all)
        began = time.monotonic()
        sleeper.send(signal.SIGSTOP)
        others.append(Worker(with_lease(url), record.path))
        await until(lambda: len(record.counts()) == 5, within=4 * LEASE + 20)
        before = record.counts()
        await until(lambda: time.monotonic() - began > hold)
        sleeper.send(signal.SIGCONT)
        # Its handlers have come to their ends in its sleep: what they ask for now is in vain.
        await mq.send("q", 99)
        await until(lambda: 99 in record.counts(), within=20)
        await asyncio.to_thread(sleeper.end)
        await asyncio.to_thread(others[0].end)
        assert sum(before.values()) == 5
        assert sleeper.stale == 5
    depth = await mq.depth("q")
    assert (depth.ready, depth.held) == (0, 0)


@pytest.mark.slow
async def test_o44_eight_processes_on_one_file_handle_each_message_and_see_no_lock(
    tmp_path: Path, record: Record
) -> None:
    url, total = f"sqlite:///{tmp_path / 'shared.db'}?lease=60", 20_000
    workers: list[Worker] = []
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue("q", dead_letter=True))
        with discarded(workers):
            workers.extend(Worker(url, record.path) for _ in range(8))
            for worker in workers:
                await asyncio.to_thread(worker.await_ready)
            await mq.send_many("q", range(total), timeout=timedelta(seconds=60))

            async def is_empty() -> bool:
                depth = await mq.depth("q")
                return (depth.ready, depth.held) == (0, 0)

            await until_async(is_empty, within=180)
            said = [await asyncio.to_thread(worker.end) for worker in workers]
    assert record.counts() == dict.fromkeys(range(total), 1)
    assert [text for text in said if "locked" in text.lower() or "Traceback" in text] == []
    assert min(len(record.by(worker.pid)) for worker in workers) > 0
    with sqlite3.connect(tmp_path / "shared.db") as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()


async def test_o44_a_writer_that_holds_the_lock_for_three_seconds_only_delays(tmp_path: Path) -> None:
    path = tmp_path / "messages.db"
    async with acemq.connect(f"sqlite:///{path}") as mq:
        await mq.declare(Topology().queue("q"))
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        asyncio.get_running_loop().call_later(3, other.execute, "COMMIT")
        await mq.send("q", 1)
        pulled = await mq.pull("q", int)
        assert pulled is not None
        assert await pulled.accept()
        other.close()


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    started: PostgreSQL | MariaDB = request.getfixturevalue(f"start_{request.param}")()
    return started


@pytest.mark.slow
async def test_a_server_that_is_killed_again_and_again_keeps_what_it_confirmed(server: Database) -> None:
    url = server.create_database("mine")
    confirmed, uncertain, handled = set[int](), set[int](), list[int]()

    async def take(message: Message[int]) -> None:
        handled.append(message.payload)

    async with acemq.connect(f"{url}?create_schema=true&lease={LEASE}", publish_timeout=timedelta(seconds=20)) as mq:
        await mq.declare(Topology().queue("q", dead_letter=True))

        async def send(number: int) -> None:
            try:
                await mq.send("q", number)
                confirmed.add(number)
            except PublishError as error:
                if error.outcome != "refused":
                    uncertain.add(number)

        async with mq.consume("q", int, take, concurrency=20):
            for first in (0, 100, 200):
                sending = [asyncio.create_task(send(first + number)) for number in range(100)]
                await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                await asyncio.gather(*sending)
            await until(lambda: confirmed <= set(handled), within=60)
    assert set(handled) <= confirmed | uncertain
    assert len(confirmed) > 100


@pytest.mark.slow
async def test_a_commit_that_is_cut_off_commits_row_and_message_or_neither(server: Database) -> None:
    url = server.create_database("mine")
    driver = "postgresql+asyncpg" if isinstance(server, PostgreSQL) else "mariadb+asyncmy"
    server.execute("CREATE TABLE business (n INT)", "mine")
    chance = random.Random(4)
    with TcpFaults(url) as faults:
        rest = faults.url.partition("://")[2]
        async with acemq.connect(f"{url}?create_schema=true") as mq:
            await mq.declare(Topology().queue("q"))
            engine = create_async_engine(f"{driver}://{rest}")
            for number in range(30):
                try:
                    async with AsyncSession(engine) as session:
                        await session.execute(sa.text(f"INSERT INTO business VALUES ({number})"))
                        await mq.send("q", number, transaction=session)
                        commit = asyncio.create_task(session.commit())
                        for _ in range(chance.randrange(6)):
                            await asyncio.sleep(0)
                        await faults.cut()
                        await commit
                except Exception:  # whichever the driver raises for a link that was cut
                    continue
            await engine.dispose()
            rows = {int(line) for line in server.execute("SELECT n FROM business", "mine").split()}
            messages = {pulled.payload for pulled in await mq.pull_many("q", int, most=100)}
            assert messages == rows


@pytest.mark.slow
async def test_t023_answers_that_are_lost_leave_no_message_to_its_lease(
    server: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """What a claim took whose answer was cut off is found by its name; a settlement that was cut off is done again."""
    url, total = server.create_database("mine"), 600
    handled: list[int] = []

    async def take(message: Message[int]) -> None:
        handled.append(message.payload)

    async with acemq.connect(f"{url}?create_schema=true") as mq:
        await mq.declare(Topology().queue("q", dead_letter=True))
        await mq.send_many("q", range(total))
    with TcpFaults(url) as faults:
        async with (
            acemq.connect(f"{faults.url}?lease=600", reconnect=QUICK) as mq,
            mq.consume("q", int, take, prefetch=3, concurrency=3) as consumer,
        ):
            chance = random.Random(23)
            for _ in range(12):
                many = len(handled)
                await until(lambda many=many: len(handled) >= min(many + 5, total), within=30)  # type: ignore[misc]
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                await faults.cut()
            await until(lambda: set(handled) == set(range(total)), within=60)

            async def is_empty() -> bool:
                depth = await mq.depth("q")
                return (depth.ready, depth.held) == (0, 0)

            await until_async(is_empty, within=30)
            assert consumer.counters.stale == 0
    assert len(handled) - total <= 12 * 3 * 2
    assert "came too late" not in caplog.text


OWNER = """
import asyncio, sys, acemq
from acemq.transports.sql import exclusive

exclusive.LEASE = 1.0

async def main():
    async def hold(message):
        print(message.payload, flush=True)
        await asyncio.Event().wait()

    async with acemq.connect(sys.argv[1]) as mq, mq.consume("q", int, hold, exclusive=True, prefetch=1, concurrency=1):
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_what_a_killed_exclusive_consumer_had_in_hand_comes_first_though_its_lease_goes_on(
    mq: AceMQ, url: str
) -> None:
    await mq.send_many("q", range(5))
    handled: list[int] = []
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, url, stdout=asyncio.subprocess.PIPE)
    try:
        assert owner.stdout is not None
        assert await asyncio.wait_for(owner.stdout.readline(), 20) == b"0\n"
    finally:
        owner.kill()
        await owner.wait()
    async with mq.consume("q", int, lambda m: handled.append(m.payload), exclusive=True, prefetch=1, concurrency=1):
        await until(lambda: len(handled) >= 4, within=20)
        await until(lambda: len(handled) == 5, within=20)
    assert handled == [0, 1, 2, 3, 4]


@pytest.mark.slow
async def test_t029_a_stalled_exclusive_consumer_is_succeeded_and_settles_nothing(
    mq: AceMQ, url: str, record: Record
) -> None:
    total = 100
    await mq.send_many("q", range(total))
    workers = [Worker(with_lease(url), record.path, hold=1.5, exclusive=True)]
    with discarded(workers):
        await asyncio.to_thread(workers[0].await_ready)
        workers.append(Worker(with_lease(url), record.path, hold=0.05, exclusive=True))
        await asyncio.to_thread(workers[1].await_ready)
        stalled, standby = workers
        assert await asyncio.to_thread(standby.state) == "waiting"
        before = len(record.order()) + 1
        await until(lambda: len(record.order()) == before, within=20)
        await asyncio.sleep(0.7)  # in the middle of a handler: a transaction on a file would keep everybody else out
        stalled.send(signal.SIGSTOP)
        assert record.by(standby.pid) == []
        await until(lambda: record.by(standby.pid) != [], within=20)
        await until(lambda: len(record.by(standby.pid)) > 10, within=30)
        stalled.send(signal.SIGCONT)

        async def waits() -> bool:
            return await asyncio.to_thread(stalled.state) == "waiting"

        await until_async(waits)
        await until(lambda: set(record.order()) == set(range(total)), within=60)
        assert await asyncio.to_thread(standby.state) == "active"
        await asyncio.to_thread(stalled.end)
        await asyncio.to_thread(standby.end)
    # It takes nothing more; what it had in hand when it was stopped it may have written down as it woke, in vain.
    assert len(record.by(stalled.pid)) <= before + 1
    assert (stalled.stale > 0, standby.stale) == (True, 0)
    assert list(dict.fromkeys(record.order())) == list(range(total))
    assert record.counts().total() - total <= 2  # of what was held: a prefetch of 2
