"""The tables once more as SQLAlchemy's, for Alembic: the same columns, keys and indexes as the statements make."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from acemq.errors import ConfigurationError

from ..dialects import DIALECTS


def tables(metadata: sa.MetaData, database: str, *, prefix: str = "acemq_", schema: str = "") -> list[sa.Table]:
    """Put the tables of the transport into `metadata`, so that autogenerate leaves them alone.

    A revision that makes them runs `sql()`, which also puts the two rows there that `acemq_meta` begins with. Raises
    `ConfigurationError` for a database that there is not.
    """
    if database not in DIALECTS:
        raise ConfigurationError(f"database={database!r} must be one of {', '.join(DIALECTS)}")
    return _Describing(metadata, database, prefix, schema).all()


class _Describing:
    def __init__(self, metadata: sa.MetaData, database: str, prefix: str, schema: str) -> None:
        self._metadata, self._database, self._prefix, self._schema = metadata, database, prefix, schema
        self._is_mysql = database in ("mariadb", "mysql")
        self._name: sa.types.TypeEngine[Any]
        self._text: sa.types.TypeEngine[Any]
        self._long: sa.types.TypeEngine[Any]
        self._bytes: sa.types.TypeEngine[Any]
        self._short: sa.types.TypeEngine[Any] = sa.SmallInteger()
        self._big: sa.types.TypeEngine[Any] = sa.BigInteger()
        self._int: sa.types.TypeEngine[Any] = sa.Integer()
        if self._is_mysql:
            # The default collation takes one name for another that differs in case, accents or blanks at its end.
            self._name = self._text = mysql.VARBINARY(255)
            self._long, self._bytes = mysql.LONGTEXT(charset="utf8mb4"), mysql.LONGBLOB()
        elif database == "postgresql":
            self._name, self._text = sa.Text(collation="C"), sa.Text()
            self._long, self._bytes = sa.Text(), sa.LargeBinary()
        else:
            self._name = self._text = self._long = sa.Text()
            self._bytes = sa.LargeBinary()
            self._short = self._big = self._int = sa.Integer()

    def all(self) -> list[sa.Table]:
        name = self._name
        kind = mysql.VARBINARY(16) if self._is_mysql else self._text
        return [
            self._table("meta", self._key("name", name), self._column("value", self._text), keyed=True),
            self._table("exchange", self._key("name", name), self._column("kind", kind), keyed=True),
            self._table("queue", self._number("id", self._int), self._unique("name"), self._column("spec", self._long)),
            self._table(
                "binding",
                self._key("exchange", name),
                self._key("queue_id", self._int),
                self._key("pattern", name),
                keyed=True,
            ),
            self._table(
                "owner",
                self._key("queue_id", self._int),
                self._key("holder", self._text),
                self._column("until_at", self._big),
                keyed=True,
            ),
            self._table(
                "exclusive",
                self._row("queue_id", self._int),
                self._column("holder", self._text),
                self._column("token", self._big),
                self._column("until_at", self._big),
            ),
            self._message(),
        ]

    def _message(self) -> sa.Table:
        place = mysql.VARBINARY(255) if self._is_mysql else self._text
        table = self._table(
            "message",
            self._number("seq", self._big),
            self._column("queue_id", self._int),
            self._column("state", self._short),
            self._column("rank_key", self._short),
            self._column("visible_at", self._big),
            self._column("token", self._big, server_default=sa.text("0")),
            self._column("expires_at", self._big, nullable=True),
            self._column("enqueued_at", self._big),
            self._column("holder", place, nullable=True),
            self._column("exchange", place),
            self._column("routing_key", place),
            self._column("headers", self._long),
            self._column("properties", self._long),
            self._column("body", self._bytes),
            postgresql_with={"fillfactor": 85, "autovacuum_vacuum_scale_factor": 0.02},
        )
        c, name = table.c, f"{self._prefix}message"
        if self._is_mysql:
            sa.Index(f"{name}_ready", c.queue_id, c.state, c.rank_key, c.seq)
            sa.Index(f"{name}_waiting", c.queue_id, c.state, c.visible_at, c.seq)
            sa.Index(f"{name}_expiry", c.expires_at)
        else:
            sa.Index(f"{name}_ready", c.queue_id, c.rank_key, c.seq, **_where(c.state == 0))
            sa.Index(f"{name}_waiting", c.queue_id, c.visible_at, c.seq, **_where(c.state != 0))
            sa.Index(f"{name}_expiry", c.expires_at, **_where(c.expires_at.is_not(None)))
        return table

    def _table(self, name: str, *columns: sa.Column[Any], keyed: bool = False, **options: Any) -> sa.Table:
        """`keyed`: found by its key alone, which on SQLite is what its rows are stored under."""
        own: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"} if self._is_mysql else {}
        if self._database == "sqlite":
            own["sqlite_with_rowid"] = not keyed
            own["sqlite_autoincrement"] = name in ("queue", "message")
        if self._database == "postgresql":
            own |= options
        return sa.Table(self._prefix + name, self._metadata, *columns, schema=self._schema or None, **own)

    def _number(self, name: str, type: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
        """Given by the database, and never twice."""
        given = (sa.Identity(always=True),) if self._database == "postgresql" else ()
        return self._row(name, type, *given, autoincrement="auto")

    def _row(
        self, name: str, type: sa.types.TypeEngine[Any], *given: sa.Identity, autoincrement: Any = False
    ) -> sa.Column[Any]:
        """SQLite says of a row's own number that it may be NULL, which it then gives."""
        may_be_null = self._database == "sqlite"
        return sa.Column(name, type, *given, primary_key=True, autoincrement=autoincrement, nullable=may_be_null)

    def _key(self, name: str, type: sa.types.TypeEngine[Any]) -> sa.Column[Any]:
        return sa.Column(name, type, primary_key=True, autoincrement=False)

    def _unique(self, name: str) -> sa.Column[Any]:
        return sa.Column(name, self._name, nullable=False, unique=True)

    def _column(
        self, name: str, type: sa.types.TypeEngine[Any], *, nullable: bool = False, server_default: Any = None
    ) -> sa.Column[Any]:
        return sa.Column(name, type, nullable=nullable, server_default=server_default)


def _where(part: sa.ColumnElement[bool]) -> dict[str, Any]:
    return {"postgresql_where": part, "sqlite_where": part}
