"""Says, per fixture file, how many of its cases have run; a file that ran in part fails the session.

A plugin, because the tests may be shared out among processes, and each of those has run a part.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.suite import Suite

KEY = "wire"


class Counting:
    """Lives in every process; one that works for another hands over what it has counted."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._told: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._add({name: _told(suite) for name, suite in Suite.known.items() if suite.run})
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[KEY] = self._told
            return
        partly = [told for told in self._told.values() if len(told["run"]) < told["cases"] - len(told["not_yet"])]
        if partly and not _narrowed(self._config) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(getattr(node, "workeroutput", {}).get(KEY, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._told:
            terminalreporter.section("wire contract")
        for name, told in sorted(self._told.items()):
            missing = dict.fromkeys(told["not_yet"].values())
            left = f"; {len(told['not_yet'])} not yet: {', '.join(missing)}" if missing else ""
            terminalreporter.line(f"{name}.json: {len(told['run'])} of {told['cases']} cases{left}")

    def _add(self, some: dict[str, dict[str, Any]]) -> None:
        for name, told in some.items():
            known = self._told.setdefault(name, {**told, "run": []})
            known["run"] = sorted({*known["run"], *told["run"]})


def _told(suite: Suite) -> dict[str, Any]:
    return {"cases": len(suite.cases), "run": sorted(suite.run), "not_yet": dict(suite.not_yet)}


def _narrowed(config: pytest.Config) -> bool:
    """Somebody asked for single cases, or the session stopped at a failure."""
    option = config.option
    asked = [option.keyword, getattr(option, "lf", False), option.maxfail]
    return any(asked) or any("::" in argument for argument in config.args)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Counting(config), "acemq-wire-counting")
