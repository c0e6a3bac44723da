"""Acknowledgements put together: nothing unsettled is ever covered, nothing settled is forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands

from acemq.transport import Delivery, Verb
from acemq.transports.rabbitmq.frames import Malformed
from acemq.transports.rabbitmq.ledger import Ledger, settlement_frames
from tests.unit.transports.rabbitmq.kit import Rig


def read(raw: list[bytes]) -> list[Any]:
    return [pamqp.frame.unmarshal(frame)[2] for frame in raw]


def fresh(*, redelivered: bool = False) -> Delivery:
    return cast("Delivery", SimpleNamespace(redelivered=redelivered))


class Broker:
    """What RabbitMQ does with acknowledgements of one channel, to the letter: an unknown tag closes the channel."""

    def __init__(self, count: int) -> None:
        self.unacked = list(range(1, count + 1))
        self.accepted: list[int] = []
        self.requeued: list[int] = []

    def take(self, frame: Any) -> None:
        assert frame.delivery_tag in self.unacked, f"unknown delivery tag {frame.delivery_tag}"
        if frame.multiple:
            done = [tag for tag in self.unacked if tag <= frame.delivery_tag]
        else:
            done = [frame.delivery_tag]
        self.unacked = [tag for tag in self.unacked if tag not in done]
        (self.accepted if isinstance(frame, commands.Basic.Ack) else self.requeued).extend(done)


def test_a_run_from_the_lowest_becomes_one_frame() -> None:
    (ack,) = read(settlement_frames(1, [1, 2, 3], [], 4))
    assert (ack.delivery_tag, ack.multiple) == (3, True)


def test_what_lies_beyond_a_gap_goes_by_itself() -> None:
    first, second, third = read(settlement_frames(1, [1, 2, 4, 6], [], 3))
    assert [(ack.delivery_tag, ack.multiple) for ack in (first, second, third)] == [(2, True), (4, False), (6, False)]


def test_one_alone_is_not_a_multiple() -> None:
    (ack,) = read(settlement_frames(1, [5], [], None))
    assert (ack.delivery_tag, ack.multiple) == (5, False)


def test_what_was_accepted_leaves_before_requeues_and_by_itself() -> None:
    first, second, nack = read(settlement_frames(1, [1, 3], [2], None))
    assert [(ack.delivery_tag, ack.multiple) for ack in (first, second)] == [(1, False), (3, False)]
    assert isinstance(nack, commands.Basic.Nack)
    assert (nack.delivery_tag, nack.multiple, nack.requeue) == (2, False, True)


def test_many_requeues_are_one_frame_where_nothing_below_is_held() -> None:
    ack, nack = read(settlement_frames(1, [2], [1, 3, 4], None))
    assert (ack.delivery_tag, ack.multiple) == (2, False)
    assert (nack.delivery_tag, nack.multiple, nack.requeue) == (4, True, True)
    assert [frame.delivery_tag for frame in read(settlement_frames(1, [], [2, 3], 1))] == [2, 3]


@given(st.integers(1, 40), st.data())
def test_whatever_the_order_the_broker_ends_up_with_what_was_said(count: int, data: st.DataObject) -> None:
    broker = Broker(count)
    held = dict.fromkeys(range(1, count + 1))
    order = data.draw(st.permutations(range(1, count + 1)))
    requeued = set(data.draw(st.lists(st.integers(1, count), max_size=count)))
    while order:
        turn = order[: data.draw(st.integers(1, count))]
        order = order[len(turn) :]
        for tag in turn:
            del held[tag]
        accepted, again = [tag for tag in turn if tag not in requeued], [tag for tag in turn if tag in requeued]
        for frame in read(settlement_frames(1, accepted, again, next(iter(held), None))):
            broker.take(frame)
        assert broker.unacked == list(held)
    assert sorted(broker.requeued) == sorted(requeued & set(range(1, count + 1)))
    assert sorted(broker.accepted + broker.requeued) == list(range(1, count + 1))


async def test_singly_while_the_prefix_stands_still_and_together_once_it_moves() -> None:
    rig, delivery = Rig(), fresh()
    ledger = Ledger(rig.lane, 1)
    for tag in range(1, 7):
        ledger.hold(tag, delivery)

    async def turn(*tags: int) -> list[tuple[int, bool]]:
        """What leaves at the end of a turn in which these were accepted."""
        rig.socket.written.clear()
        assert all(ledger.settle(tag, Verb.ACCEPT) for tag in tags)
        await asyncio.sleep(0)
        (written,) = rig.socket.written
        acks = read([written[at : at + 21] for at in range(0, len(written), 21)])
        return [(ack.delivery_tag, ack.multiple) for ack in acks]

    assert await turn(5, 2) == [(5, False), (2, False)]
    assert await turn(3) == [(3, False)]
    assert await turn(1, 4) == [(4, True)], "1 to 4, of which 2 and 3 were accepted before"
    assert await turn(6) == [(6, False)]
    assert not ledger.settle(6, Verb.ACCEPT)


class Turns:
    """A ledger that holds so many, and what it writes."""

    def __init__(self, held: int) -> None:
        self.rig = Rig()
        self.ledger = Ledger(self.rig.lane, 1, is_patient=True)
        for tag in range(1, held + 1):
            self.ledger.hold(tag, fresh())

    def accept(self, *tags: int) -> None:
        assert all(self.ledger.settle(tag, Verb.ACCEPT) for tag in tags)

    @property
    def written(self) -> list[tuple[int, bool]]:
        """Since it was asked last."""
        raw = b"".join(self.rig.socket.written)
        self.rig.socket.written.clear()
        return [(ack.delivery_tag, ack.multiple) for ack in read([raw[at : at + 21] for at in range(0, len(raw), 21)])]


async def test_among_many_a_few_wait_for_more_and_leave_as_one() -> None:
    turns = Turns(100)
    turns.accept(2, 5)
    await asyncio.sleep(0)
    turns.accept(1, 3)
    await asyncio.sleep(0)
    assert turns.written == []
    await asyncio.sleep(0.05)
    assert turns.written == [(3, True), (5, False)], "1 to 3 together; and nothing waits for long"


async def test_nothing_waits_among_few_nor_where_many_are_accepted_nor_before_a_requeue() -> None:
    few, many, back = Turns(20), Turns(100), Turns(100)
    few.accept(2)
    many.accept(*range(2, 20))
    back.accept(2)
    assert back.ledger.settle(3, Verb.REQUEUE)
    await asyncio.sleep(0)
    assert few.written == [(2, False)]
    assert len(many.written) == 18
    (written,) = back.rig.socket.written
    ack, nack = read([written[:21], written[21:]])
    assert (type(ack), ack.delivery_tag) == (commands.Basic.Ack, 2)
    assert (type(nack), nack.delivery_tag) == (commands.Basic.Nack, 3)


async def test_nothing_waits_once_something_is_held_that_may_have_killed_a_process() -> None:
    turns = Turns(100)
    turns.accept(2)
    await asyncio.sleep(0)
    assert turns.written == []
    turns.ledger.hold(101, fresh(redelivered=True))
    await asyncio.sleep(0)
    assert turns.written == [(2, False)], "before it can begin"
    turns.accept(4)
    await asyncio.sleep(0)
    assert turns.written == [(4, False)]
    turns.accept(101)
    await asyncio.sleep(0)
    assert turns.written == [], "it waits again"


async def test_what_waits_leaves_at_once_before_an_end_and_never_after_it() -> None:
    turns = Turns(100)
    turns.accept(2, 4)
    await asyncio.sleep(0)
    turns.ledger.flush()
    turns.accept(1)
    turns.ledger.flush()
    assert turns.written == [(2, False), (4, False), (1, False)]
    await asyncio.sleep(0)
    turns.accept(6)
    await asyncio.sleep(0)
    turns.ledger.lose()
    await asyncio.sleep(0.05)
    assert turns.written == [], "the channel may be gone"


def test_a_tag_that_does_not_rise_is_refused() -> None:
    ledger = Ledger(cast("Any", None), 1)
    ledger.hold(7, fresh())
    with pytest.raises(Malformed):
        ledger.hold(7, fresh())
