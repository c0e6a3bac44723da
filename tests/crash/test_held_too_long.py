"""A delivery that is held for ever, or given back for ever: the broker takes it away, and it ends somewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import Ack, ConsumerState, Diagnostic, Message, Topology
from tests.conftest import StartRabbitMQ
from tests.crash.process import Workers
from tests.crash.worker import Job, Watched
from tests.foreign.client import Foreign
from tests.services import RabbitMQ
from tests.waiting import until, until_async


@pytest.fixture(scope="module")
def impatient(start_rabbitmq_for_module: StartRabbitMQ) -> RabbitMQ:
    """Takes a delivery away after a second."""
    return start_rabbitmq_for_module(
        consumer_timeout=timedelta(seconds=1), channel_tick_interval=timedelta(milliseconds=300)
    )


@pytest.fixture
def limited(rabbitmq: RabbitMQ, name: str) -> Iterator[str]:
    """A queue on which RabbitMQ itself gives up after twenty deliveries, as version 4 does, and keeps no copy."""
    rabbitmq.ctl("set_policy", name, f"^{name}$", '{"delivery-limit": 20}', "--apply-to", "queues")
    yield name
    rabbitmq.ctl("clear_policy", name)


async def test_o04_t035_what_is_held_too_long_comes_again_is_counted_and_ends_and_no_other_waits(
    impatient: RabbitMQ, name: str, diagnostics: list[Diagnostic]
) -> None:
    held, quick = f"{name}-p", f"{name}-q"
    handled: list[int] = []
    gate = asyncio.Event()

    async def hold(message: Message[int]) -> None:
        if message.payload == 1:
            await gate.wait()
        else:
            handled.append(message.payload)

    async with acemq.connect(impatient.url, on_diagnostic=diagnostics.append) as mq:
        await mq.declare(Topology().queue(held).queue(quick, type="classic"))
        async with (
            mq.consume(held, int, hold, concurrency=4, max_deliveries=2) as slow,
            mq.consume(quick, int, lambda message: None) as other,
        ):
            await mq.send_many(held, range(1, 6))
            await until(lambda: set(handled) >= {2, 3, 4, 5})
            number = 0

            async def is_dead() -> bool:
                nonlocal number
                number += 1
                await mq.send(quick, number)
                assert other.state is ConsumerState.RUNNING
                return (await mq.depth(f"{held}.dlq")).ready == 1

            await until_async(is_dead, within=30)
            await until(lambda: other.counters.acked == number)
            await until(lambda: slow.state is ConsumerState.RUNNING)
            lost = [told for told in diagnostics if told.name == "acemq.consumer.lost"]
            assert {told.queue for told in lost} == {held}
            assert "406" in lost[0].message
            assert mq.state.generation == 1
            gate.set()
            await until(lambda: slow.counters.stale == 2)
        letter = await mq.pull(f"{held}.dlq", int)
        assert letter is not None
        assert (letter.payload, letter.attempt) == (1, 1)
        assert letter.wire_headers["x-acemq-error"] == "delivery limit: 2 deliveries without an outcome"
        await letter.accept()
    assert sorted(handled) == [2, 3, 4, 5]


async def test_t036_what_is_released_for_ever_ends_in_the_dead_letters_before_the_broker_drops_it(
    rabbit_url: str, limited: str, foreign: Foreign
) -> None:
    good: list[int] = []
    seen: list[int | None] = []

    async def release(message: Message[int]) -> Ack | None:
        if message.payload:
            good.append(message.payload)
            return None
        seen.append(message.deliveries)
        return Ack.release()

    async with acemq.connect(rabbit_url) as mq:
        await mq.declare(Topology().queue(limited))
        async with mq.consume(limited, int, release) as consumer:
            for n in range(10):
                await mq.send(limited, n)
            await until(lambda: consumer.counters.dead_lettered == 1)
            await until(lambda: len(good) == 9)
        assert seen == [*range(1, 16)]
        (letter,) = foreign.take(f"{limited}.dlq")
        assert (letter.body, letter.headers["x-acemq-attempt"]) == (b"0", 1)
        assert letter.headers["x-acemq-error"] == "delivery limit: 15 deliveries without an outcome"
        foreign.delete(limited, f"{limited}.dlq", f"{limited}.parked")


@pytest.mark.slow
async def test_t036_what_kills_its_process_ends_in_the_dead_letters_before_the_broker_drops_it(
    rabbit_url: str, limited: str, foreign: Foreign, workers: Workers
) -> None:
    async with acemq.connect(rabbit_url) as mq:
        await mq.declare(Topology().queue(limited))
        ids = [receipt.message_id for receipt in await mq.send_many(limited, [Job("bomb"), *[Job("pass")] * 5])]
    foreign.declare(f"{limited}.dlq")
    deaths = await workers.supervise(
        lambda: foreign.depth(f"{limited}.dlq") > 0, rabbit_url, within=50, consume=[Watched(limited)]
    )
    assert deaths == [9] * 15
    (letter,) = foreign.take(f"{limited}.dlq")
    assert letter.id == ids[0]
    assert letter.headers["x-acemq-error"] == "delivery limit: 15 deliveries without an outcome"
    await until(lambda: {*workers.recorder.ids("ended")} == {*ids[1:]})
    foreign.delete(limited, f"{limited}.dlq", f"{limited}.parked")


@pytest.mark.parametrize(("most", "warned"), [(None, True), (20, True), (19, False)])
async def test_t036_a_consumer_that_gives_up_later_than_the_broker_starts_with_a_warning(
    rabbit_url: str, limited: str, foreign: Foreign, caplog: pytest.LogCaptureFixture, most: int | None, warned: bool
) -> None:
    async with acemq.connect(rabbit_url) as mq:
        await mq.declare(Topology().queue(limited))
        async with mq.consume(limited, int, lambda message: None, max_deliveries=most):
            said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [limited in text and "policy" in text and "delivery-limit" in text for text in said] == [True] * warned
    foreign.delete(limited, f"{limited}.dlq", f"{limited}.parked")


@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"native": {"rabbitmq": {"x-delivery-limit": 5}}}, True),
        ({"native": {"rabbitmq": {"x-delivery-limit": 16}}}, False),
        ({"type": "classic"}, False),
    ],
)
async def test_the_limit_that_is_warned_of_is_the_queues_own(
    rabbit_url: str, foreign: Foreign, name: str, caplog: pytest.LogCaptureFixture, options: Any, warned: bool
) -> None:
    async with acemq.connect(rabbit_url) as mq:
        await mq.declare(Topology().queue(name, **options))
        async with mq.consume(name, int, lambda message: None):
            said = [record.getMessage() for record in caplog.records if "delivery-limit" in record.getMessage()]
    assert len(said) == warned
    foreign.delete(name, f"{name}.dlq", f"{name}.parked")
