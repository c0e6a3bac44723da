"""The options that several commands have."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

import typer


def duration(text: str | timedelta) -> timedelta:
    if isinstance(text, timedelta):  # typer passes defaults through here as well
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    if found is None or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no length of time; write 30s, 10m, 2h or 1d")
    unit = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[found[2]]
    return timedelta(**{unit: float(found[1])})


Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The broker. Else ACEMQ_URL, which no list of processes shows."),
]
TopologyName = Annotated[
    str | None,
    typer.Option(
        "--topology", metavar="MODULE:NAME", help="Your Topology, or a function returning it. Else ACEMQ_TOPOLOGY."
    ),
]
Timeout = Annotated[
    timedelta,
    typer.Option("--timeout", parser=duration, metavar="TIME", show_default="10s", help="How long to try to connect."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")]
Wide = Annotated[bool, typer.Option("--wide", help="Cut nothing off, and break no line.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Names = Annotated[list[str] | None, typer.Argument(metavar="[QUEUE]...", help="Else those of the topology.")]

TEN_SECONDS = timedelta(seconds=10)
