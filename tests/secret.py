"""The password of every broker that the tests start, and the watch that it is printed nowhere in a whole run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from acemq.errors import AcemqError

if TYPE_CHECKING:
    import pytest

PASSWORD = "pa55-that-nobody-prints"


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
    """Fail a test of which something was printed with the password in it: to a log, to stdout or to stderr."""
    leaks: list[str] = []
    for title, text in report.sections:
        try:
            assert_unprinted(text, title)
        except AssertionError as leak:
            leaks.append(str(leak))
    if leaks:
        report.outcome, report.longrepr, report.sections = "failed", "\n".join(leaks), []
