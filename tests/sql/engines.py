"""An engine of the application's own, on the database of a test."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

_DRIVERS = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "mariadb": "mariadb+asyncmy"}


def engine_for(url: str, **options: Any) -> AsyncEngine:
    """`url`: as acemq takes it."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    return create_async_engine(f"{_DRIVERS[scheme]}://{rest}", **options)
