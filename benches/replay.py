"""Replay: dead letters go back into their queue, beside what the raw client publishes; what 200,000 of them cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from benches import filling
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

REPLAY = "replay of dead letters"
GROWTH = "growth over 200,000 replayed"
RAW = "aio-pika, publish only, 256 outstanding"
TOGETHER = 100

TARGETS = (
    Target(
        name=f"replay, {TOGETHER} at a time, of a raw publish",
        measure=REPLAY,
        ours=f"acemq, {TOGETHER} at a time",
        peer=RAW,
        at_least=0.4,
    ),
    Target(name="replay, one by one, of a raw publish", measure=REPLAY, ours="acemq, one by one", peer=RAW),
    Target(name="growth over 200,000 replayed, MB", measure=GROWTH, ours="acemq", figure="grown_mb", at_most=5),
)

_SOURCE, _TARGET = "bench.dlq", "bench"


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    one = Task(job="replay", url=url, queue=_SOURCE, count=1_000 if quick else 3_000, limit=3.0 if quick else 8.0)
    together = replace(one, batch=TOGETHER, count=8_000 if quick else 30_000)
    raw = replace(together, job="publish", queue=_TARGET, batch=1, window=256)
    growth = replace(together, job="growth", count=20_000 if quick else 200_000, limit=150)
    ours = {f"acemq, {TOGETHER} at a time": _replay(together), "acemq, one by one": _replay(one)}
    return (
        Measure(name=REPLAY, candidates={**ours, RAW: partial(_publish, raw)}),
        Measure(name=GROWTH, candidates={"acemq": _replay(growth)}, most_rounds=1),
    )


def _replay(task: Task) -> Callable[[], Figures]:
    def run() -> Figures:
        filling.make_fresh(task.url, _TARGET)
        filling.make_fresh(task.url, _SOURCE)
        _client("acemq_rabbitmq", replace(task, job="fill", count=1))
        filling.clone(task.url, _SOURCE, task.count)
        time.sleep(0.5)  # for the broker to have done with what it was sent
        figures = _client("acemq_replay", task)
        moved = int(figures["messages"])
        filling.check_depth(task.url, _TARGET, least=moved, most=moved)
        filling.check_depth(task.url, _SOURCE, least=task.count - moved, most=task.count - moved)
        return figures

    return run


def _publish(task: Task) -> Figures:
    filling.make_fresh(task.url, _TARGET)
    return _client("aio_pika_raw", task)


def _client(module: str, task: Task) -> Figures:
    return run_client(python_client(module, task), patience=2 * task.limit + 60)
