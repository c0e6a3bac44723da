"""What a broker has of a topology and what it lacks: the answer to `declare` and `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from acemq.errors import DriftError, TopologyError


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What was found about one object, or about one argument of it."""

    verdict: Literal["present", "created", "drift", "missing"]
    kind: Literal["queue", "exchange", "binding"]
    name: str
    argument: str | None = None
    """With `drift` only, as are `wanted` and `found`."""
    wanted: object = None
    found: object = None
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:<8} {self.kind:<9} {self.name}"
        if self.argument is not None:
            line += f": {self.argument} wanted {self.wanted!r}, found {self.found!r}"
        return f"{line} ({self.note})" if self.note else line


class Plan(msgspec.Struct, frozen=True):
    """What `declare` found, object by object, and what should be known about it. It prints as one line for each."""

    findings: tuple[Finding, ...]
    advice: tuple[str, ...] = ()
    """Sentences about what no argument is wrong with and messages may yet be lost by."""

    @property
    def drifted(self) -> bool:
        """The broker has an object otherwise than it is described. Nothing of ours will change it."""
        return any(finding.verdict == "drift" for finding in self.findings)

    @property
    def missing(self) -> bool:
        """The broker lacks an object, and it was not made."""
        return any(finding.verdict == "missing" for finding in self.findings)

    def __str__(self) -> str:
        lines = [*map(str, self.findings), *(f"advice   {sentence}" for sentence in self.advice)]
        return "\n".join(lines) or "nothing is described"


def refuse_drift(findings: Sequence[Finding], *, nor_missing: bool = False) -> None:
    """Raise `DriftError` for what differs; with `nor_missing` also for what is missing, by itself a `TopologyError`."""
    drifts = [problem(finding) for finding in findings if finding.verdict == "drift"]
    gaps = [problem(finding) for finding in findings if nor_missing and finding.verdict == "missing"]
    if drifts:
        raise DriftError(Plan(tuple(findings)), *drifts, *gaps)
    if gaps:
        raise TopologyError(*gaps)


def problem(finding: Finding) -> str:
    """A drift, or something missing, as an error tells it."""
    what = f"{finding.kind} {finding.name if finding.kind == 'binding' else repr(finding.name)}"
    if finding.verdict == "missing":
        return f"{what} is missing"
    if finding.argument is None:
        return f"{what}: {finding.note}"
    return (
        f"{what} has {finding.argument}={finding.found!r}, and {finding.wanted!r} is wanted; "
        "a broker never changes it: delete it or describe it as it is"
    )
