"""The shop's own tables, and the two that acemq puts beside them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from acemq import DbIdempotencyStore, DbOutboxStore

LEASE = timedelta(seconds=2)
"""Short, as processes die here all the time; what one held is out again after it."""


class Base(DeclarativeBase):
    """What SQLAlchemy maps."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class Invoice(Base):
    __tablename__ = "invoices"
    number: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str]  # not unique, so that a second one would show
    cents: Mapped[int]


class Shop:
    """One database, and what is kept in it."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.outbox, self.inbox = DbOutboxStore(self.engine, lease=LEASE), DbIdempotencyStore(self.engine)

    def session(self) -> AsyncSession:
        return AsyncSession(self.engine)

    async def create(self) -> None:
        """Anew: what an earlier run left is gone."""
        async with self.engine.begin() as connection:
            for store in (self.outbox, self.inbox):
                store.table(Base.metadata)
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
        await self.outbox.create()
        await self.inbox.create()


def _engine(url: str) -> AsyncEngine:
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine.sync_engine, "connect")
        def connected(connection: Any, _: object) -> None:
            connection.isolation_level = None
            connection.execute("PRAGMA journal_mode = WAL")

        @event.listens_for(engine.sync_engine, "begin")
        def begun(connection: Any) -> None:
            connection.exec_driver_sql("BEGIN")

    return engine
