"""A fixture for the folders whose tests lose links and processes: what a test may not leave behind."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
async def nothing_left_behind(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No task outlives a test, no exception goes unread, the driver says nothing of our connections."""
    yield
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left: {left}"
    gc.collect()
    for record in [*caplog.get_records("setup"), *caplog.get_records("call"), *caplog.get_records("teardown")]:
        is_foreign = record.name == "asyncio" or record.name.startswith("aiormq")
        assert not (is_foreign and record.levelno >= logging.WARNING), record.getMessage()
        assert "failed inside the library" not in record.getMessage(), record.exc_text
