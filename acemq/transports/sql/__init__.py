"""A database as the broker: SQLite, PostgreSQL, MariaDB and MySQL, through SQLAlchemy.

port.py       the verbs                      running.py    what lives while it is open
address.py    URL and options                dialects.py   what differs from database to database
database.py   how statements get there       link.py       the link, kept
securing.py   TLS as each driver takes it
schema/       the tables, by version         statements/   what is asked of them, by name
routes.py     where a message goes           topology.py   declaring, counting, deleting
publish.py    from messages to rows          transaction.py  the same inside the caller's transaction
claim.py      from rows to deliveries        receive.py    subscriptions
settle.py     under the token alone          exclusive.py  the only consumer of a queue
waking.py     hearing of others              sweeping.py   what nobody else would remove
gather.py     many calls, one trip           bell.py       waiting
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from acemq.errors import MissingExtraError
from acemq.transport import Transport

_EXTRAS = {"postgresql": "postgres", "mariadb": "mysql", "mysql": "mysql"}
_DRIVER_OF = {"postgresql": "asyncpg", "mariadb": "asyncmy", "mysql": "asyncmy"}
_DRIVERS = ("sqlalchemy", "greenlet", "asyncpg", "psycopg", "asyncmy", "aiosqlite")


def transport(url: str, /, **options: Any) -> Transport:
    """Read URL and options and refuse what is wrong with them; no I/O, and no event loop is needed.

    What may be said beside the URL is in `acemq.transports.sql.address.Options`.
    """
    scheme = url.partition("://")[0].lower()
    try:
        from . import port

        name, _, driver = scheme.partition("+")
        if name in _DRIVER_OF and driver in ("", "asyncpg", "psycopg", "asyncmy"):
            import_module(driver or _DRIVER_OF[name])
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] in _DRIVERS:
            raise MissingExtraError(f"{scheme}://", _EXTRAS.get(scheme.partition("+")[0], "sql")) from None
        raise
    from .address import parse, read_options

    address, query = parse(url)
    return port.SqlTransport(address, read_options(address, query, options))
