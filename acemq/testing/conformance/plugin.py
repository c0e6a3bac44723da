"""The part of the kit that pytest loads: reports, the lines at the end, and the marker of slow scenarios."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from acemq.testing.conformance.report import report_of, skipped_groups, summary, write
from acemq.testing.conformance.running import Result
from acemq.testing.conformance.scenario import KEY, Scenario


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("acemq").addoption(
        "--acemq-report", metavar="DIR", help="write what the conformance scenarios have shown, as JSON and Markdown"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    if not hasattr(config, "workerinput"):  # in a worker of pytest-xdist the results only pass through
        config.pluginmanager.register(_Collecting(config), "acemq-conformance-results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        which, suite = _scenario(item), getattr(item, "cls", None)
        if which is not None and which.id in getattr(suite, "slow", ()):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A scenario that its own fixtures have skipped tells that, too."""
    report = yield
    which = _scenario(item)
    if which is not None and report.when == "setup" and not report.passed:
        suite: Any = getattr(item, "cls", None)
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else "failed before it began"
        result = Result(
            id=which.id,
            title=which.title,
            label=suite.label or suite.__name__,
            version=suite.version,
            outcome="skipped" if report.skipped else "failed",
            reason=str(why),
        )
        report.user_properties.append((KEY, result.told()))
    return report


def _scenario(item: pytest.Item) -> Scenario | None:
    which = getattr(getattr(item, "function", None), "scenario", None)
    return which if isinstance(which, Scenario) else None


class _Collecting:
    """Lives where the whole run is seen."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._results: dict[str, list[dict[str, Any]]] = {}
        self._reports: list[dict[str, Any]] = []
        self._written: list[list[Path]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            return
        for key, told in report.user_properties:
            if key == KEY:
                result = cast("dict[str, Any]", told)
                self._results.setdefault(result["label"], []).append(result)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._reports = [report_of(results) for _, results in sorted(self._results.items())]
        folder: str | None = self._config.getoption("--acemq-report")
        if folder:
            # What was skipped as a whole has shown nothing: an older report of it is better.
            self._written = [write(each, Path(folder)) if each["capabilities"] else [] for each in self._reports]
        ran = any(each["outcome"] != "skipped" for report in self._reports for each in report["scenarios"])
        if self._reports and not ran and os.environ.get("ACEMQ_ALLOW_EMPTY") != "1":
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        written = self._written or [[] for _ in self._reports]
        for report, paths in zip(self._reports, written, strict=True):
            groups = skipped_groups(report)
            lines = summary(report, paths)
            terminalreporter.write_line("")
            for number, line in enumerate(lines):
                terminalreporter.write_line(line, bold=number == 0)
            if groups:
                terminalreporter.write_line(f"  nothing ran of group {', '.join(groups)}", red=True)
        if self._reports and all(each["outcome"] == "skipped" for r in self._reports for each in r["scenarios"]):
            terminalreporter.write_line("no scenario was executed; ACEMQ_ALLOW_EMPTY=1 allows that", red=True)
