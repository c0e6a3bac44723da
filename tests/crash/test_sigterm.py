"""A process that is asked to end: what it has begun is finished and settled, what it has not begun is for others."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

import pytest

from acemq import AceMQ, Message, Topology
from tests.crash.conftest import remove
from tests.crash.process import Workers
from tests.crash.worker import Job, Watched
from tests.waiting import until, until_async

Kind = Literal["classic", "quorum"]
KINDS: tuple[Kind, Kind] = ("classic", "quorum")


@pytest.mark.parametrize("kind", KINDS)
async def test_sigterm_finishes_five_running_handlers_and_leaves_exactly_the_twenty_that_wait(
    rabbit_url: str, mq: AceMQ, name: str, workers: Workers, kind: Kind
) -> None:
    recorder = workers.recorder
    await mq.declare(Topology().queue(name, type=kind))
    receipts = await mq.send_many(name, [Job("work", seconds=2)] * 25)
    every = {receipt.message_id for receipt in receipts}

    worker = workers.start(rabbit_url, consume=[Watched(name, concurrency=5)], grace=10)
    await worker.ready()
    await until(lambda: len(recorder.ids("began")) == 5)
    assert not recorder.ids("ended"), "all five are running"
    worker.terminate()
    asked_at = time.monotonic()
    assert await worker.ended() == 0, worker.last_words()
    assert time.monotonic() - asked_at < 5

    done = set(recorder.ids("ended"))
    assert len(done) == len(recorder.ids("ended")) == len(recorder.ids("began")) == 5

    async def twenty_are_left() -> bool:
        return (await mq.depth(name)).ready == 20

    await until_async(twenty_are_left)
    handled: Counter[str] = Counter()
    attempts: set[int] = set()

    def handle(message: Message[Job]) -> None:
        handled[message.id] += 1
        attempts.add(message.attempt)

    async with mq.consume(name, Job, handle) as fresh:
        await until(lambda: fresh.counters.acked == 20)
    assert handled == dict.fromkeys(every - done, 1), "exactly those, each once"
    assert attempts == {1}, "going back has spent no attempt"
    assert (await mq.depth(name)).ready == 0
    await remove(mq, name)
