"""Replay from outside: cases M-098 … M-102, O-17, on both transports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from acemq import (
    AceMQ,
    Ack,
    ConfigurationError,
    Diagnostic,
    Message,
    ReplayError,
    StopReason,
    Topology,
    TopologyError,
)
from acemq import headers as h
from acemq.transport import Outgoing
from tests.waiting import until, until_async


@pytest.fixture
async def dead(mq: AceMQ, queue: str) -> str:
    """The dead-letter queue of `queue`."""
    await mq.declare(Topology().queue(f"{queue}.dlq", type="classic"))
    return f"{queue}.dlq"


async def bury(mq: AceMQ, dead: str, *tenants: str) -> None:
    for n, tenant in enumerate(tenants, 1):
        await mq.send(dead, n, headers={"x-tenant": tenant})


async def left(mq: AceMQ, queue: str) -> list[int]:
    """What is in a queue, in order; it is given back."""
    pulled = await mq.pull_many(queue, int, most=1_000)
    payloads = [each.payload for each in pulled]
    for each in pulled:
        await each.release()
    return payloads


async def test_m098_a_filter_moves_what_it_accepts_and_the_rest_keeps_its_order(
    mq: AceMQ, queue: str, dead: str
) -> None:
    await bury(mq, dead, "other", "acme", "other", "acme", "other")
    result = await mq.replay(dead).where(lambda m: m.headers.get("x-tenant") == "acme").run()
    assert (result.replayed, result.put_back, result.looked_at) == (2, 3, 5)
    assert result.stopped is StopReason.DRAINED
    assert await left(mq, dead) == [1, 3, 5]
    assert await left(mq, queue) == [2, 4]


async def test_several_filters_must_all_accept(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, dead, "acme", "acme", "other")
    replay = mq.replay(dead).where(lambda m: m.headers["x-tenant"] == "acme").where(lambda m: m.body == b"2")
    assert (await replay.run()).replayed == 1
    assert await left(mq, queue) == [2]


async def test_m099_o17_what_fails_again_is_not_taken_a_second_time(mq: AceMQ, queue: str, dead: str) -> None:
    counts: list[Any] = []

    async def fail(message: Message[int]) -> Ack:
        counts.append(message.headers[h.REPLAY_COUNT])
        return Ack.reject("again")

    await bury(mq, dead, *["acme"] * 20)
    async with mq.consume(queue, int, fail) as consumer:
        for round_ in (1, 2):
            result = await mq.replay(dead).run()
            assert (result.replayed, result.stopped) == (20, StopReason.DRAINED)
            await until(lambda round_=round_: consumer.counters.rejected == 20 * round_)  # type: ignore[misc]
            assert (await mq.depth(dead)).ready == 20
    assert counts == [1] * 20 + [2] * 20


async def test_m100_a_missing_target_leaves_every_message_where_it_was(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, dead, "a", "b", "c")
    await mq.delete(queue)
    with pytest.raises(ReplayError) as failed:
        await mq.replay(dead).run()
    assert (failed.value.result.replayed, failed.value.result.stopped) == (0, StopReason.FAILED)
    assert await left(mq, dead) == [1, 2, 3]


async def test_a_target_that_goes_missing_keeps_the_rest_in_order_and_says_how_many_went(
    mq: AceMQ, queue: str, dead: str
) -> None:
    await bury(mq, dead, "a", "b", "c")
    replayed = 0

    def delete_after_the_first(message: Message[bytes]) -> bool:
        nonlocal replayed
        replayed += 1
        return True

    publish = mq.transport.publish

    async def publishing(batch: Sequence[Outgoing], **options: Any) -> Any:
        if replayed == 2:
            await mq.delete(queue)
        return await publish(batch, **options)

    mq.transport.publish = publishing  # type: ignore[method-assign]
    with pytest.raises(ReplayError, match="1 replayed before it") as failed:
        await mq.replay(dead).where(delete_after_the_first).run()
    assert failed.value.result.replayed == 1
    assert await left(mq, dead) == [2, 3]


@pytest.mark.parametrize(
    ("describe", "match"),
    [
        (lambda mq: mq.replay("orders").run(), "does not end in"),
        (lambda mq: mq.replay("orders.dlq").into("orders.dlq").run(), "onto itself"),
        (lambda mq: mq.replay("orders.dlq").run(limit=-1), "limit=-1"),
    ],
)
async def test_m100_a_replay_that_would_go_wrong_is_refused(mq: AceMQ, describe: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        await describe(mq)
    with pytest.raises(ConfigurationError):
        mq.replay("")
    with pytest.raises(ConfigurationError):
        mq.replay("orders.dlq").into("")
    with pytest.raises(ConfigurationError, match="hold=0"):
        mq.replay("orders.dlq").where(lambda m: True, hold=0)


async def test_a_source_that_is_not_there_is_named(mq: AceMQ, name: str) -> None:
    with pytest.raises(TopologyError, match=name):
        await mq.replay(f"{name}.dlq").run()


@pytest.mark.parametrize(("keeping", "attempt"), [(False, 1), (True, 5)])
async def test_m101_stamps_count_on_and_error_and_old_names_are_gone(
    mq: AceMQ, queue: str, dead: str, keeping: bool, attempt: int
) -> None:
    arrived: dict[str, Any] = {
        h.ID: "m-1",
        h.ATTEMPT: 5,
        h.ERROR: "exhausted 5 attempts: boom",
        h.FAILED_AS: "exhausted",
        h.LEGACY_REPLAY_COUNT: 3,
        "x-acemq-shiny": "kept",
    }
    await mq.outbound.move(
        Outgoing(
            exchange="", routing_key=dead, body=b"1", headers=arrived, message_id="m-1", content_type="application/json"
        )
    )
    before = datetime.now(UTC).replace(microsecond=0)
    replay = mq.replay(dead)
    assert await replay.pending() == 1
    assert (await (replay.keeping_attempts() if keeping else replay).run()).replayed == 1
    copy = await mq.pull(queue, int)
    assert copy is not None
    headers = dict(copy.wire_headers)
    stamped = datetime.fromisoformat(str(headers.pop(h.REPLAYED_AT)))
    assert before <= stamped <= datetime.now(UTC)
    assert headers == {
        h.ID: "m-1",
        h.ATTEMPT: attempt,
        h.REPLAYED_FROM: dead,
        h.REPLAY_COUNT: 4,
        "x-acemq-shiny": "kept",
    }
    await copy.accept()


async def test_m102_a_dry_run_publishes_nothing_and_changes_nothing(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, dead, *["acme"] * 30)
    result = await mq.replay(dead).dry_run(limit=10)
    assert (result.replayed, result.dry, result.stopped) == (10, True, StopReason.LIMIT)
    assert await left(mq, dead) == list(range(1, 31))
    assert (await mq.depth(queue)).ready == 0


async def test_a_limit_stops_after_that_many_and_zero_replays_none(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, dead, "a", "b", "c")
    assert (await mq.replay(dead).run(limit=0)).replayed == 0
    result = await mq.replay(dead).run(limit=2)
    assert (result.replayed, result.stopped) == (2, StopReason.LIMIT)
    assert await left(mq, dead) == [3]


async def test_a_filter_that_holds_too_many_stops_the_run_and_keeps_the_order(mq: AceMQ, dead: str) -> None:
    await bury(mq, dead, *["acme"] * 20)
    result = await mq.replay(dead).where(lambda m: False, hold=10).run()
    assert (result.replayed, result.put_back, result.stopped) == (0, 10, StopReason.HELD)
    assert await left(mq, dead) == list(range(1, 21))


async def test_a_filter_that_raises_stops_the_run_with_everything_given_back(
    mq: AceMQ, dead: str, diagnostics: list[Diagnostic]
) -> None:
    def choose(message: Message[bytes]) -> bool:
        if message.body == b"2":
            raise LookupError("no tenant")
        return False

    await bury(mq, dead, "a", "b", "c")
    with pytest.raises(LookupError, match="no tenant"):
        await mq.replay(dead).where(choose).run()
    assert await left(mq, dead) == [1, 2, 3]
    assert [each.name for each in diagnostics] == ["acemq.replay.stopped"]
    assert "failed" in diagnostics[0].message


async def test_cancelling_a_run_gives_back_what_it_holds(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, dead, *["acme"] * 10)
    looking = asyncio.Event()

    def refuse(message: Message[bytes]) -> bool:
        looking.set()
        return False

    run = asyncio.ensure_future(mq.replay(dead).where(refuse).run())
    await looking.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert await left(mq, dead) == list(range(1, 11))


async def test_into_another_queue(mq: AceMQ, queue: str, dead: str) -> None:
    await bury(mq, queue, "a")
    result = await mq.replay(queue).into(dead).run()
    assert (result.source, result.target, result.replayed) == (queue, dead, 1)


async def test_o17_of_fifty_the_ten_that_fail_again_are_left_with_a_count_of_one(
    mq: AceMQ, queue: str, dead: str
) -> None:
    seen: list[Message[int]] = []

    async def handle(message: Message[int]) -> Ack | None:
        seen.append(message)
        return Ack.reject("again") if message.payload <= 10 else None

    await bury(mq, dead, *["acme"] * 50)
    async with mq.consume(queue, int, handle) as consumer:
        result = await mq.replay(dead).run()
        await until(lambda: consumer.counters.acked == 40 and consumer.counters.rejected == 10)
    assert (result.replayed, result.stopped) == (50, StopReason.DRAINED)
    assert len(seen) == 50
    assert all(message.attempt == 1 and message.headers[h.REPLAYED_FROM] == dead for message in seen)
    left_over = await mq.pull_many(dead, int, most=100)
    assert [each.headers[h.REPLAY_COUNT] for each in left_over] == [1] * 10
    for each in left_over:
        await each.accept()


async def test_a_run_after_a_dry_run_sees_all_that_was_given_back(mq: AceMQ, queue: str, dead: str) -> None:
    await mq.send_many(dead, range(1_500))
    assert (await mq.replay(dead).dry_run()).replayed == 1_500
    assert (await mq.replay(dead).run()).replayed == 1_500


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_filter_that_accepts_none_of_twenty_thousand_stops_at_ten_thousand_in_order(
    mq: AceMQ, dead: str
) -> None:
    await mq.send_many(dead, range(20_000))
    result = await mq.replay(dead).where(lambda m: False).run()
    assert (result.put_back, result.stopped) == (10_000, StopReason.HELD)

    async def all_back() -> bool:  # the broker does not say when what was given back is there again
        return (await mq.depth(dead)).ready == 20_000

    await until_async(all_back, within=100)  # RabbitMQ 3.10 sorts ten thousand back in for half a minute
    assert await left(mq, dead) == list(range(1_000))
