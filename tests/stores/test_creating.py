"""Tables that many processes make at once, that Alembic makes, and whose names a database would misread."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from sqlalchemy import MetaData

from acemq import ConfigurationError, DbIdempotencyStore, DbOutboxStore
from tests.stores.places import Sql
from tests.stores.test_relay import record

ROOT = Path(__file__).parents[2]

CREATOR = """
import asyncio, sys
from acemq import DbIdempotencyStore, DbOutboxStore
from tests.stores.places import engine_for

async def make(url):
    engine = engine_for(url)
    await DbOutboxStore(engine).create()
    await DbIdempotencyStore(engine).create()
    await engine.dispose()

print("ready", flush=True)
for _ in sys.stdin:  # a line for each round, to all at once
    asyncio.run(make(sys.argv[1]))
    print("made", flush=True)
"""
ROUNDS = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb"], indirect=True)
async def test_o026_tables_that_eight_processes_make_at_once(place: Sql) -> None:
    url = place.engine.url.render_as_string(hide_password=False)
    await place.execute("SELECT 1")  # an SQLite file is in its journal mode before many want it to be
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-c", CREATOR, url),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(8)
    ]
    store, claims = DbOutboxStore(place.engine), DbIdempotencyStore(place.engine)

    async def all_say(word: str) -> None:
        for process in processes:
            assert process.stdout is not None
            if await process.stdout.readline() != f"{word}\n".encode():
                _, error = await process.communicate()
                raise AssertionError(error.decode())

    try:
        await all_say("ready")
        for _ in range(ROUNDS):
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"\n")
            await all_say("made")
            await store.check()
            await claims.check()
            assert await indexes(place) == INDEXES[place.name]
            await place.add(store, record("m", key="k"))
            for table in ("acemq_outbox", "acemq_idempotency", *(["acemq_outbox_slots"] * (place.name == "mariadb"))):
                await place.execute(f"DROP TABLE {table}")
        ended = await asyncio.gather(*(process.communicate(b"") for process in processes))  # the end of its rounds
        assert [(process.returncode, error) for process, (_, error) in zip(processes, ended, strict=True)] == [
            (0, b"")
        ] * 8
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_many_that_make_the_tables_at_once_wait_for_one_another(place: Sql) -> None:
    """Also on an engine that its application has set to commit each statement: the lock outlives that."""
    engine = place.engine.execution_options(isolation_level="AUTOCOMMIT")
    await place.execute("SELECT 1")
    for _ in range(5):
        await asyncio.gather(*(DbOutboxStore(engine).create() for _ in range(5)))
        await DbOutboxStore(place.engine).check()
        for table in ("acemq_outbox", *(["acemq_outbox_slots"] * (place.name == "mariadb"))):
            await place.execute(f"DROP TABLE {table}")


INDEXES = {
    "sqlite": {"acemq_outbox_pending", "acemq_outbox_order", "acemq_outbox_published", "acemq_idempotency_expiry"},
    "postgresql": {"acemq_outbox_pending", "acemq_outbox_order", "acemq_outbox_published", "acemq_idempotency_expiry"},
    "mariadb": {"acemq_outbox_pending", "acemq_outbox_order", "acemq_idempotency_expiry"},
}


async def indexes(place: Sql) -> set[str]:
    """Those with names of ours."""
    match place.name:
        case "sqlite":
            found = await place.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        case "postgresql":
            found = await place.execute("SELECT indexname FROM pg_indexes WHERE schemaname = current_schema()")
        case _:
            found = await place.execute(
                "SELECT DISTINCT index_name FROM information_schema.statistics WHERE table_schema = DATABASE()"
            )
    names = {str(row[0]) for row in found}
    return {name for name in names if name.rpartition("_")[2] in ("pending", "order", "published", "expiry")}


async def test_the_text_makes_what_create_makes(place: Sql) -> None:
    store, claims = DbOutboxStore(place.engine), DbIdempotencyStore(place.engine)
    for statement in (store.create_table_sql() + claims.create_table_sql()).split(";\n"):
        if statement.strip():
            await place.execute(statement)
    await store.check()
    await claims.check()
    assert await place.add(store, record("m", key="k"), record("n")) == [True, True]
    assert len((await store.claim(10)).records) == 2


async def test_the_table_for_alembic_makes_it_too(place: Sql) -> None:
    store, claims = DbOutboxStore(place.engine, "orders_outbox"), DbIdempotencyStore(place.engine, "orders_inbox")
    metadata = MetaData()
    assert store.table(metadata).name == "orders_outbox"
    assert claims.table(metadata).name == "orders_inbox"
    async with place.engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await store.create()  # on MySQL, the rows of the slots
    await claims.check()
    assert await place.add(store, record("m", key="k")) == [True]


async def test_a_name_that_is_a_word_of_the_language_and_one_with_capitals(place: Sql) -> None:
    for name in ("order", "OrdersOutbox"):
        store = await place.outbox(table=name)
        assert await place.add(store, record("m", key="k")) == [True]
        batch = await store.claim(1)
        assert await store.failed("m", "boom", batch.token)
        batch = await store.claim(1)
        assert await store.published(["m"], batch.token) == 1
        assert (await store.status()).pending == 0


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_a_schema_of_its_own(place: Sql) -> None:
    await place.execute("CREATE SCHEMA messages")
    store = DbOutboxStore(place.engine, schema="messages")
    await store.create()
    assert await place.add(store, record("m", key="k")) == [True]
    batch = await store.claim(1)
    assert await store.published(["m"], batch.token) == 1
    await DbIdempotencyStore(place.engine, schema="messages").create()


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
async def test_texts_for_other_databases_need_none_of_them(place: Sql) -> None:
    store = DbOutboxStore(place.engine)
    assert "GENERATED BY DEFAULT AS IDENTITY" in store.create_table_sql("postgresql")
    assert "AUTO_INCREMENT" in store.create_table_sql("mysql")
    assert "acemq_outbox_slots" in store.create_table_sql("mariadb")
    with pytest.raises(ConfigurationError, match="dialect="):
        store.create_table_sql("oracle")
