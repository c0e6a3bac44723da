"""Real terminals: one whose keys and signals go through the system, and one that draws a screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.services import CannotBeHad, install

ROOT = Path(__file__).parents[2]
COLUMNS, ROWS = 100, 60
CTRL_C = "\x03"


def wait_for(holds: Callable[[str], bool], what: str, shown: Callable[[], str], within: float = 20) -> None:
    """Return as soon as it holds of what is shown; fail, showing that, when it does not in time."""
    end = time.monotonic() + within
    while not holds(shown()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within} s: {what}; there is {shown()[-800:]!r}")
        time.sleep(0.02)


class Pty:
    """One command on a pseudo-terminal of its own, where Ctrl-C is a key that the system turns into a signal."""

    # In a process of its own, since one with threads must not fork. SIGINT may be ignored where the tests run.
    _SPAWN = (
        "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )

    def __init__(self, *words: str, url: str, output: Path) -> None:
        self._output = output
        with output.open("wb") as written:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self._SPAWN, sys.executable, "-W", "error", "-m", "acemq.cli", *words],
                cwd=ROOT,
                env={**os.environ, "ACEMQ_URL": url, "COLUMNS": str(COLUMNS), "TERM": "xterm"},
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def shows(self, text: str) -> None:
        """Wait for it."""
        wait_for(lambda output: text in output, repr(text), lambda: self.output)

    def press(self, keys: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(keys.encode())
        self._process.stdin.flush()

    def ended(self) -> int:
        """Its exit code."""
        return self._process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()  # what runs in the terminal is hung up with it
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


class Tmux:
    """A shell in a terminal that draws, on a server of its own."""

    PROMPT = "$"

    def __init__(self, **environment: str) -> None:
        if shutil.which("tmux") is None:
            install("tmux")
        self._folder = tempfile.TemporaryDirectory(prefix="acemq-tmux-")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {"PATH": path, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", **environment}
        # COLUMNS would be believed instead of the terminal, and is set where processes share the tests.
        not_ours = ("TMUX", "ACEMQ", "LC_", "COLUMNS", "LINES")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(not_ours)}
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "exec sh", environment={**kept, **given})

    def _tmux(self, *words: str, environment: dict[str, str] | None = None) -> str:
        command = ["tmux", "-u", "-S", f"{self._folder.name}/socket", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        if done.returncode != 0:
            raise CannotBeHad(f"tmux {words[0]}: {done.stderr.strip()}")
        return done.stdout

    def enter(self, line: str) -> None:
        self._tmux("send-keys", "-l", line)
        # Seen first: else the prompt before it could be taken for the one behind it.
        self._wait(lambda screen: screen.rstrip().endswith(line), f"{line!r} as it was typed")
        self._tmux("send-keys", "Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    @property
    def screen(self) -> str:
        """As a person sees it."""
        return self._tmux("capture-pane", "-p").rstrip("\n")

    def shows(self, text: str) -> None:
        self._wait(lambda screen: text in screen, repr(text))

    def is_at_rest(self) -> None:
        """Wait for the prompt behind what was run."""
        self._wait(lambda screen: screen.splitlines()[-1:] == [self.PROMPT], "a prompt at the end")

    def clear(self) -> None:
        self.enter("clear")
        self._wait(lambda screen: screen.strip() == self.PROMPT, "an empty screen")

    def _wait(self, holds: Callable[[str], bool], what: str) -> None:
        wait_for(holds, what, lambda: self.screen)

    def __enter__(self) -> Self:
        try:
            self._wait(lambda screen: screen.strip() in ("#", "$"), "the first prompt")
            self.enter(f"PS1='{self.PROMPT} '")  # root's is another
            self.is_at_rest()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._tmux("kill-server")
        self._folder.cleanup()
