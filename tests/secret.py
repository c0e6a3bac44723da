"""The password of every broker that the tests start, and the watch that it is printed nowhere in a whole run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from acemq.errors import AcemqError

if TYPE_CHECKING:
    import pytest

PASSWORD = "pa55-that-nobody-prints"


def assert_unprinted(text: str, where: str) -> None:
    at = text.find(PASSWORD)
    assert at < 0, f"{where} shows a password: {text[max(at - 200, 0) : at]}********"


class Listening(logging.Handler):
    """Hears what the library and its driver log, at every level: what shows only in a debug log is shown as well."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.leaks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            assert_unprinted(self.format(record), f"a log line of {record.name}")
        except AssertionError as leak:
            self.leaks.append(str(leak))

    def listen(self) -> None:
        for name in ("acemq", "aiormq"):
            logging.getLogger(name).setLevel(logging.DEBUG)
            logging.getLogger(name).addHandler(self)


log = Listening()


def watch_errors(patch: pytest.MonkeyPatch) -> None:
    """From now on no error of ours can be made with the password in its text."""

    def made(self: AcemqError, *args: Any) -> None:
        assert_unprinted(repr(args), type(self).__name__)
        super(AcemqError, self).__init__(*args)

    patch.setattr(AcemqError, "__init__", made)


def watch_report(report: pytest.TestReport) -> None:
    """Fail a test of which something was printed with the password in it: to a log, to stdout or to stderr."""
    leaks, log.leaks = log.leaks, []
    for title, text in report.sections:
        try:
            assert_unprinted(text, title)
        except AssertionError as leak:
            leaks.append(str(leak))
    if leaks:
        report.outcome, report.longrepr, report.sections = "failed", "\n".join(leaks), []
