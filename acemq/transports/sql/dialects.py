"""What differs from database to database, as data: statements, versions, and what its errors mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from acemq.transport import ServerTooOld

STATEMENTS = files(__name__.rpartition(".")[0]) / "statements"

_EXPANDED = ("seqs", "pairs")
"""Parameters that stand for a list in brackets."""


class Trouble(Enum):
    """What an error of the database calls for."""

    TRANSIENT = auto()
    """A deadlock, a lock that was waited for too long: the same again will do."""
    LOST = auto()
    """The link is gone, or the server is."""
    DENIED = auto()
    """Who we are, or what we may."""
    SCHEMA = auto()
    """A table or the database itself is missing."""
    OTHER = auto()


class Dialect(msgspec.Struct, frozen=True):
    name: str
    title: str
    now: str
    """The server's clock, in microseconds of UTC; of SQLite a parameter, as its clock is the host's."""
    driver: str
    least: tuple[int, ...]
    array_statements: bool = False
    """Takes a batch as arrays, so that each verb is one statement and needs no transaction round it."""
    transient: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()
    """Codes, or what they begin with."""
    denied: frozenset[str] = frozenset()
    schema: frozenset[str] = frozenset()

    def trouble(self, error: BaseException) -> Trouble:
        if isinstance(error, OSError | EOFError | TimeoutError):
            return Trouble.LOST
        if not isinstance(error, exc.DBAPIError):
            code = code_of(error)
        elif error.connection_invalidated:
            return Trouble.LOST
        else:
            code = code_of(error.orig)
        if code is None:
            return Trouble.LOST if isinstance(error, exc.InterfaceError) else Trouble.OTHER
        if code in self.transient:
            return Trouble.TRANSIENT
        if code in self.denied:
            return Trouble.DENIED
        if code in self.schema:
            return Trouble.SCHEMA
        return Trouble.LOST if code.startswith(self.lost) else Trouble.OTHER

    def check_version(self, found: str) -> None:
        """`found`: as the server says it. Refuses what cannot do what the statements ask for."""
        numbers = tuple(map(int, re.findall(r"\d+", found)[: len(self.least)]))
        if numbers < self.least:
            wanted = ".".join(map(str, self.least))
            raise ServerTooOld(
                f"{self.title} {found} is too old: it lacks {_LACKS[self.name]}. Upgrade it to {wanted} or newer",
                found=found,
                wanted=wanted,
            )


_LACKS = {
    "postgresql": "statements that acemq stands on",
    "mariadb": "SKIP LOCKED",
    "mysql": "SKIP LOCKED",
    "sqlite": "RETURNING",
}

_MYSQL_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_MYSQL_TRANSIENT = frozenset({"1205", "1213"})
_MYSQL_LOST = ("2003", "2006", "2013", "2014", "2055", "1040", "1053", "1077", "1079", "1152", "1158", "1159", "1160",
               "1161", "1927")  # fmt: skip
_MYSQL_DENIED = frozenset({"1044", "1045", "1142", "1698"})
_MYSQL_SCHEMA = frozenset({"1049", "1146", "1054"})

POSTGRESQL = Dialect(
    "postgresql",
    "PostgreSQL",
    now="CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)",
    driver="postgresql+asyncpg",
    least=(12,),
    array_statements=True,
    transient=frozenset({"40001", "40P01", "55P03"}),
    lost=("08", "57P", "53300"),
    denied=frozenset({"28000", "28P01", "42501"}),
    schema=frozenset({"3D000", "42P01", "42703", "3F000"}),
)
MARIADB = Dialect(
    "mariadb",
    "MariaDB",
    now=_MYSQL_NOW,
    driver="mariadb+asyncmy",
    least=(10, 6),
    transient=_MYSQL_TRANSIENT,
    lost=_MYSQL_LOST,
    denied=_MYSQL_DENIED,
    schema=_MYSQL_SCHEMA,
)
MYSQL = Dialect(
    "mysql",
    "MySQL",
    now=_MYSQL_NOW,
    driver="mysql+asyncmy",
    least=(8, 0, 1),
    transient=_MYSQL_TRANSIENT,
    lost=_MYSQL_LOST,
    denied=_MYSQL_DENIED,
    schema=_MYSQL_SCHEMA,
)
SQLITE = Dialect(
    "sqlite",
    "SQLite",
    now=":now",
    driver="sqlite+pysqlite",
    least=(3, 35),
    transient=frozenset({"5", "6"}),
    lost=("10",),
    denied=frozenset({"3", "8", "14", "26"}),
    schema=frozenset({"no such table"}),
)

DIALECTS = {dialect.name: dialect for dialect in (POSTGRESQL, MARIADB, MYSQL, SQLITE)}


def code_of(error: object) -> str | None:
    """The database's own code of an error, whichever driver raised it."""
    code: object = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int):
        # The low byte is the kind; SQLite has no code for a table that is not there.
        return "no such table" if "no such table" in str(error) else str(code & 0xFF)
    arguments: tuple[object, ...] = getattr(error, "args", ())
    if arguments and isinstance(arguments[0], int) and not isinstance(error, OSError):
        return str(arguments[0])  # MySQL's own number, which tells more than the state beside it
    seen: object = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return seen if isinstance(seen, str) else None


class Tables(msgspec.Struct, frozen=True):
    """What the tables are called: `{schema}.{prefix}message`, and so on."""

    prefix: str = "acemq_"
    schema: str = ""

    def fill(self, text: str, dialect: Dialect) -> str:
        qualified = f"{self.schema}.{self.prefix}" if self.schema else self.prefix
        for mark, value in (
            ("{t}", qualified),
            ("{prefix}", qualified),
            ("{index}", self.prefix),
            ("{now}", dialect.now),
        ):
            text = text.replace(mark, value)
        return text


Row = Sequence[Any]
"""Values in the order in which the statement names them."""


class Statements:
    """The statements of one dialect on tables of this name, each compiled once: `statements["claim"]`."""

    def __init__(self, dialect: Dialect, tables: Tables) -> None:
        own = "mariadb" if dialect.name == "mysql" else dialect.name
        texts = {**_named("common"), **_named(own)}
        shared = texts.pop("written", "")  # the end of several, which they name
        texts = {name: text.replace("{written}", shared) for name, text in texts.items()}
        self._made = {name: _text(tables.fill(text, dialect)) for name, text in texts.items()}
        self._spoken: dict[tuple[str, str], str] = {}

    def __getitem__(self, name: str) -> sa.TextClause:
        return self._made[name]

    def put(self, connection: sa.Connection, name: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Once for each row, whose values are in the order of the statement.

        As the driver has it: SQLAlchemy would look at every value of every row by its name.
        """
        spoken = self._spoken.get((name, connection.dialect.paramstyle))
        if spoken is None:
            spoken = str(self._made[name].compile(dialect=connection.dialect))
            self._spoken[name, connection.dialect.paramstyle] = spoken
        connection.exec_driver_sql(spoken, list(rows))

    def fetch(self, connection: sa.Connection, name: str, given: Mapping[str, object]) -> list[Row]:
        """All rows of a statement on a file, as the driver has them: SQLAlchemy would make an object of each one."""
        done = connection.exec_driver_sql(self._made[name].text, given)
        assert done.cursor is not None
        rows = done.cursor.fetchall()
        done.close()
        return list(rows)


def _text(sql: str) -> sa.TextClause:
    made = sa.text(sql)
    expanded: list[Any] = [sa.bindparam(name, expanding=True) for name in _EXPANDED if f"IN :{name}" in sql]
    return made.bindparams(*expanded) if expanded else made


@cache
def _named(file: str) -> Mapping[str, str]:
    """The statements of a file, each below a line `-- name`."""
    parts = re.split(r"^-- (\w+)\n", (STATEMENTS / f"{file}.sql").read_text(), flags=re.MULTILINE)[1:]
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def text_of(value: Any) -> str:
    """A name as a column holds it: binary where the database has no collation that tells all names apart."""
    return value.decode() if isinstance(value, bytes) else str(value)
