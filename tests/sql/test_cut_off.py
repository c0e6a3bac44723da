"""Killed in the middle of writing: what was begun is there as a whole or not at all. Cases T-030, T-031."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import acemq
from acemq import AceMQ, Topology
from tests.sql.engines import engine_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FANS_OUT = """
import asyncio, sys, acemq

async def main():
    async with acemq.connect(sys.argv[1]) as mq:
        while True:
            await mq.publish_many("fan", "", range(50))
            print("published", flush=True)

asyncio.run(main())
"""


async def test_t030_of_a_fan_out_that_is_killed_every_queue_has_a_message_or_none(mq: AceMQ, url: str) -> None:
    queues = [f"fan.{number}" for number in range(40)]
    topology = Topology().exchange("fan", "fanout")
    for queue in queues:
        topology = topology.queue(queue).bind(queue, "fan")
    await mq.declare(topology)
    chance = random.Random(30)
    for _ in range(6):
        publishers = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", FANS_OUT, url, stdout=asyncio.subprocess.PIPE)
            for _ in range(5)
        ]
        for publisher in publishers:
            assert publisher.stdout is not None
            assert await asyncio.wait_for(publisher.stdout.readline(), 60) == b"published\n"
        for publisher in publishers:
            await asyncio.sleep(chance.uniform(0, 0.05))
            publisher.kill()
        await asyncio.gather(*(publisher.wait() for publisher in publishers))
    engine = engine_for(url)
    of_each = "SELECT count(*) AS copies FROM acemq_message GROUP BY headers"
    async with engine.connect() as connection:
        found: Any = await connection.exec_driver_sql(
            f"SELECT copies, count(*) FROM ({of_each}) AS each_one GROUP BY copies"
        )
        messages: dict[int, int] = {row[0]: row[1] for row in found}
    await engine.dispose()
    assert set(messages) == {len(queues)}
    assert messages[len(queues)] >= 30 * 50


async def test_t031_eight_processes_on_a_file_killed_at_once_lose_nothing_they_were_told(tmp_path: Path) -> None:
    path, log = tmp_path / "messages.db", tmp_path / "log"
    url = f"sqlite:///{path}"
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue("q"))
    chance = random.Random(31)
    for cut in range(10):
        workers = [await asyncio.to_thread(busy, url, log, f"{cut}.{number}") for number in range(8)]
        try:
            for worker in workers:
                assert worker.stdout is not None
                assert await asyncio.to_thread(worker.stdout.readline) == "ready\n"
            await asyncio.sleep(chance.uniform(0, 0.5))
            assert {worker.poll() for worker in workers} == {None}
        finally:
            for worker in workers:
                worker.kill()
            said = [await asyncio.to_thread(worker.communicate) for worker in workers]
        assert [text for _, text in said if "Traceback" in text] == []
        there = await asyncio.to_thread(what_is_in, path)
        told: dict[str, set[str]] = {"routed": set(), "settling": set(), "settled": set()}
        for line in log.read_text().splitlines():
            word, id = line.split()
            told[word].add(id)
        assert told["routed"] - told["settling"] <= there
        assert not told["settled"] & there
        assert told["settled"]


def busy(url: str, log: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.sql.busy", url, str(log), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def what_is_in(path: Path) -> set[str]:
    """Ids of the messages; the file is whole, and after a checkpoint its log is small."""
    engine = sa.create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        found = (
            connection.exec_driver_sql("SELECT json_extract(headers, '$.\"x-acemq-id\"') FROM acemq_message")
            .scalars()
            .all()
        )
    engine.dispose()
    wal = path.with_name(f"{path.name}-wal")
    assert not wal.exists() or wal.stat().st_size <= 64 * 2**20
    return set(found)
