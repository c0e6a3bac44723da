"""The one connection to a SQLite file, when its commit fails."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq.topology import Topology


async def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with acemq.connect(f"sqlite:///{tmp_path / 'mq.db'}") as mq:
        await mq.declare(Topology().queue("q"))
        transport: Any = mq.transport
        dialect = transport._running.database._engine.dialect
        commit, failed = dialect.do_commit, 0

        def busy(connection: Any) -> None:
            nonlocal failed
            if failed == 0:
                failed += 1
                error = sqlite3.OperationalError("database is locked")
                error.sqlite_errorcode = sqlite3.SQLITE_BUSY
                raise error
            commit(connection)

        monkeypatch.setattr(dialect, "do_commit", busy)
        await mq.send("q", 1)
        assert (await mq.depth("q")).ready == 1
    assert failed == 1
