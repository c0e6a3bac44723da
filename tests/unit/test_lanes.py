"""Whose turn it is among three lanes, how a prefetch is shared out, and what a queue with lanes is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest

from acemq import ConfigurationError, RetryPolicy, Topology, TopologyError
from acemq.clock import SYSTEM
from acemq.consuming.lanes import LaneBuffer, Lanes, lanes_for
from acemq.publishing.lanes import KnownLanes
from acemq.topology import Queue, lanes_of
from acemq.transport import Delivery


def delivery(lane: str, number: int) -> Delivery:
    queue = {"low": "q.low", "normal": "q", "high": "q.high"}[lane]
    return Delivery(
        queue=queue, body=str(number).encode(), headers={}, message_id=None, content_type=None, exchange="",
        routing_key=queue,
    )  # fmt: skip


def of(lane: str, numbers: Iterable[int]) -> list[Delivery]:
    return [delivery(lane, number) for number in numbers]


def taken(buffer: LaneBuffer) -> str:
    """Which lane is served next, and the number of the message."""
    foremost = buffer[0]
    found = buffer.popleft()
    assert found is foremost, "what is looked at is what is taken"
    return f"{ {'q.low': 'low', 'q': 'normal', 'q.high': 'high'}[found.queue] } {found.body.decode()}"


@pytest.fixture
def buffer() -> LaneBuffer:
    return LaneBuffer(Lanes("q", 12))


def test_the_highest_lane_goes_first_and_each_keeps_its_order(buffer: LaneBuffer) -> None:
    buffer.extend([*of("low", range(2)), *of("high", range(2)), *of("normal", range(2))])
    assert len(buffer) == 6
    assert [taken(buffer) for _ in range(6)] == ["high 0", "high 1", "normal 0", "normal 1", "low 0", "low 1"]
    assert not buffer


def test_every_tenth_start_is_a_lower_lane_s_and_the_lower_ones_take_turns(buffer: LaneBuffer) -> None:
    for lane in ("high", "normal", "low"):
        buffer.extend(of(lane, range(500)))
    starts = [taken(buffer).split()[0] for _ in range(400)]
    assert starts[:9] == ["high"] * 9
    assert [starts[place] for place in range(9, 400, 10)] == ["normal", "low"] * 20
    assert starts.count("high") == 360


def test_a_turn_that_nobody_lower_takes_is_had_by_the_next_that_comes(buffer: LaneBuffer) -> None:
    buffer.extend(of("high", range(100)))
    for _ in range(50):
        taken(buffer)
    buffer.extend(of("low", range(100)))
    assert [taken(buffer) for _ in range(11)] == ["low 0", *(f"high {number}" for number in range(50, 59)), "low 1"]


def test_without_high_ones_the_low_ones_have_every_tenth_start_beside_the_normal(buffer: LaneBuffer) -> None:
    buffer.extend([*of("normal", range(100)), *of("low", range(100))])
    assert [taken(buffer).split()[0] for _ in range(100)].count("low") == 10


def test_a_turn_of_one_s_own() -> None:
    buffer = LaneBuffer(Lanes("q", 12, turn=2))
    buffer.extend([*of("high", range(10)), *of("low", range(10))])
    assert [taken(buffer).split()[0] for _ in range(4)] == ["high", "low", "high", "low"]


def test_what_may_kill_the_process_is_not_passed_by_a_lower_lane() -> None:
    buffer = LaneBuffer(Lanes("q", 12), is_suspect=lambda each: each.body == b"9")
    buffer.extend([*of("high", range(20)), *of("low", range(20))])
    assert [taken(buffer) for _ in range(11)][9:] == ["high 9", "low 0"]


def test_what_comes_back_is_the_first_of_its_lane_again(buffer: LaneBuffer) -> None:
    buffer.extend([*of("high", [1, 2]), *of("low", [1])])
    first = [buffer.popleft(), buffer.popleft()]
    buffer.appendleft(first[1])
    buffer.extendleft([first[0], delivery("low", 0)])
    assert [each.body for each in buffer] == [b"1", b"2", b"0", b"1"]
    buffer.clear()
    assert len(buffer) == 0


@pytest.mark.parametrize(
    ("prefetch", "shares"),
    [(3, (1, 1, 1)), (4, (2, 1, 1)), (5, (2, 2, 1)), (6, (3, 2, 1)), (12, (6, 3, 3)), (20, (10, 5, 5))],
)
def test_half_is_high_s_and_the_rest_is_shared_evenly(prefetch: int, shares: tuple[int, ...]) -> None:
    assert Lanes("q", prefetch).shares() == dict(zip(("q.high", "q", "q.low"), shares, strict=True))
    assert sum(shares) == prefetch


def test_a_prefetch_that_is_not_given_lets_one_lane_alone_keep_every_handler_busy() -> None:
    lanes = lanes_for("q", True, {}, 20, in_hand=10, in_place=False)
    assert lanes is not None
    assert min(lanes.shares().values()) == 10
    given = lanes_for("q", True, {"prefetch": 12}, 12, in_hand=10, in_place=False)
    assert given is not None
    assert given.prefetch == 12


@pytest.mark.parametrize(
    ("there", "options", "in_place", "named"),
    [
        (True, {"exclusive": True}, False, "exclusive=True: queue 'q' has lanes"),
        (True, {"prefetch": 2}, False, "prefetch=2: queue 'q' has lanes; 3 are the least"),
        (True, {}, True, "an ordered consumer: queue 'q' has lanes"),
        (False, {"turn": 5}, False, "turn=5: queue 'q' has no lanes"),
    ],
)
def test_what_cannot_be_had_with_lanes_or_not_without_is_refused(
    there: bool, options: Any, in_place: bool, named: str
) -> None:
    with pytest.raises(ConfigurationError, match=named):
        lanes_for("q", there, options, options.get("prefetch", 20), in_hand=1, in_place=in_place)


# Described


def test_a_queue_with_lanes_is_three_ordinary_ones_each_with_what_belongs_to_it() -> None:
    policy = RetryPolicy.fixed(2, timedelta(minutes=1))
    topology = Topology().queue("in", type="classic", priorities="lanes", retry=policy)
    topology.validate()
    named = [declared.name for declared in topology.describe() if declared.kind == "queue"]
    assert named[:3] == list(lanes_of("in")) == ["in.low", "in", "in.high"]
    beside = [f"{lane}.{what}" for lane in lanes_of("in") for what in ("dlq", "parked", "retry.1m")]
    assert sorted(named[3:]) == sorted(beside)
    text = str(topology)
    assert "in.high (classic) x-dead-letter-exchange='acemq.dlx' x-dead-letter-routing-key='in.high.dlq'" in text
    assert "binding   in.low <- acemq.retry on 'in.low'" in text
    assert "x-max-priority" not in text


def test_a_lane_may_be_bound_to_a_key_of_its_own() -> None:
    topology = Topology().exchange("x", "topic").queue("in", priorities="lanes").bind("in.high", "x", "*.urgent")
    topology.validate()


@pytest.mark.parametrize(
    ("topology", "named"),
    [
        (Topology().queue("in", priorities="lanes", exclusive=True), "exclusive=True"),
        (Topology().queue("in", priorities="lanes", ordered=True), "ordered=True"),
        (Topology(queues=(Queue("in", type="stream", priorities="lanes"),)), "type='stream'"),
        (Topology().queue("in", priorities="lanes").queue("in"), "'in' is described twice"),
        (Topology().queue("in", priorities="lanes").queue("in.high", type="classic"), "'in.high' is described twice"),
        (Topology().queue("n" * 252, priorities="lanes"), "255 are allowed"),
    ],
    ids=["exclusive", "ordered", "stream", "with and without", "a lane otherwise", "too long a name"],
)
def test_what_lanes_cannot_be_is_one_problem_named(topology: Topology, named: str) -> None:
    with pytest.raises(TopologyError, match=named) as found:
        topology.validate()
    assert named in str(found.value)


async def test_who_asks_of_a_queue_together_asks_once_and_holds_up_no_other() -> None:
    asked, answer = list[str](), asyncio.Event()

    async def exists(name: str) -> bool:
        asked.append(name)
        if name == "slow.high":
            await answer.wait()
        return True

    known = KnownLanes(exists, SYSTEM)
    waiting = [asyncio.create_task(known.has("slow")) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(known.has("quick"), 1)
    answer.set()
    assert await asyncio.gather(*waiting) == [True, True, True]
    assert asked == ["slow.high", "quick.high"]
