"""What is declared here others may declare with the same arguments and no others: CONTRACT.md sections 2 and 3."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

from acemq import AceMQ, Message, RetryPolicy, Topology
from tests.foreign.client import Foreign, Refused
from tests.waiting import until

POLICY = RetryPolicy.delays(*(timedelta(seconds=seconds) for seconds in (40, 90, 3_600, 5_400)))
RUNGS = {"40s": 40_000, "90s": 90_000, "1h": 3_600_000, "90m": 5_400_000}


def set_aside(queue: str) -> dict[str, Any]:
    return {"x-dead-letter-exchange": "acemq.dlx", "x-dead-letter-routing-key": f"{queue}.dlq"}


def rung(queue: str, millis: int) -> dict[str, Any]:
    return {"x-message-ttl": millis, "x-dead-letter-exchange": "acemq.retry", "x-dead-letter-routing-key": queue}


def refused_with_one_more(foreign: Foreign, queue: str, arguments: dict[str, Any]) -> None:
    foreign.declare(queue, **arguments)
    with pytest.raises(Refused, match="PRECONDITION_FAILED") as refused:
        foreign.declare(queue, **arguments, **{"x-max-length": 12_345})
    assert refused.value.code == 406


@pytest.fixture
def made(foreign: Foreign, name: str) -> Iterator[list[str]]:
    """Queues to delete."""
    made = [name, f"{name}.dlq", f"{name}.parked", *(f"{name}.retry.{rung}" for rung in RUNGS)]
    yield made
    foreign.delete(*made)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"x-queue-type": "quorum"}),
        ({"type": "classic"}, {}),
        ({"dead_letter": True}, {"x-queue-type": "quorum"}),
        ({"type": "classic", "dead_letter": True}, {}),
        ({"type": "classic", "priorities": 10}, {"x-max-priority": 9}),
        ({"ttl": timedelta(minutes=1)}, {"x-queue-type": "quorum", "x-message-ttl": 60_000}),
        ({"native": {"rabbitmq": {"x-delivery-limit": 5}}}, {"x-queue-type": "quorum", "x-delivery-limit": 5}),
    ],
    ids=["plain", "classic", "dead letters", "classic with dead letters", "priorities", "ttl", "native"],
)
async def test_a_queue_has_the_arguments_of_the_contract_and_no_others(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str], options: Any, arguments: dict[str, Any]
) -> None:
    await mq.declare(Topology().queue(name, **options))
    dead_letters = set_aside(name) if options.get("dead_letter") else {}
    refused_with_one_more(foreign, name, arguments | dead_letters)


async def test_what_a_consumer_declares_has_the_arguments_of_the_contract_and_no_others(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str]
) -> None:
    foreign.declare(name, **{"x-max-length": 10})  # a source queue is never declared, so it may be anything
    async with mq.consume(name, int, lambda message: None, retry=POLICY):
        pass
    for suffix in (".dlq", ".parked"):
        refused_with_one_more(foreign, f"{name}{suffix}", {})
    for label, millis in RUNGS.items():
        refused_with_one_more(foreign, f"{name}.retry.{label}", rung(name, millis))


@pytest.mark.parametrize("exchange", ["acemq.dlx", "acemq.retry"])
async def test_the_shared_exchanges_are_direct_and_durable_and_have_no_arguments(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str], exchange: str
) -> None:
    await mq.declare(Topology().queue(name, type="classic", retry=POLICY))
    foreign.declare_exchange(exchange, "direct")
    for kind, arguments in (("topic", {}), ("direct", {"alternate-exchange": "elsewhere"})):
        with pytest.raises(Refused) as refused:
            foreign.declare_exchange(exchange, kind, **arguments)
        assert refused.value.code == 406


async def test_the_bindings_of_the_contract_lead_where_it_says(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str]
) -> None:
    await mq.declare(Topology().queue(name, type="classic", retry=POLICY))
    foreign.put(f"{name}.dlq", b"dead", exchange="acemq.dlx")
    foreign.put(f"{name}.parked", b"parked", exchange="acemq.dlx")
    foreign.put(name, b"home", exchange="acemq.retry")
    found = [foreign.take_one(queue).body for queue in (f"{name}.dlq", f"{name}.parked", name)]
    assert found == [b"dead", b"parked", b"home"]


async def test_what_the_broker_dead_letters_by_itself_reaches_the_dead_letter_queue(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str]
) -> None:
    await mq.declare(Topology().queue(name, type="classic", dead_letter=True))
    await mq.send(name, b"late", expires_in=timedelta(milliseconds=1))
    await until(lambda: foreign.depth(f"{name}.dlq") == 1)
    assert foreign.take_one(f"{name}.dlq").body == b"late"


async def test_what_others_declared_by_the_contract_is_present_for_us(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str]
) -> None:
    foreign.declare_exchange("acemq.dlx", "direct")
    foreign.declare_exchange("acemq.retry", "direct")
    foreign.declare(name, **{"x-queue-type": "quorum"}, **set_aside(name))
    for suffix in (".dlq", ".parked"):
        foreign.declare(f"{name}{suffix}")
        foreign.bind(f"{name}{suffix}", "acemq.dlx", f"{name}{suffix}")
    for label, millis in RUNGS.items():
        foreign.declare(f"{name}.retry.{label}", **rung(name, millis))
    foreign.bind(name, "acemq.retry", name)
    found = await mq.declare(Topology().queue(name, retry=POLICY))
    assert {finding.verdict for finding in found.findings} == {"present"}
    async with mq.consume(name, int, lambda message: None, retry=POLICY) as consumer:
        await mq.send(name, 1)
        await until(lambda: consumer.counters.acked == 1)


@pytest.fixture
async def pipeline(mq: AceMQ, foreign: Foreign, name: str) -> AsyncIterator[str]:
    yield name
    foreign.delete(*(f"{name}.{step}{suffix}" for step in ("a", "b") for suffix in ("", ".dlq", ".parked")))
    await mq.delete(name, "exchange")


async def test_a_pipeline_has_the_queues_and_the_exchange_of_the_contract(
    mq: AceMQ, foreign: Foreign, pipeline: str
) -> None:
    seen: list[int] = []

    async def a(number: int) -> int:
        seen.append(number)
        return number + 1

    async with mq.pipeline(pipeline, int).step("a", a).elsewhere("b", int).start():
        for step in ("a", "b"):
            refused_with_one_more(foreign, f"{pipeline}.{step}", {"x-queue-type": "quorum"})
        foreign.declare_exchange(pipeline, "direct")
        # Libraries in other languages publish to the exchange, and without a slip the queue says which step it is for.
        foreign.put("a", b"1", exchange=pipeline, content_type="application/json")
        await until(lambda: foreign.depth(f"{pipeline}.b") == 1)
    assert seen == [1]
    hopped = foreign.take_one(f"{pipeline}.b")
    assert (hopped.body, hopped.headers["x-acemq-route"], hopped.headers["x-acemq-route-position"]) == (b"2", "a,b", 1)
    assert hopped.headers["x-acemq-route-id"]


async def test_a_handler_is_given_what_another_client_puts_into_a_queue_of_ours(
    mq: AceMQ, foreign: Foreign, name: str, made: list[str]
) -> None:
    await mq.declare(Topology().exchange(name, "topic").queue(name).bind(name, name, "order.*"))
    seen: list[Message[str]] = []
    async with mq.consume(name, str, seen.append) as consumer:
        foreign.put("order.placed", b'"hello"', exchange=name, content_type="application/json")
        await until(lambda: consumer.counters.acked == 1)
    (message,) = seen
    assert (message.payload, message.exchange, message.routing_key) == ("hello", name, "order.placed")
    await mq.delete(name, "exchange")
