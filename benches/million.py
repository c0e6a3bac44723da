"""Memory over a million messages, published and handled in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benches import filling
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

GROWTH = "growth over 1,000,000 messages"

TARGETS = (Target(name=f"{GROWTH}, MB", measure=GROWTH, ours="acemq", figure="grown_mb", at_most=5),)


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    count = 100_000 if quick else 1_000_000
    task = Task(job="growth", url=url, queue="bench.million", count=count, window=256, limit=600)
    return (Measure(name=GROWTH, candidates={"acemq": partial(_grow, task)}, most_rounds=1),)


def _grow(task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    return run_client(python_client("acemq_rabbitmq", task), patience=1_200)
