"""How long `import acemq` takes, beside the two libraries that it cannot do without."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial

from benches.rounds import Measure
from benches.running import ROOT, Figures
from benches.targets import Target

IMPORT = "import, without the start of the interpreter"

OURS = "import acemq"
NEEDED = "import msgspec, opentelemetry.trace, opentelemetry.metrics"
LITERAL = "import msgspec, opentelemetry"
"""`opentelemetry` alone is a namespace without a line of code in it."""

# Promised in processor time: an import does nothing but compute, and the clock also counts what others do meanwhile.
TARGETS = (
    Target(
        name="import acemq, of what it stands on", measure=IMPORT, ours=OURS, peer=NEEDED, figure="cpu_ms", at_most=2.0
    ),
    Target(name="the same by the clock", measure=IMPORT, ours=OURS, peer=NEEDED, figure="ms"),
    Target(name="of msgspec and the bare opentelemetry", measure=IMPORT, ours=OURS, peer=LITERAL, figure="cpu_ms"),
)


def measures(*, quick: bool = False) -> Sequence[Measure]:
    tries = 3 if quick else 9
    return (
        Measure(
            name=IMPORT,
            candidates={statement: partial(_cost, statement, tries) for statement in (OURS, NEEDED, LITERAL)},
        ),
    )


def _cost(statement: str, tries: int) -> Figures:
    """The shortest of some tries, less the shortest of as many bare starts in between."""
    with tempfile.TemporaryDirectory() as bytecode:
        # As on a second start, wherever and with whatever settings this runs: compiled, and the files in memory.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = bytecode
        _start(statement, environment)
        tried = [(_start(statement, environment), _start("pass", environment)) for _ in range(tries)]
    return {
        "ms": round(min(wall for (wall, _), _ in tried) - min(bare for _, (bare, _) in tried), 2),
        "cpu_ms": round(min(cpu for (_, cpu), _ in tried) - min(bare for _, (_, bare) in tried), 2),
    }


def _start(statement: str, environment: dict[str, str]) -> tuple[float, float]:
    """Milliseconds, by the clock and of the processor, that an interpreter takes to start, execute this and end."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], cwd=ROOT, env=environment, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall * 1_000, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1_000
