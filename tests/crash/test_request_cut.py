"""Requests whose link is cut, and whose responder dies: an answer or an error for each, within its time."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

import acemq
from acemq import AceMQ, AcemqError, ClosedError, Message
from acemq.transport import Phase
from tests.crash.process import Workers
from tests.crash.worker import Job
from tests.proxy import Proxy
from tests.waiting import until

LIMIT = timedelta(seconds=10)


async def test_twenty_requests_outstanding_when_the_link_is_cut_each_end_within_their_time(
    mq: AceMQ, proxied: str, proxy: Proxy, queue: str
) -> None:
    gate, in_hand = asyncio.Event(), set[int]()

    async def answer(message: Message[int]) -> int:
        in_hand.add(message.payload)
        await gate.wait()
        return message.payload * 10

    async with mq.respond(queue, int, answer, concurrency=20), acemq.connect(proxied) as asking:
        began = time.monotonic()
        requests = [asyncio.create_task(asking.request("", queue, n, int, timeout=LIMIT)) for n in range(20)]
        await until(lambda: len(in_hand) == 20 and asking.state.outstanding == 0)
        proxy.cut()
        gate.set()  # so that the answers come while the link is down
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert time.monotonic() - began < 10.5
        # The reply queue outlives the link: what was answered meanwhile arrives.
        assert results == [n * 10 for n in range(20)]
        assert asking.requests.waiting == 0
        assert await asking.request("", queue, 7, int, timeout=LIMIT) == 70


async def test_requests_sent_while_the_link_goes_up_and_down_end_with_their_own_answer_or_an_error(
    mq: AceMQ, proxied: str, proxy: Proxy, queue: str
) -> None:
    async def answer(message: Message[int]) -> int:
        return message.payload * 10

    ended = dict[int, object]()

    async def ask(asking: AceMQ, n: int) -> None:
        began = time.monotonic()
        try:
            ended[n] = await asking.request("", queue, n, int, timeout=LIMIT)
        except AcemqError as error:
            ended[n] = error
        assert time.monotonic() - began < 10.5

    async with mq.respond(queue, int, answer, concurrency=20), acemq.connect(proxied) as asking:
        assert await asking.request("", queue, 0, int) == 0
        async with asyncio.TaskGroup() as requests:
            for n in range(200):
                requests.create_task(ask(asking, n))
                if n % 50 == 25:
                    await until(lambda: bool(ended))
                    proxy.cut()
        for n, end in ended.items():
            assert end == n * 10 or isinstance(end, AcemqError), end
        assert sum(isinstance(end, int) for end in ended.values()) > 0
        assert asking.requests.waiting == 0
        assert await asking.request("", queue, 3, int, timeout=LIMIT) == 30


async def test_a_responder_that_dies_leaves_its_requests_to_the_next(
    rabbit_url: str, mq: AceMQ, queue: str, workers: Workers
) -> None:
    first = workers.start(rabbit_url, responds=queue, holds=True)
    await first.ready()
    requests = [asyncio.create_task(mq.request("", queue, Job("hold"), int)) for _ in range(5)]
    await until(lambda: len(workers.recorder.ids("asked")) == 5, within=20)
    first.kill()
    second = workers.start(rabbit_url, responds=queue)
    assert await asyncio.gather(*requests) == [second.pid] * 5
    assert len(workers.recorder.ids("asked")) == 10


async def test_a_responder_killed_between_answer_and_acknowledgement_answers_twice_and_the_second_is_dropped(
    rabbit_url: str, mq: AceMQ, queue: str, workers: Workers
) -> None:
    dying = workers.start(rabbit_url, responds=queue, dies_at_settlement=1)
    await dying.ready()
    assert await mq.request("", queue, Job(), int) == dying.pid
    assert await dying.ended() == 9, dying.last_words()
    workers.start(rabbit_url, responds=queue)
    await until(lambda: mq.requests.unmatched == 1, within=20)
    assert (mq.requests.answered, mq.requests.waiting) == (1, 0)


async def test_a_broker_that_is_away_ends_a_request_within_its_time(proxied: str, proxy: Proxy, queue: str) -> None:
    async with acemq.connect(proxied) as asking:
        proxy.refuse()
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(AcemqError):
            await asking.request("", queue, 1, int, timeout=timedelta(seconds=1))
        assert time.monotonic() - began < 2
    proxy.refuse(False)


async def test_a_close_without_a_link_does_not_wait_for_its_reply_queue(
    mq: AceMQ, proxied: str, proxy: Proxy, queue: str
) -> None:
    async with mq.respond(queue, int, lambda message: message.reply_to):
        asking = await acemq.connect(proxied)
        address = await asking.request("", queue, 1, str)
        waiting = asyncio.create_task(asking.request("", f"{queue}.dlq", 1, int))
        await until(lambda: asking.requests.waiting == 1 and asking.state.outstanding == 0)
        proxy.refuse()
        proxy.cut()
        await until(lambda: asking.state.phase is Phase.RECONNECTING)
        began = time.monotonic()
        await asking.close()
        assert time.monotonic() - began < 3
        with pytest.raises(ClosedError):
            await waiting
    proxy.refuse(False)
    await mq.delete(address)
