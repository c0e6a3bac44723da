"""What a database's URL may say, what its errors mean, and the tables as they are printed; no database is asked."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from acemq import ConfigurationError, Credentials, MissingExtraError, SecurityError, Tls
from acemq.opening import transport_for
from acemq.topology import Queue
from acemq.transport import ServerTooOld
from acemq.transports.sql import schema, transport
from acemq.transports.sql.address import parse
from acemq.transports.sql.database import check_mysql
from acemq.transports.sql.dialects import DIALECTS, MARIADB, MYSQL, POSTGRESQL, SQLITE, Statements, Tables
from acemq.transports.sql.routes import read_spec, write_spec

PG = "postgresql://user:secret@host/db"


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("sqlite://", {}, "in memory"),
        ("sqlite:///:memory:", {}, "memory://"),
        ("sqlite://host/file.db", {}, "three slashes"),
        ("postgresql://user:secret@host", {}, "no database"),
        ("postgresql:///db", {}, "no host"),
        ("postgresql+pg8000://host/db", {}, "driver 'pg8000'"),
        ("postgresql://user:secret@host:port/db", {}, "no URL"),
        (PG + "?heartbeat=3", {}, "query key 'heartbeat'"),
        (PG + "?pool=many", {}, "pool='many'"),
        (PG + "?listen=perhaps", {}, "listen='perhaps'"),
        (PG + "?prefix=9x", {}, "prefix='9x'"),
        (PG + "?prefix=a&", {"prefix": "b"}, "prefix is said in the URL"),
        (PG, {"durability": "process"}, "for SQLite"),
        (PG, {"engine": object()}, "AsyncEngine"),
        (PG, {"unheard": 1}, "option 'unheard'"),
        (PG, {"lease": timedelta(milliseconds=5)}, "at least 0:00:01"),
        (PG, {"lease": timedelta(days=1)}, "at most 12:00:00"),
        (PG, {"poll": timedelta(0)}, "poll"),
        (PG, {"pool": 1}, "pool=1"),
        ("sqlite:///x.db", {"schema": "mq"}, "for PostgreSQL"),
        ("sqlite:///x.db", {"durability": "never"}, "durability='never'"),
    ],
)
def test_a_url_or_option_that_is_wrong_is_refused_by_name(url: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as refusal:
        transport(url, **options)
    assert "secret" not in str(refusal.value)


def test_what_is_for_a_network_is_refused_for_a_file() -> None:
    for option in ({"tls": Tls()}, {"credentials": Credentials("a", "b")}):
        with pytest.raises(SecurityError, match="sqlite"):
            transport("sqlite:///x.db", **option)


def test_no_secret_is_shown() -> None:
    made = transport(PG)
    assert "secret" not in repr(made) + repr(made.state) + repr(parse(PG))
    assert made.state.endpoint == "host:5432/db"


def test_every_scheme_leads_to_a_transport_that_is_not_open() -> None:
    for url in (
        "sqlite:///x.db",
        PG,
        "postgresql+psycopg://h/d",
        "mariadb://h/d",
        "mysql://h/d",
        "mysql+asyncmy://h/d",
    ):
        assert transport_for(url).capabilities.transport == "sql"


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(MissingExtraError, match="postgres"):
        transport(PG)


@pytest.mark.parametrize(
    ("dialect", "old", "new"),
    [
        (POSTGRESQL, "11.9", "12.0"),
        (POSTGRESQL, "9.6.24 (Debian)", "15.20 (Debian 15.20-0+deb12u1)"),
        (MARIADB, "10.5.20-MariaDB", "10.6.0-MariaDB-log"),
        (MYSQL, "5.7.44", "8.0.36"),
        (SQLITE, "3.34.1", "3.35.0"),
    ],
)
def test_t026_an_old_server_is_refused_with_what_was_found_and_wanted(dialect: Any, old: str, new: str) -> None:
    dialect.check_version(new)
    with pytest.raises(ServerTooOld, match=re.escape(old)) as refusal:
        dialect.check_version(old)
    assert refusal.value.found == old
    assert "Upgrade" in str(refusal.value)


def test_t026_a_binary_log_of_statements_is_refused() -> None:
    check_mysql(MARIADB, "10.11.6-MariaDB", "1", "MIXED")
    check_mysql(MARIADB, "10.11.6-MariaDB", "0", "STATEMENT")
    with pytest.raises(ServerTooOld, match="binlog_format"):
        check_mysql(MARIADB, "10.11.6-MariaDB", "1", "STATEMENT")
    with pytest.raises(ConfigurationError, match="mariadb://"):
        check_mysql(MYSQL, "10.11.6-MariaDB", "0", "ROW")
    with pytest.raises(ConfigurationError, match="mysql://"):
        check_mysql(MARIADB, "8.0.36", "0", "ROW")


@pytest.mark.parametrize("database", sorted(DIALECTS))
def test_the_tables_are_printed_whole_and_from_a_version_on(database: str) -> None:
    printed = schema.sql(database, prefix="mq_")
    assert printed.count("CREATE TABLE mq_") == 7
    assert "{" not in printed
    assert schema.sql(database, since=schema.VERSION) == "\n"


def test_the_schema_of_postgresql_qualifies_tables_and_no_index() -> None:
    printed = schema.sql("postgresql", schema="shop")
    assert "CREATE TABLE shop.acemq_message" in printed
    assert "CREATE INDEX acemq_message_ready ON shop.acemq_message" in printed


def test_the_tables_are_printed_by_a_command() -> None:
    command = [sys.executable, "-W", "error", "-m", "acemq.transports.sql.schema"]
    done = subprocess.run([*command, "postgresql"], capture_output=True, text=True, check=True)
    assert done.stdout == schema.sql("postgresql")
    refused = subprocess.run([*command, "mariadb", "--from", "7"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "version 7 is not known" in refused.stderr


def test_an_unknown_database_has_no_tables() -> None:
    with pytest.raises(ConfigurationError, match="oracle"):
        schema.sql("oracle")


@pytest.mark.parametrize("database", sorted(DIALECTS))
def test_every_statement_is_filled_in(database: str) -> None:
    statements = Statements(DIALECTS[database], Tables("mq_", ""))
    for name in ("claim", "look", "topology", "insert") if database != "mariadb" else ("candidates", "chosen"):
        if name != "claim" or database in ("postgresql", "sqlite"):
            assert isinstance(statements[name], sa.TextClause)
            assert not re.search(r"\{\w+\}", statements[name].text)


def test_a_queue_is_described_by_what_differs_and_read_back_equal() -> None:
    queue = Queue(
        "q", type="classic", dead_letter=True, ttl=timedelta(seconds=3), priorities=7, lease=timedelta(hours=1)
    )
    assert read_spec("q", write_spec(queue)) == queue
    assert write_spec(Queue("q")) == "{}"
    assert read_spec("q", '{"of_the_future": 1}') == Queue("q")
