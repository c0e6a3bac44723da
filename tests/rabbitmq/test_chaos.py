"""Whatever happens to the line: what was confirmed is there, what was refused is not, and nothing hangs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest

from acemq.retry import Backoff
from acemq.transport import Delivery, Phase, Published, Settled, Settlement, Transport, Verb
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import Recorder, drain, out, until

FOR = 12.0
"""Seconds."""


class Handler(Recorder):
    """Settles each delivery a little later, in no particular order, and counts what it saw."""

    def __init__(self, broker: Transport, order: random.Random) -> None:
        super().__init__()
        self.seen: Counter[bytes] = Counter()
        self.settled: Counter[Settled] = Counter()
        self.under_way: set[asyncio.Task[None]] = set()
        self._broker, self._random = broker, order

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        for delivery in batch:
            task = asyncio.create_task(self._handle(delivery))
            self.under_way.add(task)
            task.add_done_callback(self.under_way.discard)

    async def _handle(self, delivery: Delivery) -> None:
        await asyncio.sleep(self._random.random() * 0.01)
        verb = Verb.REQUEUE if self._random.random() < 0.05 else Verb.ACCEPT
        (answer,) = await self._broker.settle([Settlement(delivery, verb)])
        self.settled[answer] += 1
        if verb is Verb.ACCEPT:
            self.seen[delivery.body] += 1


async def publish(
    broker: Transport, queue: str, who: int, order: random.Random, outcomes: dict[bytes, Published]
) -> None:
    loop = asyncio.get_running_loop()
    end, number = loop.time() + FOR, 0
    while loop.time() < end:
        size = order.choice((1, 1, 1, 20))
        bodies = [b"%d-%d-" % (who, number + at) + b"x" * order.choice((10, 10, 200_000)) for at in range(size)]
        number += size
        within = timedelta(seconds=order.choice((0.05, 0.5, 3)))
        batch = [out(queue, body) for body in bodies]
        results = await asyncio.wait_for(broker.publish(batch, within=within), within.total_seconds() + 2)
        outcomes |= {body: result.outcome for body, result in zip(bodies, results, strict=True)}


async def break_the_line(proxy: Proxy, order: random.Random) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + FOR - 1
    while loop.time() < end:
        await asyncio.sleep(order.random() * 0.6)
        match order.randrange(5):
            case 0:
                proxy.cut()
            case 1:
                proxy.cut_after(order.randrange(1, 400_000), order.choice(("to_server", "to_client")))
            case 2:
                proxy.swallow(order.choice(("to_server", "to_client")))
                await asyncio.sleep(order.random() * 0.5)
                if order.random() < 0.5:
                    proxy.cut()
                proxy.release()
            case 3:
                proxy.refuse()
                proxy.cut()
                await asyncio.sleep(order.random() * 0.5)
                proxy.refuse(False)
            case _:
                proxy.delay(order.choice((0, 0, 0.02)))
    proxy.delay(0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_what_was_routed_is_handled_and_what_was_refused_never_comes(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str, seed: int
) -> None:
    order = random.Random(seed)
    queue = await declare(type="classic" if seed % 2 else "quorum")
    broker = await dial(proxied, reconnect=Backoff(first=timedelta(seconds=0.05), ceiling=timedelta(seconds=0.5)))
    handler = Handler(broker, order)
    await broker.subscribe(queue, handler, prefetch=30)
    outcomes: dict[bytes, Published] = {}
    async with asyncio.TaskGroup() as everybody:
        everybody.create_task(break_the_line(proxy, order))
        for who in range(4):
            everybody.create_task(publish(broker, queue, who, order, outcomes))
    await until(lambda: broker.state.phase is Phase.CONNECTED, "it is connected in the end", within=20)

    direct = await dial()
    async with asyncio.timeout(20):
        while (await direct.depth(queue)).ready or handler.under_way:
            await asyncio.sleep(0.05)
    await broker.close(timedelta(seconds=5))
    handler.seen.update(found.body for found in await drain(direct, queue))

    said = Counter(outcomes.values())
    assert said[Published.ROUTED] > 50, said
    assert broker.state.generation > 5, "the line was broken"
    lost = [body[:20] for body, outcome in outcomes.items() if outcome is Published.ROUTED and body not in handler.seen]
    assert not lost, f"confirmed and lost: {lost}"
    ghosts = [body[:20] for body, outcome in outcomes.items() if outcome is Published.REFUSED and body in handler.seen]
    assert not ghosts, f"refused and delivered all the same: {ghosts}"
    assert handler.seen.keys() <= outcomes.keys()
    assert not said[Published.UNROUTABLE]
