"""The outbox and the unit of work, on PostgreSQL and SQLite: each beside what it stands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from benches import filling
from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target

POSTGRESQL, SQLITE = "PostgreSQL", "SQLite"
RELAY = "relay from {}"
ADD = "add a record on {}"
ONCE = "a handler in once() on {}, time in the database"
CLAIM = "claim of 100 on {}"
IDLE = "an idle relay on {}"
WAKE = f"commit to published on {POSTGRESQL}"

RAW = "aio-pika, publish only, 256 outstanding"
SMALL, FULL = "1,000 rows", "2,000,000 rows, half of them sent"
_QUEUE = "bench"


def _targets() -> list[Target]:
    found: list[Target] = []
    for database, least in ((POSTGRESQL, 0.6), (SQLITE, 0.5)):
        relay, add, once, claim, idle = (each.format(database) for each in (RELAY, ADD, ONCE, CLAIM, IDLE))
        found += [
            Target(name=f"{relay}, of a raw publish", measure=relay, ours="acemq", peer=RAW, at_least=least),
            Target(name=f"{add}, of a bare insert", measure=add, ours="acemq", peer="insert", figure="ms", at_most=1.5),
            Target(name=f"{once}, of without", measure=once, ours="acemq", peer="without", figure="ms", at_most=2.0),
            Target(name=f"{claim}, p50", measure=claim, ours=FULL, peer=SMALL, figure="p50_ms", at_most=2.0),
            Target(name=f"{claim}, p99", measure=claim, ours=FULL, peer=SMALL, figure="p99_ms", at_most=3.0),
            Target(name=f"{idle}, queries a second", measure=idle, ours="acemq", figure="queries", at_most=1.0),
        ]
    of_both = "notify + publish"
    name = f"{WAKE}, of a bare NOTIFY round trip and an awaited publish"
    return [*found, Target(name=name, measure=WAKE, ours="acemq", peer=of_both, figure="p50_ms", at_most=5.0)]


TARGETS = tuple(_targets())


def measures(broker: str, databases: Mapping[str, str], *, quick: bool = False) -> Sequence[Measure]:
    """`databases`: the SQLAlchemy URL of each, by `POSTGRESQL` and `SQLITE`; each is the benchmark's alone."""
    found: list[Measure] = []
    for name, database in databases.items():

        def run(job: str, database: str = database, *, patience: float = 120, **more: int | float) -> Run:
            task = Task(job=job, url=broker, database=database, queue=_QUEUE, limit=60)
            return partial(_run, replace(task, **more), patience)

        relayed, few, rows = (1_000, 200, 10_000) if quick else (10_000, 2_000, 1_000_000)
        claims = 200 if quick else 2_000
        raw = Task(job="publish", url=broker, queue=_QUEUE, count=relayed, window=256, limit=30)
        found += [
            Measure(
                name=RELAY.format(name),
                candidates={"acemq": run("relay", count=relayed), RAW: partial(_publish, raw)},
            ),
            Measure(
                name=ADD.format(name), candidates={"acemq": run("add", count=few), "insert": run("insert", count=few)}
            ),
            Measure(
                name=ONCE.format(name),
                candidates={"acemq": run("once", count=few // 2), "without": run("without", count=few // 2)},
            ),
            Measure(
                name=CLAIM.format(name),
                candidates={
                    SMALL: run("claim", count=claims, waiting=1_000),
                    FULL: run("claim", count=claims, waiting=rows, sent=rows, patience=900),
                },
                most_rounds=1,  # filling takes its time, and each is of thousands of claims
            ),
            Measure(name=IDLE.format(name), candidates={"acemq": run("idle", limit=5 if quick else 25)}, most_rounds=1),
        ]
        if name == POSTGRESQL:
            woken = 50 if quick else 200
            candidates = {"acemq": run("wake", count=woken), "notify + publish": run("notify", count=woken)}
            found.append(Measure(name=WAKE, candidates=candidates))
    return found


Run = Callable[[], Figures]


def _run(task: Task, patience: float) -> Figures:
    filling.make_fresh(task.url, task.queue)
    figures = run_client(python_client("acemq_outbox", task), patience=patience)
    if task.job == "relay":
        filling.check_depth(task.url, task.queue, least=task.count, most=task.count)
    return figures


def _publish(task: Task) -> Figures:
    filling.make_fresh(task.url, task.queue)
    return run_client(python_client("aio_pika_raw", task), patience=2 * task.limit + 60)
