"""Relays: each record once where nothing fails, in order per key, retired where it never goes, never lost."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, DbOutboxStore, Diagnostic, Envelope, OutboxRecord, Topology
from acemq.patterns.relay import OutboxRelay, Relaying, RelayState
from acemq.stores import OutboxBatch
from acemq.transports.memory import MemoryBroker
from tests.stores.places import Sql, place_at
from tests.waiting import until, until_async

QUICK = timedelta(milliseconds=50)
SERVERS = pytest.mark.parametrize("place", ["postgresql", "mariadb"], indirect=True)
EACH = pytest.mark.parametrize("place", ["sqlite", "postgresql", "mariadb"], indirect=True)
POSTGRES = pytest.mark.parametrize("place", ["postgresql", "psycopg"], indirect=True)


LISTENING = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"


def record(id: str, *, queue: str = "q", key: str | None = None, payload: object = 1) -> OutboxRecord:
    return OutboxRecord.of("", queue, payload, envelope=Envelope.of("t", id=id), key=key)


class Log:
    """The ids that this connection has handed to its transport for the library, in order."""

    def __init__(self, mq: AceMQ) -> None:
        self.ids: list[str] = []
        move_some = mq.outbound.move_some

        async def logged(batch: Any, within: timedelta) -> Any:
            self.ids += [outgoing.message_id for outgoing in batch]
            return await move_some(batch, within)

        mq.outbound.move_some = logged  # type: ignore[method-assign]

    def of(self, prefix: str) -> list[str]:
        return [id for id in self.ids if id.startswith(prefix)]


@pytest.fixture
async def log(mq: AceMQ) -> Log:
    await mq.declare(Topology().queue("q"))
    return Log(mq)


async def drained(store: Any) -> None:
    async def nothing_is_pending() -> bool:
        return bool(await store.pending_count() == 0)

    await until_async(nothing_is_pending, within=30)


# Several relays


@SERVERS
async def test_o021_four_relays_share_a_table_and_publish_each_record_once(place: Sql, name: str) -> None:
    store = await place.outbox()
    await place.add(store, *(record(f"m-{n}", key=f"k-{n % 40}" if n % 2 else None) for n in range(2_000)))
    logs: list[Log] = []
    relays: list[OutboxRelay] = []
    async with AsyncExitStack() as opened:
        for _ in range(4):
            mq = await opened.enter_async_context(acemq.connect(f"memory://{name}"))
            await mq.declare(Topology().queue("q"))
            logs.append(Log(mq))
            relay = mq.outbox(DbOutboxStore(place.engine)).relay(interval=QUICK, batch=20)
            relays.append(await opened.enter_async_context(relay))
        await drained(store)
    ids = [id for log in logs for id in log.ids]
    assert sorted(ids) == sorted(f"m-{n}" for n in range(2_000))
    assert max(len(log.ids) for log in logs) <= 1_800
    assert sum(relay.counters.published for relay in relays) == 2_000
    assert sum(relay.counters.lease_lost for relay in relays) == 0


@EACH
async def test_m093_a_relay_that_stood_still_for_longer_than_its_lease_changes_nothing(
    place: Sql, mq: AceMQ, log: Log
) -> None:
    store = await place.outbox(lease=timedelta(seconds=1))
    await place.add(store, *(record(f"m-{n}") for n in range(5)))
    suspended = Relaying(mq, store)
    batch, ours_until = await suspended.claim(100)
    assert len(batch.records) == 5

    async def is_taken_over() -> bool:
        return (await mq.outbox(store).sweep()).published == 5

    await until_async(is_taken_over)
    assert len(log.ids) == 5

    sweep = await suspended.finish(batch, ours_until)
    assert len(log.ids) == 5, "the batch was published by one who had lost it"
    assert (sweep.published, sweep.given_back, suspended.counters.lease_lost) == (0, 5, 5)

    late = Relaying(mq, store)
    await late.finish(batch, ours_until + 1_000)  # it had published before it stood still, and marks only now
    assert late.counters.lease_lost == 5
    assert await store.pending_count() == 0


@EACH
async def test_a_mark_under_an_old_token_changes_nothing(place: Sql) -> None:
    store = await place.outbox(lease=timedelta(milliseconds=1))
    await place.add(store, record("m"))
    old = await store.claim(1)
    new = OutboxBatch()

    async def again() -> bool:
        nonlocal new
        new = await store.claim(1)
        return bool(new.records)

    await until_async(again)
    assert new.token > old.token
    assert not await store.failed("m", "late", old.token)
    assert await store.published(["m"], old.token) == 0
    assert await store.give_back(["m"], old.token) == 0
    assert await store.pending_count() == 1
    assert await store.published(["m"], new.token) == 1
    assert await store.published(["m"], new.token) == 0


# Order per key


@EACH
async def test_m089_a_retired_record_holds_its_key_and_what_is_behind_spends_no_attempt(
    place: Sql, mq: AceMQ, log: Log, diagnostics: list[Diagnostic]
) -> None:
    store = await place.outbox()
    await place.add(store, record("k1", queue="nowhere", key="k"), record("k2", key="k"), record("k3", key="k"))
    await place.add(store, *(record(f"other-{n}", key=f"o-{n}") for n in range(3)))
    outbox = mq.outbox(store)
    for _ in range(12):
        await outbox.sweep()
    assert log.of("k") == ["k1"] * 10
    assert sorted(log.of("other")) == ["other-0", "other-1", "other-2"]
    (retired,) = await store.retired()
    assert (retired.id, retired.attempts) == ("k1", 10)
    assert retired.last_error is not None
    assert "nowhere" in retired.last_error
    assert await store.pending_count() == 3
    told = [each for each in diagnostics if each.name == "acemq.outbox.retired"]
    assert [each.message_id for each in told] == ["k1"]

    assert await store.discard("k1", "made by mistake")
    assert not await store.discard("k2", "not retired")
    for _ in range(2):
        await outbox.sweep()
    assert log.of("k")[10:] == ["k2", "k3"]
    assert await store.pending_count() == 0


@EACH
async def test_m088_a_retired_record_is_released_once_its_target_is_there(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox()
    await place.add(store, record("bad", queue="later"), *(record(f"m-{n}") for n in range(30)))
    async with mq.outbox(store).relay(interval=QUICK) as relay:

        async def all_but_one() -> bool:
            return len(await store.retired()) == 1

        await until_async(all_but_one)
        assert sorted(log.of("m-")) == sorted(f"m-{n}" for n in range(30))
        assert len(log.of("bad")) == 10
        health = {part.name: part for part in (await mq.health()).parts}
        assert health["outbox acemq_outbox"].status == "degraded"
        assert "retired" in health["outbox acemq_outbox"].detail
        await mq.declare(Topology().queue("later"))
        assert await store.release("bad")
        await drained(store)
        assert relay.counters.failed == 10
    assert "outbox acemq_outbox" not in {part.name for part in (await mq.health()).parts}


@EACH
async def test_m088_an_exchange_that_nothing_is_bound_to_takes_nothing_until_something_is(
    place: Sql, mq: AceMQ, log: Log
) -> None:
    store = await place.outbox()
    await mq.declare(Topology().exchange("later"))
    lost = OutboxRecord.of("later", "k", 1, envelope=Envelope.of("t", id="lost"))
    await place.add(store, lost, *(record(f"m-{n}") for n in range(30)))
    for _ in range(12):
        await mq.outbox(store).sweep()
    assert log.of("lost") == ["lost"] * 10
    assert sorted(log.of("m-")) == sorted(f"m-{n}" for n in range(30))
    assert await store.pending_count() == 1
    await mq.declare(Topology().queue("q").exchange("later").bind("q", "later", "k"))
    assert await store.release("lost")
    assert (await mq.outbox(store).sweep()).published == 1
    assert await store.pending_count() == 0


@EACH
async def test_m088_of_an_error_a_thousand_characters_are_kept(place: Sql) -> None:
    store = await place.outbox(max_attempts=1)
    await place.add(store, record("m"))
    batch = await store.claim(1)
    assert await store.failed("m", "é\0\ud800" * 5_000, batch.token)
    (retired,) = await store.retired()
    assert retired.last_error == ("é?" * 500)


@SERVERS
async def test_m090_records_of_a_key_leave_in_the_order_of_their_commits(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox()
    async with mq.outbox(store).relay(interval=QUICK):
        slow = place.session()
        await store.add(record("a", key="k"), slow)

        async def second() -> None:
            async with place.session() as session, session.begin():
                await store.add(record("b", key="k"), session)

        waiting = asyncio.ensure_future(second())
        await place.add(store, record("c", key="other"))
        await until(lambda: log.ids == ["c"])
        assert not waiting.done(), "a transaction of the same key did not wait"
        await slow.commit()
        await slow.close()
        await waiting
        await until(lambda: log.ids == ["c", "a", "b"])

        slow = place.session()
        await store.add(record("d", key="k"), slow)
        waiting = asyncio.ensure_future(second_of(place, store, "e"))
        await slow.rollback()
        await slow.close()
        await waiting
        await until(lambda: log.ids[3:] == ["e"])


async def second_of(place: Sql, store: DbOutboxStore, id: str) -> None:
    async with place.session() as session, session.begin():
        await store.add(record(id, key="k"), session)


@pytest.mark.slow
@pytest.mark.timeout(240)
@EACH
async def test_200_random_interleavings_keep_the_order_of_commits_per_key(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox()
    committed: dict[str, list[str]] = {f"k{n}": [] for n in range(4)}
    unkeyed: list[str] = []
    numbers = iter(range(1_000_000))
    rng = random.Random(7)

    async def transaction(choice: random.Random) -> None:
        # One key a transaction, as two in different orders may be chosen as the victim of a deadlock.
        key = choice.choice([*committed, None])
        async with place.session() as session:
            added: list[str] = []
            for _ in range(choice.randint(1, 3)):
                added.append(f"{key}-{next(numbers)}")
                await store.add(record(added[-1], key=key), session)
                await asyncio.sleep(choice.choice([0, 0, 0.001, 0.004]))
            if choice.random() < 0.3:
                await session.rollback()
                return
            # Appended while the key is still locked, so that the lists are in the order of the commits.
            (unkeyed if key is None else committed[key]).extend(added)
            await session.commit()

    async with mq.outbox(store).relay(interval=QUICK), mq.outbox(DbOutboxStore(place.engine)).relay(interval=QUICK):
        for _ in range(200):
            choices = [random.Random(rng.random()) for _ in range(1 if place.name == "sqlite" else 3)]
            await asyncio.gather(*(transaction(choice) for choice in choices))
        await drained(store)
    for key, ids in committed.items():
        assert log.of(f"{key}-") == ids
    assert sorted(log.of("None-")) == sorted(unkeyed)


# The link, the store and the clock


async def test_m091_what_was_not_written_spends_no_attempt(name: str, log: Log, mq: AceMQ, tmp_path: Any) -> None:
    async with place_at("sqlite", f"sqlite+aiosqlite:///{tmp_path / 'test.db'}") as place:
        store = await place.outbox()
        broker = MemoryBroker.named(name)
        async with mq.outbox(store).relay(interval=QUICK) as relay:
            broker.block("disk")
            await until(lambda: relay.state is RelayState.HELD_UP)
            sweeps = relay.counters.sweeps
            await place.add(store, *(record(f"m-{n}") for n in range(20)))
            await until(lambda: mq.state.blocked is not None)
            assert relay.counters.sweeps == sweeps, "it claimed what it cannot publish"
            broker.unblock()
            await drained(store)
        assert relay.counters.failed == 0
        assert len(log.ids) == 20


@EACH
async def test_what_was_refused_between_claim_and_publish_is_given_back_uncounted(
    place: Sql, mq: AceMQ, log: Log, name: str
) -> None:
    store = await place.outbox()
    await place.add(store, *(record(f"m-{n}") for n in range(5)))
    MemoryBroker.named(name).block("disk")
    assert await mq.outbox(store).sweep() == acemq.Sweep(given_back=5)
    MemoryBroker.named(name).unblock()
    assert [each.attempts for each in (await store.claim(10)).records] == [0] * 5


@EACH
async def test_a_relay_goes_on_when_its_store_was_away(
    place: Sql, mq: AceMQ, log: Log, diagnostics: list[Diagnostic]
) -> None:
    store: Any = await place.outbox()
    claim, away = store.claim, asyncio.Event()

    async def flaky(most: int) -> OutboxBatch:
        if away.is_set():
            raise ConnectionError("the database is away")
        batch: OutboxBatch = await claim(most)
        return batch

    store.claim = flaky
    away.set()
    async with mq.outbox(store).relay(interval=timedelta(milliseconds=10)) as relay:
        await until(lambda: relay.state is RelayState.FAILING)
        health = {part.name: part for part in (await mq.health()).parts}
        assert health["outbox acemq_outbox"].status == "down"
        await place.add(store, record("m"))
        away.clear()
        await drained(store)
        await until(lambda: relay.state is RelayState.RUNNING)
    assert [each.name for each in diagnostics] == ["acemq.outbox.failed"]
    assert log.ids == ["m"]


@EACH
async def test_a_mark_that_fails_is_tried_again_while_the_lease_runs(place: Sql, mq: AceMQ, log: Log) -> None:
    store: Any = await place.outbox()
    published, failures = store.published, iter([True, True, True])

    async def flaky(*given: Any) -> int:
        if next(failures, False):
            raise ConnectionError("the database is away")
        return int(await published(*given))

    store.published = flaky
    await place.add(store, record("m"))
    sweep = await mq.outbox(store).sweep()
    assert (sweep.published, sweep.errors, log.ids) == (1, (), ["m"])
    assert await store.pending_count() == 0


@EACH
async def test_a_slow_target_holds_no_transaction_open(place: Sql, mq: AceMQ, log: Log, name: str) -> None:
    store = await place.outbox()
    await place.add(store, record("slow"))
    broker = MemoryBroker.named(name)
    broker.stall("publish")
    sweeping = asyncio.ensure_future(mq.outbox(store).sweep())
    await until(lambda: log.ids == ["slow"])
    # Another writer, and another relay, go on beside it.
    await place.add(store, record("quick", key="k"))
    batch = await store.claim(10)
    assert [each.id for each in batch.records] == ["quick"]
    broker.release("publish")
    await sweeping


@EACH
async def test_cancelling_a_relay_at_any_point_loses_nothing(place: Sql, mq: AceMQ, log: Log, name: str) -> None:
    store = await place.outbox(lease=timedelta(milliseconds=200))
    broker = MemoryBroker.named(name)
    await place.add(store, *(record(f"m-{n}") for n in range(10)))
    broker.stall("publish")
    relay = await mq.outbox(store).relay(interval=QUICK)
    await until(lambda: len(log.ids) >= 10)
    await relay.close(timedelta(milliseconds=10))
    assert relay.state is RelayState.CLOSED
    broker.release("publish")
    async with mq.outbox(store).relay(interval=QUICK):
        await drained(store)
    assert set(log.ids) == {f"m-{n}" for n in range(10)}


async def test_closing_the_connection_closes_its_relays(name: str, tmp_path: Any) -> None:
    async with place_at("sqlite", f"sqlite+aiosqlite:///{tmp_path / 'test.db'}") as place:
        store = await place.outbox()
        async with acemq.connect(f"memory://{name}") as mq:
            await mq.declare(Topology().queue("q"))
            relay = await mq.outbox(store).relay()
        assert relay.state is RelayState.CLOSED
        await relay.close()


# Being woken


@POSTGRES
async def test_m092_a_commit_wakes_the_relay_and_a_lost_listener_comes_back(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox()
    async with mq.outbox(store).relay(interval=timedelta(seconds=30)):
        await until_async(lambda: listening(place))
        await place.add(store, record("first"))
        await until(lambda: log.ids == ["first"], within=2)
        await place.execute(f"SELECT pg_terminate_backend(pid) {LISTENING}")
        await until_async(lambda: listening(place), within=10)
        await place.add(store, record("second"))
        await until(lambda: log.ids == ["first", "second"], within=2)


async def listening(place: Sql) -> bool:
    return bool(await place.execute(f"SELECT 1 {LISTENING}"))


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
async def test_a_pool_of_one_connection_is_enough(place: Sql, mq: AceMQ, log: Log) -> None:
    from tests.stores.places import engine_for

    engine = engine_for(place.engine.url.render_as_string(hide_password=False), pool_size=1, max_overflow=0)
    store = DbOutboxStore(engine)
    await store.create()
    async with mq.outbox(store).relay(interval=timedelta(seconds=30)):
        await until_async(lambda: listening(place))
        await place.add(store, record("m"))
        await until(lambda: log.ids == ["m"], within=2)
    await engine.dispose()


@pytest.mark.parametrize("place", ["sqlite", "mariadb"], indirect=True)
@pytest.mark.parametrize("on", ["session", "connection"])
async def test_a_commit_in_the_same_process_wakes_the_relay(place: Sql, mq: AceMQ, log: Log, on: str) -> None:
    store = await place.outbox()
    async with mq.outbox(DbOutboxStore(place.engine)).relay(interval=timedelta(seconds=30)) as relay:
        await until(lambda: relay.counters.sweeps >= 1)
        if on == "session":
            async with place.session() as session, session.begin():
                await store.add(record("m"), session)
                async with session.begin_nested():
                    await store.add(record("n"), session)
        else:
            async with place.engine.connect() as connection:
                await store.add(record("m"), connection)
                await store.add(record("n"), connection)
                await connection.commit()
        await until(lambda: sorted(log.ids) == ["m", "n"], within=2)


@EACH
async def test_an_idle_relay_asks_at_most_once_a_second(place: Sql, mq: AceMQ) -> None:
    """Once it has begun: to begin is to look, to listen, to look once more at what came before that, and to purge."""
    from sqlalchemy import event

    store = await place.outbox()
    statements: list[str] = []
    event.listen(place.engine.sync_engine, "after_cursor_execute", lambda c, cursor, sql, *rest: statements.append(sql))

    def has_begun() -> bool:
        listens = place.name != "postgresql" or any(each.startswith("LISTEN") for each in statements)
        return listens and any(each.startswith("DELETE") for each in statements)

    async with mq.outbox(store).relay() as relay:
        await until(has_begun)
        sweeps = relay.counters.sweeps
        await until(lambda: relay.counters.sweeps >= sweeps + 2)  # the look that listening asks for is among them
        began, before, sweeps = time.monotonic(), len(statements), relay.counters.sweeps
        await until(lambda: relay.counters.sweeps >= sweeps + 4, within=15)
        asked = [statement for statement in statements[before:] if statement != "BEGIN"]
        assert len(asked) <= time.monotonic() - began + 1


# Keeping and purging


@EACH
async def test_what_was_published_is_kept_and_purged_in_batches(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox(keep=timedelta(milliseconds=1))
    await place.add(store, *(record(f"m-{n}") for n in range(30)))
    await mq.outbox(store).sweep()
    assert [row[0] for row in await place.execute("SELECT count(*) FROM acemq_outbox")] == [30]
    batches: list[int] = []

    async def all_are_gone() -> bool:
        batches.append(await store.purge(batch=10))
        return sum(batches) == 30

    await until_async(all_are_gone)
    assert max(batches) == 10
    forgetful = await place.outbox(keep=timedelta(0))
    await place.add(forgetful, record("m"))
    await mq.outbox(forgetful).sweep()
    assert [row[0] for row in await place.execute("SELECT count(*) FROM acemq_outbox")] == [0]


@EACH
async def test_a_backoff_keeps_a_failed_record_back(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox(backoff=timedelta(hours=1))
    await place.add(store, record("bad", queue="nowhere"))
    outbox = mq.outbox(store)
    assert (await outbox.sweep()).failed == 1
    assert await outbox.sweep() == acemq.Sweep()
    ((wait,),) = await place.execute("SELECT not_before - created_at FROM acemq_outbox")
    assert 290_000 < wait < 310_000  # never longer than five minutes
    assert await store.release("bad")
    assert (await outbox.sweep()).failed == 1


@EACH
async def test_o024_a_claim_walks_along_the_index_whatever_was_sent(place: Sql) -> None:
    store = await place.outbox()
    columns = "id, order_key, exchange_name, routing_key, body, headers, created_at, attempts, published_at"
    numbers = "WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 20000)"
    name = "CONCAT('sent-', n)" if place.name == "mariadb" else "'sent-' || n"
    rows = f"SELECT {name}, 'k', '', 'q', '', '{{}}', n, 0, n FROM n"
    if place.name == "mariadb":
        await place.execute(f"INSERT INTO acemq_outbox ({columns}) {numbers.replace('20000', '1000')} {rows}")
        await place.execute("ANALYZE TABLE acemq_outbox")
    else:
        await place.execute(f"{numbers} INSERT INTO acemq_outbox ({columns}) {rows}")
        await place.execute("ANALYZE")
    await place.add(store, *(record(f"m-{n}", key="k" if n % 2 else None) for n in range(20)))
    explain = "EXPLAIN QUERY PLAN" if place.name == "sqlite" else "EXPLAIN"
    plan = str(await place.execute(f"{explain} {store._sql.claim.text}", ceiling=10, most=10, lease=1))
    assert "acemq_outbox_pending" in plan
    assert "acemq_outbox_order" in plan
    assert not any(sign in plan for sign in ("Seq Scan", "TEMP B-TREE", "filesort", "Sort")), plan


@EACH
async def test_status_tells_what_waits(place: Sql, mq: AceMQ, log: Log) -> None:
    store = await place.outbox(max_attempts=1)
    assert await store.status() == acemq.OutboxStatus(0, 0, None)
    await place.add(store, record("bad", queue="nowhere"))
    await mq.outbox(store).sweep()
    await place.add(store, record("m"))
    status = await store.status()
    assert (status.pending, status.retired) == (2, 1)
    assert status.oldest is not None
    assert timedelta() <= status.oldest < timedelta(minutes=1)


async def test_hooks_see_what_is_written_down_and_the_body_leaves_unchanged(
    name: str, mq: AceMQ, log: Log, tmp_path: Any
) -> None:
    class Stamp(acemq.PublishInterceptor):
        def before_publish(self, draft: acemq.Draft) -> None:
            draft.envelope = draft.envelope.replace(headers={"tenant": "t-1"})

    mq.intercept(Stamp())
    async with place_at("sqlite", f"sqlite+aiosqlite:///{tmp_path / 'test.db'}") as place:
        store = await place.outbox()
        async with place.session() as session, session.begin():
            written = await mq.outbox(store).bind(session).send("q", {"a": [1, 2]}, correlation_id="c-1")
        await mq.outbox(store).sweep()
    pulled = await mq.pull("q", dict)
    assert pulled is not None
    assert pulled.body == written.body == b'{"a":[1,2]}'
    assert dict(pulled.headers) == {"tenant": "t-1"}
    assert (pulled.id, pulled.correlation_id) == (written.id, "c-1")
    assert dict(pulled.wire_headers) == dict(written.headers)


async def test_a_payload_that_is_checked_in_is_fetched_by_its_reader(name: str, log: Log, tmp_path: Any) -> None:
    payloads = acemq.MemoryClaimStore()
    codec = acemq.ClaimCheckCodec(acemq.JsonCodec(), payloads, threshold=0)
    async with (
        acemq.connect(f"memory://{name}", codec=codec) as mq,
        place_at("sqlite", f"sqlite+aiosqlite:///{tmp_path / 'test.db'}") as place,
    ):
        store = await place.outbox()
        outbox = mq.outbox(store)
        async with place.session() as session, session.begin():
            await outbox.bind(session).send("q", {"a": 1})
            with pytest.raises(acemq.ConfigurationError, match="has to be awaited"):
                await session.run_sync(lambda sync: outbox.bind_sync(sync).send("q", {"a": 2}))
        await outbox.sweep()
        pulled = await mq.pull("q", dict)
        assert pulled is not None
        assert (pulled.payload, len(payloads)) == ({"a": 1}, 1)
        await pulled.accept()


async def test_closing_lets_a_cancelled_statement_be_cleaned_up_by_its_driver(
    mq: AceMQ, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    async def purge(batch: int) -> int:
        steps.append("purging")
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            steps.append("cleaned up")
        return 0

    async with place_at("sqlite", f"sqlite+aiosqlite:///{tmp_path / 'test.db'}") as place:
        store = await place.outbox()
        monkeypatch.setattr(store, "purge", purge)
        relay = await mq.outbox(store).relay()
        await until(lambda: steps == ["purging"])
        await until(lambda: relay.counters.sweeps > 0)
        await relay.close()
    assert steps == ["purging", "cleaned up"]
