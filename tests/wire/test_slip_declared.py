"""CONTRACT.md section 3: a route of step names in reserved headers."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from acemq import headers as h
from acemq.envelope import Envelope, EnvelopeFields, from_millis
from acemq.errors import PublishError
from acemq.headers import HeaderValue
from acemq.message import Message
from acemq.patterns import pipeline as p
from acemq.patterns.routing_slip import RoutingSlip
from acemq.transport import Outgoing
from tests.wire.broker import Bench, arrived, bench
from tests.wire.suite import Suite, Values

DECLARED = Suite("slip_declared")


@DECLARED.parametrize
async def test_slip_declared(case: str) -> None:
    await DECLARED.check(case)


def _slip(headers: dict[str, HeaderValue]) -> RoutingSlip:
    slip = RoutingSlip.from_headers(headers)
    assert slip is not None
    return slip


def _written(slip: RoutingSlip) -> dict[str, HeaderValue]:
    return slip.on(Envelope.of("t")).to_headers()


def _shown(slip: RoutingSlip) -> Values:
    return {
        "headers": _written(slip),
        "steps": list(slip.steps),
        "position": slip.position,
        "run_id": slip.run_id,
        "current": slip.current,
        "next": slip.next,
        "finished": slip.is_finished,
    }


@DECLARED.op("start")
def start(given: Values) -> Values:
    return _shown(RoutingSlip.start_of(*given["steps"]))


@DECLARED.back("start")
def a_started_slip_reads_back(given: Values, expect: Values) -> None:
    slip = RoutingSlip.start_of(*given["steps"])
    assert RoutingSlip.from_headers(_written(slip)) == slip


@DECLARED.op("read")
def read(given: Values) -> Values:
    slip = RoutingSlip.of(Message(None, arrived(given["headers"])))
    return {"slip": None} if slip is None else _shown(slip)


@DECLARED.back("read")
def a_slip_that_was_read_is_written_and_reads_the_same(given: Values, expect: Values) -> None:
    slip = RoutingSlip.from_headers(given["headers"])
    assert slip is None or RoutingSlip.from_headers(_written(slip)) == slip


@DECLARED.op("advance")
def advance(given: Values) -> Values:
    return _shown(_slip(given["headers"]).advance())


@DECLARED.op("advance_to")
def advance_to(given: Values) -> Values:
    return _shown(_slip(given["headers"]).advance_to(given["position"]))


@DECLARED.op("send")
async def send(given: Values) -> Values:
    async with bench() as at:
        with suppress(PublishError):  # nothing is declared; what counts is what was to be published
            if given.get("envelope") is None:
                await at.mq.send_along(RoutingSlip.start_of(*given["start"]), {"a": 1})
            else:
                await at.mq.forward(_slip(given["slip"]), {"a": 1}, _envelope(given["envelope"]))
        return _only(at)


def _envelope(given: Values) -> Envelope:
    fields = {name: value for name, value in given.items() if name not in ("type", "first_seen_ms")}
    if "first_seen_ms" in given:
        fields["first_seen"] = from_millis(given["first_seen_ms"])
    return Envelope.of(given["type"], **cast("EnvelopeFields", fields))


def _only(at: Bench) -> Values:
    (outgoing,) = at.published
    return _sent(outgoing)


def _sent(outgoing: Outgoing) -> Values:
    return {
        "exchange": outgoing.exchange,
        "routing_key": outgoing.routing_key,
        "queue": outgoing.routing_key if not outgoing.exchange else None,
        "default_type": outgoing.headers[h.TYPE],
        "headers": dict(outgoing.headers),
    }


@DECLARED.op("pipeline")
async def pipeline(given: Values) -> Values:
    """A pipeline that runs, with only the step under test here."""
    if given["do"] == "idempotency_key":
        return {"key": p.idempotency_key(given["at"], given["id"])}
    async with bench() as at:
        described: p.Pipeline[str, Any] = at.mq.pipeline(given["pipeline"], str)

        async def work(payload: str) -> str | None:
            return cast("str | None", given.get("output"))

        for step in given["steps"]:
            described = described.step(step, work)
        await at.declare("elsewhere")
        here = [given["at"]] if "at" in given else []
        async with described.start(only=here) as running:
            match given["do"]:
                case "send":
                    await running.send("value")
                case "resume":
                    await running.resume("value", given["headers"])
                case _:
                    headers = {h.ID: "m-1", h.ERROR: "why it failed before", **given["headers"]}
                    await at.put(running.queue_for(given["at"]), b'"value"', headers=headers)
                    await at.clock.rest()
                    assert [settlement.verb for settlement in at.settled] == ["accept"]
            counted = running.counters
            word = "completed" if counted.completed else "ended_early" if counted.ended_early else None
            return {**_sent(at.published[-1]), "counted": word} if at.published else {"publish": None, "counted": word}


@DECLARED.op("application_headers")
def application_headers(given: Values) -> Values:
    return {"application_headers": dict(Message(None, arrived(given["headers"])).headers)}
