"""The engine asks what a transport can do, and not which one it is."""

from __future__ import annotations

import re
from pathlib import Path

ACEMQ = Path(__file__).parents[3] / "acemq"


def test_nothing_outside_the_transports_compares_the_name_of_one() -> None:
    asks = re.compile(r"\.transport\s*(==|!=|in\b|not in\b)|match .*\.transport:")
    files = [path for path in ACEMQ.rglob("*.py") if path.relative_to(ACEMQ).parts[0] not in ("transports", "testing")]
    assert len(files) > 80
    assert [str(path.relative_to(ACEMQ)) for path in files if asks.search(path.read_text())] == []
