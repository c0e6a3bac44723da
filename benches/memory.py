"""The memory transport: the whole engine beside a bare `asyncio.Queue`, with few and with many messages waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

THROUGH = "through, one process"
STANDING = "at a standing depth"
GROWTH = "growth over 100,000 messages"

TARGETS = (
    Target(
        name="memory transport, of a bare asyncio.Queue",
        measure=THROUGH,
        ours="acemq",
        peer="asyncio.Queue",
        at_least=0.03,
    ),
    Target(
        name="cost of a message with 100,000 waiting, of 1,000",
        measure=STANDING,
        ours="100,000 waiting",
        peer="1,000 waiting",
        figure="cpu_per_10k",
        at_most=1.25,
    ),
    Target(
        name="growth over 100,000 messages, memory, MB",
        measure=GROWTH,
        ours="acemq",
        figure="grown_mb",
        at_most=20,
    ),
)


def measures(*, quick: bool = False, count: int | None = None) -> Sequence[Measure]:
    """`count` is for a test of the runner: as few messages everywhere."""
    through = count or (20_000 if quick else 100_000)
    queue = count or (200_000 if quick else 1_000_000)
    standing = count or (10_000 if quick else 50_000)
    return (
        Measure(
            name=THROUGH,
            candidates={
                "asyncio.Queue": _run("queue", queue),
                "acemq": _run("engine", through),
            },
        ),
        Measure(
            name=STANDING,
            most_rounds=1 if quick else None,
            candidates={
                "1,000 waiting": _run("standing", standing, count or 1_000),
                "100,000 waiting": _run("standing", standing, count or 100_000),
            },
        ),
        Measure(name=GROWTH, candidates={"acemq": _run("growth", count or 100_000)}, most_rounds=1),
    )


def _run(job: str, count: int, waiting: int = 0) -> Callable[[], Figures]:
    task = Task(job=job, count=count, waiting=waiting, limit=30)
    return partial(run_client, python_client("memory", task), patience=120)
