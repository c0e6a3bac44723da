"""Case T-011: one program under each profile. A handler sees the same, or the first use is refused by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, CapabilityError, Message, MovableClock, RetryPolicy, Topology
from acemq.transport import Outgoing, Settlement
from acemq.transports.memory import MemoryBroker, Profile

SHORT, LONG = timedelta(seconds=5), timedelta(minutes=20)

Call = tuple[str, str, float | None]
"""What the port was asked for: the queue of a publish or a verb, and with which delay."""

# How a retry of 5 s and one of 20 min, a message that expires and one that is sent for later look at the port.
EXPECTED: dict[str, tuple[Profile, list[Call], set[str]]] = {
    "FULL": (
        Profile.FULL,
        [
            ("settle", "requeue", 5.0),
            ("settle", "requeue", 1200.0),
            ("publish", "q.dlq", None),
            ("settle", "accept", 0.0),
        ],
        set(),
    ),
    "RABBITMQ": (
        Profile.RABBITMQ,
        [
            *(("publish", "q", None), ("settle", "accept", 0.0)),  # the wait of 5 s was spent in the consumer
            *(("publish", "q.retry.20m", None), ("settle", "accept", 0.0)),
            *(("publish", "q.dlq", None), ("settle", "accept", 0.0)),
        ],
        set(),  # what is sent for later goes over the ladder
    ),
    "BARE": (
        Profile.BARE,
        [
            *(("publish", "q", None), ("settle", "accept", 0.0)),
            *(("publish", "q", None), ("settle", "accept", 0.0)),
            *(("publish", "q.dlq", None), ("settle", "accept", 0.0)),
        ],
        {"delay"},
    ),
}


def watch(broker: MemoryBroker) -> list[Call]:
    """Everything that is published and settled from now on."""
    calls: list[Call] = []

    def note(subject: Any) -> bool:
        match subject:
            case Outgoing():
                delay = None if subject.delay is None else subject.delay.total_seconds()
                calls.append(("publish", subject.routing_key, delay))
            case Settlement():
                calls.append(("settle", subject.verb.value, subject.delay.total_seconds()))
            case _:
                pass
        return False

    broker.faults.next("publish", "fail", match=note)  # faults that are asked and never take effect
    broker.faults.next("settle", "fail", match=note)
    return calls


async def later(mq: AceMQ, refused: set[str]) -> None:
    if "delay" in refused:
        with pytest.raises(CapabilityError, match="delay"):
            await mq.send("later", 1, delay=timedelta(hours=2))
    else:
        await mq.scheduler()  # which moves it on, where there is a ladder
        await mq.send("later", 1, delay=timedelta(hours=2))


@pytest.mark.parametrize("profile", EXPECTED)
async def test_t011_a_handler_sees_the_same_under_each_profile_and_the_port_what_the_table_says(
    name: str, profile: str
) -> None:
    which, expected, refused = EXPECTED[profile]
    clock = MovableClock()
    broker = MemoryBroker.named(name, clock=clock, profile=which)
    seen: list[tuple[int, float]] = []
    others: list[str] = []

    async def fail(message: Message[int]) -> None:
        seen.append((message.attempt, clock.monotonic() - began))
        raise ValueError("boom")

    policy = RetryPolicy.delays(SHORT, LONG)
    async with acemq.connect(f"memory://{broker.name}", clock=clock) as mq:
        for queue in ("q", "later", "perishable"):
            await mq.declare(Topology().queue(queue, type="classic"))
        async with (
            mq.consume("q", int, fail, retry=policy),
            mq.consume("later", int, lambda message: others.append("later")),
        ):
            calls = watch(broker)
            began = clock.monotonic()
            await mq.send("q", 1)
            await clock.advance(timedelta(minutes=21))
            assert calls == [("publish", "q", None), *expected]
            await later(mq, refused)
            await mq.send("perishable", 1, expires_in=timedelta(minutes=1))
            await clock.advance(timedelta(hours=2))
        async with mq.consume("perishable", int, lambda message: others.append("perishable")):
            await clock.advance(timedelta(seconds=1))
    assert [(attempt, round(at, 3)) for attempt, at in seen] == [(1, 0), (2, 5), (3, 1205)]
    assert others == ([] if refused else ["later"]), "and what has expired is handled nowhere"
