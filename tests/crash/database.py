"""What the killed process does with a database, and the steps at which it kills itself."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from acemq import AceMQ, Ack, DbIdempotencyStore, DbOutboxStore, Idempotency, Message, Unit
from tests.crash.recording import Recorder
from tests.stores.places import engine_for

LEASE = timedelta(seconds=2)
"""Short, so that what a killed process held is soon free."""


class Kept(msgspec.Struct, omit_defaults=True):
    """A database that the process works with."""

    url: str
    relay: bool = False
    units: str = ""
    """The queue whose messages become an invoice and an announcement each, in one unit."""
    claims: str = ""
    """The queue whose messages are handled behind a claim beside the work."""
    announces: str = "announced"
    dies: str = ""
    """Where; `after claim`, `after publish`, `before mark`, `after mark` of a relay, `before commit`, `after commit`,
    `after acceptance` of a unit, `in the handler` of either."""
    at: int = 1
    """The how manieth time. Of `in the handler`, about every so many."""
    batch: int = 100
    lease: float = LEASE.total_seconds()
    """Seconds, of the relay."""
    concurrency: int = 4


def die(recorder: Recorder, where: str) -> None:
    recorder.note("died", where.replace(" ", "-"))
    os.kill(os.getpid(), signal.SIGKILL)


async def begin(kept: Kept, mq: AceMQ, recorder: Recorder, opened: AsyncExitStack) -> None:
    engine = engine_for(kept.url)
    opened.push_async_callback(engine.dispose)
    store, inbox = DbOutboxStore(engine, lease=timedelta(seconds=kept.lease)), DbIdempotencyStore(engine)
    if kept.relay:
        _relay_dies(kept, mq, store, recorder)
        await opened.enter_async_context(mq.outbox(store).relay(interval=timedelta(milliseconds=100), batch=kept.batch))
    if kept.units:
        sessions = async_sessionmaker(engine)
        if kept.dies == "after acceptance":
            _dies_after_settling(kept, mq, recorder)
        handler = mq.once(_billing(kept, recorder, sessions), session=sessions, inbox=inbox, outbox=store)
        await mq.consume(kept.units, int, handler, concurrency=kept.concurrency)
    if kept.claims:
        idempotency = Idempotency(store=inbox, lease=LEASE, put_back_after=timedelta(milliseconds=500))
        await mq.consume(kept.claims, int, _working(kept, recorder), idempotency=idempotency)


def _relay_dies(kept: Kept, mq: AceMQ, store: Any, recorder: Recorder) -> None:
    claim, published, publish, left = store.claim, store.published, mq.transport.publish, kept.at

    async def claimed(most: int) -> Any:
        batch = await claim(most)
        if batch.records and kept.dies == "after claim":
            die(recorder, kept.dies)
        return batch

    async def sent(batch: Sequence[Any], **options: Any) -> Any:
        nonlocal left
        if kept.dies != "after publish":
            return await publish(batch, **options)
        results: list[Any] = []
        for outgoing in batch:
            results += await publish([outgoing], **options)
            left -= 1
            if not left:
                die(recorder, kept.dies)
        return results

    async def marked(ids: Sequence[str], token: int) -> int:
        if kept.dies == "before mark":
            die(recorder, kept.dies)
        count: int = await published(ids, token)
        recorder.note("marked", f"{count}")
        if kept.dies == "after mark":
            die(recorder, kept.dies)
        return count

    store.claim, store.published, mq.transport.publish = claimed, marked, sent  # type: ignore[method-assign]


def _billing(kept: Kept, recorder: Recorder, sessions: Any) -> Any:
    commit = AsyncSession.commit

    async def committed(self: AsyncSession) -> None:
        if kept.dies == "before commit":
            die(recorder, kept.dies)
        await commit(self)
        if kept.dies == "after commit":
            die(recorder, kept.dies)

    class Dying(AsyncSession):
        pass

    Dying.commit = committed  # type: ignore[method-assign]
    sessions.class_ = Dying

    async def bill(message: Message[int], unit: Unit) -> Ack | None:
        n = message.payload
        await unit.session.execute(text("INSERT INTO invoice VALUES (:n, 1)"), {"n": n})
        await unit.send(kept.announces, n, message_id=f"invoice-{n}")
        if kept.dies == "in the handler" and random.random() < 1 / kept.at:
            die(recorder, kept.dies)
        return None

    return bill


def _dies_after_settling(kept: Kept, mq: AceMQ, recorder: Recorder) -> None:
    settle = mq.transport.settle

    async def settled(batch: Any) -> Any:
        answers = await settle(batch)
        await mq.depth(kept.units)  # an answer on the same link: what was written before it has arrived
        die(recorder, kept.dies)
        return answers

    mq.transport.settle = settled  # type: ignore[method-assign]


def _working(kept: Kept, recorder: Recorder) -> Any:
    async def work(message: Message[int]) -> None:
        recorder.note("began", message.id, message.attempt)
        if kept.dies == "in the handler":
            die(recorder, kept.dies)
        recorder.note("ended", message.id, message.attempt)

    return work
