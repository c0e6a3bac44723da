"""What came of making a topology, where it was not said: cut short, or refused in the middle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from acemq.plan import Finding, Plan

SHOWN = 10
"""Names in a sentence."""


class Made(msgspec.Struct, frozen=True):
    """What the broker has now of what was missing before, by another look."""

    made: tuple[str, ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    """This broker does not list them; to make them again is harmless."""

    def __str__(self) -> str:
        parts = (("made", self.made), ("not made", self.missing), ("this broker does not tell of", self.unknown))
        return "; ".join(f"{state}: {_listed(names)}" for state, names in parts if names)


def made_between(before: Plan, now: Plan) -> Made:
    """Both of the same topology. Somebody else may have made it meanwhile: what counts is that it is there."""
    was_missing = {_name(finding) for finding in before.findings if finding.verdict == "missing"}
    found: dict[str, list[str]] = {"made": [], "missing": [], "unknown": []}
    for finding in now.findings:
        if _name(finding) in was_missing:
            # With a note it was taken to be there, and not seen.
            state = "missing" if finding.verdict == "missing" else "unknown" if finding.note else "made"
            found[state].append(_name(finding))
    return Made(*map(tuple, found.values()))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _name(finding: Finding) -> str:
    return f"{finding.kind} {finding.name}"
