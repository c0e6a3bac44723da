"""The client in C: built where a compiler and the headers of librabbitmq are, left out in plain sight elsewhere."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

from benches.running import Task

SOURCE = Path(__file__).parent / "clients" / "librabbitmq.c"


class CannotBeBuilt(Exception):
    """The text says what is missing."""


def build(folder: Path) -> Path:
    """The program, made in `folder`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotBeBuilt("there is no C compiler")
    program = folder / "librabbitmq_client"
    command = [compiler, "-O2", "-o", str(program), str(SOURCE), "-lrabbitmq"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        if "amqp.h" in done.stderr:
            raise CannotBeBuilt("the headers of librabbitmq are missing (on Debian: librabbitmq-dev)")
        raise CannotBeBuilt(f"the compiler ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    return program


def command(program: Path, task: Task) -> list[str]:
    url = urlsplit(task.url)
    who = (unquote(url.username or "guest"), unquote(url.password or "guest"))
    where = (task.job, url.hostname or "localhost", url.port or 5672, *who, task.queue)
    how = (task.count, task.size, task.window, task.prefetch, task.ack_every, task.rate, task.limit)
    return [str(program), *map(str, (*where, *how))]
