"""Numbers as a sentence has them."""

from __future__ import annotations


def counted(count: int, thing: str) -> str:
    """`1 message`, `2,000 messages`."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
