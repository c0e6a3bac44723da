"""A handler far slower than its broker holds a prefetch of messages, and nothing grows."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from acemq import AceMQ, Message
from tests.waiting import until

MEGABYTE = 1 << 20


def resident() -> int:
    """Bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_t007_fifty_thousand_messages_and_ten_handled_a_second(mq: AceMQ, queue: str) -> None:
    count = 50_000
    await mq.send_many(queue, (b"x" * 2_048 for _ in range(count)))

    async def slow(message: Message[bytes]) -> None:
        await asyncio.sleep(0.1)  # the work itself

    async with mq.consume(queue, bytes, slow, concurrency=1, prefetch=50) as consumer:
        await until(lambda: consumer.counters.acked == 10)
        memory, tasks = resident(), len(asyncio.all_tasks())
        for second in range(1, 20):
            await until(lambda: consumer.counters.acked >= 10 * (second + 1))  # noqa: B023
            assert consumer.held + consumer.in_flight <= 50
            assert len(asyncio.all_tasks()) <= tasks + 1
            assert resident() - memory < 30 * MEGABYTE
            handled = consumer.counters.acked
            ready = (await mq.depth(queue)).ready
            assert count - consumer.counters.acked - 50 <= ready <= count - handled
    await mq.purge(queue)
