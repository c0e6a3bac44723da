"""The ops layer on a connection that stays open, as a page or a service has one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import acemq
from acemq import AceMQ, Ack, ConfigurationError, Message, Topology, TopologyError
from acemq.ops import filters, letters, queues, replays
from acemq.ops.replays import ReplayOrder
from tests.waiting import until

SHOP = Topology().queue("orders", dead_letter=True).queue("mails")


@pytest.fixture
async def mq(name: str) -> AsyncIterator[AceMQ]:
    async with acemq.connect(f"memory://{name}", name="shop") as mq:
        await mq.declare(SHOP)
        yield mq


@pytest.fixture
async def dead(mq: AceMQ) -> str:
    """Four orders that went wrong in two ways."""

    def refuse(message: Message[int]) -> Ack | None:
        if message.payload % 2:
            return Ack.reject("no such street")
        raise TimeoutError("the carrier is silent")

    async with mq.consume("orders", int, refuse, concurrency=1, retry=acemq.RetryPolicy.none()) as consumer:
        for number in range(4):
            await mq.send("orders", number, message_id=f"o-{number}", headers={"x-tenant": f"t{number}"})
        await until(lambda: consumer.counters.dead_lettered + consumer.counters.rejected == 4)
    return "orders.dlq"


async def test_looking_gives_everything_back_at_once_in_its_place(mq: AceMQ, dead: str) -> None:
    for _ in range(3):
        seen = await letters.look(mq, dead, most=3)
        assert [(letter.place, letter.id) for letter in seen] == [(1, "o-0"), (2, "o-1"), (3, "o-2")]
        depth = await mq.depth(dead)
        assert (depth.ready, depth.held) == (4, 0)
    (first,) = await letters.look(mq, dead, most=1)
    assert (first.how, first.error_type) == ("exhausted", "builtins.TimeoutError")
    assert (first.failed_queue, first.failed_by) == ("orders", mq.origin)
    assert (first.size, first.body, first.headers["x-tenant"]) == (1, b"0", "t0")
    with pytest.raises(ConfigurationError, match="most=0"):
        await letters.look(mq, dead, most=0)


async def test_a_message_is_found_by_the_beginning_of_its_id(mq: AceMQ, dead: str) -> None:
    await mq.send(dead, 10, message_id="o-10")
    assert (await letters.find(mq, dead, "o-1")).id == "o-1", "the whole id comes first"
    assert (await letters.find(mq, dead, "o-10")).id == "o-10"
    with pytest.raises(ConfigurationError, match=r"5 messages of orders\.dlq begin with 'o'"):
        await letters.find(mq, dead, "o")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("id=o-2", ["o-2"]),
        ("id!=o-2", ["o-0", "o-1", "o-3"]),
        ("how=rejected", ["o-1", "o-3"]),
        ("error~STREET", ["o-1", "o-3"]),
        ("error-type~timeout", ["o-0", "o-2"]),
        ("header.x-tenant=t3", ["o-3"]),
        ("header.x-other=", ["o-0", "o-1", "o-2", "o-3"]),
        ("queue=orders", ["o-0", "o-1", "o-2", "o-3"]),
        ("attempt=1", ["o-0", "o-1", "o-2", "o-3"]),
        ("replays=1", []),
        ("body~2", ["o-2"]),
        ("type=orders", ["o-0", "o-1", "o-2", "o-3"]),
    ],
)
async def test_a_filter_in_words_picks_those(mq: AceMQ, dead: str, text: str, ids: list[str]) -> None:
    order = ReplayOrder(source=dead, into="mails", where=(text,))
    assert (await replays.preview(mq, order)).waiting == 4
    result = await replays.carry_out(mq, order, lambda _: None)
    moved = await mq.pull_many("mails", int, most=10)
    assert [each.id for each in moved] == ids
    assert (result.replayed, result.put_back) == (len(ids), 4 - len(ids))


@pytest.mark.parametrize("text", ["", "error", "=5", "header.=1", "colour=red", "~x"])
def test_what_is_no_filter_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"header\.NAME"):
        filters.parse(text)


async def test_the_topology_says_which_queues_are_ours(mq: AceMQ, dead: str) -> None:
    lines = await queues.look_at_queues(mq, (), SHOP)
    assert [(line.queue, line.dead, line.needs_somebody) for line in lines] == [
        ("orders", 4, True),
        ("mails", None, False),
    ]
    aside = await queues.look_at_set_aside(mq, (), SHOP)
    assert [(line.source, line.waiting, line.of) for line in aside] == [
        ("orders.dlq", 4, "orders"),
        ("orders.parked", 0, "orders"),
    ]
    with pytest.raises(TopologyError, match="nothing"):
        await queues.look_at_set_aside(mq, ["nothing"])
    with pytest.raises(ConfigurationError, match="no queue is named"):
        await queues.look_at_queues(mq, ())
    with pytest.raises(ConfigurationError, match="201 queues"):
        await queues.look_at_queues(mq, [f"q{number}" for number in range(201)])
