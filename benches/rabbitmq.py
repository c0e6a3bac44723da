"""RabbitMQ: 256 bytes of JSON, persistent, one durable classic queue; acemq beside aio-pika and FastStream.

Our side is complete: envelope and headers, typed decode, policy and counters. A candidate is one line of `CANDIDATES`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from benches import filling
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target


@dataclass(frozen=True, kw_only=True)
class Candidate:
    command: Callable[[Task], list[str]]
    """It prints its `Figures`. Jobs: `publish`, `consume`, and `fill` if it fills its queue itself."""
    fills: bool = False
    """Else it publishes one message, of which copies are made."""


CANDIDATES = {
    "acemq": Candidate(command=partial(python_client, "acemq_rabbitmq"), fills=True),
    "aio-pika": Candidate(command=partial(python_client, "aio_pika_raw")),
    "FastStream": Candidate(command=partial(python_client, "faststream_rabbitmq")),
}

ONE_BY_ONE = "publish, awaited one by one"
OUTSTANDING = "publish, 256 outstanding"
CONSUME = "consume and acknowledge, prefetch 200"
GROWTH = "growth over 100,000 messages"

TARGETS = (
    Target(name=f"{ONE_BY_ONE}, of aio-pika", measure=ONE_BY_ONE, ours="acemq", peer="aio-pika", at_least=0.9),
    Target(name=f"{OUTSTANDING}, of aio-pika", measure=OUTSTANDING, ours="acemq", peer="aio-pika", at_least=1.0),
    Target(name=f"{OUTSTANDING}, of FastStream", measure=OUTSTANDING, ours="acemq", peer="FastStream", at_least=1.3),
    Target(name=f"{CONSUME}, of aio-pika", measure=CONSUME, ours="acemq", peer="aio-pika", at_least=0.9),
    Target(name=f"{CONSUME}, of FastStream", measure=CONSUME, ours="acemq", peer="FastStream", at_least=1.4),
    Target(
        name="growth over 100,000 messages, RabbitMQ, MB", measure=GROWTH, ours="acemq", figure="grown_mb", at_most=20
    ),
)

PREFETCH = 200
_QUEUE = "bench"
_SETTLING = 0.5
"""Seconds for the broker to have done with what it was sent before."""


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    limit = 3.0 if quick else 8.0
    one_by_one = Task(job="publish", url=url, queue=_QUEUE, count=1_000 if quick else 3_000, limit=limit)
    outstanding = replace(one_by_one, count=4_000 if quick else 20_000, window=256)
    consume = replace(one_by_one, job="consume", count=8_000 if quick else 50_000, prefetch=PREFETCH)
    growth = replace(outstanding, job="growth", count=20_000 if quick else 100_000, prefetch=PREFETCH, limit=120)
    return (
        Measure(name=ONE_BY_ONE, candidates=_each(_publish, one_by_one)),
        Measure(name=OUTSTANDING, candidates=_each(_publish, outstanding)),
        Measure(name=CONSUME, candidates=_each(_consume, consume)),
        Measure(name=GROWTH, candidates={"acemq": partial(_grow, CANDIDATES["acemq"], growth)}, most_rounds=1),
    )


def _each(run: Callable[[Candidate, Task], Figures], task: Task) -> dict[str, Callable[[], Figures]]:
    return {name: partial(run, candidate, task) for name, candidate in CANDIDATES.items()}


def _publish(candidate: Candidate, task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    figures = _run(candidate, task)
    sent = int(figures["messages"])
    filling.check_depth(task.url, task.queue, least=sent, most=sent)
    return figures


def _consume(candidate: Candidate, task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    if candidate.fills:
        _run(candidate, replace(task, job="fill"))
        filling.check_depth(task.url, task.queue, least=task.count, most=task.count)
    else:
        _run(candidate, replace(task, job="publish", count=1))
        filling.clone(task.url, task.queue, task.count)
    time.sleep(_SETTLING)
    figures = _run(candidate, task)
    # What was in hand when it stopped may have come back, nothing else.
    filling.check_depth(task.url, task.queue, most=task.count - int(figures["messages"]) + task.prefetch)
    return figures


def _grow(candidate: Candidate, task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    return _run(candidate, task)


def _run(candidate: Candidate, task: Task) -> Figures:
    return run_client(candidate.command(task), patience=2 * task.limit + 60)
