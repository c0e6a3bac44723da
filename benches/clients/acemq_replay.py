"""acemq putting dead letters back, as its guide shows it."""

from __future__ import annotations

import time
from datetime import timedelta

import acemq
from benches.running import Figures, Task, peak_rss_mb, rss_mb, serve


async def replay(task: Task) -> Figures:
    async with acemq.connect(task.url) as mq:
        cpu = time.process_time()
        described = mq.replay(task.queue).in_batches(task.batch).until(timedelta(seconds=task.limit))
        result = await described.run()
        return {
            "rate": round(result.replayed / result.took.total_seconds(), 1),
            "messages": result.replayed,
            "cpu_per_10k": round((time.process_time() - cpu) / result.replayed * 10_000, 4),
            "rss_mb": round(peak_rss_mb(), 1),
        }


async def growth(task: Task) -> Figures:
    """How much larger the process is after all of them than after the first thousand."""
    async with acemq.connect(task.url) as mq:
        described = mq.replay(task.queue).in_batches(task.batch)
        first = await described.run(limit=1_000)
        before = rss_mb()
        rest = await described.run()
        return {
            "messages": first.replayed + rest.replayed,
            "grown_mb": round(rss_mb() - before, 2),
            "rss_mb": round(rss_mb(), 1),
        }


if __name__ == "__main__":
    serve({job.__name__: job for job in (replay, growth)})
