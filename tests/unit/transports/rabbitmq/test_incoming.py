"""From frames to deliveries, those included that cannot be taken apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pamqp.frame
import pytest
from pamqp import commands
from pamqp.header import ContentHeader

from acemq.transport import Delivery
from acemq.transports.rabbitmq.incoming import IncomingChannel
from acemq.transports.rabbitmq.ledger import Ledger, Receipt


class Incoming(IncomingChannel):
    def __init__(self, counts: bool | None = None) -> None:
        super().__init__(cast("Any", SimpleNamespace()), "q", counts=counts)
        self.ledger = Ledger(cast("Any", SimpleNamespace()), 1)
        self.got: list[Delivery] = []

    def arrived(self, tag: int, delivery: Delivery) -> None:
        assert self.ledger.held[tag] is delivery
        self.got.append(delivery)


def take(incoming: Incoming, method: Any, body: bytes, **properties: Any) -> Delivery:
    raw = pamqp.frame.marshal(method, 1)
    assert incoming.method(int.from_bytes(raw[7:11], "big"), raw[11:-1])
    header = ContentHeader(body_size=len(body), properties=commands.Basic.Properties(**properties))
    incoming.content(pamqp.frame.marshal(header, 1)[19:-1], body)
    return incoming.got[-1]


def deliver(tag: int = 5, redelivered: bool = False) -> commands.Basic.Deliver:
    return commands.Basic.Deliver("consumer", tag, redelivered, "news", "order.placed")


def test_a_pushed_and_a_pulled_delivery_look_the_same() -> None:
    incoming = Incoming()
    pushed = take(incoming, deliver(), b"body", message_id="m", content_type="text/plain", headers={"a": 1})
    pulled = take(
        incoming,
        commands.Basic.GetOk(6, True, "news", "order.placed", 1234),
        b"body",
        message_id="m",
        content_type="text/plain",
        headers={"a": 1},
    )
    for delivery in (pushed, pulled):
        assert (delivery.exchange, delivery.routing_key, delivery.queue) == ("news", "order.placed", "q")
        assert (delivery.message_id, delivery.content_type, delivery.body) == ("m", "text/plain", b"body")
        assert delivery.headers == {"a": 1}
        assert delivery.fault is None
    assert (pushed.redelivered, pulled.redelivered) == (False, True)
    tags = [cast("Receipt", delivery.receipt).tag for delivery in (pushed, pulled)]
    assert tags == [5, 6]


@pytest.mark.parametrize(
    ("counts", "headers", "seen"),
    [
        (None, {}, None),
        (None, {"x-delivery-count": 2}, 3),
        (True, {}, 1),
        (True, {"x-delivery-count": 2}, 3),
        (False, {"x-delivery-count": 2}, None),
    ],
)
def test_deliveries_are_counted_where_the_queue_counts(counts: bool | None, headers: Any, seen: int | None) -> None:
    assert take(Incoming(counts), deliver(), b"", headers=headers).deliveries == seen


def test_a_queue_that_has_counted_once_is_known_to_count() -> None:
    incoming = Incoming()
    take(incoming, deliver(1), b"", headers={"x-delivery-count": 1})
    assert take(incoming, deliver(2), b"").deliveries == 1


@pytest.mark.parametrize("properties", [b"", b"\xf8", b"\x80\0", b"\x20\0\0\0", b"\x00\x80\x05"])
def test_properties_that_cannot_be_read_are_a_fault_and_the_body_is_kept(properties: bytes) -> None:
    incoming = Incoming()
    raw = pamqp.frame.marshal(deliver(), 1)
    incoming.method(int.from_bytes(raw[7:11], "big"), raw[11:-1])
    incoming.content(properties, b"body")
    (delivery,) = incoming.got
    assert delivery.body == b"body"
    assert delivery.routing_key == "order.placed"
    assert delivery.fault
