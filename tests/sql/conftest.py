"""The same test on a SQLite file, on PostgreSQL and on MariaDB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import acemq
from acemq import AceMQ, Topology

EVERY = ("sqlite", "postgresql", "mariadb")


@pytest.fixture(params=EVERY)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of the test's own, without tables."""
    return url_in(request.param, request, tmp_path)


def url_in(database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match database:
        case "sqlite":
            return f"sqlite:///{tmp_path / 'messages.db'}"
        case "postgresql":
            return f"{request.getfixturevalue('postgres_url')}?create_schema=true"
        case _:
            return f"{request.getfixturevalue('mariadb_url')}?create_schema=true"


@pytest.fixture
async def mq(url: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url) as mq:
        await mq.declare(
            Topology().queue("q", dead_letter=True).queue("r").exchange("x", "fanout").bind("q", "x").bind("r", "x")
        )
        yield mq
