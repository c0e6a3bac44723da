"""The page of the documentation that shows the results: `python -m benches.page` prints it in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from benches.results import Results, Spread, read, shown, word

PUBLISHED = Path(__file__).parent / "results"

TITLES = {"rabbitmq": "RabbitMQ", "memory": "Memory transport", "import": "Import"}
"""In the order of the page."""

_COLUMNS = {
    "rate": "messages/s",
    "cpu_per_10k": "CPU s per 10,000",
    "rss_mb": "peak memory, MB",
    "grown_mb": "grown, MB",
    "ms": "ms",
    "cpu_ms": "CPU ms",
}
_WITH_RANGE = ("rate", "ms")

INTRODUCTION = """\
# Speed

Measured by `make bench`. Only the ratios are promised: absolute figures are those of one machine, on which the broker
and all clients share the processors. Every run is a process of its own, the candidates of a measure take turns within
each round, and a target holds when the median of its ratios over all rounds meets it. All run on plain asyncio.
"""


def render(every: Iterable[Results]) -> str:
    return "\n".join((INTRODUCTION, *(line for results in every for line in _suite(results))))


def _suite(results: Results) -> Iterator[str]:
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    yield f"## {TITLES.get(results.suite, results.suite)}"
    yield ""
    yield (
        f"{results.rounds} rounds on {results.date}: {machine.cpus} CPUs, {machine.system}, {machine.python}"
        f"{f', {machine.broker}' if machine.broker else ''}; {packages}."
    )
    yield ""
    yield "| | target | median | min–max | |"
    yield "|---|---:|---:|---:|---|"
    for verdict in results.verdicts:
        target, span = verdict.target, f"{shown(verdict.lowest)}–{shown(verdict.highest)}"
        yield f"| {target.name} | {target.wanted} | {shown(verdict.median)} | {span} | {word(verdict)} |"
    for measure, candidates in results.measures.items():
        figures = [figure for figure in _COLUMNS if any(figure in found for found in candidates.values())]
        yield ""
        yield f"| {measure} | {' | '.join(_COLUMNS[figure] for figure in figures)} |"
        yield f"|---|{'---:|' * len(figures)}"
        for candidate, found in candidates.items():
            yield f"| {candidate} | {' | '.join(_cell(figure, found.get(figure)) for figure in figures)} |"
    yield ""


def _cell(figure: str, spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if figure in _WITH_RANGE:
        return f"{shown(spread.median)} ({shown(spread.lowest)}–{shown(spread.highest)})"
    return shown(spread.median)


def published(folder: Path = PUBLISHED) -> list[Results]:
    return [read(path) for suite in TITLES if (path := folder / f"{suite}.json").exists()]


if __name__ == "__main__":
    print(render(published()))
