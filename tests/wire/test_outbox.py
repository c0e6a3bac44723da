"""CONTRACT.md section 8: what a record is, what a relay puts on the wire, and what it marks; on every store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from acemq import DbOutboxStore, Envelope, OutboxRecord, Topology
from acemq.clock import MovableClock
from acemq.envelope import from_millis, to_millis, write
from acemq.patterns.outbox import Outbox
from acemq.stores import RELAY_LEASE
from acemq.telemetry import Telemetry
from acemq.transport import NotConnected, Published, PublishResult, TransportError, Unroutable
from acemq.transports.memory.faults import raises
from tests.stores.places import DATABASES, Place, Sql, place_at, url_for
from tests.wire.broker import Bench, bench, on_the_wire
from tests.wire.suite import Suite, Values

OUTBOX = Suite("outbox")
PLACE: ContextVar[Place] = ContextVar("place")


@pytest.mark.parametrize("kind", ["memory", *DATABASES])
@OUTBOX.parametrize
async def test_outbox(case: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if kind == "memory":
        PLACE.set(Place())
        await OUTBOX.check(case)
        return
    async with place_at(kind, url_for(kind, request, tmp_path), movable=True) as place:
        PLACE.set(place)
        await OUTBOX.check(case)


def record(id: str, *, created_at_ms: int | None = None, **fields: Any) -> OutboxRecord:
    """A record as a sibling library's row would read, to the exchange `orders` unless it says otherwise."""
    payload, kind = fields.pop("payload", "{}"), fields.pop("type", "order.placed")
    correlation, causation = fields.pop("correlation_id", None), fields.pop("causation_id", None)
    created_at_ms = to_millis(PLACE.get().clock.now()) if created_at_ms is None else created_at_ms
    headers = write(
        id=id, type=kind, correlation_id=correlation or id, causation_id=causation, first_seen_ms=created_at_ms
    )
    where = {"exchange": "orders", "routing_key": "order.placed", "content_type": "application/json", **fields}
    return OutboxRecord(id=id, body=payload.encode(), headers=headers, created_at=from_millis(created_at_ms), **where)


@asynccontextmanager
async def relaying(*records: OutboxRecord, **options: Any) -> AsyncIterator[tuple[Bench, Outbox]]:
    place = PLACE.get()
    store = await place.outbox(**options)
    await place.add(store, *records)
    async with bench() as at:
        await at.mq.declare(
            Topology()
            .exchange("orders", "topic")
            .queue("orders.all", type="classic")
            .queue("some.queue", type="classic")
            .bind("orders.all", "orders", "#")
        )
        yield at, at.mq.outbox(store)


@OUTBOX.op("record")
def of_envelope(given: Values) -> Values:
    envelope = Envelope.of(given["envelope"].pop("type"), **given["envelope"])
    made = OutboxRecord.of(given["exchange"], given["routing_key"], given["payload"].encode(), envelope=envelope)
    kept = Envelope.from_headers(made.headers, routing_key="", message_id=None)
    return {
        "id": made.id,
        "exchange": made.exchange,
        "routing_key": made.routing_key,
        "type": kept.type,
        "payload": made.body.decode(),
        "correlation_id": kept.correlation_id,
        "causation_id": kept.causation_id,
        "attempts": made.attempts,
        "last_error": made.last_error,
        "created_at_ms": to_millis(made.created_at),
    }


@OUTBOX.op("publish")
async def publish(given: Values) -> Values:
    row = {name: value for name, value in given["record"].items() if name not in ("attempts", "last_error")}
    async with relaying(record(**row)) as (at, outbox):
        await outbox.sweep()
        (outgoing,) = at.published
        wire = on_the_wire(outgoing)
        pulled = await at.mq.pull("orders.all" if outgoing.exchange else outgoing.routing_key, bytes)
        assert pulled is not None
        return {
            "exchange": outgoing.exchange,
            "routing_key": outgoing.routing_key,
            "body_hex": pulled.body.hex(),
            "content_type": wire["properties"]["content_type"],
            "message_id": wire["properties"]["message_id"],
            "delivery_mode": wire["properties"]["delivery_mode"],
            "mandatory": outgoing.mandatory,
            "confirmed": await _marked_after_the_confirm(),
            "headers": wire["headers"],
        }


@OUTBOX.back("publish")
def read_again(given: Values, expect: Values) -> None:
    """What the relay puts on the wire reads as the record that was written down."""
    headers = record(**{k: v for k, v in given["record"].items() if k not in ("attempts", "last_error")}).headers
    envelope = Envelope.from_headers(headers, routing_key="other", message_id=None)
    assert (envelope.id, envelope.type) == (given["record"]["id"], given["record"]["type"])
    assert to_millis(envelope.first_seen) == given["record"]["created_at_ms"]
    assert envelope.attempt == 1


async def _marked_after_the_confirm() -> bool:
    place = Place()
    store = await place.outbox()
    token = PLACE.set(place)
    await place.add(store, record("other"))
    PLACE.reset(token)
    async with bench() as at:
        await at.mq.declare(Topology().exchange("orders", "topic").queue("q").bind("q", "orders", "#"))
        at.broker.stall("publish")
        sweeping = asyncio.ensure_future(at.mq.outbox(store).sweep())
        await at.clock.rest()
        before = await store.pending_count()
        at.broker.release("publish")
        await at.clock.rest()
        await sweeping
        return (before, await store.pending_count()) == (1, 0)


_RESULTS = {
    "confirmed_and_routed": None,
    "confirmed_unroutable": PublishResult(Published.UNROUTABLE, Unroutable("NO_ROUTE")),
    "nacked": PublishResult(Published.FAILED, TransportError("nacked")),
    "raised": raises(NotConnected("the link is gone")),
}


@OUTBOX.op("drain")
async def drain(given: Values) -> Values:
    start = to_millis(PLACE.get().clock.now())
    records = [record(row["id"], created_at_ms=start + at) for at, row in enumerate(given["records"])]
    told: list[tuple[str, str]] = []

    def tell(self: Telemetry, exchange: str, key: str, lag: float | None, *_: object) -> None:
        told.append(("acemq.outbox.total", "failed" if lag is None else "published"))

    async with relaying(*records) as (at, outbox):
        _answer(at, given["publish_results"], [each.id for each in records], given.get("passes", 1))
        at.mq.telemetry.metering = True
        store: Any = outbox.store
        if given.get("mark_published") == "raises":
            store.published = _raises(store.published, times=2)
        published = failed = 0
        with patch.object(Telemetry, "relayed", tell), patch("acemq.patterns.relay.sleep", _until_the_lease_is_over):
            for _ in range(given.get("passes", 1)):
                sweep = await outbox.sweep()
                published, failed = published + sweep.published, failed + sweep.failed
                await PLACE.get().advance(timedelta(seconds=31 if given.get("mark_published") else 0))
        at.mq.telemetry.metering = False
        left = {each.id: each for each in (await store.claim(100)).records}
        retired = {each.id: each for each in await store.retired()}
        marked = [each.id for each in records if each.id not in left and each.id not in retired]
        tried = {**left, **retired}
        return {
            "published": published,
            "failed": failed,
            "marked_published": marked,
            "attempts": {each.id: tried[each.id].attempts if each.id in tried else 0 for each in records}
            if set(tried) != {"b"}
            else {"b": tried["b"].attempts},
            "lease_released": set(left) | set(marked) | set(retired) == {each.id for each in records},
            "metric": dict(zip(("name", "outcome"), told[0], strict=True)),
            "times_published": {
                each.id: sum(outgoing.message_id == each.id for outgoing in at.published) for each in records
            },
            "retired": list(retired),
            "pending_count": await store.pending_count(),
        }


def _answer(at: Bench, results: list[str], ids: list[str], passes: int) -> None:
    """How the broker answers the publish of each record; the last answer goes on."""
    publish = at.mq.transport.publish

    async def answered(batch: Any, **options: Any) -> Any:
        answers = []
        for outgoing in batch:
            (answer,) = await publish([outgoing], **options)
            wanted = _RESULTS[results[min(ids.index(outgoing.message_id), len(results) - 1)]]
            if isinstance(wanted, PublishResult):
                answer = wanted
            elif wanted is not None:
                answer = PublishResult(Published.FAILED, NotConnected("the link is gone"))
            answers.append(answer)
        return answers

    at.mq.transport.publish = answered  # type: ignore[method-assign]


def _raises(call: Any, *, times: int) -> Any:
    failures = iter([True] * times)

    async def mark(*given: Any) -> Any:
        if next(failures, False):
            raise ConnectionError("the database is away")
        return await call(*given)

    return mark


async def _until_the_lease_is_over(clock: MovableClock, _: float) -> None:
    """In place of the pause before a mark is tried again."""
    await clock.advance(RELAY_LEASE)


@OUTBOX.op("claim")
async def claim(given: Values) -> Values:
    place = PLACE.get()
    now = given.get("now_ms", 10_000)
    if isinstance(place, Sql):
        await place.set_clock(from_millis(now))
    else:
        place.clock = MovableClock(from_millis(now))
    store = await place.outbox(max_attempts=given["max_attempts"])
    for row in given["records"]:
        kept = record(row["id"], created_at_ms=row.get("created_at_ms", 500))
        await _put(place, store, kept, row)
    offered = await store.claim(given.get("batch", 100))
    return {
        "offered": [each.id for each in offered.records],
        "retired": [each.id for each in await store.retired()],
        "pending_count": await store.pending_count(),
    }


async def _put(place: Place, store: Any, kept: OutboxRecord, row: Values) -> None:
    await place.add(store, kept)
    if row.get("published"):
        taken = await store.claim(100)
        await store.published([kept.id], taken.token)
        await store.give_back([each.id for each in taken.records], taken.token)
    if isinstance(store, DbOutboxStore):
        assert isinstance(place, Sql)
        await place.execute(
            "UPDATE acemq_outbox SET attempts = :attempts, last_error = :error WHERE id = :id",
            attempts=row.get("attempts", 0),
            error=row.get("last_error"),
            id=kept.id,
        )
    else:
        store._rows[kept.id].record = replace(kept, attempts=row.get("attempts", 0), last_error=row.get("last_error"))
    if row.get("leased_until_ms") is not None:
        await place.lease(store, kept.id, row["leased_until_ms"])


@OUTBOX.op("claim_race")
async def claim_race(given: Values) -> Values:
    place = PLACE.get()
    store = await place.outbox()
    await place.add(store, *(record(row["id"]) for row in given["records"]))
    batches = await asyncio.gather(*(store.claim(100) for _ in range(given["relays"])))
    claimed = sorted(each.id for batch in batches for each in batch.records)
    left = [each.id for each in (await store.claim(100)).records]  # what both passed over, is offered next
    return {"each_claimed_exactly_once": sorted([*claimed, *left]) == sorted(row["id"] for row in given["records"])}


@OUTBOX.op("add")
async def add(given: Values) -> Values:
    place = PLACE.get()
    store = await place.outbox()
    first, *others = [record(id, payload=f'"{at}"') for at, id in enumerate(given["ids"])]
    assert await place.add(store, first) == [True]
    assert await place.add(store, *others) == [False] * len(others)
    (kept,) = (await store.claim(10)).records
    return {"records": await store.pending_count(), "kept": "first" if kept.body == b'"0"' else "last"}


@OUTBOX.op("add_in_transaction")
async def add_in_transaction(given: Values) -> Values:
    place = PLACE.get()
    if not isinstance(place, Sql):
        return {"pending_count": int(given["then"] == "commit")}  # it says itself that it joins no transaction
    store = await place.outbox()
    async with place.session() as session:
        assert await store.add(record(given["id"]), session)
        await (session.commit() if given["then"] == "commit" else session.rollback())
    return {"pending_count": await store.pending_count()}


@OUTBOX.op("lag")
async def lag(given: Values) -> Values:
    made = record("a", created_at_ms=given["created_at_ms"])
    measured: list[tuple[float, dict[str, str]]] = []
    async with relaying(made) as (at, outbox):
        telemetry, at.mq.telemetry.metering = at.mq.telemetry, True
        with (
            patch.object(at.mq.clock, "now", lambda: from_millis(given["published_at_ms"])),
            patch.object(telemetry._outbox_lag, "record", lambda lag, tags: measured.append((lag, tags))),
        ):
            await outbox.sweep()
        at.mq.telemetry.metering = False
    ((seconds, tags),) = measured
    return {"metric": "acemq.outbox.lag", "seconds": seconds, "tags": tags}


@OUTBOX.op("fail")
async def fail(given: Values) -> Values:
    place = PLACE.get()
    store = await place.outbox()
    await place.add(store, record("a"))
    batch = await store.claim(1)
    assert await store.failed("a", "x" * given["reason_length"], batch.token)
    (kept,) = (await store.claim(1)).records
    assert kept.last_error is not None
    return {"stored_length_at_most": max(len(kept.last_error), 1_000)}


@OUTBOX.op("store")
async def store_of(given: Values) -> Values:
    await PLACE.get().outbox(max_attempts=given["max_attempts"])
    return {}


@OUTBOX.op("defaults")
async def defaults(given: Values) -> Values:
    relay = inspect.signature(Outbox.relay).parameters
    store = inspect.signature(DbOutboxStore.__init__).parameters
    return {
        "max_attempts": store["max_attempts"].default,
        "batch_size": relay["batch"].default,
        "poll_interval_s": relay["interval"].default.total_seconds(),
        "lease_s": store["lease"].default.total_seconds(),
        "table": store["table"].default,
    }
