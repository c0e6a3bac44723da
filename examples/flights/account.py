"""Where every flight is at one moment, and whether it is right: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from acemq import AceMQ, PipelineCounters, RunningPipeline
from examples.flights.flights import Departure, Desk, Row


@dataclass(frozen=True)
class Sums:
    recorded: int
    ended_early: int
    dead: int


@dataclass(frozen=True)
class DeadLetter:
    departure: Departure
    reason: str
    """As it stands on the message."""
    attempt: int


@dataclass(frozen=True)
class Step:
    ran: int
    """By its own count."""
    waiting: int
    """This and the next two by the broker's."""
    dead: int
    parked: int


@dataclass(frozen=True)
class Account:
    flights: Counter[str]
    """Of the file, by key."""
    recorded: Counter[str]
    ended_early: Counter[str]
    dead_letters: Sequence[DeadLetter]
    steps: Mapping[str, Step]
    counters: PipelineCounters
    goes_on: bool = False
    """An earlier run of the program has done a part, which the counters of this one know nothing of."""

    def sums(self, expected: Sums) -> Iterator[tuple[str, int, int]]:
        """What is counted, how many were expected, how many there are."""
        every = expected.recorded + expected.ended_early + expected.dead
        yield "departures in the file", every, self.flights.total()
        yield "recorded", expected.recorded, self.recorded.total()
        yield "ended early: cancelled", expected.ended_early, self.ended_early.total()
        yield "dead letters", expected.dead, len(self.dead_letters)
        yield "runs of parse", every, self.steps["parse"].ran

    def faults(self, expected: Sums) -> Iterator[str]:
        """A line for each thing that is wrong."""
        for what, wanted, found in self.sums(expected):
            if found != wanted:
                yield f"{what}: {found:,}, expected {wanted:,}"

        dead = Counter(letter.departure.key for letter in self.dead_letters)
        once, seen = Counter(set(self.flights)), self.recorded + self.ended_early + dead
        yield from _named("missing", once - seen)
        yield from _named("twice, or not from the file", seen - once)

        for letter in self.dead_letters:
            said = letter.departure.key in letter.reason and letter.departure.destination in letter.reason
            if not said or letter.attempt != 1:
                yield f"dead letter of another kind, after {letter.attempt} attempts: {letter.reason}"
        for name, step in self.steps.items():
            if (step.waiting, step.dead, step.parked) != (0, len(self.dead_letters) if name == "enrich" else 0, 0):
                yield f"left at step {name}: {step.waiting:,} waiting, {step.dead:,} dead, {step.parked:,} parked"
        counted = (self.counters.completed, self.counters.ended_early)
        if not self.goes_on and counted != (self.recorded.total(), self.ended_early.total()):
            yield f"the pipeline itself has counted otherwise: {self.counters}"


def _named(what: str, flights: Counter[str]) -> Iterator[str]:
    if flights:
        first = sorted(flights)[:3]
        yield f"{what}: {flights.total():,}, {', '.join(first)}{' …' if len(flights) > len(first) else ''}"


async def take_stock(
    mq: AceMQ, running: RunningPipeline[Row, Any], desk: Desk, rows: Sequence[Row], goes_on: bool = False
) -> Account:
    """Changes nothing. The dead letters are those of `enrich`; there should be no others."""
    dead_letters = await look_at(mq, dead_letters_of(running, "enrich"))
    held: dict[str, list[int]] = {}
    for name in running.steps:
        queue = running.queue_for(name)
        held[name] = [(await mq.depth(queue + kind)).ready for kind in ("", ".dlq", ".parked")]
    runs = {"parse": desk.parsed, "enrich": desk.enriched, "record": desk.recorded}
    return Account(
        flights=Counter(row.key for row in rows),
        recorded=desk.recorded.copy(),
        ended_early=desk.cancelled.copy(),
        dead_letters=dead_letters,
        steps={name: Step(runs[name].total(), *counts) for name, counts in held.items()},
        counters=running.counters,
        goes_on=goes_on,
    )


async def look_at(mq: AceMQ, queue: str) -> list[DeadLetter]:
    """Take the dead letters in hand, read them, give them back."""
    held = await mq.pull_many(queue, Departure, most=1_000)
    letters = [
        DeadLetter(letter.payload, (letter.failure.text or "") if letter.failure else "", letter.attempt)
        for letter in held
    ]
    for letter in held:
        await letter.release()
    for _ in range(500):  # five seconds at most: RabbitMQ does not say when a message that was given back is there
        if (await mq.depth(queue)).ready >= len(held):
            break
        await asyncio.sleep(0.01)
    return letters


def dead_letters_of(running: RunningPipeline[Any, Any], step: str) -> str:
    return f"{running.queue_for(step)}.dlq"
