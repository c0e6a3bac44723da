"""Options that a call takes as keywords: a misspelt one is refused, and the answer names those that there are."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def check_keywords(call: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """`TypeError`, as Python itself would say it; `call` is the name of what was called."""
    if unknown := given.keys() - known:
        raise TypeError(
            f"{call}() got an unexpected keyword argument {min(unknown)!r}; known: {', '.join(sorted(known))}"
        )
