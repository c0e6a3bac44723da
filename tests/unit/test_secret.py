"""The watch over passwords (tests/secret.py) sees one wherever it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from acemq.errors import ConfigurationError, PublishRefusedError
from tests.secret import PASSWORD

ROOT = Path(__file__).parents[2]
PRINTING = {
    "stdout": "print(URL)",
    "stderr": "print(URL, file=sys.stderr)",
    "a child's stdout": "subprocess.run([sys.executable, '-c', f'print({URL!r})'], check=True)",
    "a log line": "logging.getLogger('acemq').warning('dialling %s', URL)",
    "a log line of the driver": "logging.getLogger('aiormq.connection').warning('dialling %s', URL)",
    "a traceback in the log": "\n    try: raise OSError(URL)\n    except OSError: logging.exception('lost')",
    "nothing": "print('dialling')",
}


def test_a_test_that_prints_it_fails_whatever_it_asserts(tmp_path: Path) -> None:
    lines = ["import logging, subprocess, sys", f"URL = 'amqp://guest:{PASSWORD}@h'"]
    for number, statement in enumerate(PRINTING.values()):
        lines.append(f"def test_{number}(): {statement}")
    (tmp_path / "test_printing.py").write_text("\n".join(lines))
    (tmp_path / "conftest.py").write_text(
        "from tests.conftest import no_error_shows_a_password, pytest_runtest_makereport"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert f"{len(PRINTING) - 1} failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert PASSWORD not in done.stdout


@pytest.mark.parametrize("made", [ConfigurationError, lambda text: PublishRefusedError(text, message_id="m-1")])
def test_an_error_of_ours_with_it_cannot_be_made(made: type[Exception]) -> None:
    with pytest.raises(AssertionError, match="Error shows a password") as leak:
        made(f"no answer from amqp://guest:{PASSWORD}@h")
    assert PASSWORD not in str(leak.value)
