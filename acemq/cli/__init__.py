"""The command `acemq`: what the ops layer returns, as tables for people and as JSON for programs.

commands.py   the commands, and outbox.py      options.py    what several of them can be told
target.py     which broker, which topology     databases.py  a store in a database, opened for one command
running.py    how a command ends               showing.py    tables, JSON, the progress bar
"""

from __future__ import annotations

import sys

from acemq.errors import MissingExtraError


def main() -> None:
    """The console script. It is installed with the package, and what it needs with the extra `cli`."""
    try:
        from acemq.cli.commands import app
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        print(MissingExtraError("The command acemq", "cli"), file=sys.stderr)
        sys.exit(2)
    app(prog_name="acemq")
