"""Who ends and removes what a killed test session left running."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache


class _Heir:
    """A small process that outlives this one by a moment and ends and removes what it left.

    It learns of our end, SIGKILL included, because its pipe closes. PR_SET_PDEATHSIG would not do: it speaks of
    the thread that started the child, and a server may be started in a thread of a pool.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # else whoever reads our output would wait for its end
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def keep(self, kind: str, what: object) -> None:
        self._tell(f"+ {kind} {what}")

    def forget(self, kind: str, what: object) -> None:
        self._tell(f"- {kind} {what}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


heir = cache(_Heir)
"""The one of this process, made when the first server is."""


def _inherit(lines: Iterable[str]) -> None:
    """What the heir does: listen until the pipe closes, then end and remove what is on the list."""
    left: set[tuple[str, str]] = set()
    for line in lines:
        sign, kind, what = line.rstrip("\n").split(" ", 2)
        (left.add if sign == "+" else left.discard)((kind, what))
    for kind, what in left:
        if kind == "group":
            with suppress(ProcessLookupError):
                os.killpg(int(what), signal.SIGKILL)
    for kind, what in left:
        if kind == "folder":
            shutil.rmtree(what, ignore_errors=True)


if __name__ == "__main__":
    _inherit(sys.stdin)
