from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import acemq
from acemq import AceMQ, Diagnostic
from tests.stores.places import Sql, place_at, url_for

ALL = ["sqlite", "postgresql", "psycopg", "mariadb"]


@pytest.fixture(params=ALL)
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sql]:
    """Each database, by each driver; `pytest.mark.parametrize("place", […], indirect=True)` for some of them."""
    kind: str = request.param
    async with place_at(kind, url_for(kind, request, tmp_path)) as place:
        yield place


@pytest.fixture
async def mq(name: str, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    """On a broker in memory that is this test's own."""
    async with acemq.connect(f"memory://{name}", on_diagnostic=diagnostics.append) as mq:
        yield mq
