"""The tables as Alembic sees them: the same that the statements make, on each database."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

import acemq
from acemq import ConfigurationError, Topology
from acemq.transports.sql.schema import sql, tables
from tests.sql.engines import engine_for


async def differences(url: str, metadata: sa.MetaData, *statements: str, schema: str | None = None) -> list[Any]:
    """Between the database, once these statements have run, and `metadata`."""
    engine = engine_for(url)

    def compare(connection: sa.Connection) -> list[Any]:
        options: dict[str, Any] = {"compare_type": True, "compare_server_default": True}
        if schema is not None:
            options["include_schemas"] = True
            options["include_name"] = lambda name, kind, parents: kind != "schema" or name == schema
        found: list[Any] = compare_metadata(MigrationContext.configure(connection, opts=options), metadata)
        return found

    async with engine.begin() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)
        found = await connection.run_sync(compare)
    await engine.dispose()
    return found


def statements_of(database: str, **named: Any) -> list[str]:
    return [each for each in sql(database, **named).split(";\n") if each.strip()]


async def test_autogenerate_finds_nothing_to_change(url: str) -> None:
    database, metadata = url.partition(":")[0], sa.MetaData()
    assert {table.name for table in tables(metadata, database)} == {
        f"acemq_{name}" for name in ("meta", "exchange", "queue", "binding", "owner", "exclusive", "message")
    }
    assert await differences(url, metadata, *statements_of(database)) == []


async def test_without_them_it_would_drop_them(url: str) -> None:
    found = await differences(url, sa.MetaData(), *statements_of(url.partition(":")[0]))
    assert {kind for kind, *_ in found} >= {"remove_table"}


async def test_under_another_prefix_and_in_a_schema_of_their_own(postgres_url: str) -> None:
    metadata = sa.MetaData()
    tables(metadata, "postgresql", prefix="shop_", schema="mq")
    made = ["CREATE SCHEMA mq", *statements_of("postgresql", prefix="shop_", schema="mq")]
    assert await differences(postgres_url, metadata, *made, schema="mq") == []


async def test_what_is_made_of_them_is_used(url: str) -> None:
    metadata, engine, database = sa.MetaData(), engine_for(url), url.partition(":")[0]
    tables(metadata, database)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
        await connection.exec_driver_sql(statements_of(database)[-1].rstrip(";\n"))
    await engine.dispose()
    async with acemq.connect(f"{url.partition('?')[0]}?create_schema=false") as mq:
        await mq.declare(Topology().queue("q", dead_letter=True).exchange("x", "fanout").bind("q", "x"))
        await mq.publish("x", "", 1)
        await mq.send("q", 2)
        assert [pulled.payload for pulled in await mq.pull_many("q", int)] == [1, 2]


def test_a_database_that_there_is_not_is_named() -> None:
    with pytest.raises(ConfigurationError, match="database='oracle' must be one of"):
        tables(sa.MetaData(), "oracle")
