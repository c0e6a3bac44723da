"""What is refused when a database is opened, with the next step; and the tables made by many at once. T-019, T-026."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from datetime import timedelta
from pathlib import Path

import pytest

import acemq
from acemq import AuthenticationError, ConnectionFailedError, Topology
from acemq.transport import ServerTooOld
from acemq.transports.sql import dialects, schema
from acemq.transports.sql.database import Server
from tests.services import PostgreSQL
from tests.sql.engines import engine_for

SOON = timedelta(seconds=5)


async def run(url: str, *statements: str) -> None:
    engine = engine_for(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.exec_driver_sql(statement)
    await engine.dispose()


def statements_of(url: str) -> list[str]:
    return [each for each in schema.sql(url.partition(":")[0]).split(";\n") if each.strip()]


async def test_missing_tables_are_refused_with_the_command_that_prints_them(url: str) -> None:
    bare = f"{url.partition('?')[0]}?create_schema=false"
    database = url.partition(":")[0]
    with pytest.raises(ConnectionFailedError, match=rf"acemq_meta.*missing.*sql\.schema {database}"):
        async with acemq.connect(bare, connect_timeout=SOON):
            pass


async def test_t019_tables_that_were_printed_and_run_by_another_are_enough(url: str) -> None:
    await run(url, *statements_of(url))
    async with acemq.connect(f"{url.partition('?')[0]}?create_schema=false") as mq:
        await mq.declare(Topology().queue("q"))
        await mq.send("q", 1)


async def test_t019_of_many_who_make_the_tables_at_once_one_does(url: str) -> None:
    async def use(number: int) -> None:
        async with acemq.connect(url) as mq:
            await mq.declare(Topology().queue("q"))
            await mq.send("q", number)

    await asyncio.gather(*(use(number) for number in range(4)))
    async with acemq.connect(url) as mq:
        assert {pulled.payload for pulled in await mq.pull_many("q", int)} == {0, 1, 2, 3}


@pytest.mark.parametrize(("found", "says"), [("7", "version 7.*upgrade acemq"), ("0", "missing")])
async def test_t019_tables_of_another_version_are_refused_with_both_numbers(url: str, found: str, says: str) -> None:
    await run(url, *statements_of(url), f"UPDATE acemq_meta SET value = '{found}' WHERE name = 'schema'")
    with pytest.raises(ConnectionFailedError, match=says):
        async with acemq.connect(f"{url.partition('?')[0]}?create_schema=false", connect_timeout=SOON):
            pass


async def test_t019_tables_one_version_newer_are_used(url: str) -> None:
    await run(url, *statements_of(url), "UPDATE acemq_meta SET value = '2' WHERE name = 'schema'")
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue("q"))


async def test_a_foreign_table_of_that_name_is_left_alone_and_named(url: str) -> None:
    await run(url, "CREATE TABLE acemq_meta (theirs INT)")
    with pytest.raises(ConnectionFailedError, match=r"acemq_meta is there already.*prefix"):
        async with acemq.connect(url, connect_timeout=SOON):
            pass
    async with acemq.connect(f"{url}{'&' if '?' in url else '?'}prefix=mq_") as mq:
        await mq.declare(Topology().queue("q"))


async def test_t026_an_old_server_is_refused_before_anything_is_written(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(self: dialects.Dialect, found: str) -> None:
        raise ServerTooOld(f"{self.title} {found} is too old", found=found, wanted="99")

    monkeypatch.setattr(dialects.Dialect, "check_version", old)
    with pytest.raises(ConnectionFailedError, match="too old"):
        async with acemq.connect(url, connect_timeout=SOON):
            pass
    monkeypatch.undo()
    with pytest.raises(ConnectionFailedError, match="missing"):
        async with acemq.connect(f"{url.partition('?')[0]}?create_schema=false", connect_timeout=SOON):
            pass


async def test_a_file_that_cannot_be_had_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(AuthenticationError, match="no folder"):
        async with acemq.connect(f"sqlite:///{tmp_path}/nowhere/messages.db"):
            pass
    text = tmp_path / "text.db"
    text.write_text("this is no database, but it is long enough to be taken for one" * 100)
    with pytest.raises(AuthenticationError, match="not a database"):
        async with acemq.connect(f"sqlite:///{text}"):
            pass


async def test_a_database_that_is_not_there_is_named(postgresql: PostgreSQL) -> None:
    with pytest.raises(ConnectionFailedError, match="nowhere"):
        async with acemq.connect(postgresql.url_of("nowhere"), connect_timeout=SOON):
            pass


async def test_t021_a_server_that_does_not_let_us_listen_is_polled_and_said_so_once(
    postgres_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Server) -> object:
        raise OSError("LISTEN is not supported here")

    monkeypatch.setattr(Server, "to_listen", refuse)
    got: list[int] = []

    async def take(message: acemq.Message[int]) -> None:
        got.append(message.payload)

    async with acemq.connect(f"{postgres_url}?create_schema=true") as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take), acemq.connect(f"{postgres_url}?listen=false") as other:
            await other.send("q", 1)
            async with asyncio.timeout(5):
                while not got:
                    await asyncio.sleep(0.01)
    said = [
        record for record in caplog.records if record.levelno == logging.WARNING and "listen" in record.getMessage()
    ]
    assert len(said) == 1
    assert "listen=false" in said[0].getMessage()


async def test_the_file_is_in_wal_mode_and_as_durable_as_was_asked(tmp_path: Path) -> None:
    async with acemq.connect(f"sqlite:///{tmp_path}/messages.db?durability=process") as mq:
        with sqlite3.connect(tmp_path / "messages.db") as file:
            assert file.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        file.close()
        assert any("power" in note for note in mq.capabilities.notes)
