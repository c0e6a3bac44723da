"""Case T-006: the transport of the docs, installed as a stranger's package, which acemq finds by its scheme."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "snippets" / "test_own_transport.py"

FACTORY = """

_brokers: dict[str, Broker] = {}


def transport(url: str, **options: object) -> Lists:
    return Lists(_brokers.setdefault(url, Broker()))
"""
USE = """
import asyncio, sys, acemq
from datetime import timedelta

async def main():
    attempts = []
    def fail(message):
        attempts.append(message.attempt)
        raise ValueError("boom")
    async with acemq.connect("toy://x") as mq:
        await mq.declare(acemq.Topology().queue("q", type="classic"))
        policy = acemq.RetryPolicy.fixed(3, timedelta(milliseconds=20))
        async with mq.consume("q", int, fail, retry=policy) as consumer:
            await mq.send("q", 1)
            while not consumer.counters.dead_lettered:
                await asyncio.sleep(0.01)
        print(attempts, (await mq.depth("q.dlq")).ready)
        try:
            await mq.send("q", 1, delay=timedelta(seconds=1))
        except acemq.CapabilityError as error:
            print(error)
    print(sorted(name for name in sys.modules if name.startswith("acemq.transports.")))

asyncio.run(main())
"""
SUITE = """
import acemq_toy
from acemq.testing.conformance import TransportConformance


class TestToy(TransportConformance):
    broker = acemq_toy.Broker()
    label = "toy"

    def make(self, **options):
        return acemq_toy.Lists(self.broker)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """As an installer lays it out."""
    source = EXAMPLE.read_text().replace("from acemq.testing.conformance import SmallConformance\n", "")
    (tmp_path / "acemq_toy.py").write_text(source[: source.index("class TestLists")] + FACTORY)
    information = tmp_path / "acemq_toy-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acemq-toy\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[acemq.transports]\ntoy = acemq_toy:transport\n")
    return tmp_path


def run(package: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}", **environment},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def test_t006_it_is_found_by_its_scheme_and_the_engine_works_on_it(package: Path) -> None:
    done = run(package, "-W", "error", "-c", USE)
    assert done.returncode == 0, done.stderr
    attempts, refusal, modules = done.stdout.splitlines()
    assert attempts == "[1, 2, 3] 1"
    assert "delay" in refusal
    assert "lists" in refusal
    assert modules == "[]", "no other transport was imported"


@pytest.mark.slow
def test_t006_the_whole_kit_runs_on_it_skips_with_reasons_and_writes_its_report(package: Path) -> None:
    (package / "test_toy.py").write_text(SUITE)
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(package), "--acemq-report", "out"]
    done = run(package, "-m", "pytest", *options, "test_toy.py", ACEMQ_REQUIRE_SERVICES="0")
    (written,) = (package / "out").glob("*.json")
    scenarios = json.loads(written.read_text())["scenarios"]
    outcomes = [each["outcome"] for each in scenarios]
    assert outcomes.count("passed") >= 60, done.stdout[-4_000:]
    assert all(each["reason"] for each in scenarios if each["outcome"] != "passed")
    assert re.search(r"report: .*\.json", done.stdout)
