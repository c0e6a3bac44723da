"""Rounds: every candidate of every measure once a round, in turns, so that a slow minute hits all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benches.running import Figures, RunFailed


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One thing that is measured, and who takes part: a call is one run in a fresh process."""

    name: str
    candidates: Mapping[str, Callable[[], Figures]]
    most_rounds: int | None = None
    """For what takes long and varies little."""


class Run(msgspec.Struct, frozen=True):
    measure: str
    candidate: str
    round: int
    figures: Figures


def run_rounds(measures: Sequence[Measure], rounds: int, say: Callable[[str], None]) -> Iterator[Run]:
    """Every run as it is done. One that fails is said and left out, so its targets are not met."""
    for number in range(rounds):
        for measure in measures:
            if measure.most_rounds is not None and number >= measure.most_rounds:
                continue
            names = list(measure.candidates)
            first = number % len(names)  # nobody always runs first, on the queue that was filled last
            for name in names[first:] + names[:first]:
                try:
                    figures = measure.candidates[name]()
                except RunFailed as failure:
                    say(f"round {number + 1}, {measure.name}, {name}: FAILED, {failure}")
                    continue
                shown = ", ".join(f"{figure} {value:,g}" for figure, value in figures.items())
                say(f"round {number + 1}, {measure.name}, {name}: {shown}")
                yield Run(measure.name, name, number, figures)
