"""The tables, version by version: printed, made under a lock, checked.

    python -m acemq.transports.sql.schema postgresql [--from 0] [--prefix acemq_] [--schema NAME]

A version is one file of statements for each database, `NNN_*.sql`, and only ever adds: code one version older goes on.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from acemq.errors import ConfigurationError
from acemq.transport import SchemaMissing

from ..dialects import DIALECTS, Dialect, Statements, Tables, Trouble, text_of
from .described import tables

__all__ = ["VERSION", "check", "create", "found", "sql", "tables"]

VERSION = 1
"""What this code needs; it goes along with one version more."""

_LOCK = 0x61636D71
"""Of PostgreSQL's advisory locks; 'acmq'."""


def sql(database: str, *, since: int = 0, prefix: str = "acemq_", schema: str = "") -> str:
    """The statements that bring the tables from version `since` (0: none) to the newest, to be run by who may.

    Raises `ConfigurationError` for a database or version that there is not.
    """
    dialect = DIALECTS.get(database)
    if dialect is None:
        raise ConfigurationError(f"database={database!r} must be one of {', '.join(DIALECTS)}")
    if not 0 <= since <= VERSION:
        raise ConfigurationError(f"version {since} is not known; there are 0 (no tables) to {VERSION}")
    tables = Tables(prefix, schema)
    return "\n".join(f"{statement};" for statement in _since(dialect, since, tables)) + "\n"


def _since(dialect: Dialect, since: int, tables: Tables) -> list[str]:
    texts = [text for version, text in _versions(dialect.name) if version > since]
    return [
        tables.fill(statement.strip(), dialect)
        for text in texts
        for statement in re.split(r";\s*(?:\n|$)", text)
        if statement.strip()
    ]


@cache
def _versions(database: str) -> list[tuple[int, str]]:
    folder = files(__name__) / database
    found = [(int(file.name[:3]), file.read_text()) for file in folder.iterdir() if file.name.endswith(".sql")]
    return sorted(found)


def found(connection: sa.Connection, dialect: Dialect, tables: Tables, statements: Statements) -> int:
    """The version that is there, 0 for none. Raises `SchemaMissing` where a table of that name is somebody else's."""
    inspector: Any = sa.inspect(connection)
    if not inspector.has_table(f"{tables.prefix}meta", schema=tables.schema or None):
        return 0
    try:
        value = connection.execute(statements["schema_version"]).scalar()
        version = 0 if value is None else int(text_of(value))
    except (exc.DBAPIError, ValueError) as error:
        if isinstance(error, exc.DBAPIError) and dialect.trouble(error) is Trouble.LOST:
            raise
        raise _foreign(f"{tables.prefix}meta") from error
    return version


def _foreign(table: str) -> SchemaMissing:
    return SchemaMissing(
        f"a table {table} is there already and is not acemq's; choose another prefix in the URL, such as ?prefix=mq_"
    )


def check(version: int, dialect: Dialect, tables: Tables, where: str) -> None:
    """Refuse tables that are missing, older than this code, or more than a version newer."""
    if VERSION <= version <= VERSION + 1:
        return
    meta = tables.fill("{t}meta", dialect)
    if version > VERSION:
        raise SchemaMissing(
            f"the tables in {where} ({meta}) are of version {version}, and this acemq knows {VERSION} and "
            f"{VERSION + 1}: upgrade acemq"
        )
    options = f" --from {version}" if version else ""
    options += f" --prefix {tables.prefix}" if tables.prefix != "acemq_" else ""
    options += f" --schema {tables.schema}" if tables.schema else ""
    what = f"are of version {version}, and {VERSION} is wanted" if version else "are missing"
    raise SchemaMissing(
        f"the tables of acemq in {where} ({meta} and others) {what}. Run what this prints: "
        f"python -m acemq.transports.sql.schema {dialect.name}{options} - or connect with create_schema=true in the URL"
    )


def create(connection: sa.Connection, dialect: Dialect, tables: Tables, statements: Statements) -> int:
    """Make what is missing, under a lock, so that of many processes one does; the version that is there then.

    Called inside a transaction, which it commits. On MariaDB and MySQL each statement commits by itself.
    """
    if dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    elif dialect.name != "sqlite" and not _get_lock(connection):
        raise TimeoutError("another process has been making the tables for half a minute")
    try:
        version = found(connection, dialect, tables, statements)
        try:
            for statement in _since(dialect, version, tables) if version < VERSION else ():
                connection.exec_driver_sql(statement)
        except exc.DBAPIError as error:
            if "already exists" in str(error.orig):
                raise _foreign(f"that begins with {tables.prefix}") from error
            raise
        connection.commit()
        return max(version, VERSION)
    finally:
        if dialect.name not in ("postgresql", "sqlite"):
            connection.execute(sa.text("SELECT RELEASE_LOCK('acemq schema')"))


def _get_lock(connection: sa.Connection) -> bool:
    return connection.execute(sa.text("SELECT GET_LOCK('acemq schema', 30)")).scalar() == 1
