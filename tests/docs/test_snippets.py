"""Every program of the documentation runs, on memory and on RabbitMQ, and prints what the pages say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.services import RabbitMQ

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
PROGRAMS = sorted(path.name for path in SNIPPETS.glob("*.py") if not path.name.startswith("test_"))
TESTS = sorted(path.name for path in SNIPPETS.glob("test_*.py"))
ON_ANY_BROKER = [name for name in PROGRAMS if "ACEMQ_URL" in (SNIPPETS / name).read_text()]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What a program prints. It runs in this process, where warnings are errors; a fresh one takes ten times longer."""

    def run(name: str, url: str | None = None) -> str:
        if url is None:
            monkeypatch.delenv("ACEMQ_URL", raising=False)
        else:
            monkeypatch.setenv("ACEMQ_URL", url)
        runpy.run_path(str(SNIPPETS / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def printed(name: str, *, on: str = "") -> str:
    """What the pages say that a program prints: `orders.txt`, or `orders.rabbitmq.txt` where that differs."""
    special = SNIPPETS / name.replace(".py", f".{on}.txt")
    return (special if special.exists() else SNIPPETS / name.replace(".py", ".txt")).read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs_without_a_server(name: str, run: Run) -> None:
    assert run(name) == printed(name)


@pytest.fixture(scope="module")
def url_of(rabbitmq: RabbitMQ) -> Callable[[str], str]:
    """A virtual host for each program, as all of them call their queues `orders`. Made in one call: each takes long."""
    hosts = {name: f"docs-{name.removesuffix('.py')}" for name in ON_ANY_BROKER}
    steps = [
        f'rabbit_vhost:add(<<"{host}">>, <<"docs">>), rabbit_auth_backend_internal:set_permissions('
        f'<<"guest">>, <<"{host}">>, <<".*">>, <<".*">>, <<".*">>, <<"docs">>)'
        for host in hosts.values()
    ]
    rabbitmq.ctl("eval", ", ".join([*steps, "ok."]))
    return lambda name: f"{rabbitmq.url}/{hosts[name]}"


@pytest.mark.parametrize("name", ON_ANY_BROKER)
def test_it_runs_on_rabbitmq(name: str, run: Run, url_of: Callable[[str], str]) -> None:
    assert run(name, url_of(name)) == printed(name, on="rabbitmq")


def test_the_tests_shown_pass() -> None:
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(SNIPPETS / name) for name in TESTS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= len(TESTS)


def test_every_output_belongs_to_a_program() -> None:
    outputs = {path.name.split(".")[0] + ".py" for path in SNIPPETS.glob("*.txt")}
    assert outputs == set(PROGRAMS)
