"""CONTRACT.md section 9: where an answer goes, which request it belongs to, and what becomes of the others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest

import acemq
from acemq import headers as h
from acemq.errors import RequestTimeoutError, ResponderError
from acemq.message import Message
from acemq.patterns import request_reply as rr
from acemq.topology import Topology, dead_letters_of
from acemq.transport import Outgoing, Unroutable, Verb
from acemq.transports.memory import raises
from tests.wire.broker import Bench, arrived, bench, declared, on_the_wire
from tests.wire.suite import Suite, Values

REQUEST_REPLY = Suite("request_reply", others=("dotnet_correlation",))

QUEUE = "pricing.quotes"


@REQUEST_REPLY.parametrize
async def test_request_reply(case: str) -> None:
    await REQUEST_REPLY.check(case)


# Asking


def _named(name: str) -> Any:
    """The reply queue is given this name."""
    make = rr.reply_queue
    return patch.object(rr, "reply_queue", lambda _: make(name))


@REQUEST_REPLY.op("request")
async def request(given: Values) -> Values:
    async with bench() as at:
        whole = Topology().exchange(given["exchange"]).queue(QUEUE).bind(QUEUE, given["exchange"], given["routing_key"])
        await at.mq.declare(whole)
        with _named(given["reply_queue"]):
            asking = asyncio.ensure_future(
                at.mq.request(given["exchange"], given["routing_key"], {"sku": 1}, int, timeout=timedelta(seconds=1))
            )
            await at.clock.rest()
        (sent,) = at.published
        await at.clock.advance(timedelta(seconds=1))
        with pytest.raises(RequestTimeoutError):
            await asking
        wire = on_the_wire(sent)
        return {
            "exchange": sent.exchange,
            "routing_key": sent.routing_key,
            "reply_to": wire["properties"]["reply_to"],
            "headers": wire["headers"],
        }


@REQUEST_REPLY.back("request")
def the_address_is_read_again(given: Values, expect: Values) -> None:
    message = Message(b"", arrived(expect["headers"], reply_to=expect["reply_to"]))
    assert message.reply_to == given["reply_queue"]


@REQUEST_REPLY.op("defaults")
async def defaults(given: Values) -> Values:
    (queue,) = declared(Topology(queues=(rr.reply_queue("acemq.reply.x"),)).describe())["queues"]
    assert queue["type"] == "classic"
    assert queue["durable"]
    assert queue["arguments"].keys() == {"x-expires"}
    return {
        "timeout_s": rr.TIMEOUT.total_seconds(),
        "reply_queue_expires_ms": queue["arguments"]["x-expires"],
        "in_flight_replies_per_queue": "many" if rr.PREFETCH > 1 else "one",
    }


@REQUEST_REPLY.op("receive")
async def receive(given: Values) -> Values:
    async with bench() as at:
        await at.declare(QUEUE)
        asking: dict[str, asyncio.Future[Any]] = {}
        with _named("acemq.reply.x"):
            # The first opens the reply queue, even where nobody waits any more.
            for identity in [*given["waiting"], "opens-it"]:
                asking[identity] = asyncio.ensure_future(at.mq.request("", QUEUE, 1, object, message_id=identity))
                await at.clock.rest()
        asking.pop("opens-it").cancel()
        await at.clock.rest()
        at.seen.clear()
        reply = given["reply"]
        wire = {h.CORRELATION: reply["correlation_id"], "x-acemq-id": "r-1", **reply["headers"]}
        await at.put("acemq.reply.x", b'"the answer"', headers=wire)
        await at.clock.rest()
        ended = {identity: future for identity, future in asking.items() if future.done()}
        answer: Values = {"counted": "unmatched" if at.mq.requests.unmatched else "matched"}
        (settlement,) = at.settled
        answer["settled"] = _WORDS[settlement.verb]
        answer["caller"] = next(iter(ended), None)
        for future in ended.values():
            failure = future.exception()
            if failure is not None:
                assert isinstance(failure, ResponderError)
                answer |= {"caller": "error", "text_contains": _contains(given, str(failure))}
            else:
                assert future.result() == "the answer"
        for future in asking.values():
            future.cancel()
        await at.clock.rest()
        return answer


_WORDS = {Verb.ACCEPT: "ack", Verb.REQUEUE: "nack requeue", Verb.DROP: "drop"}


def _contains(given: Values, text: str) -> str:
    """What the case looks for in it, if it is there."""
    wanted = str(given["reply"]["headers"][h.REPLY_ERROR])
    return wanted if wanted in text else text


@REQUEST_REPLY.op("timeout")
async def timeout(given: Values) -> Values:
    async with bench() as at:
        await at.declare(QUEUE)
        with patch.object(at.mq.telemetry, "requested") as counted:
            asking = asyncio.ensure_future(at.mq.request("", QUEUE, 1, int))
            await at.clock.advance(timedelta(seconds=29))
            assert not asking.done()
            await at.clock.advance(timedelta(seconds=1))
            with pytest.raises(TimeoutError):
                await asking
            ((_, _, outcome, _), _) = counted.call_args
            return {"caller": "timeout error", "metric": {"name": "acemq.request.total", "outcome": outcome}}


# Answering


@REQUEST_REPLY.op("reply_address")
def reply_address(given: Values) -> Values:
    return {"address": Message(b"", arrived(given["headers"], reply_to=given["reply_to"])).reply_to}


async def _asked(at: Bench, handler: Callable[[Message[Any]], Any], given: Values) -> acemq.Responder:
    """One request is put before a responder that is gone again when this returns."""
    await at.declare(QUEUE, given.get("address") or "h.q")
    stated: Values = given.get("request", {"id": "req-1", "correlation_id": "req-1", "type": "quote.requested"})
    wire = {h.ID: stated["id"], h.CORRELATION: stated["correlation_id"], h.TYPE: stated["type"]}
    address = {} if given.get("address", "h.q") is None else {h.REPLY_TO: given.get("address", "h.q")}
    async with at.mq.respond(QUEUE, object, handler) as responder:
        await at.put(QUEUE, b"{}", headers={**wire, **address}, message_id=stated["id"])
        await at.clock.rest()
        return responder


@REQUEST_REPLY.op("reply")
async def reply(given: Values) -> Values:
    async def handle(message: Message[Any]) -> Any:
        if "raises" in given:
            raise ValueError(given["raises"].removeprefix("ValueError: "))
        return given["result"]

    async with bench() as at:
        responder = await _asked(at, handle, given)
        sent = next(each for each in at.published if each.routing_key == given["address"])
        wire = on_the_wire(sent)
        answer: Values = {
            "exchange": sent.exchange,
            "routing_key": sent.routing_key,
            "body_json": json.loads(sent.body),
            "headers": wire["headers"],
        }
        if "raises" in given:
            assert sent.body == b"null"
            assert responder.counters.retried == 0
            (letter,) = at.waiting(dead_letters_of(QUEUE))
            return {**answer, "request_settled": "dead-letter, not retried" if letter == "req-1" else "lost"}
        return {**answer, "request_settled": _WORDS[at.settled[0].verb]}


async def _one(message: Message[Any]) -> int:
    return 1


@REQUEST_REPLY.op("serve")
async def serve(given: Values) -> Values:
    async with bench() as at:
        responder = await _asked(at, _one, given)
        return {
            "publishes": len(at.published),
            "counted": "unanswerable" if responder.unanswerable == 1 else "answered",
            "settled": _WORDS[at.settled[0].verb],
        }


@REQUEST_REPLY.op("counter_order")
async def counter_order(given: Values) -> Values:
    order: list[str] = []
    async with bench() as at:
        await at.declare(QUEUE, "h.q")
        async with at.mq.respond(QUEUE, object, _one) as responder:

            def leaving(subject: Any) -> bool:
                if isinstance(subject, Outgoing) and subject.headers.get(h.CORRELATION) == "c" and subject.body == b"1":
                    order.extend(["count answered", "publish reply"] if responder.answered else ["publish reply"])
                return False

            at.broker.faults.next("publish", "fail", match=leaving)
            await at.put(QUEUE, headers={h.REPLY_TO: "h.q", h.CORRELATION: "c"})
            await at.clock.rest()
            assert responder.answered == 1
            at.broker.faults.next("publish", raises(Unroutable("gone")), match=_is_answer)
            await at.put(QUEUE, headers={h.REPLY_TO: "h.q", h.CORRELATION: "d"})
            await at.clock.rest()
            taken_back = responder.answered == 1
            await at.clock.advance(timedelta(seconds=1))
            assert responder.answered == 2, "it went back, and was answered the second time"
        return {"order": order, "on_publish_failure": "count taken back" if taken_back else "count stands"}


def _is_answer(subject: Any) -> bool:
    return isinstance(subject, Outgoing) and subject.headers.get(h.CORRELATION) == "d" and subject.body == b"1"
