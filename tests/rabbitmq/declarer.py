"""A process that declares one topology: `python -m tests.rabbitmq.declarer URL NAME`.

It says `ready`, then declares once for each line that it reads, and writes the verdicts.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import acemq
from acemq import AcemqError, RetryPolicy, Topology

POLICY = RetryPolicy.delays(timedelta(seconds=40), timedelta(minutes=1))


def topology(name: str) -> Topology:
    return Topology().exchange(f"{name}-x", "topic").queue(name, retry=POLICY).bind(name, f"{name}-x", "order.*")


async def main(url: str, name: str) -> None:
    async with acemq.connect(url) as mq:
        print("ready", flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            try:
                plan = await mq.declare(topology(name))
            except AcemqError as error:
                print(f"{type(error).__name__}: {error}", flush=True)
            else:
                print(*sorted({finding.verdict for finding in plan.findings}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
