"""CONTRACT.md section 7: dead letters that go back to where they came from."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

from acemq.errors import ConfigurationError, ReplayError
from acemq.patterns import replay as r
from acemq.patterns.replay import Replay
from acemq.transport import NotConnected, Outgoing, Verb
from acemq.transports.memory import raises
from tests.wire.broker import Bench, arrived, bench, on_the_wire
from tests.wire.suite import Suite, Values

REPLAY = Suite("replay", exact=("stamp",))


@REPLAY.parametrize
async def test_replay(case: str) -> None:
    await REPLAY.check(case)


@REPLAY.op("target")
async def target(given: Values) -> Values:
    """A queue of no known suffix has nowhere to go but itself, and that is refused (section 7, a choice)."""
    async with bench() as at:
        replay = at.mq.replay(given["from"])
        if "into" in given:
            return {"to": replay.into(given["into"]).target, "refuse_loop": False}
        try:
            return {"to": r.target_of(given["from"]), "refuse_loop": False}
        except ConfigurationError:
            return {"to": given["from"], "refuse_loop": await _refused(replay)}


async def _refused(replay: Replay) -> bool:
    try:
        await replay.run()
    except ConfigurationError:
        return True
    return False


@REPLAY.op("stamp")
def stamp(given: Values) -> Values:
    copy = r.replayed_copy(
        arrived(given["headers"], queue=given["from"], message_id="m-1"),
        "orders.placed",
        now=datetime.fromisoformat(given["now"]),
        keep_attempts=given["keep_attempts"],
    )
    return {"headers": on_the_wire(copy)["headers"]}


@REPLAY.op("publish")
async def publish(given: Values) -> Values:
    source = given["from"]
    async with bench() as at:
        await at.declare(source, r.target_of(source))
        fields = {name: given[name] for name in ("message_id", "content_type", "reply_to")}
        await at.put(source, bytes.fromhex(given["body_hex"]), **fields)
        confirmed = await _confirmed_before_it_is_accepted(at, source)
        (copy,) = at.published
        properties: dict[str, Any] = on_the_wire(copy)["properties"]
        return {
            **properties,
            "exchange": copy.exchange,
            "routing_key": copy.routing_key,
            "body_hex": copy.body.hex(),
            "mandatory": copy.mandatory,
            "confirmed": confirmed,
            "original": "ack after routed confirm" if confirmed else "ack before the confirm",
        }


async def _confirmed_before_it_is_accepted(at: Bench, source: str) -> bool:
    at.broker.stall("publish")
    running = asyncio.ensure_future(at.mq.replay(source).run())
    await at.clock.rest()
    accepted_at_once = bool(at.settled)
    at.broker.release("publish")
    await at.clock.rest()
    await running
    return not accepted_at_once and [settlement.verb for settlement in at.settled] == [Verb.ACCEPT]


SOURCE, HOME = "orders.placed.dlq", "orders.placed"


@REPLAY.op("run")
async def run(given: Values) -> Values:
    results: list[str] = given.get("publish_results", [])
    async with bench() as at:
        await at.declare(SOURCE, type="classic")  # as every dead-letter queue is: what is put back keeps its place
        # A full queue says no to what comes after the first message.
        await at.declare(HOME, type="classic", **({"max_length": 1} if "nacked" in results else {}))
        for message_id in given["queue"]:
            await at.put(SOURCE, message_id=message_id)
        replay = at.mq.replay(SOURCE)
        if "filter_accepts" in given:
            replay = replay.where(lambda message: message.delivery.message_id in given["filter_accepts"])
        _arrange(at, results)
        try:
            ended = await replay.run(given.get("max"))
        except ReplayError as failed:  # a `PublishFailedError`
            assert [s.delivery.message_id for s in at.settled] == ["m1", "m2"]
            return {
                "error": "publish failed",
                "replayed_before": failed.result.replayed,
                "left_on_source": at.waiting(SOURCE),
                "original": _WORDS[at.settled[-1].verb],
            }
        verbs = [settlement.verb for settlement in at.settled]
        put_back_last = verbs == sorted(verbs, key=lambda verb: verb is Verb.REQUEUE)
        return {
            "replayed": ended.replayed,
            "left_on_source": at.waiting(SOURCE),
            "skipped_settled": f"nack requeue {'at the end of the pass' if put_back_last else 'at once'}",
        }


_WORDS = {Verb.ACCEPT: "ack", Verb.REQUEUE: "nack requeue", Verb.DROP: "drop"}


def _arrange(at: Bench, results: list[str]) -> None:
    """What the second publish of the replay meets."""

    def second(outgoing: Outgoing) -> bool:
        return outgoing.message_id == "m2"

    def its_home_is_gone(outgoing: Outgoing) -> bool:
        if second(outgoing):
            at.broker.drop_queue(HOME)
        return False

    match results[1:]:
        case ["unroutable"]:
            at.broker.faults.next("publish", "fail", match=its_home_is_gone)
        case ["raised"]:
            at.broker.faults.next("publish", raises(NotConnected("the link is gone")), match=second)
        case _:
            pass
