"""The process that is killed: `python -m tests.crash.worker PLAN`. It ends by itself when its standard input does."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

import acemq
from acemq import AceMQ, Ack, Message, Ordered, OrderedQueue, PartitionFailure, RetryPolicy
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


class Entry(msgspec.Struct):
    """A message of an ordered queue. Its handler fails while the file `{record}.fails` names it."""

    key: str
    number: int
    seconds: float = 0

    @property
    def name(self) -> str:
        return f"{self.key}/{self.number}"


class Ledger(msgspec.Struct):
    """An ordered queue to consume, resumed whenever nothing is to fail."""

    name: str
    partitions: int = 4
    at_most: int = 0
    """Of them under sharing; 0: without."""
    take_over_after: float = 1


class Plan(msgspec.Struct, omit_defaults=True):
    url: str
    record: str
    consume: list[Watched] = []
    pipeline: str | None = None
    """Of steps `a` and `b`, each recording its runs."""
    steps: tuple[str, ...] = ("a", "b")
    ledger: Ledger | None = None
    replay: str | None = None
    together: int = 1
    """So many are copied at a time by the replay."""
    responds: str | None = None
    """To the jobs in this queue, with the number of its process."""
    schedules: bool = False
    """Moves on what is due."""
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
        if plan.ledger is not None:
            ledger = await ordered(mq, plan.ledger).declare()
            await open_things.enter_async_context(ledger.consume(book(plan, recorder)))
            resuming = asyncio.create_task(resume(plan, ledger, recorder))
            open_things.callback(resuming.cancel)
        if plan.responds is not None:
            await open_things.enter_async_context(mq.respond(plan.responds, Job, responding(plan, recorder)))
        if plan.schedules:
            await open_things.enter_async_context(mq.scheduler())
        if plan.database is not None:
            await begin(plan.database, mq, recorder, open_things)
        terminated = asyncio.Event()
        if plan.grace:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminated.set)
        recorder.note("ready")
        if plan.replay is not None:
            await mq.replay(plan.replay).in_batches(plan.together).run()
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


def ordered(mq: AceMQ, ledger: Ledger) -> Ordered[Entry]:
    said = mq.ordered(ledger.name, Entry).partitions(ledger.partitions).keyed_by(lambda entry: entry.key)
    said = said.on_failure(PartitionFailure.STOP, attempts=2, delay=timedelta(milliseconds=20))
    if ledger.at_most:
        said = said.sharing(ledger.at_most, take_over_after=timedelta(seconds=ledger.take_over_after))
    return said


def failing(plan: Plan) -> str:
    try:
        return Path(f"{plan.record}.fails").read_text()
    except FileNotFoundError:
        return ""


def book(plan: Plan, recorder: Recorder) -> Any:
    async def apply(message: Message[Entry]) -> None:
        entry = message.payload
        recorder.note("began", entry.name, message.attempt, message.deliveries)
        await asyncio.sleep(entry.seconds)  # the work itself
        if failing(plan) == entry.name:
            recorder.note("failed", entry.name, message.attempt, message.deliveries)
            raise ValueError("boom")
        recorder.note("ended", entry.name, message.attempt, message.deliveries)

    return apply


async def resume(plan: Plan, ledger: OrderedQueue[Entry], recorder: Recorder) -> None:
    said = False
    while True:
        if ledger.halted_partitions and not said:
            recorder.note("halted")
        said = bool(ledger.halted_partitions)
        if said and not failing(plan):
            ledger.resume()
        await asyncio.sleep(0.02)


def responding(plan: Plan, recorder: Recorder) -> Any:
    async def respond(message: Message[Job]) -> int:
        recorder.note("asked", message.id)
        if message.payload.do == "hold" and plan.holds:
            await asyncio.Event().wait()
        return os.getpid()

    return respond


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
    logging.basicConfig()
    for each in ("acemq", "aiormq"):
        logging.getLogger(each).setLevel(logging.DEBUG)  # so that its output shows what it should not
    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(work(msgspec.json.decode(sys.argv[1], type=Plan)))
