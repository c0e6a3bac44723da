"""`python -m benches [rabbitmq] [memory] [import]`: measure, print, write down."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benches import imports, memory, rabbitmq
from benches.results import ENOUGH, Results, conclude, summary, write
from benches.rounds import Measure, Run, run_rounds
from benches.targets import Target
from tests.services import CannotBeHad, RabbitMQ

HERE = Path(__file__).parent
SUITES = ("import", "memory", "rabbitmq")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"unknown suite {min(unknown)!r}; known: {', '.join(SUITES)}")
    rounds = options.rounds or (3 if options.quick else ENOUGH)
    # What is published is a full run's; a first look must not overwrite it.
    folder = options.into or HERE / ("scratch" if options.quick or rounds < ENOUGH else "results")
    missed = False
    for suite in options.suites or SUITES:
        began = time.monotonic()
        _say(f"{suite}: {rounds} rounds")
        try:
            results = RUN[suite](rounds, options.quick)
        except CannotBeHad as reason:
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
    parser.add_argument("suites", nargs="*", metavar="suite", help=f"of {', '.join(SUITES)}; all of them by default")
    parser.add_argument("--quick", action="store_true", help="few messages, three rounds: two minutes, no verdict")
    parser.add_argument("--rounds", type=int, help=f"{ENOUGH} by default; fewer are not published")
    parser.add_argument("--into", type=Path, help="the folder for the results")
    parser.add_argument("--check", action="store_true", help="end with 1 when a target is missed")
    return parser


def _rabbitmq(rounds: int, quick: bool) -> Results:
    with RabbitMQ.obtain() as server:
        runs = _runs(rabbitmq.measures(server.url, quick=quick), rounds)
        broker = f"RabbitMQ {server.ctl('version').strip()}"
    return conclude("rabbitmq", rabbitmq.TARGETS, runs, rounds=rounds, quick=quick, broker=broker)


def _in_process(
    suite: str, measures: Callable[..., Sequence[Measure]], targets: Sequence[Target]
) -> Callable[[int, bool], Results]:
    def run(rounds: int, quick: bool) -> Results:
        return conclude(suite, targets, _runs(measures(quick=quick), rounds), rounds=rounds, quick=quick)

    return run


RUN: dict[str, Callable[[int, bool], Results]] = {
    "rabbitmq": _rabbitmq,
    "memory": _in_process("memory", memory.measures, memory.TARGETS),
    "import": _in_process("import", imports.measures, imports.TARGETS),
}


def _runs(measures: Sequence[Measure], rounds: int) -> list[Run]:
    return list(run_rounds(measures, rounds, _say))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
