from __future__ import annotations

import asyncio
import time

from tests.unit.transports.memory.playing import Client


async def cost(client: Client, count: int) -> float:
    """Seconds per message published in batches of 100, consumed with prefetch 100, every tenth requeued once."""
    bodies = [b"%d" % n for n in range(count)]
    began = time.process_time()  # of this process alone: the machine may be busy with others
    for start in range(0, count, 100):
        await client.send(*bodies[start : start + 100])
    sink, subscription = await client.consume(prefetch=100)
    done = 0
    while done < count:
        batch = [delivery for batch in sink.batches for delivery in batch]
        sink.batches.clear()
        again = [delivery for delivery in batch if not delivery.redelivered and delivery.body.endswith(b"7")]
        finished = [delivery for delivery in batch if delivery not in again]
        await client.requeue(*again)
        await client.accept(*finished)
        done += len(finished)
        await client.turn(1)
    await subscription.close()
    return (time.process_time() - began) / count


async def test_the_cost_of_a_message_does_not_grow_with_what_waits(client: Client) -> None:
    costs = [(await cost(client, 1_000), await cost(client, 30_000)) for _ in range(3)]
    small, large = map(min, zip(*costs, strict=True))
    # Twice would do; the rest is for a machine that others use too.
    assert large < 3 * small


async def test_no_task_is_made_for_a_message(client: Client) -> None:
    sink, _ = await client.consume(prefetch=1000)
    await client.send(*(b"%d" % n for n in range(1000)))
    tasks = len(asyncio.all_tasks())
    await client.turn()
    await client.accept(*sink.deliveries)
    assert len(sink.deliveries) == 1000
    assert tasks == len(asyncio.all_tasks()) == 1


async def test_a_message_that_expired_in_the_middle_leaves_nothing_behind(client: Client) -> None:
    await client.send(b"first")
    for _ in range(10):
        await client.send(*(b"%d" % n for n in range(100)), expires_in=client.clock.now() - client.clock.now())
        await client.advance(client.clock.now() - client.clock.now())
    await client.send(b"last")
    lying = client.broker.queues["orders"]._fresh
    assert len(lying) < 200
    assert await client.bodies() == [b"first", b"last"]
