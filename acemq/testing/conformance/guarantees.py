"""What a transport really guarantees: a row is a name, the scenarios that show it, and how its cell is written.

A cell stands only when every scenario of its row that could run has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

Facts = Mapping[str, Any]
"""Capabilities, as a report has them, and beside them what was measured."""


class Row(msgspec.Struct, frozen=True):
    name: str
    by: tuple[str, ...]
    """The scenarios that show it; none: the transport's own word, and marked as that."""
    cell: Callable[[Facts], str] = lambda _: "yes"
    needs: str = ""
    """The capability without which the cell is "no", as C-120 shows."""
    about: tuple[str, ...] = ()
    """Other capabilities that the cell tells of."""


class Guarantee(msgspec.Struct, frozen=True, kw_only=True):
    row: str
    value: str
    shown: bool
    by: tuple[str, ...]
    note: str = ""


def _length(seconds: object) -> str:
    if not isinstance(seconds, int | float):
        return str(seconds)
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count:,} bytes"


def _holding(facts: Facts) -> str:
    lease = facts["lease"]
    held_for = _length(lease["default"]) if lease else "its link"
    limit = facts["hold_limit"]
    return f"{held_for} / {_length(limit) if limit is not None else 'any'}"


ROWS: tuple[Row, ...] = (
    Row("accepted survives a restart of the server", ("C-104",), needs="durable"),
    Row("delivered at least once", ("C-076", "C-078", "C-100"), about=("delivery",)),
    Row("delivered twice without a fault", ("C-059", "C-060"), lambda _: "no"),
    Row(
        "an unroutable message is told",
        ("C-014", "C-015", "C-019"),
        lambda facts: "yes" if facts["unroutable"] == "told" else str(facts["unroutable"]),
        needs="unroutable",
    ),
    Row("order of one publisher into one queue", ("C-023", "C-024"), needs="ordering", about=("ordered_queues",)),
    Row(
        "place after a requeue",
        ("C-069",),
        lambda facts: {"head": "kept", "tail": "tail", "any": "not certain"}[facts.get("place", "any")],
        about=("requeue_place",),
    ),
    Row(
        "longest delayed send",
        ("C-089", "C-091"),
        lambda facts: _length(facts["publish_delay"]),
        needs="publish_delay",
    ),
    Row(
        "longest delayed requeue",
        ("C-070", "C-072"),
        lambda facts: _length(facts["requeue_delay"]),
        needs="requeue_delay",
    ),
    Row("attempt rises without a copy", ("C-071",), needs="requeue_rewrites"),
    Row("a stale settlement changes nothing", ("C-074", "C-081"), needs="fenced"),
    Row(
        "a delivery is held for / at most",
        ("C-078", "C-079", "C-080", "C-087"),
        _holding,
        about=("lease", "hold_limit"),
    ),
    Row("exclusive consumer", ("C-065", "C-066"), needs="exclusive"),
    Row(
        "priority levels, native",
        ("C-097", "C-098"),
        lambda facts: f"{facts['priorities']}",
        needs="priorities",
    ),
    Row("expiry of one message in the broker", ("C-095", "C-096"), needs="expiry"),
    Row("expired messages are never handled", ("C-126",)),
    Row(
        "a length limit refuses, never drops",
        ("C-025",),
        lambda facts: f"yes, {facts['beyond max_length']} late" if facts.get("beyond max_length") else "yes",
        needs="max_length",
    ),
    Row("largest message", ("C-031",), lambda facts: _size(facts["max_message"]), needs="max_message"),
    Row(
        "header values come back equal",
        ("C-028", "C-029"),
        lambda facts: "but for nan and inf, which are refused" if "numbers that are not finite" in facts else "yes",
    ),
    Row("send inside your transaction", ("C-115", "C-116", "C-117", "C-118"), needs="transactions"),
    Row("each queue of a fan-out has a copy of its own", ("C-046", "C-048", "C-049")),
    Row("topic patterns", ("C-047",), lambda facts: str(facts["topic_patterns"]), needs="topic_patterns"),
    Row(
        "deliveries are counted",
        ("C-069",),
        lambda facts: str(facts.get("deliveries counted", "no")),
        about=("counts_deliveries",),
    ),
    Row(
        "the broker gives a message up by itself",
        (),
        lambda facts: f"after {facts['delivery_limit']} deliveries" if facts["delivery_limit"] is not None else "never",
        about=("delivery_limit",),
    ),
    Row("all on the server gone: made again", ("C-105",)),
    Row("a queue deleted under a consumer: waited for", ("C-106",)),
    Row("consuming while the broker takes no publishes", ("C-108",)),
    Row("rungs for long retry waits", (), needs="dead_letter_routes"),
    Row("consumer priority", (), needs="consumer_priority"),
    Row("arguments of a consumer", (), needs="consumer_arguments"),
    Row("streams", (), needs="streams"),
    Row(
        "batches cut up at",
        ("C-121",),
        lambda facts: f"{facts['max_batch']}",
        needs="max_batch",
        about=("max_batch_bytes",),
    ),
    Row("depth", ("C-112", "C-113"), lambda facts: str(facts["depth"]), needs="depth"),
    Row("retries, dead letters, parking, replay", ("C-122", "C-123", "C-127")),
    Row(
        "an idle consumer is woken after, p50",
        ("C-056",),
        lambda facts: f"{facts['pick-up p50, ms']:g} ms" if "pick-up p50, ms" in facts else "–",
    ),
)


def guarantees(capabilities: Facts, scenarios: Mapping[str, Mapping[str, Any]]) -> list[Guarantee]:
    """The cells of one report; `scenarios` are its entries by id."""
    facts: dict[str, Any] = {**capabilities}
    for entry in scenarios.values():
        facts |= {name: value for name, value in entry["measured"].items() if name not in capabilities}
    return [_guarantee(row, facts, scenarios) for row in ROWS]


def _guarantee(row: Row, facts: Facts, scenarios: Mapping[str, Mapping[str, Any]]) -> Guarantee:
    if row.needs and not is_declared(facts, row.needs):
        refused = scenarios.get("C-120", {}).get("outcome") == "passed"
        return Guarantee(row=row.name, value="no", shown=refused, by=("C-120",))
    outcomes = {id: scenarios.get(id, {"outcome": "skipped", "reason": "not run"}) for id in row.by}
    bad = [id for id, entry in outcomes.items() if entry["outcome"] in ("failed", "gap")]
    if bad:
        return Guarantee(row=row.name, value="not shown", shown=False, by=row.by, note=", ".join(bad))
    ran = tuple(id for id, entry in outcomes.items() if entry["outcome"] == "passed")
    unshown = {id: entry["reason"] for id, entry in outcomes.items() if _is_unshown(entry)}
    if not row.by:
        return Guarantee(row=row.name, value=row.cell(facts), shown=False, by=(), note="the transport's own word")
    if unshown or not ran:
        note = "; ".join(f"{id}: {reason}" for id, reason in unshown.items()) or "nothing of it ran"
        return Guarantee(row=row.name, value=row.cell(facts), shown=False, by=row.by, note=note)
    return Guarantee(row=row.name, value=row.cell(facts), shown=True, by=ran)


def _is_unshown(entry: Mapping[str, Any]) -> bool:
    """Skipped for another reason than that it does not apply to this transport."""
    return entry["outcome"] == "skipped" and not entry["reason"].startswith("not declared")


def is_declared(facts: Facts, capability: str) -> bool:
    """Of capabilities as a report has them."""
    return facts.get(capability) not in (None, False, 0, 0.0, "none", "unknown")


# The table


def table(reports: list[dict[str, Any]]) -> str:
    """Reports side by side, in Markdown. A cell that no scenario has shown is in italics, with a footnote."""
    notes: list[str] = []
    lines = [
        ["", *(report["transport"] for report in reports), "shown by"],
        ["---"] * (len(reports) + 2),
    ]
    for row in ROWS:
        found = [_of(report, row.name) for report in reports]
        lines.append([row.name, *(_cell(each, notes) for each in found), " ".join(row.by) or "–"])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    told = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{text}\n\n{told}" if told else text


def _of(report: Mapping[str, Any], row: str) -> Mapping[str, Any] | None:
    return next((each for each in report["guarantees"] if each["row"] == row), None)


def _cell(found: Mapping[str, Any] | None, notes: list[str]) -> str:
    if found is None:
        return "–"
    if found["shown"]:
        return str(found["value"])
    if found["value"] == "not shown":
        return f"**not shown** ({found['note']})"
    note = found.get("note") or "not shown by a scenario"
    if note not in notes:
        notes.append(note)
    return f"*{found['value']}* ({notes.index(note) + 1})"
