"""What a batch becomes in the tables: a row for each copy, and what all messages have in common said once."""

from __future__ import annotations

from datetime import timedelta

import pytest

from acemq import AceMQ, BatchPublishError, Draft, Topology, UnroutableError
from acemq.transport import Outgoing, Published


async def test_messages_of_one_batch_with_a_copy_each_keep_what_they_differ_in(mq: AceMQ) -> None:
    await mq.declare(Topology().queue("a", type="classic", priorities=3))
    await mq.declare(Topology().exchange("e").queue("b").bind("b", "e", "to b"))
    drafts = [
        Draft("", "a", 0),
        Draft("e", "to b", 1, content_type="application/msgpack"),
        Draft("", "a", 2, priority=2, reply_to="answers", message_id="given"),
        Draft("", "b", 3, expires_in=timedelta(hours=1), ordering_key="k"),
    ]
    receipts = await mq.publish_batch(drafts)
    of_a, of_b = await mq.pull_many("a", int, most=4), await mq.pull_many("b", int, most=4)
    assert [(each.payload, each.exchange, each.routing_key) for each in of_a] == [(2, "", "a"), (0, "", "a")]
    assert [(each.payload, each.exchange, each.routing_key) for each in of_b] == [(1, "e", "to b"), (3, "", "b")]
    assert [each.content_type for each in of_b] == ["application/msgpack", "application/json"]
    assert (of_a[0].reply_to, of_a[1].reply_to) == ("answers", None)
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
    sent = Outgoing(
        exchange="", routing_key="q", body=b"1", headers=headers, message_id=message_id, content_type="application/json"
    )
    (result,) = await mq.transport.publish([sent], within=timedelta(seconds=10))
    assert result.outcome is Published.ROUTED
    (found,) = await mq.transport.pull("q", most=1, wait=timedelta())
    assert (found.message_id, found.headers) == (message_id, headers)
