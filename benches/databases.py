"""A database as the broker: acemq beside the same statements by hand, beside procrastinate, and beside itself.

By hand: the very statements of the transport through the driver alone, on the same rows, with the body decoded and
nothing else done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from benches.rounds import Measure
from benches.running import Figures, Task, python_client, run_client
from benches.targets import Target
from tests.services import Database

OURS, BY_HAND, PROCRASTINATE, NOTIFY = "acemq", "by hand", "procrastinate", "bare NOTIFY"
FULL, SMALL = "1,000,000 waiting", "1,000 waiting"
POSTGRESQL, MARIADB, SQLITE = "PostgreSQL", "MariaDB", "SQLite"


def send(database: str) -> str:
    return f"send in batches of 100, {database}"


def consume(database: str) -> str:
    return f"consume and accept, {database}"


def claim(database: str) -> str:
    return f"claim of 20, {database}"


def idle(database: str) -> str:
    return f"idle consumer, {database}"


def growth(database: str) -> str:
    return f"growth over 100,000 messages, {database}"


WAKING = "commit to handler, PostgreSQL"


def _targets() -> list[Target]:
    found: list[Target] = []
    for measure in (send, consume):
        for database, peer, least in (
            (POSTGRESQL, BY_HAND, 0.4),
            (POSTGRESQL, PROCRASTINATE, 8.0),
            (SQLITE, BY_HAND, 0.4),
        ):
            name = measure(database)
            found.append(Target(name=f"{name}, of {peer}", measure=name, ours=OURS, peer=peer, at_least=least))
    for database in (POSTGRESQL, MARIADB, SQLITE):
        name = claim(database)
        for figure, most in (("p50_ms", 2.0), ("p99_ms", 3.0)):
            what = f"{name}, {figure.removesuffix('_ms')} with {FULL}, of {SMALL}"
            found.append(Target(name=what, measure=name, ours=FULL, peer=SMALL, figure=figure, at_most=most))
    found.append(
        Target(name=f"{WAKING}, p50, of {NOTIFY}", measure=WAKING, ours=OURS, peer=NOTIFY, figure="p50_ms", at_most=8)
    )
    for database in (POSTGRESQL, MARIADB, SQLITE):
        name = idle(database)
        what = f"{name}, queries a second"
        found.append(Target(name=what, measure=name, ours=OURS, figure="queries", at_most=1))
    for database in (POSTGRESQL, SQLITE):
        name = growth(database)
        found.append(Target(name=f"{name}, MB", measure=name, ours=OURS, figure="grown_mb", at_most=5))
    return found


TARGETS: Sequence[Target] = tuple(_targets())

_QUEUE = "bench"
_BATCH = 100


class Places:
    """A new database for each run: what one leaves behind is not in the way of the next."""

    def __init__(self, servers: Mapping[str, Database], folder: Path) -> None:
        self._servers, self._folder = servers, folder
        self._numbers = itertools.count()

    def fresh(self, database: str) -> str:
        number = next(self._numbers)
        if database == SQLITE:
            return f"sqlite:///{self._folder / f'{number}.db'}"
        return self._servers[database].create_database(f"bench{number}")

    def forget(self, database: str, url: str) -> None:
        if database == SQLITE:
            for left in self._folder.glob(f"{Path(url).name}*"):
                left.unlink()
        else:
            self._servers[database].drop_database(url.rpartition("/")[2])


def left_out() -> dict[str, str]:
    missing = find_spec("procrastinate") is None
    return {PROCRASTINATE: "it is not installed; the extra bench has it"} if missing else {}


def measures(places: Places, *, quick: bool = False) -> Sequence[Measure]:
    def some(few: int, many: int) -> int:
        return few if quick else many

    base = Task(job="send", queue=_QUEUE, batch=_BATCH, prefetch=200, limit=4 if quick else 10)
    sending = replace(base, count=some(4_000, 20_000))
    consuming = replace(base, job="consume", count=some(4_000, 20_000))
    claiming = replace(base, job="claims", count=some(200, 2_000), limit=300)
    growing = replace(base, job="growth", count=some(10_000, 100_000), limit=300)
    waking = replace(base, job="wake", count=some(50, 300), limit=60)
    with_peers = (POSTGRESQL, SQLITE)
    every = (POSTGRESQL, MARIADB, SQLITE)

    def run(database: str, task: Task, client: str = "acemq_sql", *, filled: bool = False) -> Callable[[], Figures]:
        return partial(_run, places, database, client, task, filled)

    def beside(database: str, task: Task, *, filled: bool = False) -> dict[str, Callable[[], Figures]]:
        found = {OURS: run(database, task, filled=filled), BY_HAND: run(database, task, "raw_sql", filled=filled)}
        if database == POSTGRESQL and not left_out():
            found[PROCRASTINATE] = run(database, task, "procrastinate_postgresql")
        return found

    return (
        *(Measure(name=send(each), candidates=beside(each, sending)) for each in with_peers),
        *(Measure(name=consume(each), candidates=beside(each, consuming, filled=True)) for each in with_peers),
        Measure(
            name=WAKING,
            candidates={
                OURS: run(POSTGRESQL, waking),
                NOTIFY: run(POSTGRESQL, replace(waking, job="notify"), "raw_sql"),
            },
        ),
        *(
            Measure(
                name=claim(each),
                candidates={
                    SMALL: run(each, replace(claiming, waiting=1_000)),
                    FULL: run(each, replace(claiming, waiting=some(100_000, 1_000_000))),
                },
                most_rounds=2,
            )
            for each in every
        ),
        *(
            Measure(
                name=idle(each),
                candidates={OURS: run(each, replace(base, job="idle", limit=some(3, 10)))},
                most_rounds=1,
            )
            for each in every
        ),
        *(Measure(name=growth(each), candidates={OURS: run(each, growing)}, most_rounds=1) for each in with_peers),
    )


def _run(places: Places, database: str, client: str, task: Task, filled: bool) -> Figures:
    url = places.fresh(database)
    task = replace(task, url=url)
    patience = 2 * task.limit + 60
    try:
        if filled:
            run_client(python_client("acemq_sql", replace(task, job="fill")), patience)
        return run_client(python_client(client, task), patience)
    finally:
        places.forget(database, url)
