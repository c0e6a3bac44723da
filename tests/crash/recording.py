"""What happened in a process that may be killed at any moment: a file of lines, each on disk before the next thing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Line(NamedTuple):
    what: str
    """began, held, ended, …"""
    id: str
    attempt: int
    pid: int
    deliveries: int
    """By the broker's count; 0 where it keeps none."""


class Recorder:
    """Several processes may write to one file: a line is one write."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.touch()
        self._file: int | None = None

    def note(self, what: str, id: str = "-", attempt: int = 0, deliveries: int | None = None) -> None:
        """Return once it is on disk."""
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(self._file, f"{what} {id} {attempt} {os.getpid()} {deliveries or 0}\n".encode())
        os.fsync(self._file)

    def lines(self, what: str | None = None, *, pid: int | None = None) -> list[Line]:
        found: list[Line] = []
        whole = self._path.read_text().rpartition("\n")[0]  # a line that is being written may be there in part
        for text in whole.splitlines():
            kind, id, *numbers = text.split(" ")
            line = Line(kind, id, *map(int, numbers))
            if what in (None, line.what) and pid in (None, line.pid):
                found.append(line)
        return found

    def ids(self, what: str) -> list[str]:
        return [line.id for line in self.lines(what)]
