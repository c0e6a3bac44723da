"""The tables of the stores, as SQLAlchemy and Alembic take them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    TextClause,
    text,
)
from sqlalchemy.dialects import mysql

from acemq.adapters.sql.database import Kind
from acemq.stores import ERROR_LIMIT, ID_LIMIT

_MYSQL = ("mysql", "mariadb")
_MYSQL_OPTIONS: dict[str, Any] = {"mysql_charset": "utf8mb4", "mysql_engine": "InnoDB", "mariadb_charset": "utf8mb4"}
SLOTS = 256
"""Rows of `{table}_slots`, on MySQL and MariaDB: what a transaction locks for a key."""


def _key(length: int) -> String:
    # MySQL compares text without regard to case, accents and blanks at the end: two keys would be one.
    return String(length).with_variant(mysql.VARBINARY(length), *_MYSQL)


def outbox_table(name: str, metadata: MetaData, kind: Kind) -> Table:
    table = Table(
        name,
        metadata,
        Column(
            "seq",
            BigInteger().with_variant(Integer, "sqlite"),
            Identity(),
            primary_key=True,
        ),
        Column("id", _key(ID_LIMIT), nullable=False, unique=True),
        Column("order_key", _key(255)),
        Column("exchange_name", String(255), nullable=False),
        Column("routing_key", String(255), nullable=False),
        Column("body", LargeBinary().with_variant(mysql.LONGBLOB, *_MYSQL), nullable=False),
        Column("content_type", String(255)),
        Column("headers", Text().with_variant(mysql.LONGTEXT, *_MYSQL), nullable=False),
        Column("created_at", BigInteger, nullable=False),
        Column("attempts", Integer, nullable=False, server_default="0"),
        Column("last_error", String(ERROR_LIMIT)),
        Column("not_before", BigInteger),
        Column("leased_until", BigInteger),
        Column("lease_token", BigInteger, nullable=False, server_default="0"),
        Column("published_at", BigInteger),
        postgresql_with={"fillfactor": 70},  # a claim then stays on its page, and no index hears of it
        sqlite_autoincrement=True,  # a number that was given away never comes again
        **_MYSQL_OPTIONS,
    )
    c = table.c
    if kind == "mysql":
        # Each begins with what finds the few that are pending, however many were published.
        Index(f"{name}_pending", c.published_at, c.created_at, c.id)
        Index(f"{name}_order", c.order_key, c.published_at, c.seq)
    else:
        # Each over a part that it alone is used for, so that no planner can take one for another: it would, from
        # statistics that are older than a burst of records. To a planner, the first two are different parts.
        Index(f"{name}_pending", c.created_at, c.id, **_where(c.published_at.is_(None)))
        Index(f"{name}_order", c.order_key, c.seq, **_where(text("COALESCE(published_at, 0) = 0")))
        Index(f"{name}_published", c.published_at, **_where(c.published_at.is_not(None)))
    return table


def _where(part: ColumnElement[bool] | TextClause) -> dict[str, Any]:
    return {"postgresql_where": part, "sqlite_where": part}


def slots_table(name: str, metadata: MetaData) -> Table:
    return Table(
        f"{name}_slots",
        metadata,
        Column("slot", SmallInteger, primary_key=True, autoincrement=False),
        **_MYSQL_OPTIONS,
    )


def claims_table(name: str, metadata: MetaData) -> Table:
    return Table(
        name,
        metadata,
        Column("message_id", _key(255), primary_key=True),
        Column("state", String(16), nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("fingerprint", LargeBinary(64)),
        Column("recorded_at", BigInteger, nullable=False),
        Column("expires_at", BigInteger, nullable=False),
        Index(f"{name}_expiry", "expires_at"),
        **_MYSQL_OPTIONS,
    )
