"""The table of confirms: every publish gets its own answer, and only one."""

from __future__ import annotations

import random

import pytest

from acemq.transport import Nacked, NotConnected, Outgoing, Published, PublishResult, TimedOut, Unroutable
from acemq.transports.rabbitmq.confirms import Call, Confirms

ROUTED, UNROUTABLE, FAILED, REFUSED = Published.ROUTED, Published.UNROUTABLE, Published.FAILED, Published.REFUSED


def message(message_id: str = "m", key: str = "k", mandatory: bool = True) -> Outgoing:
    return Outgoing(
        exchange="",
        routing_key=key,
        body=b"",
        headers={},
        message_id=message_id,
        content_type=None,
        mandatory=mandatory,
    )


def published(confirms: Confirms, *batch: Outgoing, deadline: float = 10.0) -> Call:
    call = Call(batch, deadline)
    for index in range(len(batch)):
        confirms.add(call, index)
    return call


def outcomes(call: Call) -> list[Published | None]:
    return [result.outcome if result is not None else None for result in call.results]


def test_multiple_answers_all_up_to_its_tag() -> None:
    confirms = Confirms()
    call = published(confirms, *[message()] * 5)
    confirms.answered(3, multiple=True, positive=True)
    assert outcomes(call) == [ROUTED] * 3 + [None] * 2
    assert (confirms.open, call.left) == (2, 2)


def test_multiple_answers_all_up_to_a_tag_that_was_answered_itself() -> None:
    confirms = Confirms()
    call = published(confirms, *[message()] * 5)
    confirms.answered(3, multiple=False, positive=True)
    confirms.answered(3, multiple=True, positive=True)
    assert outcomes(call) == [ROUTED] * 3 + [None] * 2
    confirms.answered(0, multiple=True, positive=True)
    assert outcomes(call) == [ROUTED] * 5
    assert confirms.open == 0


def test_a_negative_answer_is_a_failure() -> None:
    confirms = Confirms()
    call = published(confirms, message(), message())
    confirms.answered(2, multiple=False, positive=False)
    confirms.answered(1, multiple=False, positive=True)
    assert outcomes(call) == [ROUTED, FAILED]
    failed = call.results[1]
    assert failed is not None
    assert isinstance(failed.error, Nacked)


def test_answers_in_any_order_are_each_their_own() -> None:
    order = random.Random(11)
    for _ in range(50):
        confirms = Confirms()
        count = 40
        calls = [published(confirms, message()) for _ in range(count)]
        wanted: list[Published | None] = [None] * count
        tags = list(range(1, count + 1))
        order.shuffle(tags)
        while tags:
            tag, multiple, positive = tags.pop(), order.random() < 0.2, order.random() < 0.8
            for at in range(tag) if multiple else [tag - 1]:
                wanted[at] = wanted[at] or (ROUTED if positive else FAILED)
            confirms.answered(tag, multiple, positive)
            assert [outcomes(call)[0] for call in calls] == wanted
            assert confirms.open == wanted.count(None)


def test_answers_to_unknown_tags_change_nothing() -> None:
    confirms = Confirms()
    call = published(confirms, message())
    confirms.answered(7, multiple=False, positive=True)
    assert outcomes(call) == [None]
    confirms.answered(1, multiple=False, positive=True)
    confirms.answered(1, multiple=False, positive=False)
    assert outcomes(call) == [ROUTED]


def test_a_return_is_its_own_publishs_of_one_id_and_place() -> None:
    confirms = Confirms()
    good, bad = published(confirms, message("same", "good")), published(confirms, message("same", "bad"))
    silent = published(confirms, message("same", "bad", mandatory=False))
    confirms.was_returned(Unroutable("one"), ("", "bad"), "same")
    confirms.answered(3, multiple=True, positive=True)
    assert [outcomes(call) for call in (good, bad, silent)] == [[ROUTED], [UNROUTABLE], [ROUTED]]


def test_of_publishes_that_are_alike_each_return_takes_the_next() -> None:
    confirms = Confirms()
    call = published(confirms, *[message("same", "bad")] * 3)
    first, second = Unroutable("first"), Unroutable("second")
    confirms.was_returned(first, ("", "bad"), "same")
    confirms.answered(1, multiple=False, positive=True)
    confirms.was_returned(second, ("", "bad"), "same")
    confirms.answered(3, multiple=True, positive=True)
    assert outcomes(call) == [UNROUTABLE, UNROUTABLE, ROUTED]
    assert [result.error for result in call.results if result is not None] == [first, second, None]


def test_a_return_out_of_order_is_its_own_publishs_too() -> None:
    confirms = Confirms()
    call = published(confirms, message("a"), message("b"), message("c"))
    confirms.was_returned(Unroutable("b"), ("", "k"), "b")
    confirms.was_returned(Unroutable("a"), ("", "k"), "a")
    confirms.answered(3, multiple=True, positive=True)
    assert outcomes(call) == [UNROUTABLE, UNROUTABLE, ROUTED]


def test_a_return_that_fits_no_publish_changes_nothing() -> None:
    confirms = Confirms()
    call = published(confirms, message("a"))
    confirms.was_returned(Unroutable("?"), ("", "k"), "b")
    confirms.was_returned(Unroutable("?"), ("x", "k"), "a")
    confirms.was_returned(Unroutable("?"), ("", "k"), None)
    confirms.answered(1, multiple=False, positive=True)
    assert outcomes(call) == [ROUTED]


def test_what_is_out_of_time_fails_once_and_a_late_answer_is_dropped() -> None:
    confirms = Confirms()
    early, late = published(confirms, message("same"), deadline=5), published(confirms, message("same"), deadline=9)
    assert confirms.expire(5) == 9
    assert (outcomes(early), outcomes(late)) == ([FAILED], [None])
    assert (confirms.open, confirms.late) == (1, 1)
    result = early.results[0]
    assert result is not None
    assert isinstance(result.error, TimedOut)
    # Its return and its confirm come late, and are not taken for those of the publish behind it.
    confirms.was_returned(Unroutable("late"), ("", "k"), "same")
    confirms.answered(1, multiple=False, positive=True)
    confirms.answered(2, multiple=False, positive=True)
    assert (outcomes(early), outcomes(late)) == ([FAILED], [ROUTED])
    assert (confirms.open, confirms.late) == (0, 0)
    assert confirms.expire(99) is None


def test_the_end_of_the_channel_answers_everything() -> None:
    confirms = Confirms()
    call = published(confirms, message("a"), message("b"))
    confirms.answered(1, multiple=False, positive=True)
    confirms.fail(lambda message: PublishResult(FAILED, NotConnected(message.message_id)))
    assert outcomes(call) == [ROUTED, FAILED]
    assert str(call.results[1].error if call.results[1] else "") == "b"
    assert confirms.open == 0


async def test_a_call_wakes_once_its_last_message_is_answered() -> None:
    import asyncio

    confirms = Confirms()
    call = published(confirms, message(), message())
    waiting = asyncio.ensure_future(call.answers())
    await asyncio.sleep(0)
    confirms.answered(1, multiple=False, positive=True)
    await asyncio.sleep(0)
    assert not waiting.done()
    confirms.answered(2, multiple=False, positive=True)
    assert [result.outcome for result in await waiting] == [ROUTED, ROUTED]


async def test_a_cancelled_call_keeps_its_place_until_the_answer() -> None:
    import asyncio

    confirms = Confirms()
    waiting = asyncio.ensure_future(published(confirms, message()).answers())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert confirms.open == 1
    idle = asyncio.ensure_future(confirms.idle())
    await asyncio.sleep(0)
    confirms.answered(1, multiple=False, positive=True)
    await idle
    assert confirms.open == 0


def test_what_was_refused_is_refused_for_good() -> None:
    call = Call([message(key="a"), message(key="b")], 1)
    call.refuse(1, NotConnected("no link"))
    assert (outcomes(call), call.left) == ([None, REFUSED], 1)
