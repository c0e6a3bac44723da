"""What is promised, as data, and whether a number of runs keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec

from benches.rounds import Run


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`ours` divided by `peer`, both of one measure and one round; without a peer, the figure itself."""

    name: str
    measure: str
    ours: str
    peer: str | None = None
    figure: str = "rate"
    at_least: float | None = None
    at_most: float | None = None
    """Neither: only reported."""

    @property
    def wanted(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "–" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def promised(self) -> bool:
        return self.at_least is not None or self.at_most is not None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    target: Target
    per_round: list[float]
    median: float | None
    lowest: float | None
    highest: float | None
    met: bool | None
    """By the median; `None` for what is only reported. Without a single value it is not met."""


def judge(target: Target, runs: Sequence[Run]) -> Verdict:
    ours, peer = _by_round(target, target.ours, runs), _by_round(target, target.peer, runs)
    values = [
        value / peer[number] if target.peer else value for number, value in ours.items() if _has(target, peer, number)
    ]
    middle = median(values) if values else None
    return Verdict(
        target=target,
        per_round=[round(value, 4) for value in values],
        median=None if middle is None else round(middle, 4),
        lowest=round(min(values), 4) if values else None,
        highest=round(max(values), 4) if values else None,
        met=_holds(target, middle) if target.promised else None,
    )


def _by_round(target: Target, candidate: str | None, runs: Sequence[Run]) -> dict[int, float]:
    return {
        run.round: run.figures[target.figure]
        for run in runs
        if run.measure == target.measure and run.candidate == candidate
    }


def _has(target: Target, peer: dict[int, float], number: int) -> bool:
    return target.peer is None or peer.get(number, 0) > 0


def _holds(target: Target, value: float | None) -> bool:
    if value is None:
        return False
    return (target.at_least is None or value >= target.at_least) and (target.at_most is None or value <= target.at_most)
