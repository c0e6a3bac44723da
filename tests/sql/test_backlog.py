"""A claim that begins where the last one did passes over nothing that should come first."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest

from acemq import AceMQ
from acemq.transport import Delivery, LostBy, Settlement, SubscriptionState, Verb


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_what_comes_due_beside_a_backlog_comes_first_and_all_of_it(mq: AceMQ) -> None:
    late, backlog = 20, 2_000
    await mq.send_many("q", range(late), delay=timedelta(seconds=1))
    await mq.send_many("q", range(late, late + backlog))
    came: list[int] = []
    async with asyncio.timeout(30):
        while not came or came[-1] != late - 1:
            message = await mq.pull("q", int)
            assert message is not None
            came.append(message.payload)
            await message.accept()
    first = came.index(0)
    assert 0 < first < backlog
    assert came[first:] == list(range(late))


class Returning:
    """A sink that puts the first message back once, and accepts everything after that."""

    def __init__(self, mq: AceMQ, enough: int) -> None:
        self._mq, self._enough = mq, enough
        self.came: list[bytes] = []
        self.came_by_then = 0
        self.over = asyncio.Event()
        self._settling: set[asyncio.Task[object]] = set()

    def deliver(self, batch: Sequence[Delivery]) -> None:
        for each in batch:
            verb = Verb.ACCEPT if self.came else Verb.REQUEUE
            self.came.append(each.body)
            task = asyncio.create_task(self._settle(Settlement(delivery=each, verb=verb)))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
        if len(self.came) >= self._enough:
            self.over.set()

    async def _settle(self, settlement: Settlement) -> None:
        await self._mq.transport.settle([settlement])
        if settlement.verb is Verb.REQUEUE:
            self.came_by_then = len(self.came)

    def lost(self, batch: Sequence[Delivery], by: LostBy) -> None: ...
    def changed(self, state: SubscriptionState) -> None: ...


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
async def test_what_is_put_back_while_a_claim_is_under_way_keeps_its_place(mq: AceMQ) -> None:
    await mq.send_many("q", range(500))
    for _ in range(10):
        sink = Returning(mq, 50)
        subscription = await mq.transport.subscribe("q", sink, prefetch=1)
        async with asyncio.timeout(10):
            await sink.over.wait()
        await subscription.close()
        # One claim may have been under way when it was there again.
        assert sink.came[0] in sink.came[1 : sink.came_by_then + 2]
