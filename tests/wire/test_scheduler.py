"""CONTRACT.md section 6: the ladder, and how messages get on, along and off it."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import acemq
from acemq import ladder
from acemq import topology as t
from acemq.envelope import from_millis, to_millis
from acemq.ladder import Waiting
from acemq.topology import SCHEDULE, SCHEDULE_QUEUE, Topology
from acemq.transport import ApplyMode, Outgoing, Unroutable, Verb
from acemq.transports.memory import raises
from tests.wire.broker import Bench, bench, declared, on_the_wire
from tests.wire.policies import millis
from tests.wire.suite import Suite, Values

SCHEDULER = Suite("scheduler")


@SCHEDULER.parametrize
async def test_scheduler(case: str) -> None:
    await SCHEDULER.check(case)


# What is declared


def _queue(name: str) -> Values:
    whole = declared(SCHEDULE.describe())
    (queue,) = [each for each in whole["queues"] if each["name"] == name]
    (binding,) = [each for each in whole["bindings"] if each["queue"] == name]
    return {
        "queue": queue["name"],
        "type": queue["type"],
        "durable": queue["durable"],
        "arguments": queue["arguments"],
        "binding": {"exchange": binding["exchange"], "routing_key": binding["routing_key"]},
    }


@SCHEDULER.op("rung")
def rung(given: Values) -> Values:
    (found,) = [each for each in ladder.RUNGS if each.millis == given["ttl_ms"]]
    return _queue(found.queue)


@SCHEDULER.op("exchange")
def exchange(given: Values) -> Values:
    (found,) = declared(SCHEDULE.describe())["exchanges"]
    return found


@SCHEDULER.op("control")
async def control(given: Values) -> Values:
    async with bench() as at:
        subscribed: list[int] = []
        subscribe = at.mq.transport.subscribe

        async def watched(queue: str, sink: Any, *, prefetch: int, **rest: Any) -> Any:
            assert queue == SCHEDULE_QUEUE
            subscribed.append(prefetch)
            return await subscribe(queue, sink, prefetch=prefetch, **rest)

        with patch.object(at.mq.transport, "subscribe", watched):
            async with at.mq.scheduler():
                beside = (t.dead_letters_of(SCHEDULE_QUEUE), t.parked_of(SCHEDULE_QUEUE))
                there = [name for name in beside if await at.mq.exists(name)]
        return {**_queue(SCHEDULE_QUEUE), "prefetch": subscribed[0], "dead_letter_queues": there}


@SCHEDULER.op("close")
async def close(given: Values) -> Values:
    async with bench() as at:
        async with at.mq.scheduler():
            pass
        names = [queue.name for queue in SCHEDULE.queues]
        gone = [name for name in names if not await at.mq.exists(name)]
        exchange_gone = [] if await at.mq.exists("acemq.schedule", "exchange") else ["acemq.schedule"]
        return {"deletes": gone + exchange_gone}


# The arithmetic


@SCHEDULER.op("choose")
def choose(given: Values) -> Values:
    found = ladder.rung_for(given["remaining_ms"])
    if found is None:
        return {"deliver": True}
    copy = ladder.onward(Waiting("x", "k", given["remaining_ms"]), b"", now_ms=0, origin="")
    assert copy.routing_key == found.queue
    return {"deliver": False, "rung_queue": found.queue, "exchange": copy.exchange}


@SCHEDULER.op("hops")
def hops(given: Values) -> Values:
    left, passed = given["delay_ms"], list[int]()
    while (found := ladder.rung_for(left)) is not None:
        passed.append(found.millis)
        left -= found.millis
    return {"rungs_ms": passed, "count": ladder.hops(given["delay_ms"]), "delivered_with_remaining_ms": left}


# On, along and off


async def _somewhere_to_go(at: Bench, exchange: str, routing_key: str) -> None:
    whole = Topology().queue("taken", type="classic")
    if exchange:
        whole = whole.exchange(exchange).bind("taken", exchange, routing_key)
    else:
        whole = whole.queue(routing_key, type="classic")
    await at.mq.transport.apply(whole, ApplyMode.CREATE)


def _shown(at: Bench, message: Outgoing) -> Values:
    wire = on_the_wire(message)
    return {
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "content_type": wire["properties"]["content_type"],
        "body_hex": message.body.hex(),
        "headers": wire["headers"],
        "persistent": wire["properties"]["delivery_mode"] == 2,
        "mandatory": message.mandatory,
        "expiration": wire["properties"]["expiration"],
    }


@SCHEDULER.op("schedule")
async def schedule(given: Values) -> Values:
    async with bench() as at:
        await _somewhere_to_go(at, given["exchange"], given["routing_key"])
        now = from_millis(given["now_ms"])
        with patch.object(type(at.clock), "now", lambda clock: now):
            async with at.mq.scheduler() as later:
                at.broker.stall("publish")
                calling = asyncio.ensure_future(
                    later.at(
                        from_millis(given["due_ms"]),
                        given["exchange"],
                        given["routing_key"],
                        bytes.fromhex(given["body_hex"]),
                        content_type=given["content_type"],
                    )
                )
                await at.clock.rest()
                confirmed = not calling.done()
                at.broker.release("publish")
                await calling
        (message,) = at.published
        assert message.delay is None
        return {**_shown(at, message), "confirmed": confirmed}


@SCHEDULER.op("schedule_naive_datetime")
async def schedule_naive_datetime(given: Values) -> Values:
    async with bench() as at, at.mq.scheduler() as later:
        naive = at.clock.now().replace(tzinfo=None) + timedelta(minutes=1)
        await later.at(naive, "", "some.queue", 1)
        return {}


@SCHEDULER.op("due")
async def due(given: Values) -> Values:
    async with bench() as at:
        headers: dict[str, Any] = given["headers"]
        await _somewhere_to_go(at, "billing", "invoice.due")
        async with at.mq.scheduler() as later:
            if given.get("publish") == "unroutable":
                at.broker.faults.next("publish", raises(Unroutable("nothing is bound")), match=_onward)
            # First-seen is compared with the real time, so the case is moved there, and its moment is moved with it.
            shift = to_millis(at.clock.now()) - given["now_ms"]
            moved = _moved(headers, shift)
            await at.put(SCHEDULE_QUEUE, bytes.fromhex(given["body_hex"]), headers=moved)
            at.broker.stall("publish")
            await at.clock.rest()
            settled_before = len(at.settled)
            at.broker.release("publish")
            await at.clock.rest()
            answer = _what_became(at, later.counters, shift)
            if answer["action"] == "retry":
                began = at.clock.now()
                await at.clock.advance(millis(4_999))
                assert len(at.published) == 1
                await at.clock.advance(millis(1))
                answer |= _again(at, shift) | {"wait_ms": (at.seen[1].at - began) // millis(1)}
        return {**answer, "confirmed": settled_before == 0}


def _onward(message: Any) -> bool:
    return isinstance(message, Outgoing) and message.headers.get("x-acemq-type") == "ScheduledMessage"


def _moved(headers: dict[str, Any], by: int) -> dict[str, Any]:
    """The same with another moment, of the type that it had."""
    due_at = headers.get("x-schedule-due-at")
    if isinstance(due_at, int):
        return {**headers, "x-schedule-due-at": due_at + by}
    if isinstance(due_at, str) and due_at.isdigit():
        return {**headers, "x-schedule-due-at": str(int(due_at) + by)}
    return headers


def _what_became(at: Bench, counters: acemq.SchedulerCounters, shift: int) -> Values:
    told = [each for each in at.told if each.name.startswith("acemq.schedule") or each.name == "acemq.move.failed"]
    event = {"event": told[0].name, "level": told[0].level} if told else {}
    verbs = ["ack" if each.verb is Verb.ACCEPT else each.verb.value for each in at.settled]
    settle = {"settle": verbs[0]} if verbs else {}
    if not at.published:
        return {"action": "drop", "publishes": 0, **event, **settle}
    message = at.published[0]
    shown = _shown(at, message)
    shown["headers"] = _moved(shown["headers"], -shift)
    if told:
        return {"action": "retry", "delivered_counter": counters.delivered, **event}
    if message.exchange == "acemq.schedule":
        return {"action": "hop", "rung_queue": message.routing_key, **shown, **settle}
    return {"action": "deliver", **shown, **settle}


def _again(at: Bench, shift: int) -> Values:
    """The message that goes back to the control queue after its wait."""
    back = at.published[1]
    assert back.headers["x-acemq-attempt"] == 2
    assert back.exchange == ""
    return {"republish_queue": back.routing_key, "headers": _moved(on_the_wire(back)["headers"], -shift)}


@SCHEDULER.op("counters")
async def counters(given: Values) -> Values:
    async with bench() as at:
        await at.declare("some.queue")
        async with at.mq.scheduler() as later:
            for delay in given["delays_ms"]:
                await later.after(millis(delay), "", "some.queue", 1)
            await at.clock.advance(millis(sum(given["delays_ms"]) + 1_000))
            assert len(at.waiting("some.queue")) == later.counters.delivered
            found = later.counters
            return {"scheduled": found.scheduled, "delivered": found.delivered, "hops": found.hops}


@SCHEDULER.back("schedule")
def read_again(given: Values, expect: Values) -> None:
    """What is written on a message is what a scheduler reads off it."""
    if "x-schedule-due-at" in expect["headers"]:
        assert Waiting.from_headers(expect["headers"]) == Waiting(
            given["exchange"], given["routing_key"], given["due_ms"], given["content_type"]
        )


@SCHEDULER.back("due")
def written_again(given: Values, expect: Values) -> None:
    """A message that is kept or hops keeps saying what it said."""
    if "x-schedule-due-at" in expect.get("headers", {}):
        waiting = Waiting.from_headers(given["headers"])
        assert waiting is not None
        assert waiting.to_headers() == expect["headers"]
