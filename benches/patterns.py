"""What the patterns cost, each beside what it stands on: a publish, a publish and its answer, the awaits themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benches import filling
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

SCHEDULING = "schedule, 256 outstanding"
MOVING = "move on what is due"
ASKING = "request and answer, awaited one by one"
SEALING = "publish 1 KiB, awaited one by one"
UNDOING = "a saga of three steps"

TARGETS = (
    Target(name=f"{SCHEDULING}, of a publish", measure=SCHEDULING, ours="schedule", peer="publish", at_least=0.8),
    Target(name=f"{MOVING}, of aio-pika's publish", measure=MOVING, ours="scheduler", peer="aio-pika", at_least=0.5),
    Target(
        name="growth while 20,000 are moved on, MB", measure=MOVING, ours="scheduler", figure="grown_mb", at_most=20
    ),
    Target(
        name=f"{ASKING}, p50, of a publish and an answer by hand",
        measure=ASKING,
        ours="request",
        peer="by hand",
        figure="p50_ms",
        at_most=2.0,
    ),
    Target(name=f"{SEALING}, encrypted, of plain", measure=SEALING, ours="encrypted", peer="plain", at_least=1 / 1.3),
    Target(
        name=f"{UNDOING}, of its bare awaits, each a turn of the loop",
        measure=UNDOING,
        ours="saga",
        peer="bare awaits",
        at_least=1 / 3,
    ),
)

_QUEUE = "bench"


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    def run(job: str, count: int, *, client: str = "patterns", window: int = 1) -> Callable[[], Figures]:
        task = Task(job=job, url=url, queue=_QUEUE, count=count, window=window, limit=20)
        return partial(_run, client, task)

    many, few = (4_000, 500) if quick else (20_000, 3_000)
    return (
        Measure(
            name=SCHEDULING,
            candidates={"publish": run("publish", many, window=256), "schedule": run("schedule", many, window=256)},
        ),
        Measure(
            name=MOVING,
            candidates={
                "aio-pika": run("publish", many, client="aio_pika_raw", window=256),
                "scheduler": run("move", many),
            },
        ),
        Measure(name=ASKING, candidates={"by hand": run("by_hand", few), "request": run("request", few)}),
        Measure(name=SEALING, candidates={"plain": run("plain", few), "encrypted": run("encrypted", few)}),
        Measure(
            name=UNDOING,
            candidates={"bare awaits": run("bare_awaits", many), "saga": run("saga", many)},
        ),
    )


def _run(client: str, task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    return run_client(python_client(client, task), patience=2 * task.limit + 60)
