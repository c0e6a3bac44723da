"""`acemq outbox` against each database: what it shows, what it changes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq import AceMQ, DbOutboxStore, Envelope, OutboxRecord, Topology
from acemq.cli.running import ExitCode
from acemq.ops.outbox import OutboxActed
from tests.cli.conftest import Run
from tests.cli.terminal import CTRL_C, Pty
from tests.services import free_ports
from tests.stores.places import Sql, place_at, url_for

SQLITE = pytest.mark.parametrize("shop", ["sqlite"], indirect=True)


def record(id: str, to: str, *, key: str | None = None) -> OutboxRecord:
    return OutboxRecord.of("", to, {"order": id}, envelope=Envelope.of("order.placed", id=id), key=key)


class Shop:
    """An outbox whose target is missing: `o-1` and `o-2` are retired, `o-3` waits behind the first."""

    def __init__(self, place: Sql, mq: AceMQ) -> None:
        self.place, self.mq, self.store = place, mq, DbOutboxStore(place.engine)

    @property
    def url(self) -> str:
        """As an operator writes it: without a driver."""
        return re.sub(r"\+\w+:", ":", self.place.engine.url.render_as_string(hide_password=False))

    async def fill(self) -> None:
        await self.store.create()
        records = record("o-1", "shipping", key="k"), record("o-2", "shipping"), record("o-3", "shipping", key="k")
        await self.place.add(self.store, *records)
        for _ in range(self.store.max_attempts):
            await self.mq.outbox(self.store).sweep()

    async def retired(self) -> list[str]:
        return [each.id for each in await self.store.retired()]

    async def published(self) -> list[str]:
        """What goes out, now that the target is there."""
        await self.mq.declare(Topology().queue("shipping"))
        while (await self.mq.outbox(self.store).sweep()).published:
            pass
        return [message.id for message in await self.mq.pull_many("shipping", bytes, most=10)]


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
async def shop(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Shop]:
    kind: str = request.param
    async with place_at(kind, url_for(kind, request, tmp_path)) as place, acemq.connect(f"memory://{name}") as mq:
        shop = Shop(place, mq)
        await shop.fill()
        monkeypatch.setenv("ACEMQ_DATABASE_URL", shop.url)
        yield shop


# Looking


async def test_status_says_how_much_waits_and_that_somebody_should_look(run: Run, shop: Shop) -> None:
    shown = await run("outbox", "status")
    assert shown.code == ExitCode.ATTENTION
    assert re.search(r"^acemq_outbox +3 +2  \d+\.\d s$", shown.out, re.MULTILINE), shown.out
    told = (await run("outbox", "status", "--json")).json
    (line,) = told["items"]
    assert (told["kind"], line["outbox"], line["pending"], line["retired"]) == ("outbox", "acemq_outbox", 3, 2)
    assert isinstance(line["oldest"], float)


async def test_status_of_an_outbox_that_is_well_is_done(run: Run, shop: Shop) -> None:
    for id in ("o-1", "o-2"):
        assert await shop.store.discard(id, "test")
    shown = await run("outbox", "status")
    assert (shown.code, "retired" in shown.out) == (ExitCode.DONE, False)
    assert await shop.published() == ["o-3"]
    assert re.search(r"^acemq_outbox +0 +0  –$", (await run("outbox", "status")).out, re.MULTILINE)


async def test_retired_says_what_failed_and_why(run: Run, shop: Shop) -> None:
    shown = await run("outbox", "retired")
    assert shown.code == ExitCode.DONE
    assert re.search(r"^o-1 +shipping +k +10 +\d{4}\S+ \S+ +(?!message).*shipping", shown.out, re.MULTILINE)
    whole = await run("outbox", "retired", "--wide")
    assert re.search(r"^o-1 .* message o-1 to queue 'shipping' reached", whole.out, re.MULTILINE), whole.out
    assert "o-3" not in shown.out
    told = (await run("outbox", "retired", "--most", "1", "--json")).json
    assert [each["id"] for each in told["items"]] == ["o-1"]
    nowhere = f"postgresql://test@127.0.0.1:{free_ports(1)[0]}/test"
    refused = await run("outbox", "retired", "--most", "0", "--database", nowhere)
    assert refused.code == ExitCode.USAGE
    assert "must lie between 1 and 1,000" in refused.err  # before it connects
    assert await shop.retired() == ["o-1", "o-2"]


async def test_retired_of_one_record_has_its_headers_and_body(run: Run, shop: Shop) -> None:
    shown = await run("outbox", "retired", "o-2")
    assert '{\n  "order": "o-2"\n}' in shown.out
    assert re.search(r"^x-acemq-id +o-2$", shown.out, re.MULTILINE)
    refused = await run("outbox", "retired", "o-3")
    assert (refused.code, "it is not retired" in refused.err) == (ExitCode.USAGE, True)


# Acting


async def test_released_records_are_published(run: Run, shop: Shop) -> None:
    shown = await run("outbox", "release", "--all", "--yes")
    assert (shown.code, shown.out) == (ExitCode.DONE, "2 of 2 released\n")
    assert await shop.retired() == []
    assert sorted(await shop.published()) == ["o-1", "o-2", "o-3"]
    again = await run("outbox", "release", "--all")  # nothing to release, so nothing to confirm
    assert (again.code, again.out) == (ExitCode.DONE, "0 of 0 released\n")


async def test_one_is_released_by_the_beginning_of_its_id(run: Run, shop: Shop) -> None:
    told = (await run("outbox", "release", "o-2", "--yes", "--json")).json
    assert (told["kind"], told["affected"], told["skipped"], told["outbox"]) == ("acted", 1, {}, "acemq_outbox")
    assert await shop.retired() == ["o-1"]


async def test_a_discarded_record_is_never_published_and_what_waited_behind_it_is(run: Run, shop: Shop) -> None:
    shown = await run("outbox", "discard", "o-1", "--reason", "made by mistake", "--yes")
    assert (shown.code, shown.out) == (ExitCode.DONE, "1 of 1 discarded\n")
    assert await shop.retired() == ["o-2"]
    ((reason,),) = await shop.place.execute("SELECT last_error FROM acemq_outbox WHERE id = :id", id="o-1")
    assert reason == "discarded: made by mistake"
    assert await shop.published() == ["o-3"]


@SQLITE
async def test_nobody_to_ask_means_nothing_is_done(run: Run, shop: Shop) -> None:
    for words in (("release", "--all"), ("release", "o-1"), ("discard", "o-1", "--reason", "test")):
        refused = await run("outbox", *words)
        assert (refused.code, "add --yes" in refused.err) == (ExitCode.REFUSED, True)
    assert await shop.retired() == ["o-1", "o-2"]


@SQLITE
async def test_what_another_has_dealt_with_meanwhile_is_left_and_said(
    run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acemq.ops import outbox

    discard = outbox.discard

    async def too_late(store: DbOutboxStore, *given: Any) -> OutboxActed:
        await store.release("o-1")
        return await discard(store, *given)

    monkeypatch.setattr(outbox, "discard", too_late)
    ended = await run("outbox", "discard", "o-1", "o-2", "--reason", "test", "--yes")
    assert (ended.code, ended.out) == (ExitCode.PARTLY, "1 of 2 discarded; 1 were not retired any more\n")


@SQLITE
async def test_a_database_that_goes_away_in_the_middle_says_how_far_it_came(
    run: Run, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = DbOutboxStore.release

    async def once(store: DbOutboxStore, id: str, /) -> bool:
        if id == "o-2":
            raise ConnectionResetError("the database is away")
        return await release(store, id)

    monkeypatch.setattr(DbOutboxStore, "release", once)
    ended = await run("outbox", "release", "--all", "--yes", "--json")
    assert (ended.code, ended.json["affected"]) == (ExitCode.PARTLY, 1)
    assert "the database is away" in json.loads(ended.err)["message"]
    failed = await run("outbox", "release", "--all", "--yes")
    assert (failed.code, failed.out) == (ExitCode.UNREACHABLE, "")


# At a terminal


@SQLITE
@pytest.mark.parametrize(
    ("keys", "code", "left"),
    [("y\n", ExitCode.DONE, []), ("n\n", ExitCode.REFUSED, ["o-2"]), (CTRL_C, ExitCode.INTERRUPTED, ["o-2"])],
)
async def test_at_a_terminal_it_asks_before_it_gives_up(
    shop: Shop, tmp_path: Path, keys: str, code: int, left: list[str]
) -> None:
    await shop.store.discard("o-1", "test")
    words = ("outbox", "discard", "o-2", "--reason", "test", "--database", shop.url)
    with Pty(*words, url="", output=tmp_path / "output") as shown:
        shown.shows("Discard the record o-2 of acemq_outbox, never to be published? [y/N]: ")
        shown.press(keys)
        assert shown.ended() == code, shown.output
        assert "Traceback" not in shown.output
    assert await shop.retired() == left


# What is refused


async def test_a_table_that_is_missing_or_somebody_elses_is_named(run: Run, shop: Shop) -> None:
    await shop.place.execute("CREATE TABLE shop_outbox (id INTEGER PRIMARY KEY, payload TEXT)")
    for words in (("status",), ("retired",), ("release", "--all", "-y"), ("discard", "o-1", "--reason", "r", "-y")):
        missing = await run("outbox", *words, "--table", "no_outbox")
        assert (missing.code, missing.out) == (ExitCode.USAGE, "")
        assert "there is no table 'no_outbox'. Is the name right" in missing.err
        foreign = await run("outbox", *words, "--table", "shop_outbox")
        assert (foreign.code, "it has no seq" in foreign.err) == (ExitCode.USAGE, True)
    no_name = await run("outbox", "status", "--table", "x; DROP TABLE y")
    assert (no_name.code, "no plain identifier" in no_name.err) == (ExitCode.USAGE, True)


async def test_an_unknown_id_among_several_leaves_all_as_they_are(run: Run, shop: Shop) -> None:
    for words in (("release", "o-1", "o-9"), ("discard", "o-1", "o-9", "--reason", "test")):
        refused = await run("outbox", *words, "--yes")
        assert (refused.code, "no record 'o-9'" in refused.err) == (ExitCode.USAGE, True)
    several = await run("outbox", "release", "o-", "--yes")
    assert (several.code, "2 retired records of acemq_outbox begin with 'o-'" in several.err) == (ExitCode.USAGE, True)
    assert await shop.retired() == ["o-1", "o-2"]


@SQLITE
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("release",), "give --all"),
        (("release", "o-1", "--all"), "not both"),
        (("discard", "o-1", "--reason", " "), "say why"),
        (("discard", "o-1"), "reason"),
        (("status", "--max-attempts", "0"), "max_attempts=0"),
    ],
)
async def test_half_an_order_is_refused(run: Run, shop: Shop, words: tuple[str, ...], text: str) -> None:
    refused = await run("outbox", *words, *(("--yes",) if words[0] != "status" else ()))
    assert (refused.code, text in refused.err) == (ExitCode.USAGE, True), refused.err
    assert await shop.retired() == ["o-1", "o-2"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("amqp://amy:secret@host/shop", "which is a broker"),
        ("memory://shop", "which is a broker"),
        ("oracle://amy:secret@host/shop", "postgresql://"),
        ("amy:secret@host", "postgresql://"),
        ("postgresql://amy:sec/ret@host:x/shop", "%2F"),
        ("postgresql+secret://amy@host/shop", "acemq[postgres]"),
        ("sqlite:///no-such-file.db", "there is no file 'no-such-file.db'"),
        ("sqlite://", "there is no file ''"),
    ],
)
async def test_what_is_no_database_is_refused_without_its_password(
    run: Run, url: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = await run("outbox", "status", "--database", url)
    assert (refused.code, text in refused.err) == (ExitCode.USAGE, True), refused.err
    assert "secret" not in refused.err.replace("postgresql+secret", "")
    assert os.listdir(tmp_path) == [], "looking made a file"


async def test_no_database_named_says_where_it_may_be_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ACEMQ_DATABASE_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    refused = await run("outbox", "status")
    assert (refused.code, "ACEMQ_DATABASE_URL" in refused.err) == (ExitCode.USAGE, True)
    (tmp_path / "pyproject.toml").write_text('[tool.acemq]\ndatabase = "sqlite:///gone.db"\n')
    assert "gone.db" in (await run("outbox", "status")).err


@pytest.mark.parametrize("kind", ["postgresql", "mariadb"])
async def test_a_database_that_does_not_answer_is_a_code_of_its_own(run: Run, kind: str) -> None:
    (port,) = free_ports(1)
    url = f"{kind}://amy:secret@127.0.0.1:{port}/shop"
    for more in ((), ("--json",)):
        failed = await run("outbox", "status", "--database", url, "--timeout", "2s", *more)
        assert failed.code == ExitCode.UNREACHABLE, failed.err
        assert "secret" not in failed.out + failed.err
        assert "127.0.0.1" in failed.err


@pytest.mark.parametrize("shop", ["postgresql"], indirect=True)
async def test_a_schema_and_a_driver_may_be_named(run: Run, shop: Shop) -> None:
    await shop.place.execute("CREATE SCHEMA messages")
    store = DbOutboxStore(shop.place.engine, schema="messages")
    await store.create()
    await shop.place.add(store, record("m", "shipping"))
    url = shop.url.replace("postgresql:", "postgresql+psycopg:")
    told = (await run("outbox", "status", "--schema", "messages", "--database", url, "--json")).json
    assert told["items"][0]["pending"] == 1


# As a program


@SQLITE
async def test_programs_find_the_same_keys_for_ever(run: Run, shop: Shop) -> None:
    """Keys are added, never taken away or renamed, while the first of them is 1."""
    record_keys = "id type exchange routing_key key attempts written_at error content_type size headers body"
    for words, kind, keys in (
        (("status",), "outbox", "outbox pending retired oldest"),
        (("retired",), "outbox.retired", record_keys),
        (("retired", "o-1"), "outbox.record", record_keys),
    ):
        told = (await run("outbox", *words, "--json")).json
        assert {"acemq", "kind", "at", "items", "next"} <= told.keys()
        assert (told["acemq"], told["kind"]) == (1, kind)
        assert set(keys.split()) <= told["items"][0].keys()
    acted = (await run("outbox", "release", "--all", "--yes", "--json")).json
    assert {"acemq", "kind", "at", "affected", "skipped", "took", "outbox"} <= acted.keys()
