"""What each promise costs on RabbitMQ: each is switched on in turn, on top of those before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from msgspec.structs import replace

from benches import filling
from benches.clients.costs import CONFIRMS, ENVELOPE, MANDATORY, METRICS, TRACING
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

QUORUM = "quorum"

AWAITED, OUTSTANDING, CONSUME = "publish, each awaited", "publish, 256 outstanding", "consume and acknowledge"

BARE = "nothing"
_PUBLISH = {
    BARE: (),
    "confirms": (CONFIRMS,),
    "mandatory": (MANDATORY,),
    "a quorum queue": (QUORUM,),
    "the envelope in headers": (ENVELOPE,),
    "tracing": (TRACING,),
    "metrics": (METRICS,),
}
"""In the order in which they are switched on."""
_CONSUME = {
    "acknowledgements": (CONFIRMS, MANDATORY),
    **{name: _PUBLISH[name] for name in ("a quorum queue", "the envelope in headers", "tracing", "metrics")},
}

STEPS: Mapping[str, Sequence[str]] = {
    # One that nobody answers has nothing that could be awaited.
    AWAITED: [name for name in _PUBLISH if name != BARE],
    OUTSTANDING: [*_PUBLISH],
    CONSUME: [*_CONSUME],
}


def _steps() -> Iterator[Target]:
    for measure, names in STEPS.items():
        for before, name in pairwise(names):
            yield Target(name=f"{measure}, {name}, of the step before", measure=measure, ours=name, peer=before)


TARGETS = tuple(_steps())
"""Promised is none; they say what a step leaves of the rate before it."""

_QUEUE = "bench.costs"
_SETTLING = 0.5


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    base = Task(job="publish", url=url, queue=_QUEUE, limit=3 if quick else 8)
    awaited = replace(base, count=300 if quick else 1_500)
    outstanding = replace(base, count=2_560 if quick else 20_480, window=256)
    consume = replace(base, job="consume", count=4_000 if quick else 30_000)
    return (
        _measure(AWAITED, _publish, _PUBLISH, awaited),
        _measure(OUTSTANDING, _publish, _PUBLISH, outstanding),
        _measure(CONSUME, _consume, _CONSUME, consume),
    )


def _measure(name: str, run: Callable[[Task], Figures], promises: Mapping[str, Sequence[str]], task: Task) -> Measure:
    candidates: dict[str, Callable[[], Figures]] = {}
    on: list[str] = []
    for step, more in promises.items():
        on += more
        if step in STEPS[name]:
            changed = replace(task, promises=tuple(on), queue_type="quorum" if QUORUM in on else "classic")
            candidates[step] = partial(run, changed)
    return Measure(name=name, candidates=candidates)


def _publish(task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue, task.queue_type)
    figures = _run(task)
    sent = int(figures["messages"])
    filling.check_depth(task.url, task.queue, least=sent, most=sent)
    return figures


def _consume(task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue, task.queue_type)
    _run(replace(task, job="fill"))
    time.sleep(_SETTLING)
    return _run(task)


def _run(task: Task) -> Figures:
    return run_client(python_client("costs", task), patience=2 * task.limit + 30)
