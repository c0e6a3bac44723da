"""A process that is killed while it handles messages: twice is possible, never zero (promises 2, 3 and 4)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import pytest

from acemq import AceMQ, Topology
from tests.crash.conftest import remove
from tests.crash.process import Workers
from tests.crash.worker import Job, Watched
from tests.foreign.client import Foreign
from tests.waiting import until, until_async

Kind = Literal["classic", "quorum"]
KINDS: tuple[Kind, Kind] = ("classic", "quorum")


async def empty(mq: AceMQ, *queues: str) -> bool:
    return not any([(await mq.depth(queue)).ready for queue in queues])


async def holds(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


async def holds_at_least(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready >= count


async def send(mq: AceMQ, queue: str, jobs: Sequence[Job]) -> list[str]:
    return [receipt.message_id for receipt in await mq.send_many(queue, jobs)]


@pytest.fixture
async def queues(mq: AceMQ, name: str) -> AsyncIterator[dict[Kind, str]]:
    found: dict[Kind, str] = {kind: f"{name}-{kind}" for kind in KINDS}
    for kind, queue in found.items():
        await mq.declare(Topology().queue(queue, type=kind))
    yield found
    await remove(mq, *found.values())


@pytest.mark.parametrize("kind", KINDS)
async def test_kill_9_of_a_consumer_loses_nothing_and_every_attempt_is_counted(
    rabbit_url: str, mq: AceMQ, queues: dict[Kind, str], workers: Workers, kind: Kind
) -> None:
    queue, recorder = queues[kind], workers.recorder
    passing = await send(mq, queue, [Job("pass")] * 20)
    failing = await send(mq, queue, [Job("fail", until=3)] * 20)
    holding = await send(mq, queue, [Job("hold")] * 20)
    consume = [Watched(queue, waits=[0, 0])]

    first = workers.start(rabbit_url, consume=consume, holds=True)
    # In work: ten that are held, ten that were fetched and not begun. Behind them: the second attempts of the failing.
    await until(lambda: len(recorder.ids("held")) == 10, within=30)
    await until_async(lambda: holds(mq, queue, 20))
    first.kill()

    second = workers.start(rabbit_url, consume=consume)
    every = {*passing, *failing, *holding}
    await until(lambda: set(recorder.ids("ended")) >= every, within=30)
    await until_async(lambda: empty(mq, queue, f"{queue}.dlq", f"{queue}.parked"))
    second.kill()

    began = recorder.lines("began")
    held = set(recorder.ids("held"))
    for id in every:
        lines = [line for line in began if line.id == id]
        attempts = [line.attempt for line in lines]
        if id in failing:
            assert sorted(set(attempts)) == [1, 2, 3]
            assert [line.pid for line in lines if line.attempt == 1] == [first.pid], "it did not begin again"
        elif id in held:
            assert attempts == [1, 1]
            if kind == "quorum":
                assert lines[1].deliveries == 2, "the broker has counted the cut run"
        else:
            assert set(attempts) == {1}
    assert all(line.attempt == 3 for line in recorder.lines("ended") if line.id in failing)


async def test_kill_9_again_and_again_under_load_loses_nothing(
    rabbit_url: str, mq: AceMQ, queues: dict[Kind, str], workers: Workers
) -> None:
    recorder, jobs = workers.recorder, [Job("fail", until=3)] * 60
    every = {id for queue in queues.values() for id in await send(mq, queue, jobs)}
    consume = [Watched(queue, waits=[0, 0.05]) for queue in queues.values()]
    for enough in (40, 120, 200):
        worker = workers.start(rabbit_url, consume=consume)
        await until(lambda enough=enough: len(recorder.lines("began")) >= enough, within=30)  # type: ignore[misc]
        worker.kill()
    workers.start(rabbit_url, consume=consume)
    await until(lambda: set(recorder.ids("ended")) == every, within=30)
    await until_async(lambda: empty(mq, *queues.values(), *(f"{queue}.dlq" for queue in queues.values())))
    seen = {id: {line.attempt for line in recorder.lines("began") if line.id == id} for id in every}
    assert set(map(frozenset, seen.values())) == {frozenset({1, 2, 3})}
    twice = sum(count - 1 for count in Counter(recorder.ids("ended")).values())
    assert twice <= 3 * 2 * 20, "each death repeats at most what was out, a prefetch of each queue"


@pytest.mark.slow
async def test_t037_kill_9_at_twenty_moments_while_handlers_end_in_random_order(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers
) -> None:
    recorder, dice, slots = workers.recorder, random.Random(37), 200
    every = set(await send(mq, queue, [Job("work", seconds=dice.uniform(0, 0.01)) for _ in range(10_000)]))
    for kills in range(20):
        worker = workers.start(rabbit_url, consume=[Watched(queue, concurrency=slots)])
        # Each begins where much is left: later kills must find something to interrupt, too.
        await until(lambda kills=kills: len(set(recorder.ids("ended"))) >= 300 * (kills + 1), within=60)  # type: ignore[misc]
        await asyncio.sleep(dice.uniform(0, 0.05))
        worker.kill()
        unended = every - set(recorder.ids("ended"))
        await until_async(lambda unended=unended: holds_at_least(mq, queue, len(unended)))  # type: ignore[misc]
    workers.start(rabbit_url, consume=[Watched(queue, concurrency=slots)])
    await until(lambda: set(recorder.ids("ended")) == every, within=60)
    await until_async(lambda: empty(mq, queue))
    assert foreign.depth(queue) == 0
    twice = len(recorder.ids("ended")) - len(every)
    assert twice <= 20 * slots, "each death repeats at most what was out"


OUTCOMES: dict[str, tuple[Job, dict[str, Any], str]] = {
    "a retry": (Job("fail"), {"waits": [0]}, ""),
    "a retry on a rung": (Job("fail"), {"waits": [40]}, ".retry.40s"),
    "a dead letter": (Job("reject"), {}, ".dlq"),
    "a parked message": (Job("park"), {}, ".parked"),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_crash_between_copy_and_acknowledgement_sends_twice_never_loses(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queue: str, workers: Workers, outcome: str
) -> None:
    job, watched, suffix = OUTCOMES[outcome]
    target = f"{queue}{suffix}"
    (id,) = await send(mq, queue, [job])
    consume = [Watched(queue, **watched)]

    dying = workers.start(rabbit_url, consume=consume, dies_at_settlement=1)
    assert await dying.ended() == 9, dying.last_words()
    await until(lambda: foreign.depth(queue) + (foreign.depth(target) if suffix else 0) == 2)
    copies = foreign.look(target)
    if not suffix:
        assert [(letter.id, letter.headers["x-acemq-attempt"]) for letter in copies] == [(id, 1), (id, 2)]
        return
    (copy,), (original,) = copies, foreign.look(queue)
    assert copy.id == original.id == id
    assert original.redelivered
    assert copy.body == original.body

    workers.start(rabbit_url, consume=consume)
    await until(lambda: foreign.depth(target) == 2 and foreign.depth(queue) == 0, within=30)
    assert [letter.id for letter in foreign.look(target)] == [id, id]


async def test_m084_a_crash_between_hop_and_acknowledgement_hops_twice_never_loses(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, name: str, workers: Workers
) -> None:
    recorder = workers.recorder

    async def passes(job: Job) -> Job:
        raise AssertionError("it runs in the workers alone")

    described = mq.pipeline(name, Job).step("a", passes).step("b", passes)
    async with described.start(only=()) as entry:
        receipt = await entry.send(Job("pass"))
    dying = workers.start(rabbit_url, pipeline=name, steps=("a",), dies_at_settlement=1)
    assert await dying.ended() == 9, dying.last_words()
    await until(lambda: foreign.depth(f"{name}.a") == foreign.depth(f"{name}.b") == 1)
    assert foreign.look(f"{name}.b")[0].id == receipt.message_id

    workers.start(rabbit_url, pipeline=name)
    await until(lambda: len(recorder.ids("b")) == 2, within=30)
    assert set(recorder.ids("a") + recorder.ids("b")) == {receipt.message_id}
    assert len(recorder.ids("a")) == 2
    await until(lambda: foreign.depth(f"{name}.a") == foreign.depth(f"{name}.b") == 0)
    await remove(mq, f"{name}.a", f"{name}.b")
    await mq.delete(name, "exchange")


async def test_m033_o15_a_message_that_kills_its_process_ends_in_the_dead_letters_and_the_others_are_handled(
    rabbit_url: str, foreign: Foreign, mq: AceMQ, queues: dict[Kind, str], workers: Workers
) -> None:
    queue, recorder = queues["quorum"], workers.recorder
    before = await send(mq, queue, [Job("pass")] * 10)
    (bomb,) = await send(mq, queue, [Job("bomb")])
    behind = await send(mq, queue, [Job("pass")] * 10)
    foreign.declare(f"{queue}.dlq")

    def is_disarmed() -> bool:
        return foreign.depth(f"{queue}.dlq") > 0

    consume = [Watched(queue, max_deliveries=3)]
    deaths = await workers.supervise(is_disarmed, rabbit_url, within=30, consume=consume)
    assert deaths == [9, 9, 9]
    await until(lambda: foreign.depth(queue) == 0)
    (letter,) = foreign.take(f"{queue}.dlq")
    assert letter.id == bomb
    await until(lambda: {*recorder.ids("ended")} == {*before, *behind})
    assert letter.headers["x-acemq-error"] == "delivery limit: 3 deliveries without an outcome"
    assert letter.headers["x-acemq-failed-as"] == "delivery_limit"
    assert letter.headers["x-acemq-attempt"] == 1
    runs = [line for line in recorder.lines("began") if line.id == bomb]
    assert [line.deliveries for line in runs[1:]] == [2, 3]
