"""The process that is killed: `python -m tests.crash.worker PLAN`. It ends by itself when its standard input does."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any, Literal

import msgspec

import acemq
from acemq import AceMQ, Ack, Message, RetryPolicy
from tests.crash.database import Kept, begin
from tests.crash.recording import Recorder


class Job(msgspec.Struct):
    """A message of these tests, and what its handler does."""

    do: Literal["pass", "hold", "work", "fail", "reject", "park", "bomb"] = "pass"
    until: int = 0
    """`fail` does so below this attempt; 0: at each."""
    seconds: float = 0
    """`work` takes so long."""


class Watched(msgspec.Struct):
    """A queue to consume, with the waits between attempts in seconds."""

    queue: str
    waits: list[float] = []
    rungs_from: float = 30
    max_deliveries: int = 15
    concurrency: int = 10


class Plan(msgspec.Struct, omit_defaults=True):
    url: str
    record: str
    consume: list[Watched] = []
    pipeline: str | None = None
    """Of steps `a` and `b`, each recording its runs."""
    steps: tuple[str, ...] = ("a", "b")
    replay: str | None = None
    holds: bool = False
    """`hold` waits for ever, else it passes."""
    grace: float = 0
    """SIGTERM closes the connection within so many seconds, and the process ends by itself; 0: it kills."""
    database: Kept | None = None
    dies_at_settlement: int = 0
    """The n-th time that a broker would be told how a delivery ended, the process dies instead; 0: never."""


async def work(plan: Plan) -> None:
    recorder = Recorder(plan.record)
    async with AsyncExitStack() as open_things:
        mq = await open_things.enter_async_context(acemq.connect(plan.url, name="worker"))
        if plan.dies_at_settlement:
            die_at_settlement(mq, plan.dies_at_settlement)
        for watched in plan.consume:
            await mq.consume(
                watched.queue,
                Job,
                handler(plan, recorder),
                retry=policy(watched),
                max_deliveries=watched.max_deliveries,
                concurrency=watched.concurrency,
            )
        if plan.pipeline is not None:
            described = mq.pipeline(plan.pipeline, Job)
            for name in ("a", "b"):
                described = described.step(name, step(name, recorder))
            await open_things.enter_async_context(described.start(only=plan.steps))
        if plan.database is not None:
            await begin(plan.database, mq, recorder, open_things)
        terminated = asyncio.Event()
        if plan.grace:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
        recorder.note("ready")
        if plan.replay is not None:
            await mq.replay(plan.replay).run()
            recorder.note("replayed")
            return
        await terminated.wait()
        await mq.close(timedelta(seconds=plan.grace))


def policy(watched: Watched) -> RetryPolicy:
    if not watched.waits:
        return RetryPolicy.none()
    waits = RetryPolicy.delays(*(timedelta(seconds=seconds) for seconds in watched.waits))
    return waits.wait_in_broker_from(timedelta(seconds=watched.rungs_from))


def handler(plan: Plan, recorder: Recorder) -> Any:
    async def handle(message: Message[Job]) -> Ack | None:
        job = message.payload
        recorder.note("began", message.id, message.attempt, message.deliveries)
        match job.do:
            case "hold" if plan.holds:
                recorder.note("held", message.id, message.attempt)
                await asyncio.Event().wait()
            case "work":
                await asyncio.sleep(job.seconds)  # the work itself
            case "fail" if not job.until or message.attempt < job.until:
                raise ValueError("boom")
            case "reject":
                return Ack.reject("bad")
            case "park":
                return Ack.park("why")
            case "bomb":
                os._exit(9)
            case _:
                pass
        recorder.note("ended", message.id, message.attempt, message.deliveries)
        return None

    return handle


def step(name: str, recorder: Recorder) -> Any:
    async def run(job: Job) -> Job:
        message = acemq.current_message()
        assert message is not None
        recorder.note(name, message.id, message.attempt)
        return job

    return run


def die_at_settlement(mq: AceMQ, number: int) -> None:
    settle, left = mq.transport.settle, number

    async def settle_or_die(batch: Sequence[Any]) -> Any:
        nonlocal left
        left -= len(batch)
        if left <= 0:
            os._exit(9)  # the copy is confirmed, and nobody has told the broker that the original is done
        return await settle(batch)

    mq.transport.settle = settle_or_die  # type: ignore[method-assign]


def end_with_stdin() -> None:
    # Not by sys.stdin: its lock, held by this thread, would abort a process that ends by itself.
    while os.read(0, 1_024):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(work(msgspec.json.decode(sys.argv[1], type=Plan)))
