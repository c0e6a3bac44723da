"""How a replay goes and how it ends: rate, deadline, progress, batches, what it says when it is cut short."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    ConfigurationError,
    DecodeError,
    Message,
    MovableClock,
    Replay,
    ReplayError,
    ReplayResult,
    StopReason,
    Topology,
)
from acemq import headers as h
from acemq.transport import Outgoing, Settled, Settlement, Verb
from tests.engine.test_replay import left


@pytest.fixture
async def dead(mq: AceMQ, queue: str) -> str:
    await mq.declare(Topology().queue(f"{queue}.dlq", type="classic"))
    return f"{queue}.dlq"


# Rate and deadline, by a clock that is moved


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def still(name: str, clock: MovableClock) -> AsyncIterator[AceMQ]:
    """A connection for which time stands still, with 200 dead letters of `orders`."""
    async with acemq.connect(f"memory://{name}", clock=clock) as mq:
        await mq.declare(Topology().queue("orders", dead_letter=True))
        await mq.send_many("orders.dlq", range(200))
        yield mq


async def test_fifty_a_second_are_four_seconds_for_two_hundred_evenly(still: AceMQ, clock: MovableClock) -> None:
    run = asyncio.ensure_future(still.replay("orders.dlq").at_rate(50).run())
    gone: list[int] = []
    for _ in range(40):
        await clock.advance(timedelta(seconds=0.1))
        gone.append((await still.depth("orders")).ready)
    assert all(abs(count - 5 * tenth) <= 1 for tenth, count in enumerate(gone, 1))
    assert (await run).replayed == 200


async def test_a_rate_goes_on_evenly_after_a_stall_and_does_not_rush(still: AceMQ, clock: MovableClock) -> None:
    stalled = asyncio.Event()

    def stall_at_the_tenth(batch: Sequence[Outgoing]) -> bool:
        return len(batch) == 1 and batch[0].body == b"10" and not stalled.is_set()

    holding_up(still, stall_at_the_tenth, stalled)
    run = asyncio.ensure_future(still.replay("orders.dlq").at_rate(50).run())
    await clock.advance(timedelta(seconds=10))
    assert (await still.depth("orders")).ready == 10
    stalled.set()
    await clock.advance(timedelta(seconds=1))
    assert 60 <= (await still.depth("orders")).ready <= 67
    await clock.advance(timedelta(seconds=5))
    await run


async def test_a_batch_after_a_stall_is_no_larger_than_its_rate_allows(still: AceMQ, clock: MovableClock) -> None:
    stalled = asyncio.Event()
    holding_up(still, lambda batch: batch[0].body == b"1" and not stalled.is_set(), stalled)
    run = asyncio.ensure_future(still.replay("orders.dlq").at_rate(50).in_batches(100).run())
    await clock.advance(timedelta(seconds=10))
    stalled.set()
    await clock.rest()
    assert 2 <= (await still.depth("orders")).ready <= 9
    await clock.advance(timedelta(seconds=5))
    assert (await run).replayed == 200


@pytest.mark.parametrize("absolute", [False, True])
async def test_at_its_deadline_it_stops_and_the_rest_keeps_its_place(
    still: AceMQ, clock: MovableClock, absolute: bool
) -> None:
    length = timedelta(milliseconds=950)
    replay = still.replay("orders.dlq").at_rate(10).until(clock.now() + length if absolute else length)
    run = asyncio.ensure_future(replay.run())
    await clock.advance(length)
    result = await run
    assert (result.replayed, result.looked_at, result.stopped) == (10, 10, StopReason.DEADLINE)
    assert await left(still, "orders.dlq") == list(range(10, 200))


async def test_a_deadline_that_is_over_lets_nothing_go(still: AceMQ, clock: MovableClock) -> None:
    result = await still.replay("orders.dlq").until(clock.now() - timedelta(hours=1)).run()
    assert (result.looked_at, result.stopped) == (0, StopReason.DEADLINE)


def holding_up(mq: AceMQ, which: Any, until: asyncio.Event, met: asyncio.Event | None = None) -> None:
    """Publishes of which `which` says so wait for `until`."""
    publish = mq.transport.publish

    async def publishing(batch: Sequence[Outgoing], **options: Any) -> Any:
        if which(batch):
            if met is not None:
                met.set()
            await until.wait()
        return await publish(batch, **options)

    mq.transport.publish = publishing  # type: ignore[method-assign]


# Progress


async def test_progress_is_told_on_the_way_and_at_the_end(mq: AceMQ, queue: str, dead: str) -> None:
    told: list[ReplayResult] = []
    await mq.send_many(dead, range(5))
    result = await mq.replay(dead).where(lambda m: m.body != b"1").reporting(told.append, every=2).run()
    assert [(each.looked_at, each.replayed, each.put_back, each.stopped) for each in told] == [
        (2, 1, 1, StopReason.RUNNING),
        (4, 3, 1, StopReason.RUNNING),
        (5, 4, 1, StopReason.DRAINED),
    ]
    assert told[-1] == result


async def test_progress_is_told_of_a_run_that_fails(mq: AceMQ, queue: str, dead: str) -> None:
    told: list[ReplayResult] = []
    await mq.send(dead, 1)
    await mq.delete(queue)
    with pytest.raises(ReplayError) as failed:
        await mq.replay(dead).reporting(told.append).run()
    assert [told[-1]] == told == [failed.value.result]
    assert told[-1].stopped is StopReason.FAILED


async def test_progress_that_raises_ends_the_run_with_the_rest_in_place(mq: AceMQ, queue: str, dead: str) -> None:
    def stop(result: ReplayResult) -> None:
        if result.stopped is StopReason.RUNNING:
            raise LookupError("enough")

    await mq.send_many(dead, range(5))
    with pytest.raises(LookupError, match="enough"):
        await mq.replay(dead).reporting(stop, every=2).run()
    assert (await left(mq, queue), await left(mq, dead)) == ([0, 1], [2, 3, 4])


async def test_an_error_of_ours_that_a_filter_raises_is_raised_as_it_is(mq: AceMQ, dead: str) -> None:
    def unreadable(message: Message[bytes]) -> bool:
        raise DecodeError("no JSON")

    await mq.send(dead, 1)
    with pytest.raises(DecodeError, match="no JSON"):
        await mq.replay(dead).where(unreadable).run()
    assert await left(mq, dead) == [1]


# Batches


async def test_batches_keep_order_and_counts(mq: AceMQ, queue: str, dead: str) -> None:
    await mq.send_many(dead, range(100))
    result = await mq.replay(dead).where(lambda m: not m.body.endswith(b"7")).in_batches(32).run(limit=50)
    assert (result.replayed, result.put_back, result.stopped) == (50, 5, StopReason.LIMIT)
    assert await left(mq, queue) == [n for n in range(55) if n % 10 != 7]
    assert await left(mq, dead) == [7, 17, 27, 37, 47, *range(55, 100)]


async def test_a_batch_of_which_some_land_counts_those_and_leaves_the_rest(mq: AceMQ, queue: str, dead: str) -> None:
    full = f"{queue}.full"
    await mq.declare(Topology().queue(full, type="classic", max_length=10))
    await mq.send_many(dead, range(40))
    with pytest.raises(ReplayError) as failed:
        await mq.replay(dead).into(full).in_batches(16).run()
    assert (failed.value.result.replayed, failed.value.result.in_doubt) == (10, 0)
    assert await left(mq, full) == list(range(10))
    assert await left(mq, dead) == list(range(10, 40))
    await mq.delete(full)


async def test_a_batch_waits_for_room_and_leaves_some_to_others(url: str, queue: str, dead: str) -> None:
    async with acemq.connect(url, max_outstanding=4) as mq:
        await mq.send_many(dead, range(20))
        assert (await mq.replay(dead).in_batches(16).run()).replayed == 20
        assert await left(mq, queue) == list(range(20))


# Cut short


@pytest.mark.parametrize("together", [1, 4])
async def test_cancelled_in_the_middle_of_a_copy_it_finishes_that_and_counts_it(
    mq: AceMQ, queue: str, dead: str, together: int
) -> None:
    told: list[ReplayResult] = []
    await mq.send_many(dead, range(10))
    copying, go_on = asyncio.Event(), asyncio.Event()
    holding_up(mq, lambda batch: True, go_on, copying)
    run = asyncio.ensure_future(mq.replay(dead).in_batches(together).reporting(told.append).run())
    await copying.wait()
    run.cancel()
    await asyncio.sleep(0)
    assert not run.done(), "it does not leave a copy behind of which nobody knows"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (told[-1].replayed, told[-1].stopped, told[-1].in_doubt) == (together, StopReason.CANCELLED, 0)
    assert await left(mq, queue) == list(range(together))
    assert await left(mq, dead) == list(range(together, 10))


async def test_cancelled_while_it_waits_for_its_rate_it_ends_at_once(mq: AceMQ, queue: str, dead: str) -> None:
    first = asyncio.Event()
    await mq.send_many(dead, range(3))
    run = asyncio.ensure_future(mq.replay(dead).at_rate(0.001).reporting(lambda _: first.set(), every=1).run())
    await first.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await left(mq, queue), await left(mq, dead)) == ([0], [1, 2])


def finding_stale(mq: AceMQ, verb: Verb) -> None:
    """As a transport answers when the broker has taken back what was held."""
    settle = mq.transport.settle

    async def settling(batch: Sequence[Settlement]) -> Sequence[Settled]:
        if any(settlement.verb is verb for settlement in batch):
            return [Settled.STALE] * len(batch)
        return await settle(batch)

    mq.transport.settle = settling  # type: ignore[method-assign]


async def test_a_copy_whose_original_was_taken_back_is_in_both_queues_and_the_result_says_so(
    mq: AceMQ, queue: str, dead: str
) -> None:
    await mq.send_many(dead, range(3))
    finding_stale(mq, Verb.ACCEPT)
    with pytest.raises(ReplayError, match="1 may be in both queues") as failed:
        await mq.replay(dead).run()
    assert (failed.value.result.replayed, failed.value.result.in_doubt) == (1, 1)


async def test_what_was_taken_back_before_the_end_fails_the_run(mq: AceMQ, queue: str, dead: str) -> None:
    """Somebody else may have had it, and it may have been looked at twice."""
    await mq.send_many(dead, range(3))
    finding_stale(mq, Verb.REQUEUE)
    with pytest.raises(ReplayError, match="taken back what was held") as failed:
        await mq.replay(dead).where(lambda message: message.body == b"1").run()
    assert (failed.value.result.replayed, failed.value.result.in_doubt) == (1, 0)
    assert failed.value.result.stopped is StopReason.FAILED


async def test_a_source_that_goes_missing_ends_the_run_with_its_numbers(mq: AceMQ, queue: str, dead: str) -> None:
    await mq.send_many(dead, range(3))
    deleted = False

    async def delete_once(batch: Sequence[Outgoing], **options: Any) -> Any:
        nonlocal deleted
        results = await publish(batch, **options)
        if not deleted:
            deleted = True
            await mq.delete(dead)
        return results

    publish = mq.transport.publish
    mq.transport.publish = delete_once  # type: ignore[method-assign]
    with pytest.raises(ReplayError) as failed:
        await mq.replay(dead).run()
    assert failed.value.result.replayed == 1
    assert failed.value.result.stopped is StopReason.FAILED
    assert (await mq.depth(queue)).ready == 1


async def test_what_is_set_aside_or_replayed_since_the_run_began_is_not_taken(mq: AceMQ, queue: str, dead: str) -> None:
    """However low the count was: what came since is not of this run."""
    await mq.send_many(dead, range(3))

    async def one_more(batch: Sequence[Outgoing], **options: Any) -> Any:
        results = await publish(batch, **options)
        await publish(
            [
                Outgoing(
                    exchange="",
                    routing_key=dead,
                    body=b"9",
                    headers={h.FAILED_AT: int(datetime.now(UTC).timestamp() * 1_000), h.FAILED_AS: "rejected"},
                    message_id="since",
                    content_type="application/json",
                )
            ],
            **options,
        )
        return results

    publish = mq.transport.publish
    mq.transport.publish = one_more  # type: ignore[method-assign]
    result = await mq.replay(dead).run()
    assert (result.replayed, result.stopped) == (3, StopReason.DRAINED)
    assert await left(mq, dead) == [9, 9, 9]


async def test_two_runs_share_a_queue_and_lose_and_double_nothing(mq: AceMQ, queue: str, dead: str) -> None:
    await mq.send_many(dead, range(60))
    both = await asyncio.gather(mq.replay(dead).run(), mq.replay(dead).in_batches(7).run())
    assert sum(result.replayed for result in both) == 60
    assert sorted(await left(mq, queue)) == list(range(60))


# Refused where it is described


@pytest.mark.parametrize(
    ("describe", "match"),
    [
        (lambda replay: replay.at_rate(0), "per_second=0 must be more than 0"),
        (lambda replay: replay.at_rate(-1), "per_second=-1"),
        (lambda replay: replay.at_rate(float("nan")), "per_second=nan"),
        (lambda replay: replay.until(timedelta()), "more than zero"),
        (lambda replay: replay.until(datetime(2027, 1, 1)), "is naive"),
        (lambda replay: replay.until(5), "must be a timedelta"),
        (lambda replay: replay.reporting(print, every=0), "every=0"),
        (lambda replay: replay.reporting(None), "takes a function"),
        (lambda replay: replay.where("error~timeout"), "takes a function"),
        (lambda replay: replay.in_batches(0), "most=0"),
        (lambda replay: replay.in_batches(1_001), "most=1001"),
    ],
)
async def test_what_cannot_be_is_refused_where_it_is_said(describe: Any, match: str) -> None:
    async with acemq.connect("memory://") as mq:
        replay: Replay = mq.replay("orders.dlq")
        with pytest.raises(ConfigurationError, match=match):
            describe(replay)
