"""A replay that is interrupted: what its result says is what a client that is not ours finds in both queues."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import acemq
from acemq import AceMQ, Message, ReplayError, ReplayResult, StopReason, Topology
from tests.conftest import StartRabbitMQ
from tests.crash.process import ROOT
from tests.foreign.client import Foreign
from tests.proxy import Proxy
from tests.services import RabbitMQ
from tests.waiting import until

COUNT = 400
Act = Callable[[], None]


async def dead_letters(mq: AceMQ, queue: str) -> list[str]:
    await mq.declare(Topology().queue(queue, type="classic").queue(f"{queue}.dlq", type="classic"))
    return [receipt.message_id for receipt in await mq.send_many(f"{queue}.dlq", range(COUNT))]


def at(moved: int, act: Act) -> Callable[[ReplayResult], None]:
    """Once so many have gone."""
    done = False

    def progress(result: ReplayResult) -> None:
        nonlocal done
        if result.replayed >= moved and not done:
            done = True
            act()

    return progress


async def all_are_back(foreign: Foreign, queue: str) -> None:
    """Wait until the broker has noticed the end of the connection, and has sorted back in what was held."""

    def are_back() -> bool:
        return foreign.depth(queue) + foreign.depth(f"{queue}.dlq") >= COUNT

    await until(are_back)


def check(foreign: Foreign, queue: str, every: list[str], result: ReplayResult) -> None:
    """The numbers of the result bound what is there; without doubt they are exact."""
    gone, kept = ([letter.id for letter in foreign.look(where)] for where in (queue, f"{queue}.dlq"))
    assert {*gone, *kept} == set(every), "none is lost"
    assert max(Counter(gone).values()) == 1
    assert max(Counter(kept).values(), default=1) == 1
    assert result.replayed <= len(gone) <= result.replayed + result.in_doubt
    assert len({*gone} & {*kept}) <= result.in_doubt
    assert kept == [id for id in every if id in kept], "in its order"


# The link is cut


@pytest.mark.parametrize("together", [1, 25])
@pytest.mark.parametrize("holding", [False, True])
async def test_a_link_that_is_cut_ends_the_run_and_its_counts_are_those_of_both_queues(
    mq: AceMQ, foreign: Foreign, queue: str, proxy: Proxy, proxied: str, together: int, holding: bool
) -> None:
    every = await dead_letters(mq, queue)
    async with acemq.connect(proxied) as replaying:
        replay = replaying.replay(f"{queue}.dlq").in_batches(together).reporting(at(100, proxy.cut), every=1)
        if holding:
            replay = replay.where(lambda message: not message.body.endswith(b"7"))
        with pytest.raises(ReplayError) as failed:
            await replay.run()
    result = failed.value.result
    assert result.stopped is StopReason.FAILED
    assert 100 <= result.replayed < 350

    await all_are_back(foreign, queue)
    check(foreign, queue, every, result)
    # What was given up is finished by the next run.
    await mq.replay(f"{queue}.dlq").in_batches(50).run()
    assert {letter.id for letter in foreign.look(queue)} == set(every)


# The broker is restarted


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("together", [1, 25])
async def test_a_broker_that_is_restarted_ends_the_run_and_its_counts_are_those_of_both_queues(
    start_rabbitmq: StartRabbitMQ, together: int
) -> None:
    server = start_rabbitmq()
    stopping = threading.Thread(target=server.stop)
    async with acemq.connect(server.url) as mq:
        every = await dead_letters(mq, "orders")
        paced = mq.replay("orders.dlq").in_batches(together).at_rate(100)
        with pytest.raises(ReplayError) as failed:
            await paced.reporting(at(100, stopping.start), every=1).run()
        await asyncio.to_thread(stopping.join)
        assert failed.value.result.stopped is StopReason.FAILED
        await asyncio.to_thread(server.start)
        with Foreign(server.url) as foreign:
            check(foreign, "orders", every, failed.value.result)
        rest = await _replayed_when_it_is_back(mq, server)
        assert rest.stopped is StopReason.DRAINED
        with Foreign(server.url) as foreign:
            assert {letter.id for letter in foreign.look("orders")} == set(every)
            assert foreign.depth("orders.dlq") == 0


async def _replayed_when_it_is_back(mq: AceMQ, server: RabbitMQ) -> ReplayResult:
    def is_connected() -> bool:
        return mq.state.phase == "connected"

    await until(is_connected, within=40)
    return await mq.replay("orders.dlq").in_batches(50).run()


# The target goes missing


@pytest.mark.parametrize("together", [1, 25])
async def test_a_target_that_goes_missing_ends_the_run_and_the_rest_is_where_it_was(
    mq: AceMQ, foreign: Foreign, queue: str, together: int
) -> None:
    every = await dead_letters(mq, queue)
    gone: list[str] = []

    def take_the_target_away() -> None:
        gone.extend(letter.id for letter in foreign.take(queue))
        foreign.delete(queue)

    replay = mq.replay(f"{queue}.dlq").in_batches(together)
    with pytest.raises(ReplayError, match="did not land") as failed:
        await replay.reporting(at(100, take_the_target_away), every=1).run()
    result = failed.value.result
    assert (result.replayed, result.in_doubt) == (len(gone), 0)
    assert gone == every[: len(gone)]
    assert [letter.id for letter in foreign.look(f"{queue}.dlq")] == every[len(gone) :]


# The process is interrupted or killed

SCRIPT = """
import sys
import acemq
with acemq.blocking.connect(sys.argv[1]) as mq:
    print(mq.replay(sys.argv[2]).reporting(print).run(limit=300))
"""


def script(url: str, source: str, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as written:
        command = [sys.executable, "-u", "-W", "error", "-c", SCRIPT, url, source]  # in the order in which it is said
        return subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=written)


async def test_m102_a_blocking_script_that_is_killed_half_way_loses_none_and_doubles_at_most_one(
    rabbit_url: str, mq: AceMQ, foreign: Foreign, queue: str, tmp_path: Path
) -> None:
    every = await dead_letters(mq, queue)
    running = script(rabbit_url, f"{queue}.dlq", tmp_path / "output")

    def is_half_way() -> bool:
        return foreign.depth(queue) >= 50

    await until(is_half_way, within=30)
    running.kill()
    running.wait()

    await all_are_back(foreign, queue)
    gone, kept = ([letter.id for letter in foreign.look(where)] for where in (queue, f"{queue}.dlq"))
    assert {*gone, *kept} == set(every)
    assert len(gone) + len(kept) - COUNT in (0, 1)


async def test_a_blocking_script_that_is_interrupted_ends_and_its_counts_are_those_of_both_queues(
    rabbit_url: str, mq: AceMQ, foreign: Foreign, queue: str, tmp_path: Path
) -> None:
    every = await dead_letters(mq, queue)
    running = script(rabbit_url, f"{queue}.dlq", tmp_path / "output")

    def is_half_way() -> bool:
        return foreign.depth(queue) >= 50

    await until(is_half_way, within=30)
    os.kill(running.pid, signal.SIGINT)
    await asyncio.to_thread(running.wait, 20)
    await all_are_back(foreign, queue)
    words = (tmp_path / "output").read_text()
    assert words.rstrip().endswith("KeyboardInterrupt"), words
    (told,) = [line for line in words.splitlines() if "CANCELLED" in line]
    gone, kept = ([letter.id for letter in foreign.look(where)] for where in (queue, f"{queue}.dlq"))
    assert f"replayed={len(gone)}," in told
    assert gone + kept == every


async def test_a_filter_that_holds_what_the_broker_takes_back_ends_the_run(
    mq: AceMQ, queue: str, rabbitmq: RabbitMQ
) -> None:
    """As a run does that holds messages for longer than the broker allows: its channel is closed under it."""
    every = await dead_letters(mq, queue)

    def refuse(message: Message[bytes]) -> bool:
        if message.body == b"200":
            rabbitmq.close_all_connections("held for too long")
        return False

    with pytest.raises(ReplayError) as failed:
        await mq.replay(f"{queue}.dlq").where(refuse).run()
    assert (failed.value.result.replayed, failed.value.result.stopped) == (0, StopReason.FAILED)

    def are_all_back() -> bool:
        with Foreign(rabbitmq.url) as another:
            return another.depth(f"{queue}.dlq") == COUNT

    await until(are_all_back)
    with Foreign(rabbitmq.url) as another:
        assert [letter.id for letter in another.look(f"{queue}.dlq")] == every
