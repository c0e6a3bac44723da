"""The password of every broker that the tests start, and the watch that it is printed nowhere in a whole run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from acemq.errors import AcemqError

if TYPE_CHECKING:
    import pytest

PASSWORD = "pa55-that-nobody-prints"


def log_everything() -> None:
    """What shows only in a debug log is shown as well."""
    for name in ("acemq", "aiormq"):
        logging.getLogger(name).setLevel(logging.DEBUG)


def assert_unprinted(text: str, where: str) -> None:
    at = text.find(PASSWORD)
    assert at < 0, f"{where} shows a password: {text[max(at - 200, 0) : at]}********"


def watch_errors(patch: pytest.MonkeyPatch) -> None:
    """From now on no error of ours can be made with the password in its text."""

    def made(self: AcemqError, *args: Any) -> None:
        assert_unprinted(repr(args), type(self).__name__)
        super(AcemqError, self).__init__(*args)

    patch.setattr(AcemqError, "__init__", made)


def watch_report(report: pytest.TestReport) -> None:
    """Fail a test of which something was printed with the password in it: to the log, to stdout or to stderr."""
    try:
        for title, text in report.sections:
            assert_unprinted(text, title)
    except AssertionError as leak:
        report.outcome, report.longrepr = "failed", str(leak)
        report.sections = []
