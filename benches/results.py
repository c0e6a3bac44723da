"""What is written down of a suite: `results/{suite}.json`, and the summary that is printed."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import msgspec

from benches.rounds import Run
from benches.running import cpu_count
from benches.targets import Target, Verdict, judge

PACKAGES = (
    *("acemq", "aio-pika", "aiormq", "aiosqlite", "amqp", "asyncmy", "asyncpg", "celery", "dramatiq", "faststream"),
    *("kombu", "msgspec", "opentelemetry-api", "opentelemetry-sdk", "pamqp", "pika", "procrastinate", "psycopg"),
    *("pydantic", "SQLAlchemy", "taskiq", "taskiq-aio-pika", "uvloop"),
)
"""Whose versions matter."""

ENOUGH = 5
"""Rounds that a verdict needs."""


class Spread(msgspec.Struct, frozen=True):
    median: float
    lowest: float
    highest: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """No name of it and no path: the file is published."""

    cpus: int
    system: str
    python: str
    packages: dict[str, str]
    broker: str | None = None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    suite: str
    date: str
    quick: bool
    rounds: int
    machine: Machine
    verdicts: list[Verdict]
    measures: dict[str, dict[str, dict[str, Spread]]]
    """By measure, candidate and figure."""
    runs: list[Run]
    left_out: dict[str, str] = {}
    """Candidates that could not be had, and why. Nothing is judged beside them."""


def conclude(
    suite: str,
    targets: Sequence[Target],
    runs: Sequence[Run],
    *,
    rounds: int,
    quick: bool,
    broker: str | None = None,
    left_out: Mapping[str, str] | None = None,
) -> Results:
    missing = dict(left_out or {})
    return Results(
        suite=suite,
        date=datetime.now(UTC).date().isoformat(),
        quick=quick,
        rounds=rounds,
        machine=Machine(
            cpus=cpu_count(),
            system=f"{platform.system()} {platform.machine()}",
            python=f"{platform.python_implementation()} {platform.python_version()}",
            packages=dict(_versions()),
            broker=broker,
        ),
        verdicts=[judge(target, runs) for target in targets if missing.keys().isdisjoint((target.ours, target.peer))],
        measures=_spreads(runs),
        runs=list(runs),
        left_out=missing,
    )


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _spreads(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, Spread]]]:
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    for run in runs:
        for figure, value in run.figures.items():
            of_candidate = values.setdefault(run.measure, {}).setdefault(run.candidate, {})
            of_candidate.setdefault(figure, []).append(value)
    return {
        measure: {
            candidate: {figure: Spread(median(each), min(each), max(each)) for figure, each in figures.items()}
            for candidate, figures in candidates.items()
        }
        for measure, candidates in values.items()
    }


def write(results: Results, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{results.suite}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    return path


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def summary(results: Results) -> str:
    """A line per target: what was promised, what was measured, and whether it holds."""
    if not results.verdicts:
        return "nothing is promised here; the figures are in the file"
    width = max((len(verdict.target.name) for verdict in results.verdicts), default=0)
    lines = [f"{'':{width}} {'target':>8} {'median':>8}  {'min–max':17}"]
    for verdict in results.verdicts:
        span = f"{shown(verdict.lowest)}–{shown(verdict.highest)}"
        target, middle = verdict.target, shown(verdict.median)
        lines.append(f"{target.name:{width}} {target.wanted:>8} {middle:>8}  {span:17} {word(verdict)}")
    lines.extend(f"{candidate} is left out: {why}" for candidate, why in results.left_out.items())
    if results.rounds < ENOUGH:
        lines.append(f"{results.rounds} rounds only: a verdict needs {ENOUGH}")
    return "\n".join(line.rstrip() for line in lines)


def word(verdict: Verdict) -> str:
    if verdict.met is None:
        return ""
    if verdict.median is None:
        return "NOT MEASURED"
    return "met" if verdict.met else "NOT MET"


def shown(value: float | None) -> str:
    """Three figures that count, and none before the point cut off."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
