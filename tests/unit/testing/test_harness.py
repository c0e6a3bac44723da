"""A program tested with the harness: what it sees, what it refuses, what it does not let pass."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from acemq import (
    Ack,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    DecodeError,
    Message,
    PublishInterceptor,
    RetryPolicy,
    Topology,
    TopologyError,
)
from acemq.testing import MessageHarness, message
from acemq.transports.memory import Profile

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
ORDERS = Topology().queue("shipping.orders").queue("billing")


@dataclass(frozen=True)
class Order:
    id: str


@dataclass(frozen=True)
class Invoice:
    order: str


async def ship(message: Message[Order]) -> None:
    if message.payload.id == "o-bad":
        raise ConnectionError("the carrier does not answer")


async def ignore(message: Message[Any]) -> None: ...


async def fail(message: Message[Any]) -> None:
    raise ConnectionError("the carrier does not answer")


@pytest.mark.parametrize("profile", [Profile.FULL, Profile.RABBITMQ], ids=["full", "rabbitmq"])
async def test_third_failure_goes_to_the_dead_letters(profile: Profile) -> None:
    async with MessageHarness(profile=profile) as h:
        await h.mq.declare(ORDERS)
        async with h.mq.consume("shipping.orders", Order, fail, retry=RetryPolicy.fixed(3, MINUTE)):
            await h.mq.send("shipping.orders", Order("o-1"))
            await h.advance(timedelta(minutes=3))
            await h.dead_letters("shipping.orders", Order)  # looked at, left in place
            letters = await h.dead_letters("shipping.orders", Order)
            assert [(m.payload, m.attempt) for m in letters] == [(Order("o-1"), 3)]
            assert letters[0].failure is not None
            outcomes = [each.handled.outcome for each in h.handled(Order)]
            assert outcomes == ["retried", "retried", "dead_lettered"]
            assert [sent.payload for sent in h.published(Order)] == [Order("o-1")]


async def test_ship_alone() -> None:
    await ship(message(Order("o-1")))
    with pytest.raises(ConnectionError):
        await ship(message(Order("o-bad")))


def test_a_message_is_what_a_handler_would_be_given() -> None:
    seen = datetime(2026, 12, 31, tzinfo=UTC)
    made = message(Order("o-1"), queue="orders", headers={"tenant": "a"}, attempt=3, id="m-1", first_seen=seen)
    assert (made.payload, made.body, made.content_type) == (Order("o-1"), b'{"id":"o-1"}', "application/json")
    assert (made.queue, made.type, made.id, made.correlation_id, made.attempt) == ("orders", "orders", "m-1", "m-1", 3)
    assert dict(made.headers) == {"tenant": "a"}
    assert made.envelope.first_seen == seen
    assert message(1, type="order.placed", age_known=False).age is None
    assert message(object()).body == b""


async def test_a_day_of_retries_and_delays_takes_less_than_half_a_second() -> None:
    began = time.perf_counter()
    async with MessageHarness() as h:
        await h.mq.declare(ORDERS)
        at: list[datetime] = []

        async def note(message: Message[Invoice]) -> None:
            at.append(h.clock.now())

        policy = RetryPolicy.fixed(24, HOUR)
        async with (
            h.mq.consume("shipping.orders", Order, fail, retry=policy),
            h.mq.consume("billing", Invoice, note),
        ):
            await h.mq.send("shipping.orders", Order("o-1"))
            for hours in (2, 1, 23):
                await h.mq.send("billing", Invoice(f"o-{hours}"), delay=hours * HOUR)
            await h.advance(timedelta(days=1))
            assert len(h.handled(Order)) == 24
            assert [each.message.payload.order for each in h.handled(Invoice)] == ["o-1", "o-2", "o-23"]
            assert at == [datetime(2027, 1, 1, hour, tzinfo=UTC) for hour in (1, 2, 23)]
            assert len(await h.dead_letters("shipping.orders", Order)) == 1
    assert time.perf_counter() - began < 0.5


async def test_what_rabbitmq_would_refuse_is_refused_by_name() -> None:
    async with MessageHarness(profile=Profile.RABBITMQ) as h:
        await h.mq.declare(ORDERS)
        with pytest.raises(CapabilityError, match="delay"):
            await h.mq.send("billing", Invoice("o-1"), delay=HOUR, headers={"tenant": "a"})
        assert h.published(object) == []


async def test_two_harnesses_do_not_meet() -> None:
    async with MessageHarness() as one, MessageHarness(at=datetime(2030, 1, 1, tzinfo=UTC)) as two:
        for each in (one, two):
            await each.mq.declare(ORDERS)
        await one.mq.send("billing", Invoice("o-1"))
        await one.advance(HOUR)
        assert one.broker is not two.broker
        assert (len(one.published(Invoice)), len(two.published(Invoice))) == (1, 0)
        assert (await two.mq.depth("billing")).ready == 0
        assert two.clock.now() == datetime(2030, 1, 1, tzinfo=UTC)


async def test_published_and_handled_are_told_apart_by_class_and_place() -> None:
    async with MessageHarness() as h:
        await h.mq.declare(ORDERS.exchange("events", "topic").bind("billing", "events", "order.*"))

        async def pass_on(message: Message[Order]) -> None:
            await h.mq.publish("events", "order.shipped", Invoice(message.payload.id))

        async with (
            h.mq.consume("shipping.orders", Order, pass_on),
            h.mq.consume("billing", Invoice, ignore),
        ):
            await h.mq.send_many("shipping.orders", [Order("o-1"), Order("o-2")])
            await h.run_until_idle()
        assert [sent.payload.id for sent in h.published(Order, queue="shipping.orders")] == ["o-1", "o-2"]
        assert [sent.routing_key for sent in h.published(Invoice, exchange="events")] == ["order.shipped"] * 2
        assert h.published(Invoice, queue="billing") == []
        assert h.published(Invoice)[0].envelope.correlation_id == h.published(Order)[0].envelope.id
        assert [each.message.payload for each in h.handled(Order, queue="shipping.orders")] == [
            Order("o-1"),
            Order("o-2"),
        ]
        assert h.handled(Order, queue="billing") == []
        assert len(h.handled(Invoice)) == 2


@pytest.mark.parametrize("profile", [Profile.FULL, Profile.RABBITMQ], ids=["full", "rabbitmq"])
async def test_idle_is_after_the_retries_within_the_bound(profile: Profile) -> None:
    async with MessageHarness(profile=profile) as h:
        await h.mq.declare(ORDERS)
        async with h.mq.consume("shipping.orders", Order, fail, retry=RetryPolicy.fixed(3, MINUTE)):
            await h.mq.send("shipping.orders", Order("o-1"))
            with pytest.raises(AssertionError, match=r"not idle after 0:00:10: 1 \w+ in 'shipping.orders"):
                await h.run_until_idle()
            await h.run_until_idle(5 * MINUTE)
            assert h.clock.now() < datetime(2027, 1, 1, 0, 3, tzinfo=UTC)
            assert len(await h.dead_letters("shipping.orders", Order)) == 1


async def test_not_idle_names_what_nobody_consumes() -> None:
    async with MessageHarness() as h:
        await h.mq.declare(ORDERS)
        await h.mq.send("billing", Invoice("o-1"))
        with pytest.raises(AssertionError, match="1 ready in 'billing'"):
            await h.run_until_idle()


async def test_parked_messages_are_looked_at_as_bytes() -> None:
    async def park(message: Message[Order]) -> Ack:
        return Ack.park("ask the customer")

    async with MessageHarness() as h:
        await h.mq.declare(ORDERS)
        async with h.mq.consume("shipping.orders", Order, park):
            await h.mq.send("shipping.orders", Order("o-1"))
            await h.run_until_idle()
        (parked,) = await h.parked("shipping.orders")
        assert parked.payload == b'{"id":"o-1"}'
        assert parked.failure is not None
        assert parked.failure.text == "the handler parked it: ask the customer"
        assert await h.dead_letters("shipping.orders", Order) == []
        with pytest.raises(TopologyError, match="shiping"):
            await h.parked("shiping.orders")


async def test_a_dead_letter_of_another_class_is_a_decode_error() -> None:
    async def refuse(message: Message[Order]) -> Ack:
        return Ack.reject("no")

    async with MessageHarness() as h:
        await h.mq.declare(ORDERS)
        async with h.mq.consume("billing", Order, refuse):
            await h.mq.send("billing", Order("o-1"))
            await h.run_until_idle()
        with pytest.raises(DecodeError):
            await h.dead_letters("billing", Invoice)
        assert [m.payload for m in await h.dead_letters("billing", Order)] == [Order("o-1")]


async def test_what_no_handler_was_given_is_not_handled() -> None:
    async with MessageHarness() as h:
        await h.mq.declare(ORDERS)
        async with h.mq.consume("billing", Invoice, fail):
            await h.mq.send("billing", Order("o-1"))
            await h.run_until_idle()
        assert h.handled(object) == []
        assert len(await h.parked("billing")) == 1


async def consume_one(handler: Any, *, idle: bool = False, error: Exception | None = None) -> None:
    """The test that somebody wrote: one message, one handler, and then whatever the harness says."""
    async with MessageHarness(close_timeout=timedelta(milliseconds=10)) as h:
        await h.mq.declare(ORDERS)
        await h.mq.consume("shipping.orders", Order, handler)
        await h.mq.send("shipping.orders", Order("o-1"), message_id="m-1")
        if idle:
            await h.run_until_idle()
        await h.clock.rest()
        if error is not None:
            raise error


async def hang(message: Message[Order]) -> None:
    await asyncio.Event().wait()


async def test_a_handler_that_never_ends_fails_the_test_by_name() -> None:
    with pytest.raises(AssertionError, match=r"^handler hang of 'shipping\.orders' never ended.*m-1"):
        await consume_one(hang)
    with pytest.raises(AssertionError, match=r"^not idle after .*; handler hang of 'shipping\.orders' runs"):
        await consume_one(hang, idle=True)


async def test_the_error_of_a_background_task_fails_the_test_by_name() -> None:
    async def explode() -> None:
        raise ValueError("boom")

    async def spawn(message: Message[Order]) -> None:
        asyncio.create_task(explode(), name="mails the customer")  # noqa: RUF006 - the fault under test

    with pytest.raises(AssertionError, match=r"^task 'mails the customer' failed: ValueError: boom$"):
        await consume_one(spawn, idle=True)
    assert asyncio.get_running_loop().get_exception_handler() is None


async def test_pytest_fail_in_a_handler_fails_the_test() -> None:
    async def check(message: Message[Order]) -> None:
        pytest.fail("not this one")

    with pytest.raises(AssertionError, match=r"^handler check of 'shipping\.orders' ended its worker.*not this one$"):
        await consume_one(check)


async def test_the_error_of_the_block_goes_first() -> None:
    with pytest.raises(KeyError, match="mine") as raised:
        await consume_one(hang, error=KeyError("mine"))
    assert "handler hang" in raised.value.__notes__[0]


async def test_the_programs_own_options_hold_and_the_clock_is_refused() -> None:
    class Tenant(PublishInterceptor):
        def before_publish(self, draft: Any) -> None:
            draft.envelope = draft.envelope.replace(headers={"tenant": "a"})

    with pytest.raises(ConfigurationError, match="clock"):
        MessageHarness(clock=MessageHarness().clock)
    h = MessageHarness(name="shop", interceptors=[Tenant()])
    async with h:
        await h.mq.declare(ORDERS)
        await h.mq.send("billing", Invoice("o-1"))
        assert dict(h.published(Invoice)[0].envelope.headers) == {"tenant": "a"}
    with pytest.raises(ClosedError):
        async with h:
            pass


@pytest.mark.parametrize("profile", [Profile.FULL, Profile.RABBITMQ], ids=["full", "rabbitmq"])
async def test_a_day_of_schedules_takes_no_time(profile: Profile) -> None:
    async with MessageHarness(profile=profile) as h:
        await h.mq.declare(ORDERS)
        at = list[datetime]()

        async def bill(message: Message[Invoice]) -> None:
            at.append(h.clock.now())

        began = h.clock.now()
        async with h.mq.scheduler() as later, h.mq.consume("billing", Invoice, bill):
            for hours in (24, 4, 1):
                await later.after(hours * HOUR, "", "billing", Invoice("o-1"))
            await h.advance(25 * HOUR)
        assert [moment - began for moment in at] == [HOUR, 4 * HOUR, 24 * HOUR]
