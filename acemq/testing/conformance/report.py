"""What a run has shown: one file for each transport, and the lines at the end of the run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from acemq.testing.conformance.guarantees import guarantees, table
from acemq.testing.conformance.scenario import Scenario

Told = Mapping[str, Any]
"""A result, as a scenario tells it (`running.Result.told`)."""

KIT = 1
"""Grows whenever a scenario changes its meaning. A report names the kit that it was made with."""


def report_of(results: Iterable[Told]) -> dict[str, Any]:
    """Of one transport. Each scenario once; one that failed in any of its runs has failed."""
    by_id: dict[str, dict[str, Any]] = {}
    head: dict[str, Any] = {"label": "", "version": "", "server": "", "capabilities": {}}
    for told in results:
        head = {key: told[key] or head[key] for key in head}
        entry = {key: told[key] for key in ("id", "title", "outcome", "reason", "seconds", "measured")}
        if by_id.get(told["id"], {}).get("outcome") != "failed":
            by_id[told["id"]] = entry
    scenarios = dict(sorted(by_id.items()))
    return {
        "kit": KIT,
        "transport": head["label"],
        "version": head["version"],
        "server": head["server"],
        "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "capabilities": head["capabilities"],
        "scenarios": list(scenarios.values()),
        "guarantees": [
            msgspec.json.decode(msgspec.json.encode(each))
            for each in (guarantees(head["capabilities"], scenarios) if head["capabilities"] else ())
        ],
    }


def write(report: Told, folder: Path) -> list[Path]:
    """As JSON for programs and as Markdown for people."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9]+", "-", report["transport"].lower()).strip("-")
    paths = [folder / f"{stem}.json", folder / f"{stem}.md"]
    paths[0].write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    paths[1].write_text(as_markdown(report))
    return paths


def as_markdown(report: Told) -> str:
    rows = (
        f"| {each['id']} | {each['title']} | {each['outcome']} | {each['reason'].replace('|', '/')} |"
        for each in report["scenarios"]
    )
    return "\n".join(
        [
            f"# {title(report)}",
            "",
            table([dict(report)]),
            "",
            "| id | scenario | outcome | reason |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def title(report: Told) -> str:
    version = f" {report['version']}" if report["version"] else ""
    server = f" on {report['server']}" if report["server"] else ""
    return f"acemq conformance · {report['transport']}{version}{server} · kit {report['kit']}"


def counts(report: Told) -> Counter[str]:
    return Counter(each["outcome"] for each in report["scenarios"])


def summary(report: Told, written: Iterable[Path] = ()) -> list[str]:
    """What is printed at the end of a run."""
    count, scenarios = counts(report), report["scenarios"]
    gaps = [each["id"] for each in scenarios if each["outcome"] == "gap"]
    failed = [each["id"] for each in scenarios if each["outcome"] == "failed"]
    lines = [
        title(report),
        f"  {count['passed']} passed · {_with(count['gap'], 'gaps', gaps)} · {count['skipped']} skipped · "
        f"{_with(count['failed'], 'failed', failed)}",
    ]
    skips = Counter(each["reason"] for each in scenarios if each["outcome"] == "skipped")
    if skips:
        lines.append("  skipped: " + " · ".join(f"{number} {reason}" for reason, number in skips.most_common()))
    paths = [str(path) for path in written]
    return [*lines, f"  report: {', '.join(paths)}"] if paths else lines


def _with(count: int, word: str, ids: list[str]) -> str:
    return f"{count} {word} ({', '.join(ids)})" if ids else f"{count} {word}"


def skipped_groups(report: Told) -> list[str]:
    """Groups of which nothing ran."""
    groups: dict[str, set[str]] = {}
    for each in report["scenarios"]:
        group = Scenario(each["id"], each["title"]).group
        groups.setdefault(group, set()).add(each["outcome"])
    return [group for group, outcomes in sorted(groups.items()) if outcomes == {"skipped"}]
