"""Where the database is and who we are there, read from a URL; and the options beside it.

    sqlite:///relative.db    sqlite:////absolute.db
    postgresql://user:password@host[:port]/database    mariadb://…    mysql://…

An error of this file never quotes what may hold a part of the password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc

from acemq.clock import SYSTEM, Clock, check_duration
from acemq.errors import ConfigurationError, SecurityError
from acemq.retry import Backoff
from acemq.security import CredentialsSource, Tls, check_credentials, check_tls
from acemq.transport import LeaseTerms, TransportState

from .dialects import DIALECTS, Dialect

SHORTEST_LEASE = timedelta(seconds=1)
LONGEST_LEASE = timedelta(hours=12)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,30}")
_PORTS = {"postgresql": 5432, "mariadb": 3306, "mysql": 3306}
_DRIVERS = {
    "postgresql": {"", "asyncpg", "psycopg"},
    "mariadb": {"", "asyncmy"},
    "mysql": {"", "asyncmy"},
    "sqlite": {"", "aiosqlite", "pysqlite"},
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a transport on a database can be told beside its URL; the lower half as keys of the URL's query too."""

    name: str = "acemq"
    clock: Clock = SYSTEM
    reconnect: Backoff = Backoff()
    on_change: Callable[[TransportState], None] | None = None
    credentials: CredentialsSource | None = None
    tls: Tls | None = None
    engine: Any = None
    """An `AsyncEngine` of the same database, used in place of one of our own and not disposed of."""
    prefix: str = "acemq_"
    """What the names of the tables begin with."""
    schema: str = ""
    """Of PostgreSQL, where the tables are; the search path unless given."""
    create_schema: bool | None = None
    """Make the tables where they are missing: True on SQLite only, unless given."""
    lease: timedelta = timedelta(seconds=30)
    """For how long a delivery is held unless it is renewed."""
    poll: timedelta = timedelta(seconds=1)
    """The longest that a consumer waits between two looks that nothing has asked for."""
    listen: bool = True
    """PostgreSQL: be woken by NOTIFY. A pooler that gives out a session per transaction cannot do that."""
    pool: int = 10
    """Connections to a server, one for listening not counted."""
    max_message: int = 16 * 1024 * 1024
    """Bytes of a message, headers included."""
    durability: str = "power"
    """SQLite: a message that is confirmed survives a power cut, or with `process` only the end of every process."""
    keep_dead_letters: timedelta | None = None
    """For how long what is in a `.dlq` stays; for ever unless given."""


IN_QUERY = ("prefix", "schema", "create_schema", "lease", "poll", "listen", "pool", "max_message", "durability",
             "keep_dead_letters")  # fmt: skip


class Address(msgspec.Struct, frozen=True):
    dialect: Dialect
    url: sa.URL
    endpoint: str
    """To show: no user, no secret."""
    path: str = ""
    """Of a SQLite file."""

    def __repr__(self) -> str:
        return f"<Address {self.endpoint}>"


def parse(url: object) -> tuple[Address, dict[str, str]]:
    """The address, and the keys of its query. Refuses what is wrong with it, before any I/O."""
    if not isinstance(url, str):
        raise ConfigurationError(f"a database's URL must be text, not {type(url).__name__}")
    scheme, _, rest = url.partition("://")
    name, _, driver = scheme.lower().partition("+")
    dialect = DIALECTS.get(name)
    if dialect is None:
        raise ConfigurationError(f"scheme {scheme!r} is none of {', '.join(f'{each}://' for each in DIALECTS)}")
    if driver not in _DRIVERS[name]:
        known = ", ".join(f"{name}+{each}://" for each in sorted(_DRIVERS[name] - {""}))
        raise ConfigurationError(f"acemq does not stand on the driver {driver!r}; write {name}:// or {known}")
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        raise ConfigurationError(
            f"this is no URL of a database; it reads {name}://user:password@host/database, and in a password "
            "'/', '?', '#', '@' are written %2F, %3F, %23, %40"
        ) from None
    query = {key: value if isinstance(value, str) else value[-1] for key, value in parsed.query.items()}
    plain = parsed.set(query={})
    if name == "sqlite":
        return _file(dialect, plain, rest), query
    if not parsed.host or not parsed.database:
        what = "host" if not parsed.host else "database"
        raise ConfigurationError(f"the URL names no {what}; it reads {name}://user:password@host/database")
    chosen = plain.set(drivername=f"{name}+{driver}" if driver else dialect.driver)
    port = parsed.port or _PORTS[name]
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    return Address(dialect, chosen.set(port=port), f"{host}:{port}/{parsed.database}"), query


def _file(dialect: Dialect, url: sa.URL, rest: str) -> Address:
    path = url.database or ""
    if path in ("", ":memory:") or path.startswith("file:"):
        raise ConfigurationError(
            "a database in memory would be lost with the process and seen by nobody else: name a file, "
            "sqlite:///messages.db or sqlite:////absolute/messages.db, or write memory:// for a broker in this process"
        )
    if url.host or url.username:
        raise ConfigurationError(f"a SQLite URL has three slashes and no host: sqlite:///{path}")
    return Address(dialect, url.set(drivername=dialect.driver), f"sqlite:///{path}", str(Path(path).absolute()))


def read_options(address: Address, query: Mapping[str, str], given: Mapping[str, object]) -> Options:
    """Typed and checked; what is unknown is refused by name."""
    known = Options.__struct_fields__
    for option in given:
        if option not in known:
            raise ConfigurationError(
                f"option {option!r} of {address.dialect.title} is not known; there are {', '.join(known)}"
            )
    values = dict(given)
    for key, text in query.items():
        if key not in IN_QUERY:
            raise ConfigurationError(
                f"query key {key!r} of a {address.dialect.title} URL is not known; there are {', '.join(IN_QUERY)}"
            )
        if key in values:
            raise ConfigurationError(f"{key} is said in the URL and as an option; leave one of them out")
        values[key] = _READ[key](key, text)
    for option, check in _CHECKS.items():
        if option in values:
            check(option, values[option])
    options = Options(**cast("dict[str, Any]", values))
    _check_together(address, options)
    return options


def lease_terms(options: Options) -> LeaseTerms:
    step = timedelta(milliseconds=1)
    return LeaseTerms(default=options.lease, shortest=SHORTEST_LEASE, longest=LONGEST_LEASE, step=step, renewable=True)


def _check_together(address: Address, options: Options) -> None:
    name = address.dialect.name
    if options.tls is not None:
        if name == "sqlite":
            raise SecurityError("tls= has no use with sqlite://, where nothing leaves the machine", setting="tls")
        check_tls(options.tls)
        if options.tls.server_name is not None and address.url.drivername == "postgresql+psycopg":
            raise SecurityError(
                "server_name= cannot be had with psycopg, which checks the name that it connects to; "
                f"write {name}:// for asyncpg",
                setting="server_name",
            )
    if options.credentials is not None:
        if name == "sqlite":
            raise SecurityError("credentials= has no use with sqlite://, a file has no users", setting="credentials")
        check_credentials(options.credentials)
    if options.schema and name != "postgresql":
        raise ConfigurationError(
            f"schema={options.schema!r} is for PostgreSQL; {address.dialect.title} has the database"
        )
    if options.durability != "power" and name != "sqlite":
        raise ConfigurationError(f"durability={options.durability!r} is for SQLite; a server has a setting of its own")
    if options.engine is not None:
        for option in ("tls", "credentials"):
            if getattr(options, option) is not None:
                raise SecurityError(
                    f"{option}= has no use beside engine=, which connects by itself: give it to the engine",
                    setting=option,
                )
        _check_engine(address, options.engine)


def _check_engine(address: Address, engine: object) -> None:
    from sqlalchemy.ext.asyncio import AsyncEngine

    if not isinstance(engine, AsyncEngine):
        raise ConfigurationError(f"engine= is a {type(engine).__name__}; it must be an AsyncEngine")
    if address.dialect.name == "sqlite":
        raise ConfigurationError(
            "engine= has no use with sqlite://: a file is opened by its name. Send inside your transaction with "
            "transaction="
        )
    if engine.dialect.name not in _SAME.get(address.dialect.name, (address.dialect.name,)):
        raise ConfigurationError(f"engine= is one of {engine.dialect.name}, and the URL says {address.dialect.name}")
    theirs = engine.url.database
    if theirs is not None and theirs != address.url.database:
        raise ConfigurationError(
            f"engine= is one of the database {theirs!r}, and the URL names {address.url.database!r}; name the same"
        )


_SAME = {"mariadb": ("mariadb", "mysql"), "mysql": ("mariadb", "mysql")}
"""SQLAlchemy has two names for what speaks one language."""


def _identifier(option: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigurationError(
            f"{option}={value!r} must be a name of 1 to 31 letters, digits and underscores that begins with no digit"
        )
    return value


def _schema(option: str, value: object) -> str:
    return "" if value == "" else _identifier(option, value)


def _switch(option: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if not isinstance(value, str) or value.lower() not in words:
        raise ConfigurationError(f"{option}={value!r} must be true or false")
    return words[value.lower()]


def _seconds(option: str, text: str) -> timedelta:
    try:
        return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        raise ConfigurationError(f"{option}={text!r} must be a number of seconds") from None


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigurationError(f"{option}={text!r} must be a whole number")
    return int(text)


def _same(option: str, text: str) -> str:
    return text


_READ: dict[str, Callable[[str, str], object]] = {
    "prefix": _same,
    "schema": _same,
    "create_schema": _switch,
    "lease": _seconds,
    "poll": _seconds,
    "listen": _switch,
    "pool": _number,
    "max_message": _number,
    "durability": _same,
    "keep_dead_letters": _seconds,
}


def check_lease(option: str, value: object) -> timedelta:
    lease = check_duration(option, value)
    if not SHORTEST_LEASE <= lease <= LONGEST_LEASE:
        raise ConfigurationError(f"{option}={lease} must be at least {SHORTEST_LEASE} and at most {LONGEST_LEASE}")
    return lease


def _poll(option: str, value: object) -> None:
    if not timedelta(milliseconds=50) <= check_duration(option, value) <= timedelta(minutes=1):
        raise ConfigurationError(f"{option}={value} must lie between 50 ms and a minute")


def _between(least: int, most: int) -> Callable[[str, object], None]:
    def check(option: str, value: object) -> None:
        if not isinstance(value, int) or not least <= value <= most:
            raise ConfigurationError(f"{option}={value!r} must lie between {least:,} and {most:,}")

    return check


def _durability(option: str, value: object) -> None:
    if value not in ("power", "process"):
        raise ConfigurationError(f"{option}={value!r} must be 'power' or 'process'")


def _age(option: str, value: object) -> None:
    if value is not None:
        check_duration(option, value)


def _name(option: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{option}={value!r} must be text")


def _reconnect(option: str, value: object) -> None:
    if not isinstance(value, Backoff):
        raise ConfigurationError(f"{option}={value!r} must be a Backoff")


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "name": _name,
    "reconnect": _reconnect,
    "prefix": _identifier,
    "schema": _schema,
    "lease": check_lease,
    "poll": _poll,
    "pool": _between(2, 1_000),
    "max_message": _between(1_024, 512 * 1024 * 1024),
    "durability": _durability,
    "keep_dead_letters": _age,
}
