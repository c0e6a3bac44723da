"""What a batch becomes in the tables: a row for each copy, in which each message has what is its own."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, BatchPublishError, ConfigurationError, Draft, Topology, UnroutableError
from acemq.codec import JsonCodec
from acemq.transport import Outgoing, Published, Settled, Settlement, Verb
from tests.sql.engines import engine_for
from tests.waiting import until_async


async def test_messages_of_one_batch_with_a_copy_each_keep_what_they_differ_in(mq: AceMQ) -> None:
    await mq.declare(Topology().queue("a", type="classic", priorities=3))
    await mq.declare(Topology().exchange("e").queue("b").bind("b", "e", "to b"))
    drafts = [
        Draft("", "a", 0),
        Draft("e", "to b", 1, content_type="application/msgpack"),
        Draft("", "a", 2, priority=2, reply_to="answers", message_id="given"),
        Draft("", "b", 3, expires_in=timedelta(hours=1), ordering_key="k"),
        Draft("", "b", 4, delay=timedelta(seconds=1)),
    ]
    receipts = await mq.publish_batch(drafts)
    of_a, of_b = await mq.pull_many("a", int, most=4), await mq.pull_many("b", int, most=4)
    of_b += await mq.pull_many("b", int, most=4, wait=timedelta(seconds=20))
    assert [(each.payload, each.exchange, each.routing_key) for each in of_a] == [(2, "", "a"), (0, "", "a")]
    assert [(each.payload, each.exchange, each.routing_key) for each in of_b] == [
        (1, "e", "to b"),
        (3, "", "b"),
        (4, "", "b"),
    ]
    assert [each.content_type for each in of_b] == ["application/msgpack", "application/json", "application/json"]
    assert [(each.reply_to, each.delivery.priority) for each in of_a] == [("answers", 2), (None, None)]
    assert [(each.delivery.expires_in, each.delivery.ordering_key) for each in of_b] == [
        (None, None),
        (timedelta(hours=1), "k"),
        (None, None),
    ]
    assert {each.payload: each.id for each in [*of_a, *of_b]} == {n: each.message_id for n, each in enumerate(receipts)}


async def test_copies_of_one_message_stand_beside_messages_that_go_nowhere(mq: AceMQ) -> None:
    await mq.declare(Topology().exchange("e", "fanout").queue("a").queue("b").bind("a", "e").bind("b", "e"))
    with pytest.raises(BatchPublishError) as failed:
        await mq.publish_batch([Draft("e", "k", 0), Draft("", "nowhere", 1), Draft("", "b", 2), Draft("e", "l", 3)])
    nowhere = failed.value.results[1]
    assert isinstance(nowhere, UnroutableError)
    assert [isinstance(each, Exception) for each in failed.value.results] == [False, True, False, False]
    for queue, expected in (("a", [(0, "k"), (3, "l")]), ("b", [(0, "k"), (2, "b"), (3, "l")])):
        pulled = await mq.pull_many(queue, int, most=9)
        assert [(each.payload, each.routing_key) for each in pulled] == expected


@pytest.mark.parametrize(
    ("headers", "message_id"),
    [({"x-acemq-id": "same"}, "same"), ({"x-acemq-id": "one"}, "another"), ({}, "property alone")],
)
async def test_the_id_of_a_message_is_its_own_whatever_its_header_says(
    mq: AceMQ, headers: dict[str, str], message_id: str
) -> None:
    transport, within = mq.transport, timedelta(seconds=10)
    sent = Outgoing(
        exchange="", routing_key="q", body=b"1", headers=headers, message_id=message_id, content_type="application/json"
    )
    (result,) = await transport.publish([sent], within=within)
    assert result.outcome is Published.ROUTED
    (found,) = await transport.pull("q", most=1, wait=within)
    assert (found.message_id, found.headers) == (message_id, headers)
    for others in ({"x": 1}, {"x-acemq-id": "two"}, headers):
        assert await transport.settle([Settlement(found, Verb.REQUEUE, headers=others)]) == [Settled.DONE]
        (found,) = await transport.pull("q", most=1, wait=within)
        assert (found.message_id, found.headers, found.content_type) == (message_id, others, "application/json")


async def test_what_most_messages_have_to_say_beside_their_headers_is_one_text(mq: AceMQ, url: str) -> None:
    await mq.send_many("q", range(3))
    engine = engine_for(url)
    async with engine.connect() as connection:
        found = (await connection.exec_driver_sql("SELECT properties FROM acemq_message")).scalars().all()
    await engine.dispose()
    assert found == ['{"type":"application/json"}'] * 3


async def test_a_priority_that_is_no_number_is_refused_and_says_nothing_of_others(mq: AceMQ) -> None:
    await mq.declare(Topology().queue("a", type="classic", priorities=3))
    wrong: Any = True
    with pytest.raises(ConfigurationError, match="priority=True must be a whole number from 0 to 255"):
        await mq.send("a", 0, priority=wrong)
    await mq.send("a", 1, priority=1)
    (found,) = await mq.pull_many("a", int)
    assert (found.payload, found.delivery.priority) == (1, 1)


class Awaited:
    """JSON that has to be awaited."""

    content_type = "application/json"

    def can_decode(self, content_type: str | None) -> bool:
        return content_type == self.content_type

    async def encode(self, payload: object) -> bytes:
        return json.dumps(payload).encode()

    async def decode(self, body: bytes, into: Any) -> Any:
        return json.loads(body)


@pytest.mark.parametrize("codec", [JsonCodec(), Awaited()])
async def test_a_row_that_cannot_be_taken_apart_is_parked_and_not_handled(mq: AceMQ, url: str, codec: Any) -> None:
    await mq.send("q", 1)
    engine = engine_for(url)
    async with engine.begin() as connection:
        await connection.exec_driver_sql("UPDATE acemq_message SET headers = 'no headers'")
    await engine.dispose()
    handled: list[int] = []
    async with acemq.connect(url, codec=codec) as other, other.consume("q", int, lambda m: handled.append(m.payload)):
        await until_async(lambda: has(mq, "q.parked", 1))
    assert handled == []
    (parked,) = await mq.pull_many("q.parked", int)
    assert parked.failure is not None
    assert "its row cannot be taken apart" in (parked.failure.text or "")


async def has(mq: AceMQ, queue: str, ready: int) -> bool:
    return (await mq.depth(queue)).ready == ready
