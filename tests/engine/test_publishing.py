"""What a publish promises: cases M-011 … M-023 and O-06, on both transports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    BatchPublishError,
    CapabilityError,
    ClosedError,
    ConfigurationError,
    EncodeError,
    HeaderValue,
    LoopError,
    Message,
    MessageTooLargeError,
    PublishFailedError,
    PublishRefusedError,
    RetryPolicy,
    Topology,
    UnroutableError,
)
from tests.proxy import Proxy
from tests.waiting import until


async def test_a_receipt_says_that_the_message_is_confirmed_and_routed(mq: AceMQ, queue: str) -> None:
    receipt = await mq.send(queue, {"n": 1}, message_id="m-1")
    assert (receipt.message_id, receipt.exchange, receipt.routing_key, receipt.routed) == ("m-1", "", queue, True)
    assert receipt.took > timedelta()
    assert (await mq.depth(queue)).ready == 1


async def test_m012_what_no_queue_takes_is_an_error_unless_that_was_asked_for(mq: AceMQ, name: str) -> None:
    await mq.declare(Topology().exchange(name, "topic"))
    with pytest.raises(UnroutableError) as refused:
        await mq.publish(name, "k", 1, message_id="m-1")
    assert (refused.value.exchange, refused.value.routing_key, refused.value.message_id) == (name, "k", "m-1")
    assert refused.value.outcome == "unroutable"
    assert (await mq.publish(name, "k", 1, mandatory=False)).routed is None
    await mq.delete(name, "exchange")


async def test_m013_of_300_concurrent_publishes_exactly_the_unroutable_ones_raise(mq: AceMQ, queue: str) -> None:
    keys = ["nowhere-" + queue if i % 7 == 0 else queue for i in range(300)]
    results = await asyncio.gather(
        *(mq.send(key, i, message_id=f"m-{i}") for i, key in enumerate(keys)), return_exceptions=True
    )
    raised = {i for i, result in enumerate(results) if isinstance(result, UnroutableError)}
    assert raised == set(range(0, 300, 7))
    assert all(getattr(result, "message_id", None) == f"m-{i}" for i, result in enumerate(results))
    assert (await mq.depth(queue)).ready == 300 - len(raised)


async def test_two_publishes_of_one_id_are_not_taken_for_each_other(mq: AceMQ, queue: str) -> None:
    routed, lost = await asyncio.gather(
        mq.send(queue, 1, message_id="twin"),
        mq.send("nowhere-" + queue, 2, message_id="twin"),
        return_exceptions=True,
    )
    assert not isinstance(routed, BaseException)
    assert isinstance(lost, UnroutableError)


async def test_m011_a_full_queue_refuses_and_keeps_what_it_has(mq: AceMQ, name: str) -> None:
    await mq.declare(Topology().queue(name, type="classic", max_length=1))
    await mq.send(name, 1)
    with pytest.raises((PublishFailedError, PublishRefusedError)) as full:
        await mq.send(name, 2)
    if isinstance(full.value, PublishFailedError):
        assert full.value.nacked
    assert (await mq.depth(name)).ready == 1
    await mq.delete(name)


async def test_m018_a_batch_takes_payloads_only_as_there_is_room(url: str, queue: str) -> None:
    async with acemq.connect(url, max_outstanding=100) as small:
        taken = confirmed = most_ahead = 0

        def payloads() -> Iterator[int]:
            nonlocal taken, most_ahead
            for n in range(2_000):
                taken += 1
                most_ahead = max(most_ahead, taken - confirmed)
                yield n

        publish = small.transport.publish

        async def counting(batch: Any, **options: Any) -> Any:
            nonlocal confirmed
            results = await publish(batch, **options)
            confirmed += len(results)
            return results

        small.transport.publish = counting  # type: ignore[method-assign]
        receipts = await small.send_many(queue, payloads())
        assert len(receipts) == 2_000
        assert most_ahead <= 100
        pulled = await small.pull_many(queue, int, most=1_000)
        assert [each.payload for each in pulled] == list(range(1_000))


async def test_m019_a_batch_ends_each_message_by_itself_and_raises_with_all_results(mq: AceMQ, queue: str) -> None:
    limit = mq.capabilities.max_message
    assert limit is not None
    payloads: list[object] = [b"0", b"1", b"x" * (limit + 1), b"3", object()]
    with pytest.raises(BatchPublishError) as failed:
        await mq.send_many(queue, payloads)
    results = failed.value.results
    assert failed.value.confirmed == 3
    assert isinstance(results[2], MessageTooLargeError)
    assert isinstance(results[4], EncodeError)
    assert failed.value.__cause__ is results[2]
    assert failed.value.safe_to_resend
    assert (await mq.depth(queue)).ready == 3


async def test_a_batch_with_an_unroutable_message_is_not_safe_to_send_again(mq: AceMQ, queue: str) -> None:
    with pytest.raises(BatchPublishError) as failed:
        await mq.send_many("nowhere-" + queue, [1, 2])
    assert (failed.value.confirmed, failed.value.failed, failed.value.safe_to_resend) == (0, 2, False)


async def test_m020_a_missing_exchange_is_refused_and_ends_no_other_publish(mq: AceMQ, queue: str) -> None:
    good = [asyncio.ensure_future(mq.send(queue, i)) for i in range(50)]
    with pytest.raises(PublishRefusedError) as refused:
        await mq.publish("missing-" + queue, "k", 1)
    assert refused.value.code == 404
    assert "missing-" + queue in str(refused.value)
    assert all(receipt.routed for receipt in await asyncio.gather(*good))
    assert (await mq.send(queue, "next")).routed


async def test_m021_headers_arrive_as_they_were_sent_also_after_a_retry_and_a_dead_letter(
    mq: AceMQ, queue: str
) -> None:
    sent: dict[str, HeaderValue] = {
        "n": -(2**63),
        "flag": False,
        "when": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC),
        "deep": {"a": [1, b"x\x00\xff"]},
        "half": 0.5,
        "nothing": None,
    }
    seen: list[dict[str, Any]] = []

    async def fail(message: Message[int]) -> None:
        seen.append(dict(message.headers))
        raise ValueError("boom")

    await mq.send(queue, 1, headers=sent)
    async with mq.consume(queue, int, fail, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1)
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    for headers in (*seen, dict(letter.headers)):
        kept = {name: value for name, value in headers.items() if name in sent}
        assert kept == sent
        assert {name: type(value) for name, value in kept.items()} == {
            name: type(value) for name, value in sent.items()
        }
    assert len(seen) == 2
    await letter.accept()


@pytest.mark.parametrize(
    "headers",
    [
        {"x-acemq-id": "1"},
        {"x-acemq-shiny": 1},
        {"when": datetime(2026, 1, 1)},
        {"n": 2**63},
        {"kind": {1, 2}},
        {"x" * 129: 1},
    ],
)
async def test_m021_a_header_that_would_not_arrive_is_refused_at_the_call(
    mq: AceMQ, queue: str, headers: dict[str, Any]
) -> None:
    with pytest.raises(ConfigurationError, match="header"):
        await mq.send(queue, 1, headers=headers)
    assert (await mq.depth(queue)).ready == 0


async def test_m022_a_publish_in_a_handler_carries_the_correlation_and_nothing_else(mq: AceMQ, queue: str) -> None:
    async def answer(message: Message[str]) -> None:
        if message.payload == "A" and message.attempt == 2:
            await mq.send(f"{queue}.dlq", "B")
            await mq.send(f"{queue}.dlq", "C", correlation_id="own")
        elif message.payload == "A":
            raise ValueError("again")

    async with mq.consume(queue, str, answer, retry=RetryPolicy.fixed(3, timedelta())) as consumer:
        await mq.send(queue, "A", message_id="a", correlation_id="c")
        await until(lambda: consumer.counters.acked == 1)
    b, c = await mq.pull_many(f"{queue}.dlq", str)
    assert (b.payload, b.attempt, b.correlation_id, b.envelope.causation_id) == ("B", 1, "c", "a")
    assert (c.payload, c.correlation_id, c.envelope.causation_id) == ("C", "own", None)
    assert b.envelope.error is None
    await b.accept()
    await c.accept()


async def test_correlate_false_takes_nothing_over(url: str, queue: str) -> None:
    async with acemq.connect(url, correlate=False) as plain:

        async def answer(message: Message[str]) -> None:
            if message.payload == "A":
                await plain.send(f"{queue}.dlq", "B")

        async with plain.consume(queue, str, answer) as consumer:
            await plain.send(queue, "A", message_id="a", correlation_id="c")
            await until(lambda: consumer.counters.acked == 1)
        pulled = await plain.pull(f"{queue}.dlq", str)
        assert pulled is not None
        assert pulled.correlation_id == pulled.id
        assert pulled.envelope.causation_id is None
        await pulled.accept()


async def test_m014_without_a_permit_in_time_a_publish_is_refused_and_says_how_many_are_outstanding(
    url: str, queue: str
) -> None:
    async with acemq.connect(url, max_outstanding=5) as small:
        gate = asyncio.Event()
        publish = small.transport.publish

        async def held_back(batch: Any, **options: Any) -> Any:
            await gate.wait()
            return await publish(batch, **options)

        small.transport.publish = held_back  # type: ignore[method-assign]
        five = [asyncio.ensure_future(small.send(queue, i, timeout=timedelta(seconds=30))) for i in range(5)]
        await until(lambda: small.outbound.permits.in_use == 5)
        with pytest.raises(PublishRefusedError, match="5 publishes are without an answer"):
            await small.send(queue, "sixth", timeout=timedelta(milliseconds=200))
        gate.set()
        await asyncio.gather(*five)
        assert (await small.send(queue, "seventh")).routed
        assert (await small.depth(queue)).ready == 6


async def test_with_a_thousand_unanswered_the_next_is_refused_in_its_time_and_a_cancelled_thousand_gives_its_room_back(
    name: str, proxy: Proxy, proxied: str
) -> None:
    async with acemq.connect(proxied) as far:
        await far.declare(acemq.Topology().queue(queue := name, type="classic"))
        assert (await far.send(queue, "before")).routed
        proxy.swallow("to_client")
        thousand = [asyncio.ensure_future(far.send(queue, n, timeout=timedelta(seconds=30))) for n in range(1_000)]
        await until(lambda: far.state.outstanding == 1_000)
        with pytest.raises(PublishRefusedError, match="1000 publishes are without an answer, 1000 are allowed"):
            await far.send(queue, "one more", timeout=timedelta(milliseconds=200))
        for publish in thousand:
            publish.cancel()
        proxy.release()
        assert (await far.send(queue, "after")).routed
        await until(lambda: far.outbound.permits.in_use == 0)
        await far.delete(queue)


async def test_took_counts_from_the_write_and_not_the_wait_for_a_permit(url: str, queue: str) -> None:
    async with acemq.connect(url, max_outstanding=1) as small:
        assert small.outbound.permits.take_now()
        waiting = asyncio.ensure_future(small.send(queue, 1))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        small.outbound.permits.give(1)
        assert (await waiting).took < timedelta(seconds=0.4)


async def test_m015_cancelled_publishes_give_back_their_permits(mq: AceMQ, queue: str) -> None:
    tasks = [asyncio.ensure_future(mq.send(queue, i)) for i in range(500)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [r for i, r in enumerate(results) if i % 3 and isinstance(r, BaseException)]
    await until(lambda: mq.outbound.permits.in_use == 0 and mq.state.outstanding == 0, within=2)


async def test_m023_what_the_target_cannot_do_is_refused_by_name(mq: AceMQ, queue: str) -> None:
    if mq.capabilities.transport == "rabbitmq":
        with pytest.raises(CapabilityError, match=r"headers=.*delay=.*rabbitmq") as refused:
            await mq.send(queue, 1, delay=timedelta(seconds=1), headers={"a": 1})
        assert refused.value.transport == "rabbitmq"
    with pytest.raises((CapabilityError, ConfigurationError)):
        await mq.send(queue, 1, priority=300)


async def test_m023_a_priority_queue_delivers_nine_before_one_and_an_expired_message_is_gone(
    mq: AceMQ, name: str
) -> None:
    await mq.declare(Topology().queue(name, type="classic", priorities=10))
    await mq.send(name, "one", priority=1)
    await mq.send(name, "nine", priority=9)
    await mq.send(name, "short", priority=5, expires_in=timedelta(milliseconds=1))
    await asyncio.sleep(0.05)
    assert [each.payload for each in await mq.pull_many(name, str)] == ["nine", "one"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"version": 0}, "version"),
        ({"timeout": timedelta(seconds=-1)}, "timeout"),
        ({"timeout": 5}, "timedelta"),
        ({"expires_in": timedelta()}, "expires_in"),
        ({"delay": timedelta(seconds=-1)}, "delay"),
        ({"message_id": "x" * 256}, "message_id"),
        ({"content_type": "application/x-protobuf"}, "content_type"),
        ({"envelope": acemq.Envelope.of("t"), "type": "u"}, "envelope"),
    ],
)
async def test_bad_options_are_refused_at_the_call(mq: AceMQ, queue: str, options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        await mq.send(queue, {"n": 1}, **options)
    assert (await mq.depth(queue)).ready == 0


async def test_an_unknown_option_is_a_type_error(mq: AceMQ, queue: str) -> None:
    with pytest.raises(TypeError, match="persistant"):
        await mq.send(queue, 1, persistant=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def test_a_payload_that_cannot_be_encoded_is_refused_before_any_io(mq: AceMQ, queue: str) -> None:
    with pytest.raises(EncodeError, match="object"):
        await mq.send(queue, object())
    assert (await mq.depth(queue)).ready == 0


async def test_an_empty_queue_name_and_a_key_that_is_too_long_are_refused(mq: AceMQ) -> None:
    with pytest.raises(ConfigurationError, match="queue name is empty"):
        await mq.send("", 1)
    with pytest.raises(ConfigurationError, match="256 bytes"):
        await mq.send("q" * 256, 1)


async def test_a_closed_connection_refuses_to_publish(url: str, queue: str) -> None:
    async with acemq.connect(url) as short:
        pass
    with pytest.raises(ClosedError):
        await short.send(queue, 1)


async def test_another_event_loop_is_refused(mq: AceMQ, queue: str) -> None:
    def elsewhere() -> None:
        asyncio.run(mq.send(queue, 1))

    with pytest.raises(LoopError):
        await asyncio.to_thread(elsewhere)


async def test_a_publisher_names_exchange_key_and_class_once(mq: AceMQ, queue: str) -> None:
    publisher = mq.publisher("", queue, str, headers={"x-tenant": "acme"})
    await publisher.publish("one")
    await publisher.publish_many(["two", "three"])
    pulled = await mq.pull_many(queue, str)
    assert [(each.payload, each.headers["x-tenant"]) for each in pulled] == [
        ("one", "acme"),
        ("two", "acme"),
        ("three", "acme"),
    ]


async def test_a_batch_of_nothing_is_nothing_but_its_place_is_looked_at(mq: AceMQ, queue: str) -> None:
    assert await mq.send_many(queue, []) == []
    with pytest.raises(ConfigurationError, match="queue name is empty"):
        await mq.send_many("", [])
    with pytest.raises(ConfigurationError, match="queue name is empty"):
        await mq.send_many("", [], type="order")
