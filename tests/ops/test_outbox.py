"""An outbox as an operator sees it, of any store that retires records."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime, timedelta

import pytest

from acemq import ConfigurationError, Envelope, InMemoryOutboxStore, OutboxRecord
from acemq.clock import MovableClock
from acemq.ops import outbox
from acemq.ops.outbox import OutboxActed


def record(id: str, *, key: str | None = None) -> OutboxRecord:
    return OutboxRecord.of("orders", "order.placed", {"id": id}, envelope=Envelope.of("order.placed", id=id), key=key)


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock(datetime.now(UTC))


@pytest.fixture
async def store(clock: MovableClock) -> InMemoryOutboxStore:
    """`o-1` and `o-10` failed once and are retired for it; `o-2` waits behind the first of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = InMemoryOutboxStore(max_attempts=1, clock=clock)
    for each in (record("o-1", key="k"), record("o-10"), record("o-2", key="k")):
        await store.add(each)
    batch = await store.claim(10)
    for each in batch.records:
        assert await store.failed(each.id, "no such exchange", batch.token)
    return store


def nobody(so_far: OutboxActed) -> None:
    """Who is not interested in how far it came."""


async def test_what_is_retired_or_waits_for_a_minute_needs_somebody(
    store: InMemoryOutboxStore, clock: MovableClock
) -> None:
    line = await outbox.look(store)
    assert (line.outbox, line.pending, line.retired, line.needs_somebody) == ("memory", 3, 2, True)
    await outbox.discard(store, ["o-1", "o-10"], "nobody wants them", nobody)
    assert not (await outbox.look(store)).needs_somebody
    await clock.advance(timedelta(seconds=61))
    line = await outbox.look(store)
    assert (line.pending, line.retired, line.needs_somebody) == (1, 0, True)


async def test_what_is_retired_is_shown_with_its_error(store: InMemoryOutboxStore) -> None:
    first, second = await outbox.look_at_retired(store)
    assert (first.id, first.type, first.target, first.key) == ("o-1", "order.placed", "orders on 'order.placed'", "k")
    assert (first.attempts, first.error, first.body) == (1, "no such exchange", b'{"id":"o-1"}')
    assert second.id == "o-10"
    assert [line.id for line in await outbox.look_at_retired(store, most=1)] == ["o-1"]
    with pytest.raises(ConfigurationError, match="most=0"):
        await outbox.look_at_retired(store, most=0)


async def test_a_record_is_found_by_the_beginning_of_its_id(store: InMemoryOutboxStore) -> None:
    assert (await outbox.find(store, "o-1")).id == "o-1", "the whole id comes first"
    assert (await outbox.find(store, "o-10")).id == "o-10"
    with pytest.raises(ConfigurationError, match="2 retired records of memory begin with 'o'"):
        await outbox.find(store, "o")
    with pytest.raises(ConfigurationError, match="'o-2' is among the 2 retired records of memory: it is not retired"):
        await outbox.find(store, "o-2")


async def test_one_unknown_id_among_several_leaves_all_as_they_are(store: InMemoryOutboxStore) -> None:
    with pytest.raises(ConfigurationError, match="'o-3'"):
        await outbox.ids_of(store, ["o-1", "o-3"])
    assert await outbox.ids_of(store, ["o-1", "o-10", "o-1"]) == ["o-1", "o-10"]
    assert await outbox.ids_of_all(store) == ["o-1", "o-10"]


async def test_released_records_are_tried_again_from_the_first_attempt(store: InMemoryOutboxStore) -> None:
    told: list[OutboxActed] = []
    result = await outbox.release(store, ["o-1", "o-10"], told.append)
    assert (result.asked, result.affected, result.skipped, result.is_whole) == (2, 2, {}, True)
    assert [each.affected for each in told] == [1, 2]
    assert [(each.id, each.attempts) for each in (await store.claim(10)).records] == [("o-1", 0), ("o-10", 0)]


async def test_a_discarded_record_lets_go_what_waits_behind_it(store: InMemoryOutboxStore) -> None:
    assert (await store.claim(10)).records == []
    await outbox.discard(store, ["o-1"], "made by mistake", nobody)
    assert [each.id for each in (await store.claim(10)).records] == ["o-2"]


async def test_what_somebody_else_has_dealt_with_is_left_and_counted(store: InMemoryOutboxStore) -> None:
    await store.release("o-1")
    result = await outbox.discard(store, ["o-1", "o-10"], "too late", nobody)
    assert (result.affected, result.skipped, result.is_whole) == (1, {"not_retired": 1}, False)
    assert (await store.status()).pending == 2


async def test_a_discard_needs_a_reason(store: InMemoryOutboxStore) -> None:
    with pytest.raises(ConfigurationError, match="say why"):
        await outbox.discard(store, ["o-1"], "  ", nobody)
    assert (await store.status()).retired == 2


async def test_an_act_that_is_cut_short_has_said_how_far_it_came(store: InMemoryOutboxStore) -> None:
    told: list[OutboxActed] = []

    def interrupted(so_far: OutboxActed) -> None:
        told.append(so_far)
        raise ConnectionError("the database is away")

    with pytest.raises(ConnectionError):
        await outbox.release(store, ["o-1", "o-10"], interrupted)
    assert [(each.affected, each.is_whole) for each in told] == [(1, False)]
    assert (await store.status()).retired == 1
