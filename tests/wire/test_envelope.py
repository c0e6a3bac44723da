"""CONTRACT.md section 1: what a publish writes, and what is made of whatever arrives."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, cast

from acemq import headers as h
from acemq.clock import MovableClock
from acemq.codec import Codecs
from acemq.envelope import Envelope, EnvelopeFields, from_millis, to_millis
from acemq.mq import AceMQ
from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import Outbound
from acemq.telemetry import Telemetry
from tests.wire.broker import on_the_wire
from tests.wire.suite import Suite, Values

ENVELOPE = Suite("envelope", exact=("write",))

_AS_OPTION = {"id": "message_id"}
_NOT_AN_OPTION = {"error", "route", "route_position", "route_id"}


@ENVELOPE.parametrize
async def test_envelope(case: str) -> None:
    await ENVELOPE.check(case)


@ENVELOPE.op("write")
def write(given: Values) -> Values:
    return _write(given)


def _write(given: Values) -> Values:
    """Through the one way out of a connection, down to the bytes for RabbitMQ."""
    fields: dict[str, Any] = given["envelope"]
    connection = AceMQ("memory://")
    clock = MovableClock(from_millis(fields["first_seen_ms"])) if "first_seen_ms" in fields else connection.clock
    outbound = Outbound(
        connection.transport,
        codecs=Codecs.default(),
        telemetry=Telemetry("rabbitmq"),
        origin=fields.get("origin", connection.origin),
        timeout=timedelta(seconds=10),
        lay_ladder=connection.lay_ladder,
        clock=clock,
    )
    assert fields.get("attempt", 1) == 1
    outgoing = outbound.encoder.encode("orders-events", given["routing_key"], {"a": 1}, _options(fields))
    assert outgoing.content_type == given["content_type"]
    return on_the_wire(outgoing)


def _options(fields: dict[str, Any]) -> PublishOptions | None:
    if not fields:
        return None
    if _NOT_AN_OPTION.isdisjoint(fields):
        said = {_AS_OPTION.get(name, name): value for name, value in fields.items()}
        return cast(
            "PublishOptions", {k: v for k, v in said.items() if k not in ("origin", "first_seen_ms", "attempt")}
        )
    said = {name: value for name, value in fields.items() if name not in ("type", "first_seen_ms")}
    said["first_seen"] = from_millis(fields["first_seen_ms"])
    return {"envelope": Envelope.of(fields["type"], **cast("EnvelopeFields", said))}


@ENVELOPE.back("write")
def what_is_written_reads_back(given: Values, expect: Values) -> None:
    fields = given["envelope"]
    written = _write(given)["headers"]
    envelope = Envelope.from_headers(written, routing_key="elsewhere", message_id=None, now=datetime.now(UTC))
    read = _fields(envelope)
    for name, value in fields.items():
        assert read["application_headers" if name == "headers" else name] == (value or None if value == "" else value)
    assert envelope.age_known
    assert envelope.to_headers() == written


@ENVELOPE.op("set_application_header")
def set_application_header(given: Values) -> Values:
    Envelope.of("t", headers={given["name"]: given["value"]})
    return {}


@ENVELOPE.op("is_reserved")
def is_reserved(given: Values) -> Values:
    return {"reserved": given["name"] not in h.application({given["name"]: "v"})}


@ENVELOPE.op("read")
def read(given: Values) -> Values:
    return _fields(_read(given))


def _read(given: Values) -> Envelope:
    return Envelope.from_headers(
        given["headers"], routing_key=given["routing_key"], message_id=given["message_id"], now=datetime.now(UTC)
    )


def _fields(envelope: Envelope) -> Values:
    names = ("id", "type", "version", "correlation_id", "causation_id", "attempt", "age_known", "origin", "error")
    fields: Values = {
        name: getattr(envelope, name) for name in (*names, "claim", "route", "route_position", "route_id")
    }
    return {
        **fields,
        "first_seen_ms": to_millis(envelope.first_seen),
        "application_headers": dict(envelope.headers),
    }


@ENVELOPE.back("read")
def what_was_read_is_written_and_reads_the_same(given: Values, expect: Values) -> None:
    envelope = _read(given)
    again = Envelope.from_headers(
        envelope.to_headers(), routing_key=envelope.type, message_id=None, now=datetime.now(UTC)
    )
    assert again.replace(age_known=envelope.age_known) == envelope
