"""CONTRACT.md section 2: when a failed message is tried again, where it waits, and what is said about it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from acemq import headers as h
from acemq import retry as rules
from acemq import topology as t
from acemq.ack import Ack
from acemq.codec import JsonCodec
from acemq.envelope import to_millis
from acemq.errors import DecodeError, FatalError
from acemq.interceptors import ConsumeInterceptor
from acemq.message import Message
from acemq.retry import RetryPolicy
from acemq.transport import Outgoing, Settlement, Verb
from acemq.transports.memory import delay
from tests.wire.broker import Bench, bench, on_the_wire
from tests.wire.policies import in_millis, millis, policy_of
from tests.wire.suite import Suite, Values

RETRY = Suite("retry")

CONFIRM = timedelta(milliseconds=100)
"""How long the broker takes to confirm a copy: what is accepted earlier was not waited for."""


@RETRY.parametrize
async def test_retry(case: str) -> None:
    await RETRY.check(case)


@RETRY.op("schedule")
def schedule(given: Values) -> Values:
    policy = policy_of(given["policy"])
    rungs = policy.rungs()
    return {
        "delays_ms": [in_millis(wait) for wait in policy.schedule()],
        "rungs_ms": [in_millis(wait) for wait in rungs],
        "rung_queues": [queue.name for queue in t.rungs("jobs.in", rungs).queues],
    }


@RETRY.op("decide")
def decide(given: Values) -> Values:
    age = None if given["age_ms"] is None else millis(given["age_ms"])
    decided = policy_of(given["policy"]).decide(given["attempt"], age)
    return {"retries": decided.gave_up is None, "delay_ms": in_millis(decided.delay), "where": decided.where}


@RETRY.op("waits_in_broker")
def waits_in_broker(given: Values) -> Values:
    return {"in_broker": rules.waits_in_broker(millis(given["delay_ms"]), millis(given["threshold_ms"]))}


@RETRY.op("jitter_bounds")
async def jitter_bounds(given: Values) -> Values:
    wait, factor = millis(given["delay_ms"]), given["factor"]
    if given["where"] == "consumer":
        low, high = rules.jitter_bounds(wait, factor)
        policy = RetryPolicy.delays(wait, jitter=factor)
        assert all(low <= policy.jittered(wait) <= high for _ in range(100))
        return {"min_ms": in_millis(low), "max_ms": in_millis(high)}
    waited = in_millis(await _waited_in_broker(RetryPolicy.delays(wait, jitter=factor)))
    return {"min_ms": waited, "max_ms": waited}


async def _waited_in_broker(policy: RetryPolicy) -> timedelta:
    """From the first delivery to the second, by the broker's clock."""
    async with bench() as at:
        delivered = []

        async def handle(message: Message[bytes]) -> Ack | None:
            delivered.append(at.clock.now())
            return Ack.retry() if len(delivered) == 1 else None

        await at.declare("jobs.in")
        async with at.mq.consume("jobs.in", bytes, handle, retry=policy):
            await at.put("jobs.in")
            await at.clock.advance(policy.waits[0] * 3)
        first, second = delivered
        return second - first


@RETRY.op("settle")
async def settle(given: Values) -> Values:
    """By a consumer at work: its handler answers once, and what it asks of the broker is looked at."""
    reader = InMemoryMetricReader()
    with patch.object(metrics, "get_meter_provider", lambda: MeterProvider([reader], shutdown_on_exit=False)):
        async with bench() as at:
            return await _settled(given, at, reader)


async def _settled(given: Values, at: Bench, reader: InMemoryMetricReader) -> Values:
    queue, outcome, attempt = given["queue"], given["outcome"], given["attempt"]
    policy = policy_of(given["policy"])
    if "max_message_age_ms" in given:
        policy = policy.give_up_after(millis(given["max_message_age_ms"]))
    routed = given.get("republish") != "unroutable"
    await at.declare(queue)

    async def handle(message: Message[Any]) -> Ack | None:
        assert outcome in _ANSWERS, "the handler ran although the message was refused"
        answer: Ack = _ANSWERS[outcome](given.get("reason"))
        return answer

    codec = _Unreadable(given.get("reason")) if outcome == "decode_error" else JsonCodec()
    options: dict[str, Any] = {"declare": routed, "codec": codec, "retry": policy.with_jitter(0)}
    first_seen = at.clock.now() - millis(given.get("age_ms", 0))
    headers = {h.ID: "m-1", h.ATTEMPT: attempt, h.FIRST_SEEN: to_millis(first_seen)}
    if outcome == "interceptor_refused":
        options["interceptors"] = [_Refuses(given["reason"])]
    async with at.mq.consume(queue, dict, handle, **options) as consumer:
        gone = t.rung_of(queue, policy.first) if given.get("rung") == "missing" else None
        if gone:
            await at.mq.delete(gone)
        began = at.clock.now()
        await at.put(queue, headers=headers, message_id="m-1")
        at.broker.faults.next("publish", delay(CONFIRM), times=9, match=lambda copy: copy.routing_key != gone)
        await at.clock.advance(timedelta())
        while not at.settled:
            await at.clock.advance(timedelta(seconds=1))
            assert at.clock.now() - began < timedelta(minutes=2), "nothing came of it"
        found = _found(at)
        await consumer.drain(timedelta())
    published_at = [seen.at for seen in at.seen if isinstance(seen.what, Outgoing)]
    waited = published_at[-1] - began if found["action"] == "republish" else None
    return {
        **found,
        "wait_ms_before_jitter": None if waited is None else in_millis(waited),
        "event": at.told[0].name if at.told else None,
        "metric": _counted(reader, "acemq.retry.rung.missing"),
    }


def _found(at: Bench) -> Values:
    """The first settlement, and the last copy before it."""
    index = next(i for i, seen in enumerate(at.seen) if isinstance(seen.what, Settlement))
    settlement = at.seen[index].what
    assert isinstance(settlement, Settlement)
    del at.seen[index + 1 :]
    if settlement.verb is Verb.REQUEUE:
        return {"action": "nack", "requeue": True}
    assert settlement.verb is Verb.ACCEPT
    if not at.published:
        return {"action": "ack"}
    copy, asked = at.published[-1], at.seen[index - 1].at
    assert on_the_wire(copy)["properties"]["message_id"] == "m-1"
    return {
        "action": "republish",
        "exchange": copy.exchange,
        "routing_key": copy.routing_key,
        "persistent": copy.persistent,
        "mandatory": copy.mandatory,
        "confirmed": at.seen[index].at - asked >= CONFIRM,
        "original": "ack",
        "attempt": copy.headers[h.ATTEMPT],
        "x-acemq-error": copy.headers.get(h.ERROR),
    }


_ANSWERS: dict[str, Any] = {
    "accept": lambda reason: Ack.accept(),
    "retry": Ack.retry,
    "retry_fatal": lambda reason: Ack.retry(FatalError(reason)),
    "reject": Ack.reject,
    "park": Ack.park,
    "decode_error": None,
    "in_progress": lambda reason: Ack.in_progress(),
    "release": lambda reason: Ack.release(),
}


class _Refuses(ConsumeInterceptor):
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def before_handle(self, message: Message[Any]) -> None:
        raise PermissionError(self._reason)


class _Unreadable(JsonCodec):
    def __init__(self, reason: str | None) -> None:
        super().__init__()
        self._reason = reason

    def decode(self, body: bytes, into: Any) -> Any:
        raise DecodeError(self._reason or "")


def _counted(reader: InMemoryMetricReader, name: str) -> str | None:
    data = reader.get_metrics_data()
    found = [
        metric.name
        for resource in (data.resource_metrics if data else ())
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    return name if name in found else None
