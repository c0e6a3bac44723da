"""The shop, run as its readers run it: it kills its own processes, and proves that nothing was lost or done twice."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("broker", "database"), [("a file", "a file"), ("rabbitmq", "a file"), ("rabbitmq", "postgresql")]
)
async def test_every_committed_order_is_billed_once(broker: str, database: str, request: pytest.FixtureRequest) -> None:
    options: list[str] = []  # none: two files, and no server
    if broker == "rabbitmq":
        options += ["--broker", request.getfixturevalue("rabbit_url")]
    if database == "postgresql":
        options += ["--database", request.getfixturevalue("postgres_url").replace("postgresql:", "postgresql+asyncpg:")]
    command = [sys.executable, "-m", "examples.shop", "--deaths", "3", *options]
    environment = {name: value for name, value in os.environ.items() if name != "ACEMQ_URL"}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=190, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every order that was committed is billed once, and nothing else is." in done.stdout
    deaths = re.search(r"relay (\d+) times, billing (\d+) times", done.stdout)
    assert deaths is not None
    assert int(deaths[1]) + int(deaths[2]) >= 1, done.stdout
