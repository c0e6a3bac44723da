"""An ordered queue of 8 partitions on RabbitMQ, beside the same quorum queues without an order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

HANDLED = "ordered: handled, 8 partitions, one process"
SENT = "ordered: sent, 256 outstanding"
TAKEN_OVER = "ordered: taken over after kill -9"

TARGETS = (
    Target(name="ordered, of plain with prefetch 1", measure=HANDLED, ours="ordered", peer="plain", at_least=0.5),
    Target(name="sent in order, of send", measure=SENT, ours="ordered", peer="plain", at_least=0.9),
    Target(name="taken over after kill -9, ms", measure=TAKEN_OVER, ours="ordered", figure="ms", at_most=3_000),
)

_QUEUE = "bench-ordered"
_SETTLING = 0.5


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    limit = 3.0 if quick else 8.0
    handled = Task(job="ordered", url=url, queue=_QUEUE, count=4_000 if quick else 20_000, limit=limit)
    sent = replace(handled, job="send_ordered", window=256)
    return (
        Measure(
            name=HANDLED,
            candidates={
                "ordered": partial(_run, handled, handled.count),
                "plain": partial(_run, replace(handled, job="plain"), handled.count),
            },
        ),
        Measure(
            name=SENT,
            candidates={"ordered": partial(_run, sent, 0), "plain": partial(_run, replace(sent, job="send_plain"), 0)},
        ),
        Measure(name=TAKEN_OVER, candidates={"ordered": partial(_run, replace(handled, job="take_over"), 0)}),
    )


def _run(task: Task, filled: int) -> Figures:
    patience = 2 * task.limit + 60
    run_client(python_client("acemq_ordered", replace(task, job="fill", count=filled)), patience)
    time.sleep(_SETTLING)  # the broker has done with what it was sent before
    return run_client(python_client("acemq_ordered", task), patience)
