"""The results as Markdown, for the pages of the documentation that show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benches.results import Results, Spread, read, shown
from benches.targets import Target, Verdict

PUBLISHED = Path(__file__).parent / "results"

TITLES = {
    "rabbitmq": "RabbitMQ",
    "databases": "A database as the broker",
    "ordered": "Ordered queues on RabbitMQ",
    "million": "A million messages",
    "patterns": "Patterns",
    "outbox": "Outbox and unit of work",
    "memory": "The memory transport",
    "import": "Import",
    "peers": "Other libraries on RabbitMQ",
}
"""In the order of the page."""

FIGURES = {
    "rate": "messages a second",
    "p50_ms": "p50, ms",
    "p99_ms": "p99, ms",
    "cpu_per_10k": "processor seconds for 10,000",
    "rss_mb": "memory at its highest, MB",
    "grown_mb": "memory grown by, MB",
    "ms": "ms",
    "cpu_ms": "processor ms",
    "us": "processor µs",
    "queries": "queries a second",
}
"""Those that are shown, in their order."""
_WITH_RANGE = ("rate", "p50_ms", "p99_ms", "ms")


def benchmarks(folder: Path = PUBLISHED) -> str:
    """Every suite but the costs, which have a page of their own."""
    found = [read(path) for suite in TITLES if (path := folder / f"{suite}.json").exists()]
    if not found:
        return "There are no results in `benches/results` yet. `make bench` measures and writes them."
    return "\n\n".join(part for results in found for part in _suite(results))


def _suite(results: Results) -> Iterator[str]:
    yield f"## {TITLES[results.suite]}"
    yield where(results)
    for candidate, why in results.left_out.items():
        yield f"**{candidate}** is left out: {why}."
    if results.verdicts:
        head = ("target", "beside", "wanted", "median", "lowest – highest", "kept")
        yield table(head, map(_verdict, results.verdicts))
    for measure, candidates in results.measures.items():
        figures = [figure for figure in FIGURES if any(figure in found for found in candidates.values())]
        yield f"### {measure[0].upper()}{measure[1:]}"
        rows = ((name, *(_cell(figure, found.get(figure)) for figure in figures)) for name, found in candidates.items())
        yield table(("", *(FIGURES[figure] for figure in figures)), rows)


def where(results: Results) -> str:
    """Where, when and with what it was measured."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    broker = f", {machine.broker}" if machine.broker else ""
    rounds = len({run.round for run in results.runs})
    return (
        f"{results.date}, {rounds} round{'s' * (rounds != 1)}, {machine.cpus} processors, {machine.system}, "
        f"{machine.python}{broker}. {packages}."
    )


def _verdict(verdict: Verdict) -> tuple[str, ...]:
    kept = {True: "yes", False: "**no**", None: "–"}[verdict.met]
    span = f"{shown(verdict.lowest)} – {shown(verdict.highest)}"
    return (*_work_and_peer(verdict.target), verdict.target.wanted, shown(verdict.median), span, kept)


def _work_and_peer(target: Target) -> tuple[str, str]:
    peer = target.peer or ""
    return target.name.removesuffix(f", of {peer}"), peer


def _cell(figure: str, spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if figure in _WITH_RANGE and spread.lowest != spread.highest:
        return f"{shown(spread.median)} ({shown(spread.lowest)} – {shown(spread.highest)})"
    return shown(spread.median)


def beside_peers(folder: Path = PUBLISHED) -> str:
    """Each measure of the RabbitMQ suite beside the libraries that others use, as so many times their figure."""
    path = folder / "rabbitmq.json"
    if not path.exists():
        return "There are no results in `benches/results` yet. `make bench` measures and writes them."
    results = read(path)
    rows = (
        (*_work_and_peer(each.target), f"{shown(each.median)} ×", f"{shown(each.lowest)} – {shown(each.highest)}")
        for each in results.verdicts
        if each.target.peer in _USED_BY_OTHERS
    )
    return f"{where(results)}\n\n{table(('', 'acemq, of', 'median', 'lowest – highest'), rows)}"


_USED_BY_OTHERS = ("aio-pika", "FastStream")


def costs(folder: Path = PUBLISHED) -> str:
    """A table for each measure: what is switched on, from top to bottom, and what it leaves of the rate before it."""
    path = folder / "costs.json"
    if not path.exists():
        return "There are no results in `benches/results` yet. `make bench` measures and writes them."
    results = read(path)
    parts = [where(results)]
    for measure, steps in results.measures.items():
        left = {each.target.ours: each.median for each in results.verdicts if each.target.measure == measure}
        parts.append(f"### {measure[0].upper()}{measure[1:]}")
        parts.append(
            table(
                ("switched on", FIGURES["rate"], "of the step before", FIGURES["cpu_per_10k"]),
                (
                    (
                        step if number == 0 else f"+ {step}",
                        _cell("rate", found["rate"]),
                        shown(left.get(step)),
                        shown(found["cpu_per_10k"].median),
                    )
                    for number, (step, found) in enumerate(steps.items())
                ),
            )
        )
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
