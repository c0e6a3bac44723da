"""Tables for people, JSON for programs, and the bar of a replay."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from acemq.patterns.replay import ReplayResult

WIDTH = 100
"""Columns of a table, also on a wider terminal."""
BODY_SHOWN = 64 * 1024
"""Bytes of a body."""

STYLES = {"ok": "green", "up": "green", "look": "yellow", "degraded": "yellow", "wrong": "red", "down": "red"}
"""Never colour alone: the word says it too."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # for `ending`, where rich would leave with 1, which means something else here


class Output:
    """Where a command writes: tables, or with `--json` one object."""

    def __init__(self, *, as_json: bool, wide: bool = False) -> None:
        self.as_json = as_json
        self._console = _Console(highlight=False)
        self._wide = wide

    def items(self, kind: str, items: Sequence[Any], **more: Any) -> None:
        """One JSON object, where that is asked for."""
        if self.as_json:
            _write(kind, {"items": items, "next": None, **more})

    def acted(self, affected: int, *, skipped: Mapping[str, int], took: timedelta, **more: Any) -> None:
        if self.as_json:
            _write("acted", {"affected": affected, "skipped": skipped, "took": took, **more})

    def error(self, kind: str, message: str, **more: object) -> None:
        if self.as_json:
            _write("error", {"error": kind, "message": message, **more}, to_error=True)
        else:
            print(clean(message), file=sys.stderr, flush=True)

    def say(self, line: str = "") -> None:
        """A line for people, broken between words at a terminal and nowhere else."""
        if not self.as_json:
            self._console.print(Text(clean(line)), soft_wrap=not self._console.is_terminal)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        right: Sequence[str] = (),
        a_line_each: bool = False,
    ) -> None:
        """At a terminal a last column that does not fit is broken into lines, or with `a_line_each` cut.

        Elsewhere, and with `wide`, neither.
        """
        if self.as_json:
            return
        cells = [[clean(shown(value)).replace("\n", " ") for value in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
        before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        if self._console.is_terminal and not self._wide:
            widths[-1] = min(widths[-1], max(min(self._console.width, WIDTH) - before, _LEAST))
        for number, row in enumerate([columns, *cells]):
            line = Text(no_wrap=True)
            for column, cell, width in zip(columns[:-1], row, widths, strict=False):
                line.append(_aligned(_styled(cell, number), width, column in right)).append(_GAP)
            last = _styled(row[-1], number)
            if a_line_each:
                last.truncate(widths[-1], overflow="ellipsis")
            for part in last.wrap(self._console, widths[-1]) or [last]:
                line.append(_aligned(part, widths[-1], columns[-1] in right))
                line.rstrip()
                self._console.print(line, soft_wrap=True)
                line = Text(" " * before, no_wrap=True)


def _styled(cell: str, number: int) -> Text:
    return Text(cell, style="bold" if number == 0 else STYLES.get(cell, ""))


def _aligned(cell: Text, width: int, right: bool) -> Text:
    cell.rstrip()
    cell.align("right" if right else "left", width)
    return cell


_GAP = "  "
_LEAST = 20
"""Columns that the last cell of a row is given in any case."""


def shown(value: object) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case datetime():
            return value.astimezone().strftime("%Y-%m-%d %H:%M:%S%z")
        case timedelta():
            return f"{value.total_seconds():.1f} s"
        case _:
            return str(value)


def clean(text: str) -> str:
    """Without what could steer a terminal: messages come from anybody."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def body_of(body: bytes) -> str:
    """For people: JSON indented, text as it is, the rest as hex; cut at `BODY_SHOWN`."""
    cut = f"\n… and {len(body) - BODY_SHOWN:,} bytes more" if len(body) > BODY_SHOWN else ""
    part = body[:BODY_SHOWN]
    if not cut:
        try:
            return msgspec.json.format(part, indent=2).decode()
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
    try:
        return part.decode() + cut
    except UnicodeDecodeError:
        return part.hex(" ", 4) + cut


# JSON


def _write(kind: str, fields: Mapping[str, Any], *, to_error: bool = False) -> None:
    whole = {"acemq": 1, "kind": kind, "at": datetime.now(UTC), **fields}
    print(msgspec.json.encode(plain(whole)).decode(), file=sys.stderr if to_error else sys.stdout, flush=True)


def plain(value: Any) -> Any:
    """As JSON says it: durations in seconds, times in UTC, bytes as text, or as base64 where they are none."""
    match value:
        case msgspec.Struct():
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return [plain(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
        case timedelta():
            return round(value.total_seconds(), 3)
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                return {"base64": base64.b64encode(value).decode()}
        case _:
            return value


# Progress


@contextmanager
def bar(label: str, total: int, output: Output) -> Generator[Callable[[ReplayResult], None]]:
    """A bar on standard error, where that is a terminal and people are spoken to; what it gives moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = output.as_json or not console.is_terminal
    with Progress(*columns, console=console, disable=hidden) as progress:
        task = progress.add_task(escape(clean(label)), total=total, more="")

        def moved(result: ReplayResult) -> None:
            more = f"{result.put_back:,} stay" if result.put_back else ""
            progress.update(task, completed=min(result.looked_at, total), more=more)

        yield moved
