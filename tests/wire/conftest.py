"""Says, per fixture file, how many of its cases have run; a file that ran in part fails the session."""

from __future__ import annotations

import pytest

from tests.wire.suite import Suite


def _ran() -> list[Suite]:
    return [suite for suite in Suite.known.values() if suite.run]


def _narrowed(config: pytest.Config) -> bool:
    """Somebody asked for single cases, or the session stopped at a failure."""
    option = config.option
    asked = [option.keyword, getattr(option, "lf", False), option.maxfail]
    return any(asked) or any("::" in argument for argument in config.args) or hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    partly = [suite for suite in _ran() if len(suite.run) < len(suite.cases) - len(suite.not_yet)]
    if partly and not _narrowed(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ran := _ran():
        terminalreporter.section("wire contract")
    for suite in ran:
        left = (
            f"; {len(suite.not_yet)} not yet: {', '.join(dict.fromkeys(suite.not_yet.values()))}"
            if suite.not_yet
            else ""
        )
        terminalreporter.line(f"{suite.name}.json: {len(suite.run)} of {len(suite.cases)} cases{left}")
