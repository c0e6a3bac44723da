"""While it runs: what expires, what is private, what is deleted, who is woken. Cases T-020, T-028, O-45."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, Message, Topology
from acemq.transport import AccessDenied, Claims, QueueMissing
from acemq.transports.sql import sweeping
from acemq.transports.sql.port import SqlTransport
from acemq.transports.sql.running import Running
from tests.waiting import until, until_async


def running_of(mq: AceMQ) -> Running:
    assert isinstance(mq.transport, SqlTransport)
    running = mq.transport._running
    assert running is not None
    return running


@pytest.fixture
def sweeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "EVERY", (0.05, 0.1))


async def test_t028_what_expires_where_nobody_consumes_goes_to_the_dead_letters(
    sweeps_at_once: None, mq: AceMQ
) -> None:
    await mq.send_many("q", range(1200), expires_in=timedelta(milliseconds=1))
    await mq.send("q", 7777)
    await mq.send("r", 1, expires_in=timedelta(milliseconds=1))

    async def is_swept() -> bool:
        counts = [(await mq.depth(queue)).ready for queue in ("q", "q.dlq", "r")]
        return counts == [1, 1200, 0]

    await until_async(is_swept, within=20)


async def test_t028_a_consumer_comes_past_expired_messages_to_the_live_one(mq: AceMQ) -> None:
    await mq.send_many("q", range(1200), expires_in=timedelta(milliseconds=1))
    await mq.send("q", 7777)
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with mq.consume("q", int, take):
        await until(lambda: got == [7777], within=20)

    async def is_moved() -> bool:
        return (await mq.depth("q.dlq")).ready == 1200

    await until_async(is_moved)


async def test_messages_of_a_deleted_queue_are_removed(sweeps_at_once: None, mq: AceMQ) -> None:
    await mq.send_many("r", range(1200))
    await mq.delete("r")
    await mq.declare(Topology().queue("r"))
    assert (await mq.depth("r")).ready == 0
    running = running_of(mq)

    async def is_gone() -> bool:
        def count(connection: object) -> int:
            import sqlalchemy as sa

            assert isinstance(connection, sa.Connection)
            return int(connection.execute(sa.text("SELECT count(*) FROM acemq_message")).scalar_one())

        return await running.link.start(count) == 0

    await until_async(is_gone, within=20)


async def test_a_private_queue_is_its_owners_alone_and_goes_with_it(mq: AceMQ, url: str) -> None:
    async with acemq.connect(url) as owner:
        await owner.declare(Topology().queue("mine", exclusive=True))
        await owner.send("mine", 1)
        with pytest.raises(acemq.AuthenticationError, match="exclusive to another"):
            await mq.pull("mine", int)
        with pytest.raises(AccessDenied):
            await mq.transport.pull("mine", most=1, wait=timedelta())
        pulled = await owner.pull("mine", int)
        assert pulled is not None
    assert not await mq.exists("mine")
    with pytest.raises(QueueMissing):
        await mq.transport.pull("mine", most=1, wait=timedelta())


async def test_t020_a_consumer_in_another_process_is_woken(url: str, mq: AceMQ) -> None:
    script = """
        import asyncio, sys, acemq
        async def main(url):
            async with acemq.connect(url) as mq:
                for number in range(int(sys.stdin.readline())):
                    await asyncio.sleep(0.05)
                    await mq.send("q", number)
        asyncio.run(main(sys.argv[1]))
    """
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with mq.consume("q", int, take):
        command = [sys.executable, "-c", textwrap.dedent(script), url]
        await asyncio.to_thread(subprocess.run, command, input="10\n", text=True, check=True)
        await until(lambda: got == list(range(10)))


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
async def test_o45_the_zone_of_a_process_moves_nothing(url: str, mq: AceMQ, zone: str) -> None:
    script = """
        import asyncio, sys, acemq
        from datetime import timedelta
        async def main(url):
            async with acemq.connect(url) as mq:
                await mq.send("q", 1, delay=timedelta(seconds=1))
        asyncio.run(main(sys.argv[1]))
    """
    environment = {**os.environ, "TZ": zone}
    command = [sys.executable, "-c", textwrap.dedent(script), url]
    await asyncio.to_thread(subprocess.run, command, env=environment, check=True)
    pulled = await mq.pull("q", int, wait=timedelta(seconds=10))
    assert pulled is not None
    assert pulled.delivery.enqueued_at is not None
    age = mq.clock.now() - pulled.delivery.enqueued_at
    assert timedelta(seconds=0.9) <= age <= timedelta(seconds=30)


async def test_t015_what_waits_for_a_day_is_counted_and_not_handed_out(mq: AceMQ) -> None:
    await mq.send_many("q", range(300), delay=timedelta(days=1))
    await mq.send("q", 1)
    depth = await mq.depth("q")
    assert (depth.ready, depth.delayed, depth.exact) == (1, 300, True)
    assert [pulled.payload for pulled in await mq.pull_many("q", int, most=10)] == [1]


async def test_a_retry_changes_the_row_in_place(mq: AceMQ) -> None:
    seen: list[tuple[int, int | None]] = []

    async def fail(message: Message[int]) -> None:
        seen.append((message.attempt, message.delivery.deliveries))
        if message.attempt < 3:
            raise ValueError("not yet")

    await mq.send("q", 1)
    policy = acemq.RetryPolicy.fixed(5, timedelta(milliseconds=50))
    async with mq.consume("q", int, fail, retry=policy) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    assert seen == [(1, 1), (2, 2), (3, 3)]


async def test_whether_a_queue_is_claimed_is_seen_without_taking_it(url: str, mq: AceMQ) -> None:
    looks = mq.transport
    assert isinstance(looks, Claims)
    assert not await looks.is_claimed("q")
    async with acemq.connect(url) as other:
        async with other.consume("q", int, lambda m: None, exclusive=True):
            assert await looks.is_claimed("q")
        assert not await looks.is_claimed("q")
    with pytest.raises(QueueMissing):
        await looks.is_claimed("nowhere")
