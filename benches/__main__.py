"""`python -m benches [suite …]`: measure, print, write down."""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benches import c_client, costs, databases, imports, memory, million, ordered, outbox, patterns, peers, rabbitmq
from benches.results import ENOUGH, Results, conclude, summary, write
from benches.rounds import Measure, Run, run_rounds
from benches.targets import Target
from tests.services import CannotBeHad, MariaDB, PostgreSQL, RabbitMQ

HERE = Path(__file__).parent
Suite = Callable[[int, bool, str], Results]
"""Of rounds, whether it is a quick one, and what the names of its measures have in them."""
SUITES = ("import", "memory", "rabbitmq", "databases", "ordered", "patterns", "outbox", "costs")
ASKED_FOR = ("million", "peers")
"""Suites that take long or need more installed, and run only when they are named."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.suites) - {*SUITES, *ASKED_FOR}:
        parser.error(f"unknown suite {min(unknown)!r}; known: {', '.join((*SUITES, *ASKED_FOR))}")
    rounds = options.rounds or (1 if options.quick else ENOUGH)
    # What is published is a full run's; a first look must not overwrite it.
    is_look = options.quick or options.only or rounds < ENOUGH
    folder = options.into or HERE / ("scratch" if is_look else "results")
    missed = False
    for suite in options.suites or SUITES:
        began = time.monotonic()
        _say(f"{suite}: {rounds} rounds")
        try:
            results = RUN[suite](rounds, options.quick, options.only)
        except (CannotBeHad, RuntimeError, TimeoutError) as reason:  # the rest is measured nevertheless
            _say(f"{suite}: not measured, {reason}")
            missed = True
            continue
        path = write(results, folder)
        print(
            f"\n{suite}, {rounds} rounds in {time.monotonic() - began:.0f} s\n{summary(results)}\n-> {_shown(path)}\n"
        )
        missed = missed or any(verdict.met is False for verdict in results.verdicts)
    return 1 if missed and options.check else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benches", description="How fast acemq is, beside its peers.")
    parser.add_argument(
        "suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}, all by default; or {', '.join(ASKED_FOR)}"
    )
    parser.add_argument("--quick", action="store_true", help="few messages, one round: two minutes, no verdict")
    parser.add_argument("--only", default="", metavar="TEXT", help="measures with this in their names; not published")
    parser.add_argument("--rounds", type=int, help=f"{ENOUGH} by default; fewer are not published")
    parser.add_argument("--into", type=Path, help="the folder for the results")
    parser.add_argument("--check", action="store_true", help="end with 1 when a target is missed")
    return parser


def _rabbitmq(rounds: int, quick: bool, only: str) -> Results:
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="acemq-") as folder:
        try:
            c = c_client.build(Path(folder))
        except c_client.CannotBeBuilt as reason:
            _say(f"rabbitmq: no client in C, {reason}")
            c, left_out = None, dict.fromkeys((rabbitmq.C, rabbitmq.C_BY_50), str(reason))
        return _on_broker("rabbitmq", partial(rabbitmq.measures, c=c), rabbitmq.TARGETS, left_out)(rounds, quick, only)


def _outbox(rounds: int, quick: bool, only: str) -> Results:
    with RabbitMQ.obtain() as server, PostgreSQL.obtain() as database, tempfile.TemporaryDirectory() as folder:
        version = database.execute("SHOW server_version").split()[0]
        broker = f"RabbitMQ {server.ctl('version').strip()}, PostgreSQL {version}, SQLite {sqlite3.sqlite_version}"
        databases = {
            outbox.POSTGRESQL: database.url.replace("postgresql:", "postgresql+asyncpg:"),
            outbox.SQLITE: f"sqlite+aiosqlite:///{folder}/bench.db",
        }
        runs = _runs(outbox.measures(server.url, databases, quick=quick), rounds, only)
    return conclude("outbox", _of(outbox.TARGETS, only), runs, rounds=rounds, quick=quick, broker=broker)


def _databases(rounds: int, quick: bool, only: str) -> Results:
    with (
        PostgreSQL.obtain() as postgresql,
        MariaDB.obtain() as mariadb,
        tempfile.TemporaryDirectory(prefix="acemq-") as folder,
    ):
        servers = {databases.POSTGRESQL: postgresql, databases.MARIADB: mariadb}
        versions = (
            f"PostgreSQL {postgresql.execute('SHOW server_version').split()[0]}",
            f"MariaDB {mariadb.execute('SELECT VERSION()').strip().partition('-')[0]}",
            f"SQLite {sqlite3.sqlite_version}",
        )
        runs = _runs(databases.measures(databases.Places(servers, Path(folder)), quick=quick), rounds, only)
    return conclude(
        "databases",
        _of(databases.TARGETS, only),
        runs,
        rounds=rounds,
        quick=quick,
        broker=", ".join(versions),
        left_out=databases.left_out(),
    )


def _on_broker(
    suite: str,
    measures: Callable[..., Sequence[Measure]],
    targets: Sequence[Target],
    left_out: Mapping[str, str] | None = None,
) -> Suite:
    def run(rounds: int, quick: bool, only: str) -> Results:
        with RabbitMQ.obtain() as server:
            broker = f"RabbitMQ {server.ctl('version').strip()}"
            runs = _runs(measures(server.url, quick=quick), rounds, only)
        return conclude(suite, _of(targets, only), runs, rounds=rounds, quick=quick, broker=broker, left_out=left_out)

    return run


def _in_process(suite: str, measures: Callable[..., Sequence[Measure]], targets: Sequence[Target]) -> Suite:
    def run(rounds: int, quick: bool, only: str) -> Results:
        runs = _runs(measures(quick=quick), rounds, only)
        return conclude(suite, _of(targets, only), runs, rounds=rounds, quick=quick)

    return run


RUN: dict[str, Suite] = {
    "rabbitmq": _rabbitmq,
    "databases": _databases,
    "memory": _in_process("memory", memory.measures, memory.TARGETS),
    "import": _in_process("import", imports.measures, imports.TARGETS),
    "patterns": _on_broker("patterns", patterns.measures, patterns.TARGETS),
    "outbox": _outbox,
    "costs": _on_broker("costs", costs.measures, costs.TARGETS),
    "ordered": _on_broker("ordered", ordered.measures, ordered.TARGETS),
    "peers": _on_broker("peers", peers.measures, peers.TARGETS),
    "million": _on_broker("million", million.measures, million.TARGETS),
}


def _runs(measures: Sequence[Measure], rounds: int, only: str) -> list[Run]:
    return list(run_rounds([measure for measure in measures if only in measure.name], rounds, _say))


def _of(targets: Sequence[Target], only: str) -> list[Target]:
    return [target for target in targets if only in target.measure]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
