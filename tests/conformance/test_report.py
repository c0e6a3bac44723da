"""The kit's own parts: how scenarios are chosen, how a run is told, and that the published table is of this kit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acemq.opening import transport_for
from acemq.testing.conformance import KIT, Impossible, NotSupplied, SmallConformance, TransportConformance
from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.guarantees import ROWS, guarantees, is_declared, table
from acemq.testing.conformance.memory import MemoryConformance
from acemq.testing.conformance.report import report_of, skipped_groups, summary, write
from acemq.testing.conformance.running import Result, execute, plain
from acemq.testing.conformance.scenario import DECLARED, Body, Scenario, scenarios_of
from acemq.transport import Capabilities

ROOT = Path(__file__).parents[2]
REPORTS = sorted((ROOT / "docs" / "reports").glob("*.json"))
ALL = scenarios_of(TransportConformance)


def play(body: Body, *needs: str, **hooks: Any) -> Result:
    suite = type("Suite", (MemoryConformance,), hooks)()
    return execute(suite, Scenario("C-001", "a trial", needs), body)


async def passes(suite: object, bench: Bench) -> None:
    pass


async def fails(suite: object, bench: Bench) -> None:
    raise AssertionError("on purpose")


# How a scenario ends


def test_a_capability_that_is_not_declared_skips_its_scenario() -> None:
    result = play(passes, "durable", "expiry", "transactions")
    assert (result.outcome, result.reason) == ("skipped", "not declared: durable, transactions")


def test_a_missing_hook_skips_and_fails_where_services_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asks(suite: Any, bench: Bench) -> None:
        raise NotSupplied("no faults: restart")

    async def cannot(suite: Any, bench: Bench) -> None:
        raise Impossible("there is no such thing")

    monkeypatch.delenv("ACEMQ_REQUIRE_SERVICES", raising=False)
    assert (play(asks).outcome, play(asks).reason) == ("skipped", "no faults: restart")
    monkeypatch.setenv("ACEMQ_REQUIRE_SERVICES", "1")
    assert play(asks).outcome == "failed"
    assert play(cannot).outcome == "skipped"


def test_a_known_gap_is_expected_and_fails_the_day_it_passes() -> None:
    gaps = {"C-001": "not yet"}
    assert (play(fails, known_gaps=gaps).outcome, play(fails, known_gaps=gaps).reason) == ("gap", "not yet")
    passed = play(passes, known_gaps=gaps)
    assert (passed.outcome, passed.reason) == ("failed", "C-001 passes: take it out of known_gaps")


def test_what_a_scenario_leaves_behind_fails_it() -> None:
    import asyncio

    left: list[asyncio.Task[None]] = []

    async def leaves(suite: object, bench: Bench) -> None:
        async def forever() -> None:
            await asyncio.Event().wait()

        left.append(asyncio.create_task(forever()))

    assert "tasks left behind" in play(leaves).reason


def test_an_exception_that_nobody_reads_fails_it() -> None:
    import asyncio

    async def drops(suite: object, bench: Bench) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    assert "ZeroDivisionError" in play(drops).reason


# Rows and scenarios


def test_every_row_names_scenarios_that_exist() -> None:
    named = {id for row in ROWS for id in row.by}
    assert named <= ALL.keys()


def test_every_capability_is_in_a_row() -> None:
    told = {row.needs for row in ROWS} | {capability for row in ROWS for capability in row.about}
    fields = set(Capabilities.__struct_fields__) - {"transport", "notes"}
    assert fields <= told
    assert DECLARED.keys() <= fields


def test_the_small_suite_is_a_part_of_the_whole() -> None:
    small = scenarios_of(SmallConformance)
    assert len(small) >= 30
    assert small.keys() < ALL.keys()


def entry(id: str, outcome: str, reason: str = "", **measured: object) -> dict[str, Any]:
    return {"id": id, "title": "", "outcome": outcome, "reason": reason, "seconds": 0, "measured": measured}


@pytest.mark.parametrize(
    ("outcomes", "cell"),
    [
        ({"C-065": "passed", "C-066": "passed"}, "yes"),
        ({"C-065": "passed", "C-066": "gap"}, r"\*\*not shown\*\* \(C-066\)"),
        ({"C-065": "failed", "C-066": "passed"}, r"\*\*not shown\*\* \(C-065\)"),
        ({"C-065": "passed", "C-066": "skipped"}, r"\*yes\* \(\d+\)"),
    ],
)
def test_a_cell_stands_only_when_its_scenarios_passed(outcomes: dict[str, str], cell: str) -> None:
    found = {id: entry(id, outcome, "no faults: abandon") for id, outcome in outcomes.items()}
    can = plain(Capabilities(transport="mine", durable=False, exclusive=True))
    report = {"transport": "mine", "guarantees": [_built(each) for each in guarantees(can, found)]}
    assert re.search(rf"^\| exclusive consumer \| {cell} \| C-065 C-066 \|$", table([report]), re.MULTILINE)


def test_what_is_not_declared_reads_no_once_its_refusal_was_seen() -> None:
    can = plain(Capabilities(transport="mine", durable=False))
    shown = {each.row: each for each in guarantees(can, {"C-120": entry("C-120", "passed")})}
    assert (shown["exclusive consumer"].value, shown["exclusive consumer"].shown) == ("no", True)
    assert not {each.row: each for each in guarantees(can, {})}["exclusive consumer"].shown


def _built(each: Any) -> dict[str, Any]:
    return {field: getattr(each, field) for field in each.__struct_fields__}


# The report and the end of a run


def told(id: str, outcome: str, reason: str = "") -> dict[str, Any]:
    can = plain(Capabilities(transport="mine", durable=False))
    head = {"label": "mine", "version": "1.4", "server": "minebroker 3.2", "capabilities": can}
    return {**entry(id, outcome, reason), **head}


def test_the_lines_at_the_end_of_a_run(tmp_path: Path) -> None:
    results = [told("C-001", "passed"), told("C-066", "gap", "why"), told("C-099", "skipped", "no faults")]
    results += [told("C-100", "skipped", "no faults"), told("C-115", "skipped", "not declared: transactions")]
    report = report_of(results)
    written = write(report, tmp_path)
    assert summary(report, written) == [
        f"acemq conformance · mine 1.4 on minebroker 3.2 · kit {KIT}",
        "  1 passed · 1 gaps (C-066) · 3 skipped · 0 failed",
        "  skipped: 2 no faults · 1 not declared: transactions",
        f"  report: {tmp_path / 'mine.json'}, {tmp_path / 'mine.md'}",
    ]
    assert skipped_groups(report) == ["J", "M"]
    assert json.loads(written[0].read_text()) == report


def test_a_strangers_suite_is_run_told_and_written(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from acemq.testing.conformance import SmallConformance\n"
        "from acemq.transports.memory import MemoryBroker, transport\n"
        "class TestMine(SmallConformance):\n"
        "    label = 'mine'\n"
        "    broker = MemoryBroker()\n"
        "    def make(self, **options):\n"
        "        return transport('memory://', broker=self.broker, **options)\n"
    )
    folder = tmp_path / "reports"
    done = _pytest(tmp_path, "--acemq-report", str(folder), "-k", "c00 or c011 or c012 or c120")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nacemq conformance · mine · kit 1\n  5 passed · 0 gaps · 0 skipped · 0 failed\n" in done.stdout
    merged = subprocess.run(
        [sys.executable, "-m", "acemq.testing.conformance", "table", str(folder / "mine.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert merged.stdout.startswith("|  | mine | shown by |")


def test_a_run_in_which_nothing_was_executed_fails(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import pytest\n"
        "from acemq.testing.conformance import SmallConformance\n"
        "class TestMine(SmallConformance):\n"
        "    @pytest.fixture(autouse=True)\n"
        "    def server(self):\n"
        "        pytest.skip('no server')\n"
    )
    done = _pytest(tmp_path)
    assert done.returncode == 1, done.stdout
    assert "no scenario was executed" in done.stdout
    assert _pytest(tmp_path, ACEMQ_ALLOW_EMPTY="1").returncode == 0


def _pytest(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    plugin = ["-p", "acemq.testing.conformance.plugin", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "--quiet", *options, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


# What is published

URLS = {
    "memory": "memory://",
    "rabbitmq": "amqp://localhost",
    "sqlite": "sqlite:///messages.db",
    "postgresql": "postgresql://localhost/shop",
    "mariadb": "mariadb://localhost/shop",
}


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_published_report_is_of_this_kit_and_of_this_transport(path: Path) -> None:
    report = json.loads(path.read_text())
    now = plain(transport_for(URLS[report["transport"].partition(",")[0]]).capabilities)
    assert report["kit"] == KIT
    assert [each["id"] for each in report["scenarios"]] == list(ALL)
    for field in Capabilities.__struct_fields__:
        if field not in ("lease", "max_message"):  # of memory, settings of its broker
            assert report["capabilities"][field] == now[field], field
    assert not [each for each in report["scenarios"] if each["outcome"] in ("failed", "gap")]
    cells = guarantees(report["capabilities"], {each["id"]: each for each in report["scenarios"]})
    assert [each["value"] for each in report["guarantees"]] == [each.value for each in cells]


def test_what_is_declared_has_run_in_the_published_reports() -> None:
    for path in REPORTS:
        report = json.loads(path.read_text())
        for each in report["scenarios"]:
            which, _ = ALL[each["id"]]
            if each["reason"].startswith("not declared"):
                assert not all(is_declared(report["capabilities"], need) for need in which.needs)
