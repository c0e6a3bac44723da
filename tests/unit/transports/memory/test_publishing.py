from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from acemq.clock import MovableClock
from acemq.errors import CapabilityError
from acemq.topology import Topology
from acemq.transport import (
    BadHeader,
    ExchangeMissing,
    MessageTooLarge,
    Published,
    QueueFull,
    Unroutable,
)
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import SECOND, Client, outgoing


async def test_a_message_arrives_as_it_was_published(client: Client) -> None:
    headers = {"x-acemq-id": "m-1", "n": 1, "at": datetime(2027, 1, 1, tzinfo=UTC), "deep": {"$b": [1, {"x": b"\0"}]}}
    await client.send(b"\0body", headers=headers, message_id="m-1", reply_to="answers", content_type=None)
    (delivery,) = await client.take()
    assert (delivery.body, delivery.headers, delivery.message_id) == (b"\0body", headers, "m-1")
    assert (delivery.exchange, delivery.routing_key, delivery.queue) == ("", "orders", "orders")
    assert (delivery.reply_to, delivery.content_type, delivery.redelivered) == ("answers", None, False)
    assert delivery.enqueued_at == client.clock.now()


async def test_every_item_of_a_batch_has_its_own_outcome(client: Client, broker: MemoryBroker) -> None:
    broker.max_message = 100
    results = await client.publish(
        outgoing(b"good"),
        outgoing(b"nowhere", to="nobody"),
        outgoing(b"x" * 101),
        outgoing(b"bad", headers={"n": 2**63}),
        outgoing(b"exchange", exchange="gone"),
        outgoing(b"last"),
    )
    assert [result.outcome for result in results] == ["routed", "unroutable", "refused", "refused", "refused", "routed"]
    assert [type(result.error) for result in results[1:5]] == [Unroutable, MessageTooLarge, BadHeader, ExchangeMissing]
    assert await client.bodies() == [b"good", b"last"]


async def test_the_error_of_a_refusal_carries_its_facts(client: Client, broker: MemoryBroker) -> None:
    broker.max_message = 10
    too_large, bad, no_exchange = await client.publish(
        outgoing(b"123456", headers={"name": "ab"}),
        outgoing(b"x", headers={"tag": float}),
        outgoing(exchange="gone"),
    )
    assert isinstance(too_large.error, MessageTooLarge)
    assert (too_large.error.size, too_large.error.limit) == (12, 10)
    assert isinstance(bad.error, BadHeader)
    assert bad.error.name == "tag"
    assert isinstance(no_exchange.error, ExchangeMissing)
    assert no_exchange.error.code == 404


async def test_a_message_of_exactly_the_limit_passes(client: Client, broker: MemoryBroker) -> None:
    broker.max_message = 10
    assert await client.outcome(outgoing(b"1234", headers={"name": "ab"})) == (Published.ROUTED, None)


@pytest.mark.parametrize(
    "headers",
    [{"": 1}, {"x" * 129: 1}, {"at": datetime(2027, 1, 1)}, {"half": "\ud800"}, {"deep": [{"set": {1}}]}, {1: "x"}],
)
async def test_a_header_that_no_broker_could_carry_is_refused(client: Client, headers: dict[str, str]) -> None:
    outcome, error = await client.outcome(outgoing(headers=headers))
    assert outcome is Published.REFUSED
    assert isinstance(error, BadHeader)


async def test_a_mandatory_message_that_no_queue_takes_is_told_and_stored_nowhere(
    client: Client, broker: MemoryBroker
) -> None:
    await client.apply(Topology().exchange("news", "topic").queue("orders").bind("orders", "news", "a.*"))
    assert (await client.outcome(outgoing(exchange="news", to="b.x")))[0] is Published.UNROUTABLE
    assert (await client.outcome(outgoing(exchange="news", to="b.x", mandatory=False)))[0] is Published.ROUTED
    assert broker.snapshot() == []


async def test_a_full_queue_refuses_and_never_drops(client: Client) -> None:
    await client.declare("small", max_length=2)
    results = await client.publish(*(outgoing(b"%d" % n, to="small") for n in range(4)))
    assert [result.outcome for result in results] == ["routed", "routed", "refused", "refused"]
    assert isinstance(results[2].error, QueueFull)
    await client.accept(*await client.take("small", 1))
    await client.send(b"4", to="small")
    assert await client.bodies("small") == [b"1", b"4"]


async def test_a_fan_out_into_one_full_queue_reaches_none(client: Client) -> None:
    await client.apply(
        Topology()
        .exchange("all", "fanout")
        .queue("small", max_length=1)
        .queue("orders")
        .bind("small", "all")
        .bind("orders", "all")
    )
    await client.send(b"1", exchange="all")
    assert (await client.outcome(outgoing(b"2", exchange="all")))[0] is Published.REFUSED
    assert await client.bodies() == [b"1"]


async def test_nobody_shares_headers(client: Client) -> None:
    await client.apply(Topology().exchange("all", "fanout").queue("a").queue("b").bind("a", "all").bind("b", "all"))
    headers: dict[str, Any] = {"list": [1], "n": 1}
    await client.send(b"x", exchange="all", headers=headers)
    headers["list"].append(2)
    headers["n"] = 2
    (one,) = await client.take("a")
    received = cast(dict[str, Any], one.headers)
    received["list"].append(3)
    received["new"] = 1
    await client.requeue(one)
    (again,) = await client.take("a")
    (other,) = await client.take("b")
    assert again.headers == other.headers == {"list": [1], "n": 1}


async def test_a_priority_that_a_queue_has_no_level_for_is_refused_naming_the_queue(client: Client) -> None:
    await client.declare("urgent", priorities=3, type="classic")
    for message in (outgoing(priority=1), outgoing(to="urgent", priority=3), outgoing(to="urgent", priority=-1)):
        outcome, error = await client.outcome(message)
        assert outcome is Published.REFUSED
        assert isinstance(error, CapabilityError)
        assert message.routing_key in str(error)


async def test_a_transaction_is_refused(client: Client) -> None:
    (result,) = await client.port.publish([outgoing()], within=SECOND, transaction=object())
    assert result.outcome is Published.REFUSED
    assert isinstance(result.error, CapabilityError)


async def test_an_empty_batch_has_no_results(client: Client) -> None:
    assert await client.publish() == []
    assert await client.port.settle([]) == []


async def test_publishing_does_not_suspend(client: Client) -> None:
    call = client.port.publish([outgoing()], within=SECOND)
    with pytest.raises(StopIteration):
        call.__await__().__next__()


async def test_the_limit_on_a_message_is_a_setting_of_the_broker(clock: MovableClock, connect: Connect) -> None:
    client = await connect(MemoryBroker(clock=clock, max_message=5))
    assert client.port.capabilities.max_message == 5
    assert (await client.outcome(outgoing(b"123456")))[0] is Published.REFUSED
