"""CONTRACT.md section 13: three answers to a claim, on every store, and what a consumer makes of each."""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from acemq import Claim, DbIdempotencyStore, Envelope, Idempotency, Message, RetryPolicy
from acemq import headers as h
from acemq.patterns.pipeline import of_step
from acemq.transport import Outgoing, Settlement, Verb
from tests.stores.places import DATABASES, Place, place_at, url_for
from tests.wire.broker import arrived, bench
from tests.wire.suite import Suite, Values

IDEMPOTENCY = Suite("idempotency")
PLACE: ContextVar[Place] = ContextVar("place")


@pytest.mark.parametrize("kind", ["memory", *DATABASES])
@IDEMPOTENCY.parametrize
async def test_idempotency(case: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if kind == "memory":
        PLACE.set(Place())
        await IDEMPOTENCY.check(case)
        return
    async with place_at(kind, url_for(kind, request, tmp_path), movable=True) as place:
        PLACE.set(place)
        await IDEMPOTENCY.check(case)


@IDEMPOTENCY.op("sequence")
async def sequence(given: Values) -> Values:
    place = PLACE.get()
    store = await place.claims()
    lease, retention = (timedelta(seconds=given[name]) for name in ("claim_timeout_s", "retention_s"))
    tokens: dict[str, int] = {}
    results: list[str | None] = []
    at = 0
    for verb, key, seconds in given["steps"]:
        await place.advance(timedelta(seconds=seconds - at))
        at = seconds
        match verb:
            case "claim":
                claim = await store.claim(key, lease=lease)
                results.append(claim.answer)
                if claim.answer == "claimed":
                    assert claim.token > tokens.get(key, 0), "a token that does not grow"
                    tokens[key] = claim.token
            case "confirm":
                assert await store.confirm(key, tokens[key], retention=retention)
                results.append(None)
            case _:
                assert await store.release(key, tokens[key])
                results.append(None)
    return {"results": results}


class _Scripted:
    """A store that gives one answer, and remembers what else it was told."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.confirmed, self.released = answer, False, False

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        return Claim(self.answer, 1)

    async def renew(self, key: str, token: int, /, *, lease: timedelta) -> bool:
        return True

    async def confirm(self, key: str, token: int, /, *, retention: timedelta) -> bool:
        self.confirmed = True
        return True

    async def release(self, key: str, token: int, /) -> bool:
        self.released = True
        return True


@IDEMPOTENCY.op("key")
def key(given: Values) -> Values:
    headers = Envelope.of("t", **given["envelope"]).to_headers()
    idempotency = Idempotency(store=_Scripted("claimed"))
    if "step" in given:
        idempotency = of_step(given["step"], idempotency)
    return {"key": idempotency.key(Message(None, arrived(headers)))}


@IDEMPOTENCY.op("defaults")
def defaults(given: Values) -> Values:
    idempotency = Idempotency(store=_Scripted("claimed"))
    return {
        "claim_timeout_s": idempotency.lease.total_seconds(),
        "retention_s": idempotency.retention.total_seconds(),
        "in_progress_delay_s": idempotency.put_back_after.total_seconds(),
        "table": inspect.signature(DbIdempotencyStore.__init__).parameters["table"].default,
    }


@IDEMPOTENCY.op("deliver")
async def deliver(given: Values) -> Values:
    store, called = _Scripted(given["claim"]), list[str]()

    def handle(message: Message[Any]) -> None:
        called.append(message.id)
        if given.get("handler") == "raises":
            raise ValueError("boom")

    async with bench() as at:
        await at.declare("q")
        attempt = given.get("attempt", 1)
        await at.put("q", message_id="m-1", headers={h.ID: "m-1", h.ATTEMPT: attempt})
        began = at.clock.now()
        policy = RetryPolicy.fixed(given.get("max_attempts", 5), timedelta(hours=1))
        async with at.mq.consume("q", dict, handle, retry=policy, idempotency=store) as consumer:
            await at.clock.advance(timedelta(seconds=5))
            counters = consumer.counters
            outcome = "in_progress" if counters.in_progress else "acked"
            assert counters.dead_lettered == 0
        first: Outgoing | None = at.published[0] if at.published else None
        settled: Settlement = next(s for s in at.settled if s.delivery.headers[h.ID] == "m-1")
        back = [seen for seen in at.seen if isinstance(seen.what, Outgoing)]
        return {
            "handler_called": bool(called),
            "settled": "ack" if settled.verb is Verb.ACCEPT else str(settled.verb),
            "wait_s": (back[0].at - began).total_seconds() if back else None,
            "republished_to_own_queue": first is not None and (first.exchange, first.routing_key) == ("", "q"),
            "attempt": first.headers[h.ATTEMPT] if first is not None else None,
            "outcome": outcome,
            "released": store.released,
            "confirmed": store.confirmed,
        }


@IDEMPOTENCY.op("claim_key")
async def claim_key(given: Values) -> Values:
    await (await PLACE.get().claims()).claim(given["key"], lease=timedelta(seconds=1))
    return {}
