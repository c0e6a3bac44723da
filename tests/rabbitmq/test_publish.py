"""Publishing on a real broker: every message is answered for, with its own answer."""

from __future__ import annotations

import asyncio
import random
import time
from datetime import timedelta

import pytest

from acemq.headers import Headers
from acemq.topology import Topology
from acemq.transport import (
    ApplyMode,
    Blocked,
    ExchangeMissing,
    MessageTooLarge,
    Nacked,
    NotConnected,
    Phase,
    Published,
    PublishResult,
    TimedOut,
    Unroutable,
)
from tests.proxy import Proxy
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import SOON, drain, out, send, until, until_depth
from tests.services import RabbitMQ
from tests.waiting import at_once


def outcomes(results: list[PublishResult] | tuple[PublishResult, ...]) -> list[Published]:
    return [result.outcome for result in results]


async def test_of_200_concurrent_publishes_exactly_the_unroutable_ones_are_told(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    messages = [out(f"{queue}-nowhere" if number % 10 == 0 else queue, b"%d" % number) for number in range(200)]
    answers = await asyncio.gather(*(send(broker, message) for message in messages))
    for number, (answer,) in enumerate(answers):
        wanted = Published.UNROUTABLE if number % 10 == 0 else Published.ROUTED
        assert answer.outcome is wanted
    returned = answers[0][0].error
    assert isinstance(returned, Unroutable)
    assert returned.code == 312
    assert "nowhere" in str(returned)
    assert {int(found.body) for found in await drain(broker, queue)} == {n for n in range(200) if n % 10}


async def test_publishes_of_one_id_keep_their_own_answers(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    places = [queue, f"{queue}-nowhere"] * 20
    batch = [out(place, message_id="the-same") for place in places]
    results = await send(broker, *batch)
    assert [result.outcome for result in results] == [Published.ROUTED, Published.UNROUTABLE] * 20
    apart = await asyncio.gather(*(send(broker, out(place, message_id="the-same")) for place in places))
    assert [result.outcome for (result,) in apart] == [Published.ROUTED, Published.UNROUTABLE] * 20


async def test_t032_each_of_two_thousand_has_its_own_return_also_among_cancelled_ones(
    dial: Dial, declare: Declare
) -> None:
    broker, queue = await dial(), await declare()
    places = [(f"m-{number}", place) for number in range(500) for place in (queue, f"{queue}-nowhere") * 2]
    random.shuffle(places)
    calls = [asyncio.create_task(send(broker, out(place, message_id=id))) for id, place in places]
    cancelled = set(random.sample(range(len(calls)), 100))
    await asyncio.sleep(0)  # all are written
    for number in cancelled:
        calls[number].cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    for number, ((_, place), end) in enumerate(zip(places, ended, strict=True)):
        if isinstance(end, BaseException):
            assert isinstance(end, asyncio.CancelledError)
            assert number in cancelled
        else:
            assert end[0].outcome is (Published.ROUTED if place == queue else Published.UNROUTABLE), number
    await until(lambda: broker.state.outstanding == 0, "nothing is outstanding")
    routed = sum(not isinstance(end, BaseException) and end[0].outcome is Published.ROUTED for end in ended)
    there = (await broker.depth(queue)).ready
    assert routed <= there <= 1_000, "one that was cancelled may be there"


async def test_without_mandatory_the_unroutable_is_dropped_as_asked(dial: Dial, name: str) -> None:
    (result,) = await send(await dial(), out(f"{name}-nowhere", mandatory=False))
    assert result == PublishResult(Published.ROUTED)


async def test_each_item_of_a_batch_has_its_own_outcome(dial: Dial, declare: Declare, name: str) -> None:
    broker, queue = await dial(), await declare()
    results = await send(
        broker,
        out(queue, b"first"),
        out(f"{queue}-nowhere"),
        out(queue, b"x" * (16 * 1024 * 1024 + 1)),
        out(queue, headers={"n": 2**63}),
        out("any", exchange=f"{name}-no-exchange"),
        out("k" * 256),
        out(queue, headers={"big": "x" * 140_000}),
        out(queue, expires_in=timedelta(days=50)),
        out(queue, delay=timedelta(seconds=1)),
        out(queue, b"last"),
    )
    refused = Published.REFUSED
    assert [result.outcome for result in results] == [
        Published.ROUTED,
        Published.UNROUTABLE,
        *[refused] * 7,
        Published.ROUTED,
    ]
    assert isinstance(results[2].error, MessageTooLarge)
    assert isinstance(results[4].error, ExchangeMissing)
    assert results[4].error.code == 404
    assert [found.body for found in await drain(broker, queue)] == [b"first", b"last"]


@pytest.mark.parametrize("size", [0, 1, 4096, 131_063, 131_064, 131_065, 262_143, 3_000_000])
async def test_bodies_of_any_size_arrive_whole(dial: Dial, declare: Declare, size: int) -> None:
    broker, queue = await dial(), await declare()
    body = (bytes(range(256)) * (size // 256 + 1))[:size]
    assert (await send(broker, out(queue, body)))[0].outcome is Published.ROUTED
    (found,) = await drain(broker, queue)
    assert found.body == body


async def test_properties_arrive_as_they_were_sent(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare()
    headers: Headers = {"x-acemq-id": "id-1", "n": -(2**63), "deep": {"a": [1, b"x", None, True, 0.1]}}
    sent = out(
        queue,
        headers=headers,
        content_type="application/json",
        reply_to="answers",
        expires_in=timedelta(seconds=90),
        message_id="id-1",
    )
    await send(broker, sent)
    (found,) = await drain(broker, queue)
    assert found.headers == headers
    assert (found.message_id, found.content_type, found.reply_to) == ("id-1", "application/json", "answers")
    assert (found.expires_in, found.priority, found.redelivered) == (timedelta(seconds=90), None, False)
    assert (found.exchange, found.routing_key, found.queue) == ("", queue, queue)


async def test_a_missing_exchange_refuses_its_message_and_disturbs_no_other(
    dial: Dial, declare: Declare, name: str
) -> None:
    broker, queue = await dial(), await declare()
    good = [asyncio.create_task(send(broker, out(queue))) for _ in range(50)]
    (bad,) = await send(broker, out("k", exchange=f"{name}-missing"))
    assert bad.outcome is Published.REFUSED
    assert isinstance(bad.error, ExchangeMissing)
    assert f"{name}-missing" in str(bad.error)
    assert [(await task)[0].outcome for task in good] == [Published.ROUTED] * 50
    assert broker.state.generation == 1


async def test_an_exchange_that_vanishes_costs_its_channel_and_the_next_publish_works(
    dial: Dial, declare: Declare, name: str
) -> None:
    broker, queue, exchange = await dial(), await declare(), f"{name}-x"
    topology = Topology().exchange(exchange).queue(queue, type="classic").bind(queue, exchange, "k")
    await broker.apply(topology, ApplyMode.CREATE)
    assert (await send(broker, out("k", exchange=exchange)))[0].outcome is Published.ROUTED
    await broker.delete(exchange, "exchange")
    places = [("", queue)] * 20 + [(exchange, "k")] + [("", queue)] * 20
    results = await send(broker, *(out(key, exchange=place) for place, key in places))
    assert results[20].outcome is Published.FAILED
    assert {result.outcome for result in results} <= {Published.ROUTED, Published.FAILED}
    (after,) = await send(broker, out(queue))
    assert after.outcome is Published.ROUTED
    (again,) = await send(broker, out("k", exchange=exchange))
    assert again.outcome is Published.REFUSED
    assert broker.state.generation == 1, "the channel was replaced, not the link"


async def test_a_full_queue_is_a_failure_that_says_it_was_the_broker(dial: Dial, declare: Declare) -> None:
    broker, queue = await dial(), await declare(max_length=1)
    results = [(await send(broker, out(queue)))[0] for _ in range(2)]
    assert [result.outcome for result in results] == [Published.ROUTED, Published.FAILED]
    assert isinstance(results[1].error, Nacked)
    await until_depth(broker, queue, 1)


async def test_publishes_in_flight_when_the_link_is_cut_all_end(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await send(broker, out(queue, b"warm"))
    proxy.swallow("to_client")
    publishes = [asyncio.create_task(send(broker, out(queue, b"%d" % number))) for number in range(100)]
    await until(lambda: broker.state.outstanding == 100, "100 publishes are written and unanswered")
    proxy.cut()
    proxy.release()
    done, pending = await asyncio.wait(publishes, timeout=10)
    assert not pending
    failed = [task.result()[0] for task in done]
    assert {result.outcome for result in failed} == {Published.FAILED}
    assert "may be there" in str(failed[0].error)
    (after,) = await send(broker, out(queue, b"after"))
    assert after.outcome is Published.ROUTED
    assert broker.state.outstanding == 0
    await until(lambda: broker.state.generation >= 2, "the other link is back, too")


async def test_a_confirm_that_never_comes_is_a_time_out_and_a_late_one_is_dropped(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await send(broker, out(queue))
    proxy.swallow("to_client")
    began = time.monotonic()
    results = await send(broker, *(out(queue) for _ in range(20)), within=timedelta(seconds=0.3))
    assert 0.25 < time.monotonic() - began < 2
    assert {result.outcome for result in results} == {Published.FAILED}
    assert isinstance(results[0].error, TimedOut)
    assert broker.state.outstanding == 0
    proxy.release()
    later = await send(broker, *(out(queue) for _ in range(20)))
    assert {result.outcome for result in later} == {Published.ROUTED}


async def test_cancelled_publishes_give_their_place_back_when_the_broker_answers(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await send(broker, out(queue))
    proxy.swallow("to_client")
    publishes = [asyncio.create_task(send(broker, out(queue))) for _ in range(90)]
    await until(lambda: broker.state.outstanding == 90, "90 publishes are unanswered")
    for task in publishes[::3]:
        task.cancel()
    await asyncio.wait(publishes[::3])
    proxy.release()
    results = await asyncio.gather(*(task for task in publishes if not task.cancelled()))
    assert len(results) == 60
    assert {result.outcome for (result,) in results} == {Published.ROUTED}
    await until(lambda: broker.state.outstanding == 0, "nothing is outstanding", within=2)


async def test_while_there_is_no_link_publishes_wait_and_are_refused_and_never_written(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    proxy.refuse()
    proxy.cut()
    began = time.monotonic()
    answers = await asyncio.gather(
        *(send(broker, out(queue, b"early"), within=timedelta(seconds=0.5)) for _ in range(50))
    )
    assert 0.4 < time.monotonic() - began < 2.5
    assert {answer.outcome for (answer,) in answers} == {Published.REFUSED}
    assert isinstance(answers[0][0].error, NotConnected)
    waiting = asyncio.create_task(send(broker, out(queue, b"patient"), within=timedelta(seconds=20)))
    proxy.refuse(False)
    assert (await waiting)[0].outcome is Published.ROUTED
    await until(lambda: broker.state.phase is Phase.CONNECTED, "both links are back")
    assert [found.body for found in await drain(broker, queue)] == [b"patient"]


async def test_back_pressure_of_the_socket_refuses_what_was_not_written(
    dial: Dial, declare: Declare, proxy: Proxy, proxied: str
) -> None:
    queue = await declare()
    broker = await dial(proxied)
    await send(broker, out(queue))
    proxy.swallow("to_server")
    batch = [out(queue, b"x" * 1_000_000) for _ in range(60)]
    results = await broker.publish(batch, within=timedelta(seconds=1))
    kinds = [result.outcome for result in results]
    assert kinds == sorted(kinds, key=[Published.FAILED, Published.REFUSED].index), "written first, refused behind"
    refused = kinds.count(Published.REFUSED)
    assert refused
    proxy.release()
    assert (await send(broker, out(queue, b"after"), within=timedelta(seconds=20)))[0].outcome is Published.ROUTED
    await until_depth(broker, queue, 60 - refused + 2)


async def test_a_blocked_broker_refuses_at_once_with_its_reason_and_is_noticed_free(
    dial: Dial, declare: Declare, rabbitmq: RabbitMQ
) -> None:
    broker, queue = await dial(), await declare()
    await send(broker, out(queue))
    try:
        await asyncio.to_thread(rabbitmq.set_memory_alarm, True)
        first = asyncio.create_task(send(broker, out(queue), within=timedelta(seconds=2)))
        await until(lambda: broker.state.blocked, "the broker has blocked the connection")

        async def refused() -> None:
            (result,) = await send(broker, out(queue))
            assert result.outcome is Published.REFUSED
            assert isinstance(result.error, Blocked)
            assert "memory" in str(result.error)

        await at_once(refused)
        assert (await first)[0].outcome is Published.FAILED
        # Consuming goes on, and its acknowledgements are read.
        assert await drain(broker, queue)
    finally:
        await asyncio.to_thread(rabbitmq.set_memory_alarm, False)
    await until(lambda: broker.state.blocked is None, "the broker has freed the connection")
    assert (await send(broker, out(queue)))[0].outcome is Published.ROUTED


async def test_an_empty_batch_does_nothing(dial: Dial) -> None:
    broker = await dial()
    assert await broker.publish([], within=SOON) == []
    assert await broker.settle([]) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_number_that_is_not_finite_is_refused_and_costs_nobody_the_link(
    dial: Dial, declare: Declare, value: float
) -> None:
    one, queue = await dial(), await declare()
    results = await send(one, out(queue), out(queue, headers={"n": value}), out(queue))
    assert [result.outcome for result in results] == [Published.ROUTED, Published.REFUSED, Published.ROUTED]
    assert one.state.generation == 1
