"""A replay that is killed in the middle: nothing is lost, and what was in hand may be there twice."""

from __future__ import annotations

from collections import Counter

import pytest

from acemq import AceMQ, Topology
from tests.crash.process import Workers
from tests.crash.worker import Job
from tests.foreign.client import Foreign
from tests.waiting import until, until_async


async def dead_letters(mq: AceMQ, queue: str, count: int) -> set[str]:
    await mq.declare(Topology().queue(f"{queue}.dlq", type="classic"))
    return {receipt.message_id for receipt in await mq.send_many(f"{queue}.dlq", [Job()] * count)}


def check(foreign: Foreign, queue: str, every: set[str], *, doubled: tuple[int, ...]) -> None:
    # In this order: what has left the one is in the other by then.
    found = Counter(letter.id for where in (f"{queue}.dlq", queue) for letter in foreign.look(where))
    assert found.keys() == every, "none is lost"
    assert found.total() - len(every) in doubled
    assert max(found.values()) <= 2


async def test_m102_a_replay_killed_between_copy_and_acknowledgement_doubles_that_one_and_loses_none(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers
) -> None:
    every = await dead_letters(mq, queue, 40)
    dying = workers.start(rabbit_url, replay=f"{queue}.dlq", dies_at_settlement=15)
    assert await dying.ended() == 9, dying.last_words()
    await until(lambda: foreign.depth(f"{queue}.dlq") == 26)
    assert foreign.depth(queue) == 15
    check(foreign, queue, every, doubled=(1,))

    again = workers.start(rabbit_url, replay=f"{queue}.dlq")
    assert await again.ended() == 0, again.last_words()
    assert (foreign.depth(queue), foreign.depth(f"{queue}.dlq")) == (41, 0)
    check(foreign, queue, every, doubled=(1,))


async def test_a_replay_in_batches_that_is_killed_doubles_at_most_a_batch_and_loses_none(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers
) -> None:
    every = await dead_letters(mq, queue, 40)
    dying = workers.start(rabbit_url, replay=f"{queue}.dlq", together=8, dies_at_settlement=17)
    assert await dying.ended() == 9, dying.last_words()
    await until(lambda: foreign.depth(f"{queue}.dlq") == 24)
    assert foreign.depth(queue) == 24
    check(foreign, queue, every, doubled=(8,))


@pytest.mark.parametrize("moved", [20, 150])
async def test_m102_a_replay_killed_at_any_moment_doubles_at_most_one_and_loses_none(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers, moved: int
) -> None:
    every = await dead_letters(mq, queue, 600)
    worker = workers.start(rabbit_url, replay=f"{queue}.dlq")

    async def is_half_way() -> bool:
        return (await mq.depth(queue)).ready >= moved

    await until_async(is_half_way, within=30)
    worker.kill()
    # What was in hand is back when the broker has noticed the death.
    await until(lambda: foreign.depth(queue) + foreign.depth(f"{queue}.dlq") >= len(every))
    check(foreign, queue, every, doubled=(0, 1))
