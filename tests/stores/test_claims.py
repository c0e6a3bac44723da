"""Stores of claims: one holder at a time, whoever asks, and by the clock of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from acemq import (
    ConfigurationError,
    DbIdempotencyStore,
    IdempotencyConflictError,
    MemoryIdempotencyStore,
    TopologyError,
)
from acemq.clock import MovableClock
from tests.stores.places import DATABASES, Place, Sql, place_at, url_for

LEASE = timedelta(seconds=30)
KEPT = timedelta(hours=1)


@pytest.fixture(params=["memory", *DATABASES])
async def somewhere(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """With a clock that a test may move."""
    kind: str = request.param
    if kind == "memory":
        yield Place()
        return
    async with place_at(kind, url_for(kind, request, tmp_path), movable=True) as place:
        yield place


async def test_of_many_at_once_one_has_the_key(somewhere: Place) -> None:
    store = await somewhere.claims()
    claims = await asyncio.gather(*(store.claim("m", lease=LEASE) for _ in range(8)))
    assert sorted(claim.answer for claim in claims) == ["claimed", *["in_progress"] * 7]


async def test_of_many_that_find_an_expired_claim_one_takes_it_over(somewhere: Place) -> None:
    store = await somewhere.claims()
    first = await store.claim("m", lease=LEASE)
    await somewhere.advance(LEASE)
    claims = await asyncio.gather(*(store.claim("m", lease=LEASE) for _ in range(4)))
    (second,) = [claim for claim in claims if claim.answer == "claimed"]
    assert second.token > first.token
    assert not await store.confirm("m", first.token, retention=KEPT)
    assert not await store.renew("m", first.token, lease=LEASE)
    assert not await store.release("m", first.token)
    assert (await store.claim("m", lease=LEASE)).answer == "in_progress"
    assert await store.confirm("m", second.token, retention=KEPT)


async def test_a_renewed_claim_lives_on(somewhere: Place) -> None:
    store = await somewhere.claims()
    claim = await store.claim("m", lease=LEASE)
    for _ in range(4):
        await somewhere.advance(LEASE * 0.9)
        assert await store.renew("m", claim.token, lease=LEASE)
    assert (await store.claim("m", lease=LEASE)).answer == "in_progress"


async def test_tokens_grow_also_after_a_release_and_a_purge(somewhere: Place) -> None:
    store = await somewhere.claims()
    tokens: list[int] = []
    for _ in range(3):
        claim = await store.claim("m", lease=LEASE)
        tokens.append(claim.token)
        assert await store.release("m", claim.token)
        await somewhere.advance(timedelta(milliseconds=1))
        if isinstance(store, DbIdempotencyStore):
            assert await store.purge() == 1
    assert tokens == sorted(set(tokens))


async def test_a_purge_spares_what_lives(somewhere: Place) -> None:
    store = await somewhere.claims()
    if not isinstance(store, DbIdempotencyStore):
        return
    confirmed = await store.claim("confirmed", lease=LEASE)
    await store.confirm("confirmed", confirmed.token, retention=KEPT)
    await store.claim("live", lease=LEASE)
    for n in range(5):
        await store.claim(f"over-{n}", lease=timedelta(milliseconds=1))
    await somewhere.advance(timedelta(seconds=1))
    assert [await store.purge(batch=3) for _ in range(3)] == [3, 2, 0]
    assert (await store.claim("live", lease=LEASE)).answer == "in_progress"
    assert (await store.claim("confirmed", lease=LEASE)).answer == "duplicate"
    with pytest.raises(ConfigurationError, match="batch="):
        await store.purge(batch=0)


async def test_a_key_with_another_fingerprint_is_a_conflict_and_no_duplicate(somewhere: Place) -> None:
    store = await somewhere.claims()
    claim = await store.claim("m", lease=LEASE, fingerprint=b"one")
    with pytest.raises(IdempotencyConflictError) as caught:
        await store.claim("m", lease=LEASE, fingerprint=b"two")
    assert caught.value.key == "m"
    await store.confirm("m", claim.token, retention=KEPT)
    with pytest.raises(IdempotencyConflictError):
        await store.claim("m", lease=LEASE, fingerprint=b"two")
    assert (await store.claim("m", lease=LEASE, fingerprint=b"one")).answer == "duplicate"
    assert (await store.claim("m", lease=LEASE)).answer == "duplicate"


async def test_keys_are_text_and_compared_exactly(somewhere: Place) -> None:
    store = await somewhere.claims()
    for key in ("A", "a", "a ", "ä", "a\u0308", "é", "e", "🐇" * 60):
        assert (await store.claim(key, lease=LEASE)).answer == "claimed", key
    as_bytes: Any = b"A"
    assert (await store.claim(as_bytes, lease=LEASE)).answer == "in_progress"
    refused: list[Any] = ["", "k" * 256, "🐇" * 64, None, 7, "a\0b"]
    for bad in refused:
        with pytest.raises(ConfigurationError, match="idempotency key"):
            await store.claim(bad, lease=LEASE)
    for zero in (timedelta(), timedelta(seconds=-1)):
        with pytest.raises(ConfigurationError, match="lease="):
            await store.claim("m", lease=zero)
    with pytest.raises(ConfigurationError, match="retention="):
        await store.confirm("A", 1, retention=timedelta())


async def test_memory_forgets_what_was_confirmed_first_and_never_a_live_claim() -> None:
    store = MemoryIdempotencyStore(most=3, clock=MovableClock())
    for key in ("a", "b"):
        claim = await store.claim(key, lease=LEASE)
        await store.confirm(key, claim.token, retention=KEPT)
    for key in ("c", "d"):
        await store.claim(key, lease=LEASE)
    assert (await store.claim("b", lease=LEASE)).answer == "duplicate"
    assert (await store.claim("c", lease=LEASE)).answer == "in_progress"
    assert (await store.claim("a", lease=LEASE)).answer == "claimed"
    with pytest.raises(ConfigurationError, match="most="):
        MemoryIdempotencyStore(most=0)


# Within the caller's transaction


async def test_a_claim_in_the_work_holds_when_the_work_is_committed(place: Sql) -> None:
    store = await place.claims()
    async with place.session() as session:
        assert (await store.claim_within("m", session)).answer == "claimed"
        await session.rollback()
    async with place.session() as session, session.begin():
        claim = await store.claim_within("m", session)
        assert claim.answer == "claimed"
        assert claim.token > 0
    async with place.session() as session:
        assert (await store.claim_within("m", session)).answer == "duplicate"
    assert (await store.claim("m", lease=LEASE)).answer == "duplicate"


@pytest.mark.parametrize("place", ["postgresql", "psycopg", "mariadb"], indirect=True)
async def test_a_key_in_the_hands_of_another_transaction_is_in_progress(place: Sql) -> None:
    store = await place.claims()
    async with place.session() as one, place.session() as other:
        assert (await store.claim_within("m", one)).answer == "claimed"
        async with asyncio.timeout(5):
            assert (await store.claim_within("m", other)).answer == "in_progress"
        # Its transaction goes on, and so does its own time limit of locks.
        if place.name == "mariadb":
            limit = await (await other.connection()).exec_driver_sql("SELECT @@innodb_lock_wait_timeout")
            assert limit.scalar_one() > 1
        assert (await store.claim_within("n", other)).answer == "claimed"
        await one.rollback()
        assert (await store.claim_within("m", other)).answer == "claimed"


async def test_a_claim_beside_the_work_keeps_one_in_it_away(place: Sql) -> None:
    store = await place.claims()
    await store.claim("m", lease=LEASE)
    async with place.session() as session:
        assert (await store.claim_within("m", session)).answer == "in_progress"


async def test_synchronous_work_claims_too(place: Sql) -> None:
    store = await place.claims()
    async with place.session() as session, session.begin():
        assert (await session.run_sync(lambda sync: store.claim_within_sync("m", sync))).answer == "claimed"
        assert (await session.run_sync(lambda sync: store.claim_within_sync("m", sync))).answer == "duplicate"


async def test_a_table_of_claims_that_does_not_fit_is_named(place: Sql) -> None:
    store = DbIdempotencyStore(place.engine)
    with pytest.raises(TopologyError, match="no table"):
        await store.check()
    with pytest.raises(TopologyError, match="does not fit"):
        await store.claim("m", lease=LEASE)
    await place.execute("CREATE TABLE acemq_idempotency (message_id VARCHAR(255) PRIMARY KEY, confirmed INTEGER)")
    with pytest.raises(TopologyError, match=r"it has no .*token.*expires_at"):
        await store.check()
