"""A million messages over a line that is cut fifty times in the middle of its bytes.

`make test-slow` sends a tenth of them; `ACEMQ_MESSAGES=1000000` in the environment sends all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest

from acemq.retry import Backoff
from acemq.transport import (
    Delivery,
    Nacked,
    Outgoing,
    Phase,
    Published,
    PublishResult,
    Settled,
    Settlement,
    Transport,
    Verb,
)
from tests.proxy import WAYS, Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import Recorder, out, send, until, until_depth

MESSAGES = int(os.environ.get("ACEMQ_MESSAGES", "100000"))
CUTS = 50
PUBLISHERS = 6
PATIENT = timedelta(seconds=60)


class Sender:
    """Publishes numbered messages in batches; what kind each is, and so what may become of it, follows from its number.

    Of twenty, one goes nowhere, one into a full queue, four into a queue that nobody reads. So an answer given to a
    neighbour's publish is one that cannot be.
    """

    def __init__(self, broker: Transport, queue: str, order: random.Random) -> None:
        self.results: list[PublishResult | None] = []
        self._broker, self._queue, self._order = broker, queue, order

    def place(self, number: int) -> str:
        match number % 20:
            case 0:
                return f"{self._queue}-nowhere"
            case 7:
                return f"{self._queue}-full"
            case 2 | 9 | 10 | 15:
                return f"{self._queue}-kept"
            case _:
                return self._queue

    def message(self, number: int) -> Outgoing:
        size = 200_000 if self._order.random() < 0.0005 else self._order.choice((0, 10, 100))
        # One id for two neighbours: a return is to find its own.
        return out(self.place(number), b"%d " % number + bytes(size), message_id=f"m-{number // 2}")

    async def send(self, done: asyncio.Event) -> None:
        while len(self.results) < MESSAGES or not done.is_set():
            first, size = len(self.results), self._order.choice((1, 20, 100, 200))
            self.results += [None] * size
            batch = [self.message(number) for number in range(first, first + size)]
            self.results[first : first + size] = await self._broker.publish(batch, within=PATIENT)

    def of(self, *outcomes: Published) -> set[int]:
        return {number for number, result in enumerate(self.results) if result and result.outcome in outcomes}


class Handler(Recorder):
    """Accepts in no order, a little later, and keeps one in fifty until many others were accepted, or for ever."""

    def __init__(self, broker: Transport, order: random.Random) -> None:
        super().__init__()
        self.handled: set[int] = set()
        self.settled: Counter[Settled] = Counter()
        self._waiting: list[Delivery] = []
        self._broker, self._order = broker, order

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self._waiting += batch

    async def handle(self) -> None:
        while True:
            waiting, self._waiting = self._waiting, []
            self._order.shuffle(waiting)
            keep = len(waiting) // 50
            self._waiting += waiting[:keep]
            settlements = [Settlement(delivery, Verb.ACCEPT) for delivery in waiting[keep:]]
            for settlement, answer in zip(settlements, await self._broker.settle(settlements), strict=True):
                self.settled[answer] += 1
                if answer is Settled.DONE:
                    self.handled.add(number_of(settlement.delivery))
            await asyncio.sleep(self._order.choice((0, 0, 0.002)))


def number_of(delivery: Delivery) -> int:
    return int(delivery.body.split(b" ", 1)[0])


async def cut_again_and_again(proxy: Proxy, broker: Transport, sender: Sender, order: random.Random) -> None:
    for number in range(CUTS):
        while len(sender.results) < number * MESSAGES // CUTS or broker.state.phase is not Phase.CONNECTED:
            await asyncio.sleep(0.005)
        cut = proxy.cut_after(order.randrange(1, 150_000), order.choice(WAYS))
        async with asyncio.timeout(60):
            await cut.wait()


class Reader(Recorder):
    """Accepts all at once."""

    def __init__(self, broker: Transport) -> None:
        super().__init__()
        self.numbers: set[int] = set()
        self._accepting: set[asyncio.Future[Sequence[Settled]]] = set()
        self._broker = broker

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.numbers.update(map(number_of, batch))
        accepting = asyncio.ensure_future(self._broker.settle([Settlement(each, Verb.ACCEPT) for each in batch]))
        self._accepting.add(accepting)
        accepting.add_done_callback(self._accepting.discard)


async def read_all(broker: Transport, queue: str) -> set[int]:
    """The numbers of all that is in a queue, which is empty afterwards."""
    reader = Reader(broker)
    subscription = await broker.subscribe(queue, reader, prefetch=1_000)
    await until_depth(broker, queue, 0, within=300)
    await until(lambda: not subscription.state.held, "all is accepted")
    await subscription.close()
    return reader.numbers


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_every_publish_has_its_own_answer_and_what_is_confirmed_is_handled_whatever_is_cut(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "acemq.rabbitmq")  # what is kept for ever is stale thousands of times
    order = random.Random(50)
    queue, kept, full = await declare(), await declare("q-kept"), await declare("q-full", max_length=1)
    direct = await dial()
    await send(direct, out(full, b"-1 "))
    broker = await dial(proxied, reconnect=Backoff(first=timedelta(seconds=0.01), ceiling=timedelta(seconds=0.1)))
    sender, handler, done = Sender(broker, queue, order), Handler(broker, order), asyncio.Event()
    async with asyncio.TaskGroup() as everybody:
        handling = everybody.create_task(handler.handle())
        await broker.subscribe(queue, handler, prefetch=500)
        publishing = [everybody.create_task(sender.send(done)) for _ in range(PUBLISHERS)]
        await cut_again_and_again(proxy, broker, sender, order)
        done.set()
        await asyncio.wait(publishing)
        routed, unroutable = sender.of(Published.ROUTED), sender.of(Published.UNROUTABLE)
        nacked = {number for number, result in enumerate(sender.results) if result and isinstance(result.error, Nacked)}
        owed = {number for number in routed if sender.place(number) == queue}
        await until(lambda: broker.state.phase is Phase.CONNECTED, "connected", within=60)
        await until_depth(direct, queue, 0, within=300)
        await until(lambda: handler.handled >= owed, "what was confirmed is handled", within=60)
        handling.cancel()
    await broker.close(timedelta(seconds=5))
    stored = await read_all(direct, kept)

    counted = Counter(result.outcome for result in sender.results if result is not None)
    print(f"{counted.total()} published: {dict(counted)}, {len(nacked)} of them refused by a full queue")
    print(f"{broker.state.generation} links, settled {dict(handler.settled)}")
    assert counted.total() == len(sender.results) >= MESSAGES
    assert len(routed) > MESSAGES / 4
    assert broker.state.generation > CUTS / 2, "the line was cut"
    # No confirm for another's publish: each kind has only the answers that its kind can have.
    assert {sender.place(number) for number in routed} == {queue, kept}
    assert {sender.place(number) for number in unroutable} == {f"{queue}-nowhere"}
    assert {sender.place(number) for number in nacked} == {full}
    # What was confirmed is there, what was refused is not.
    assert not owed - handler.handled
    assert not routed - owed - stored
    assert not sender.of(Published.REFUSED) & (handler.handled | stored)
