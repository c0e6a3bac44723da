"""RabbitMQ: acemq beside aio-pika, FastStream and a client in C, on persistent JSON in one durable queue.

Our side is complete: envelope and headers, mandatory, typed decode, policy and counters. A candidate is one line of
`candidates`. C sends the same header table, and mandatory as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from benches import c_client, filling
from benches import replay as replays
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client, run_pair
from benches.targets import Target


@dataclass(frozen=True, kw_only=True)
class Candidate:
    command: Callable[[Task], list[str]]
    """It prints its `Figures`. Jobs: `publish`, `consume`, `receive`, and `fill` if it fills its queue itself."""
    fills: bool = False
    """Else it publishes one message, of which copies are made."""
    declares: bool = False
    """It declares its queue itself, with arguments of its own."""
    changes: Mapping[str, object] | None = None
    """What its task has otherwise than the measure's."""

    def task(self, task: Task) -> Task:
        return replace(task, **(self.changes or {}))


OURS, AIO_PIKA, FASTSTREAM, C = "acemq", "aio-pika", "FastStream", "C"
UVLOOP, MANY, C_BY_50 = "acemq on uvloop", "acemq, publish_many of 200", "C, one acknowledgement for 50"


def candidates(c: Path | None) -> dict[str, Candidate]:
    """`c`: the client in C, if there is one."""
    ours = partial(python_client, "acemq_rabbitmq")
    every = {
        OURS: Candidate(command=ours, fills=True),
        UVLOOP: Candidate(command=ours, fills=True, changes={"loop": "uvloop"}),
        MANY: Candidate(command=ours, changes={"window": 1, "batch": 200}),
        AIO_PIKA: Candidate(command=partial(python_client, "aio_pika_raw")),
        FASTSTREAM: Candidate(command=partial(python_client, "faststream_rabbitmq")),
    }
    if c is not None:
        in_c = partial(c_client.command, c)
        every |= {C: Candidate(command=in_c), C_BY_50: Candidate(command=in_c, changes={"ack_every": 50})}
    return every


AWAITED = "publish, each awaited"
OUTSTANDING = "publish, 256 outstanding"
OUTSTANDING_QUORUM = "publish, 256 outstanding, quorum queue"
OUTSTANDING_4K = "publish, 256 outstanding, 4 KiB"
CONSUME = "consume and acknowledge"
CONSUME_QUORUM = "consume and acknowledge, quorum queue"
CONSUME_4K = "consume and acknowledge, 4 KiB"
END_TO_END = "both at once, two processes, end to end"
LATENCY = "latency at 200 a second, two processes"
HEADER_TABLE = "header table of 10 entries, out and in"
GROWTH = "growth over 100,000 messages"

_WITHIN_A_QUARTER = 0.75
"""What bodies of 4 KiB may lose of a ratio."""


def _faster(measure: str, aio_pika: float, faststream: float | None, c: float, ours: str = OURS) -> Iterator[Target]:
    for peer, ratio in ((AIO_PIKA, aio_pika), (FASTSTREAM, faststream), (C, c)):
        if ratio is not None:
            yield Target(name=_of(measure, ours, peer), measure=measure, ours=ours, peer=peer, at_least=ratio)


def _less(measure: str, what: str, figure: str, aio_pika: float, faststream: float) -> Iterator[Target]:
    for peer, ratio in ((AIO_PIKA, aio_pika), (FASTSTREAM, faststream)):
        name = f"{what}, of {peer}"
        yield Target(name=name, measure=measure, ours=OURS, peer=peer, figure=figure, at_most=ratio)


def _shown(measure: str, ours: str, peer: str, figure: str = "rate") -> Target:
    """Promised by nobody."""
    return Target(name=_of(measure, ours, peer), measure=measure, ours=ours, peer=peer, figure=figure)


def _of(measure: str, ours: str, peer: str) -> str:
    return f"{measure}{ours.removeprefix(OURS)}, of {peer}"


TARGETS = (
    *_faster(AWAITED, 1.2, 1.3, 0.75),
    *_faster(OUTSTANDING, 1.8, 2.3, 0.8),
    *_faster(OUTSTANDING_QUORUM, 4, 4.5, 0.6),
    *_faster(OUTSTANDING, 2, None, 0.9, ours=MANY),
    *_faster(CONSUME, 3, 4.5, 0.5),
    *_faster(CONSUME_QUORUM, 3.5, 6, 0.4),
    *_faster(END_TO_END, 3.5, 4.5, 0.5),
    *_less(LATENCY, "latency at 200 a second, p50", "p50_ms", 0.6, 0.55),
    *_less(LATENCY, "latency at 200 a second, p99", "p99_ms", 0.8, 0.8),
    *_less(OUTSTANDING, "client CPU, publish", "cpu_per_10k", 0.25, 0.2),
    *_less(CONSUME, "client CPU, consume", "cpu_per_10k", 0.35, 0.2),
    *_faster(OUTSTANDING_4K, 1.8 * _WITHIN_A_QUARTER, 2.3 * _WITHIN_A_QUARTER, 0.8 * _WITHIN_A_QUARTER),
    *_faster(CONSUME_4K, 3 * _WITHIN_A_QUARTER, 4.5 * _WITHIN_A_QUARTER, 0.5 * _WITHIN_A_QUARTER),
    Target(name=f"{HEADER_TABLE}, of pamqp", measure=HEADER_TABLE, ours=OURS, peer="pamqp", figure="us", at_most=0.45),
    Target(name=f"{GROWTH}, MB", measure=GROWTH, ours=OURS, figure="grown_mb", at_most=20),
    _shown(OUTSTANDING, UVLOOP, OURS),
    _shown(CONSUME, UVLOOP, OURS),
    _shown(CONSUME, OURS, C_BY_50),
    _shown(LATENCY, OURS, C, "p50_ms"),
    *replays.TARGETS,
)

PREFETCH = 200
_QUEUE = "bench"
_SETTLING = 0.5
"""Seconds for the broker to have done with what it was sent before."""


def measures(url: str, *, quick: bool = False, c: Path | None = None) -> Sequence[Measure]:
    def some(few: int, many: int) -> int:
        return few if quick else many

    every = candidates(c)
    beside = (OURS, AIO_PIKA, FASTSTREAM, C)
    base = Task(job="publish", url=url, queue=_QUEUE, prefetch=PREFETCH, limit=3 if quick else 8)
    outstanding = replace(base, count=some(4_000, 16_000), window=256)
    consuming = replace(base, job="consume", count=some(6_000, 25_000))
    both = replace(outstanding, job="receive", count=some(4_000, 16_000))
    paced = replace(both, count=some(200, 800), window=1, rate=200, limit=30)
    growth = replace(outstanding, job="growth", count=some(10_000, 100_000), limit=120)

    def measure(name: str, run: Callable[[Candidate, Task], Figures], task: Task, *more: str) -> Measure:
        taking_part = {each: every[each] for each in (*beside, *more) if each in every}
        return Measure(name=name, candidates={each: partial(run, found, task) for each, found in taking_part.items()})

    return (
        measure(AWAITED, publish, replace(base, count=some(500, 2_000)), UVLOOP),
        measure(OUTSTANDING, publish, outstanding, UVLOOP, MANY),
        measure(OUTSTANDING_QUORUM, publish, replace(outstanding, queue_type="quorum"), MANY),
        measure(OUTSTANDING_4K, publish, replace(outstanding, size=4096)),
        measure(CONSUME, consume, consuming, UVLOOP, C_BY_50),
        measure(CONSUME_QUORUM, consume, replace(consuming, queue_type="quorum")),
        measure(CONSUME_4K, consume, replace(consuming, count=some(4_000, 15_000), size=4096)),
        measure(END_TO_END, _both, both),
        measure(LATENCY, _both, paced, UVLOOP),
        Measure(
            name=HEADER_TABLE,
            candidates={
                OURS: partial(_headers, Task(job="ours", count=some(2_000, 10_000))),
                "pamqp": partial(_headers, Task(job="pamqp", count=some(2_000, 10_000))),
            },
        ),
        Measure(name=GROWTH, candidates={OURS: partial(_grow, every[OURS], growth)}, most_rounds=1),
        *replays.measures(url, quick=quick),
    )


def publish(candidate: Candidate, task: Task) -> Figures:
    _make_fresh(candidate, task)
    figures = _run(candidate, task)
    sent = int(figures["messages"])
    filling.check_depth(task.url, task.queue, least=sent, most=sent)
    return figures


def consume(candidate: Candidate, task: Task) -> Figures:
    _make_fresh(candidate, task)
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


def _make_fresh(candidate: Candidate, task: Task) -> None:
    if candidate.declares:
        filling.remove(task.url, task.queue)
    else:
        filling.make_fresh(task.url, task.queue, task.queue_type)


def _both(candidate: Candidate, task: Task) -> Figures:
    """Publish in one process and receive in another. The figures are the receiver's."""
    task = candidate.task(task)
    filling.make_fresh(task.url, task.queue, task.queue_type)
    time.sleep(_SETTLING)
    return run_pair(
        candidate.command(task),
        # Twice the time: else it might stop before the receiver, which would wait for what does not come.
        candidate.command(replace(task, job="publish", limit=2 * task.limit)),
        partial(filling.await_consumer, task.url, task.queue),
        patience=_patience(task),
    )


def _grow(candidate: Candidate, task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    return _run(candidate, task)


def _headers(task: Task) -> Figures:
    return run_client(python_client("header_table", task), patience=60)


def _run(candidate: Candidate, task: Task) -> Figures:
    return run_client(candidate.command(candidate.task(task)), _patience(task))


def _patience(task: Task) -> float:
    return 2 * task.limit + 30
