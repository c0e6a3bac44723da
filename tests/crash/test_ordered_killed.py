"""Owners of ordered partitions that are killed: order per key holds, nothing is lost, no two handlers of a key at once.

Cases M-075 and O-19, and the three runs that issue 5 asks for.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from acemq import AceMQ, OrderedQueue
from tests.crash.conftest import remove
from tests.crash.process import Worker, Workers
from tests.crash.recording import Line, Recorder
from tests.crash.worker import Entry, Ledger, ordered
from tests.waiting import until, until_async

KEYS = ("a", "b", "c")


@pytest.fixture
async def ledger(mq: AceMQ, name: str) -> AsyncIterator[OrderedQueue[Entry]]:
    async with ordered(mq, Ledger(name)).declare() as ledger:
        yield ledger
    await remove(mq, *ledger.queues)


class Fault:
    """One message whose handler fails, whatever process it runs in, until it is mended."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "record.fails"

    def at(self, name: str) -> None:
        self._file.write_text(name)

    def mend(self) -> None:
        self._file.unlink()


@pytest.fixture
def fault(tmp_path: Path) -> Fault:
    return Fault(tmp_path)


def entries(most: int, *keys: str, seconds: float = 0) -> list[Entry]:
    return [Entry(key, number, seconds) for number in range(1, most + 1) for key in keys]


def kill(worker: Worker, recorder: Recorder) -> None:
    worker.kill()
    recorder.note("killed", str(worker.pid))


def numbers(recorder: Recorder, what: str, key: str) -> list[int]:
    names = (id.split("/") for id in recorder.ids(what) if "/" in id)
    return [int(number) for named, number in names if named == key]


def complete(recorder: Recorder, most: int, *keys: str) -> bool:
    return all(set(numbers(recorder, "ended", key)) == set(range(1, most + 1)) for key in keys)


def expect_order(recorder: Recorder, most: int, *keys: str) -> None:
    """First successes in order; whatever is begun again is what was not accepted; no two handlers of a key at once."""
    by_key: dict[str, list[Line]] = defaultdict(list)
    killed: set[int] = set()
    for line in recorder.lines():
        if line.what == "killed":
            killed.add(int(line.id))
        elif "/" in line.id:
            key = line.id.split("/")[0]
            running = by_key[key][-1] if by_key[key] else None
            if line.what == "began" and running is not None and running.what == "began":
                assert running.pid in killed, f"{line} while {running}"
            if line.what != "began":
                assert running is not None
                assert (running.what, running.id, running.pid) == ("began", line.id, line.pid), (
                    f"{line} after {running}"
                )
            by_key[key].append(line)
    for key in keys:
        done = 0
        for line in by_key[key]:
            number = int(line.id.split("/")[1])
            # The last success may come again: its acceptance may have died with its process. Nothing older does.
            assert number in (done, done + 1), f"{line} after {done} were done"
            if line.what == "ended":
                done = max(done, number)
        assert done == most


async def test_m075_the_owner_killed_while_a_partition_is_halted_the_failed_message_comes_first_again(
    rabbit_url: str, mq: AceMQ, ledger: OrderedQueue[Entry], workers: Workers, fault: Fault
) -> None:
    recorder, plan = workers.recorder, Ledger(ledger.name)
    fault.at("a/7")
    owner = workers.start(rabbit_url, ledger=plan)
    await owner.ready()
    standby = workers.start(rabbit_url, ledger=plan)
    await standby.ready()
    await ledger.send_many(entries(20, *KEYS))
    await until(lambda: complete(recorder, 20, "b", "c") and bool(recorder.lines("halted")), within=20)
    assert not recorder.lines("began", pid=standby.pid)

    kill(owner, recorder)
    await until(lambda: bool(recorder.lines("halted", pid=standby.pid)), within=10)
    begun = {line.id for line in recorder.lines("began", pid=standby.pid)}
    # The last ones of the others may not have been accepted yet when their process died.
    assert begun - {"b/20", "c/20"} == {"a/7"}
    assert numbers(recorder, "ended", "a") == [1, 2, 3, 4, 5, 6]
    fault.mend()
    await until(lambda: complete(recorder, 20, *KEYS), within=20)
    expect_order(recorder, 20, *KEYS)
    assert numbers(recorder, "ended", "a") == list(range(1, 21)), "each once"


async def test_m075_the_owner_killed_while_it_is_busy_the_other_begins_with_what_was_in_hand(
    rabbit_url: str, mq: AceMQ, ledger: OrderedQueue[Entry], workers: Workers
) -> None:
    recorder, plan = workers.recorder, Ledger(ledger.name)
    owner = workers.start(rabbit_url, ledger=plan)
    await owner.ready()
    standby = workers.start(rabbit_url, ledger=plan)
    await standby.ready()
    await ledger.send_many(entries(15, *KEYS, seconds=0.05))
    await until(lambda: len(recorder.lines("ended")) >= 12)
    await until(lambda: len(recorder.lines("began")) > len(recorder.lines("ended")))
    kill(owner, recorder)
    in_hand = {line.id for line in recorder.lines("began")} - {line.id for line in recorder.lines("ended")}
    await until(lambda: complete(recorder, 15, *KEYS), within=20)
    expect_order(recorder, 15, *KEYS)
    begun = [line.id for line in recorder.lines("began", pid=standby.pid)]
    first = {next(id for id in begun if id.startswith(f"{key}/")) for key in KEYS}
    assert in_hand <= first


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_ten_kills_at_random_moments_lose_nothing_and_keep_the_order_of_fifty_keys(
    rabbit_url: str, mq: AceMQ, name: str, workers: Workers
) -> None:
    recorder, keys = workers.recorder, [f"k{number}" for number in range(50)]
    plan = Ledger(name, partitions=8, at_most=4, take_over_after=1)
    ledger = await ordered(mq, plan).declare()
    running = [workers.start(rabbit_url, ledger=plan) for _ in range(2)]
    for worker in running:
        await worker.ready()
    sending = asyncio.create_task(ledger.send_many(entries(200, *keys, seconds=0.02)))
    dice = random.Random(5)
    for _ in range(10):
        seen = len(recorder.lines("began"))
        more = dice.randrange(50, 400)
        await until(lambda seen=seen, more=more: len(recorder.lines("began")) >= seen + more, within=60)  # type: ignore[misc]
        which = dice.randrange(2)
        kill(running[which], recorder)
        running[which] = workers.start(rabbit_url, ledger=plan)
        await running[which].ready()
    await sending
    await until(lambda: len(set(recorder.ids("ended"))) == 50 * 200, within=200)
    expect_order(recorder, 200, *keys)

    async def is_drained() -> bool:
        return not any((await ledger.depths()).values())

    await until_async(is_drained)
    for worker in running:
        worker.kill()
    await remove(mq, *ledger.queues)
