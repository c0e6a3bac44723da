from __future__ import annotations

import asyncio
import logging

import pytest

from acemq.transport import Delivery, Settled, Settlement, Verb
from acemq.transports.memory import MemoryBroker
from tests.unit.transports.memory.conftest import Connect
from tests.unit.transports.memory.playing import Client

DONE, STALE, FAILED = Settled.DONE, Settled.STALE, Settled.FAILED


async def three(client: Client) -> list[Delivery]:
    await client.send(b"1", b"2", b"3", b"4", b"5", b"6")
    return await client.take(most=3)


async def test_what_was_accepted_or_dropped_is_gone_and_in_no_dead_letters(client: Client) -> None:
    await client.declare("letters", dead_letter=True)
    await client.send(b"1", b"2", to="letters")
    one, two = await client.take("letters")
    assert await client.port.settle([Settlement(one, Verb.ACCEPT), Settlement(two, Verb.DROP)]) == [DONE, DONE]
    assert await client.depth("letters") == (0, 0, 0)
    assert await client.depth("letters.dlq") == (0, 0, 0)


async def test_a_requeued_message_keeps_its_place_and_says_that_it_is_redelivered(client: Client) -> None:
    _, second, third = await three(client)
    assert await client.requeue(third, second) == [DONE, DONE]
    taken = await client.take()
    assert [delivery.body for delivery in taken] == [b"2", b"3", b"4", b"5", b"6"]
    assert [delivery.redelivered for delivery in taken] == [True, True, False, False, False]
    assert [delivery.deliveries for delivery in taken] == [2, 2, 1, 1, 1]


async def test_places_are_kept_whatever_the_order_of_requeues(client: Client) -> None:
    first, second, third = await three(client)
    for delivery in (second, first, third):
        await client.requeue(delivery)
    assert await client.bodies() == [b"1", b"2", b"3", b"4", b"5", b"6"]


async def test_a_requeue_may_rewrite_the_headers_and_nothing_else(client: Client, broker: MemoryBroker) -> None:
    await client.send(b"1", headers={"x-acemq-attempt": 1, "a": [1]}, message_id="m-1")
    (delivery,) = await client.take()
    await client.requeue(delivery, headers={"x-acemq-attempt": 2})
    (again,) = await client.take()
    assert (again.headers, again.body, again.message_id) == ({"x-acemq-attempt": 2}, b"1", "m-1")
    assert len(broker.snapshot()) == 1


async def test_a_rewrite_with_a_bad_header_fails_and_the_delivery_stays_held(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    await client.send(b"1", headers={"a": 1})
    (delivery,) = await client.take()
    assert await client.requeue(delivery, headers={"a": 2**63}) == [FAILED]
    assert "2" in caplog.text
    assert await client.accept(delivery) == [DONE]


async def test_the_first_of_two_settlements_counts(client: Client) -> None:
    first, second, _ = await three(client)
    assert await client.accept(first, first) == [DONE, STALE]
    assert await client.accept(second) == [DONE]
    assert await client.requeue(second) == [STALE]
    assert await client.depth() == (3, 1, 0)


async def test_stale_is_logged_once_for_a_delivery(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    first, *_ = await three(client)
    for _ in range(3):
        await client.accept(first)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


async def test_a_requeued_delivery_is_stale_although_nobody_took_it_since(client: Client) -> None:
    first, *_ = await three(client)
    await client.requeue(first)
    assert await client.accept(first) == [STALE]


async def test_an_old_fence_changes_nothing_and_fences_grow(client: Client) -> None:
    await client.send(b"1")
    (old,) = await client.take()
    await client.requeue(old)
    (new,) = await client.take()
    for verb in Verb:
        assert await client.port.settle([Settlement(old, verb)]) == [STALE]
    assert old.fence is not None
    assert new.fence is not None
    assert new.fence > old.fence
    assert await client.accept(new) == [DONE]


async def test_nobody_settles_what_another_holds(client: Client, connect: Connect, broker: MemoryBroker) -> None:
    first, *_ = await three(client)
    assert await (await connect(broker)).accept(first) == [STALE]
    assert await client.accept(first) == [DONE]


async def test_answers_are_in_input_order_and_a_foreign_delivery_is_stale(client: Client) -> None:
    first, second, third = await three(client)
    foreign = Delivery(
        queue="orders", body=b"", headers={}, message_id=None, content_type=None, exchange="", routing_key=""
    )
    items = [
        Settlement(third, Verb.REQUEUE),
        Settlement(foreign, Verb.ACCEPT),
        Settlement(first, Verb.ACCEPT),
        Settlement(second, Verb.DROP),
    ]
    assert await client.port.settle(items) == [DONE, STALE, DONE, DONE]
    assert (await client.bodies())[0] == b"3"


async def test_settling_from_many_tasks_at_once_counts_each_once(client: Client) -> None:
    await client.send(*(b"%d" % n for n in range(200)))
    held = await client.take(most=200)
    answers = await asyncio.gather(*(client.accept(*held[start : start + 4]) for start in range(0, 200, 4)))
    assert [answer for answers in answers for answer in answers] == [DONE] * 200
    assert await client.depth() == (0, 0, 0)


async def test_after_close_settling_is_stale(client: Client) -> None:
    first, *_ = await three(client)
    await client.port.close()
    assert await client.accept(first) == [STALE]
