from __future__ import annotations

import pytest

from acemq.topology import ExchangeKind, Topology
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import Client, outgoing


def bound(kind: ExchangeKind, **patterns: str) -> Topology:
    topology = Topology().exchange("news", kind)
    for queue, pattern in patterns.items():
        topology = topology.queue(queue).bind(queue, "news", pattern)
    return topology


async def reached(client: Client, key: str, *queues: str) -> list[str]:
    await client.publish(outgoing(exchange="news", to=key))
    return [queue for queue in queues if await client.bodies(queue)]


@pytest.mark.parametrize(
    ("kind", "key", "expected"),
    [
        ("direct", "a", ["one"]),
        ("direct", "c", []),
        ("fanout", "c", ["one", "two"]),
        ("topic", "a", ["one"]),
        ("topic", "b", ["two"]),
    ],
)
async def test_each_kind_of_exchange_routes_its_way(
    client: Client, kind: ExchangeKind, key: str, expected: list[str]
) -> None:
    await client.apply(bound(kind, one="a", two="b"))
    assert await reached(client, key, "one", "two") == expected


@pytest.mark.parametrize(("pattern", "key"), [("order.*", "order."), ("#", ""), ("a.#.z", "a.z"), ("#.b.*", "a.b.c")])
async def test_topic_patterns_match_as_on_rabbitmq(client: Client, pattern: str, key: str) -> None:
    await client.apply(bound("topic", q=pattern))
    assert await reached(client, key, "q") == ["q"]


async def test_a_queue_gets_one_copy_however_many_bindings_match(client: Client) -> None:
    await client.apply(bound("topic", q="a.*").bind("q", "news", "*.b"))
    await client.publish(outgoing(exchange="news", to="a.b"))
    assert await client.depth("q") == (1, 0, 0)


async def test_copies_of_a_fan_out_are_settled_apart(client: Client) -> None:
    await client.apply(bound("fanout", one="", two=""))
    await client.publish(outgoing(exchange="news"))
    await client.accept(*await client.take("one"))
    (second,) = await client.take("two")
    await client.requeue(second)
    assert await client.depth("one") == (0, 0, 0)
    assert await client.depth("two") == (1, 0, 0)


async def test_a_binding_made_before_the_publish_is_always_seen(
    client: Client, connect: Connect, broker: MemoryBroker
) -> None:
    await client.apply(bound("topic", one="a"))
    assert await reached(client, "a", "one") == ["one"]
    other = await connect(broker)
    await other.apply(bound("topic", two="#"))
    assert await reached(client, "a", "one", "two") == ["one", "two"]


async def test_a_queue_and_an_exchange_may_share_a_name(client: Client) -> None:
    await client.apply(bound("direct", orders="k", news="nothing"))
    await client.publish(outgoing(b"sent", to="news"), outgoing(b"published", exchange="news", to="k"))
    assert await client.bodies("news") == [b"sent"]
    assert await client.bodies("orders") == [b"published"]


async def test_the_bindings_of_a_deleted_queue_are_gone(client: Client) -> None:
    await client.apply(bound("fanout", one="", two=""))
    await client.port.delete("one")
    await client.declare("one")
    assert await reached(client, "", "one", "two") == ["two"]


async def test_names_are_compared_byte_for_byte(client: Client) -> None:
    names = ("a.b", "a-b", "Orders", "x", "x ", "é", "e\u0301")
    await client.declare(*names)
    for name in names:
        await client.send(name.encode(), to=name)
    assert [await client.bodies(name) for name in names] == [[name.encode()] for name in names]
