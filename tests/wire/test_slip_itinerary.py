"""CONTRACT.md section 4: a route of addresses in one JSON header, and which form wins."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import datetime

from acemq import headers as h
from acemq.envelope import Envelope
from acemq.errors import PublishError
from acemq.message import Message
from acemq.patterns.pipeline import SlipForm
from acemq.patterns.routing_slip import Itinerary, Route, RoutingSlip, Stop, address_of
from tests.wire.broker import arrived, bench
from tests.wire.suite import Suite, Values

ITINERARY = Suite("slip_itinerary")


@ITINERARY.parametrize
async def test_slip_itinerary(case: str) -> None:
    await ITINERARY.check(case)


def _stops(given: list[dict[str, str]]) -> tuple[Stop, ...]:
    return tuple(
        Stop(step["exchange"], step["routingKey"], step.get("name", ""), step.get("completedAt", "")) for step in given
    )


def _shown(stops: tuple[Stop, ...]) -> list[dict[str, str]]:
    """Stops as the cases write them: a name and a stamp only when there is one."""
    rows = ((s.exchange, s.routing_key, s.name, s.completed_at) for s in stops)
    names = ("exchange", "routingKey", "name", "completedAt")
    return [
        {name: value for name, value in zip(names, row, strict=True) if value or name in ("exchange", "routingKey")}
        for row in rows
    ]


def _made(given: Values) -> Itinerary:
    return Itinerary(_stops(given["steps"]), _stops(given["done"]))


@ITINERARY.op("write")
def write(given: Values) -> Values:
    (header,) = (headers := _made(given).on(Envelope.of("t")).headers)
    return {"header": header, "value": headers[header]}


@ITINERARY.back("write")
def what_is_written_reads_back(given: Values, expect: Values) -> None:
    assert Itinerary.parse(expect["value"]) == _made(given)


@ITINERARY.op("write_parsed")
def write_parsed(given: Values) -> Values:
    return {"parsed": json.loads(str(_made(given)))}


@ITINERARY.back("write_parsed")
def what_is_written_raw_reads_back(given: Values, expect: Values) -> None:
    assert Itinerary.parse(str(_made(given))) == _made(given)
    assert "\\u" not in str(_made(given)), "raw UTF-8 is written"


@ITINERARY.op("advance")
def advance(given: Values) -> Values:
    onward = Itinerary.parse(given["value"]).advance(now=datetime.fromisoformat(given["now"]))
    return {"value": str(onward), "finished": onward.is_finished}


@ITINERARY.op("timestamp")
def timestamp(given: Values) -> Values:
    onward = Itinerary((Stop("", "q"),)).advance(now=datetime.fromisoformat(given["at"]))
    return {"text": onward.done[0].completed_at}


@ITINERARY.op("read")
def read(given: Values) -> Values:
    itinerary = Itinerary.of(Message(None, arrived({h.ROUTING_SLIP: given["value"]})))
    if itinerary is None:
        return {"slip": None}
    return {
        "steps": _shown(itinerary.steps),
        "done": _shown(itinerary.done),
        "finished": itinerary.is_finished,
        "rewritten": str(itinerary),
    }


@ITINERARY.back("read")
def what_was_read_is_written_and_reads_the_same(given: Values, expect: Values) -> None:
    itinerary = Itinerary.from_headers({h.ROUTING_SLIP: given["value"]})
    assert itinerary is None or Itinerary.parse(str(itinerary)) == itinerary


@ITINERARY.op("route_from")
def route_from(given: Values) -> Values:
    route = Route.of(Message(None, arrived(given["headers"])))
    if route is None:
        return {"form": None}
    form = {Itinerary: "itinerary", RoutingSlip: "declared"}[type(route)]
    if route.is_finished:
        return {"form": form, "finished": True}
    stop = address_of(route)
    return {"form": form, "exchange": stop.exchange, "routing_key": stop.routing_key}


@ITINERARY.op("application_headers")
def application_headers(given: Values) -> Values:
    return {"application_headers": dict(Message(None, arrived(given["headers"])).headers)}


@ITINERARY.op("pipeline_start")
async def pipeline_start(given: Values) -> Values:
    async with bench() as at:
        described = at.mq.pipeline(given["pipeline"], str).writing_slip_as(SlipForm.ITINERARY)
        for step in given["steps"]:
            described = described.elsewhere(step, str)
        async with described.start() as running:
            await running.send("value")
        (outgoing,) = at.published
        return {
            "value": outgoing.headers[h.ROUTING_SLIP],
            "exchange": outgoing.exchange,
            "routing_key": outgoing.routing_key,
        }


@ITINERARY.op("send_along")
async def send_along(given: Values) -> Values:
    async with bench() as at:
        with suppress(PublishError):  # nothing is declared; what counts is what was to be published
            await at.mq.send_along(Itinerary.parse(given["value"]), {"a": 1})
        (outgoing,) = at.published
        assert outgoing.headers[h.ROUTING_SLIP] == given["value"]
        return {
            "exchange": outgoing.exchange,
            "routing_key": outgoing.routing_key,
            "default_type": outgoing.headers[h.TYPE],
        }
