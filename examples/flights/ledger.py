"""Each aircraft's departures, applied in order by two processes of which one is killed half-way.

`keep` is what a process does, and `python -m examples.flights.ledger FOLDER` such a process. `run` is the story: it
sends the rows, kills, waits for the aircraft that is grounded, releases it, and takes stock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

import acemq
from acemq import AceMQ, BatchPublishError, Diagnostic, Message, Ordered, PartitionFailure
from examples.flights.flights import Row
from examples.flights.tables import known

PARTITIONS = 8
GROUNDED = "MQ 4573 of 2013-01-01"
"""The fourth of seven flights of N730MQ. It cannot be applied until somebody has released the aircraft."""
WORK = 0.002
"""Seconds for one row."""


class Grounded(Exception):
    def __init__(self, row: Row) -> None:
        super().__init__(f"{row.tailnum} is grounded and cannot have flown {row.key}")


class Entry(NamedTuple):
    what: str
    """applied or halted"""
    process: str
    aircraft: str
    text: str
    """The flight, or why its partition stands."""


class Journal:
    """The ledger itself: a file in which each process appends a line at a time."""

    def __init__(self, folder: Path, process: str = "") -> None:
        self._path, self._grounded, self._process = folder / "ledger", folder / "grounded", process
        self._path.touch()

    def write(self, what: str, aircraft: str, text: str) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{what}\t{self._process}\t{aircraft}\t{text}\n".encode())
        os.close(file)

    def read(self) -> list[Entry]:
        whole = self._path.read_text().rpartition("\n")[0]  # the last line may be there in part
        return [Entry(*line.split("\t")) for line in whole.splitlines()]

    def applied(self) -> list[tuple[str, str]]:
        """Aircraft and flight, as they were applied; a flight may be there twice."""
        return [(entry.aircraft, entry.text) for entry in self.read() if entry.what == "applied"]

    def halts(self) -> list[str]:
        return [entry.text for entry in self.read() if entry.what == "halted"]

    def ground(self) -> None:
        self._grounded.touch()

    def release(self) -> None:
        self._grounded.unlink()

    @property
    def is_grounded(self) -> bool:
        return self._grounded.exists()


# What a process does


def described(mq: AceMQ) -> Ordered[Row]:
    return (
        mq.ordered("aircraft", Row)
        .partitions(PARTITIONS)
        .keyed_by(aircraft_of)
        .on_failure(PartitionFailure.STOP, attempts=2, delay=timedelta(milliseconds=50))
        .sharing(at_most=PARTITIONS // 2, take_over_after=timedelta(seconds=1))
    )


def aircraft_of(row: Row) -> str:
    tail_number = known(row.tailnum)
    if tail_number is None:
        raise ValueError(f"{row.key} has no tail number")
    return tail_number


async def keep(url: str, journal: Journal) -> None:
    """Until it is cancelled or killed."""

    async def apply(message: Message[Row]) -> None:
        row = message.payload
        await asyncio.sleep(WORK)  # the work itself
        if journal.is_grounded and row.key == GROUNDED:
            raise Grounded(row)
        journal.write("applied", row.tailnum, row.key)

    def told(diagnostic: Diagnostic) -> None:
        if diagnostic.name == "acemq.partition.halted":
            journal.write("halted", "", diagnostic.message)

    async with acemq.connect(url, name="ledger", on_diagnostic=told) as mq:
        aircraft = await described(mq).declare()
        async with aircraft.consume(apply):
            while True:
                if not journal.is_grounded:
                    aircraft.resume()  # whatever stands still; in a real service an operator's command
                await asyncio.sleep(0.05)


class Process(Protocol):
    async def kill(self) -> None: ...


class OfItsOwn:
    """A process that ends when it is killed, and with this one."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    async def start(url: str, folder: Path) -> Process:
        return OfItsOwn(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "examples.flights.ledger", str(folder)),
                stdin=asyncio.subprocess.PIPE,
                env=os.environ | {"ACEMQ_URL": url},
            )
        )

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


class InThisOne:
    """What stands for a process where the broker is in this one."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    @staticmethod
    async def start(url: str, folder: Path, process: str) -> Process:
        return InThisOne(asyncio.create_task(keep(url, Journal(folder, process))))

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


# The story


@dataclass(frozen=True)
class Kept:
    refused: Sequence[str]
    """Why, one for each row without an aircraft."""
    halted: str
    before_release: Sequence[str]
    """Flights of the aircraft that was grounded."""
    applied: Mapping[str, Sequence[str]]
    """By aircraft, each flight once, in the order in which it was first applied."""
    repeated: int
    """In hand when its process was killed."""
    by_process: Mapping[str, int]

    def faults(self, rows: Sequence[Row]) -> Iterator[str]:
        """A line for each thing that is wrong."""
        wanted = by_aircraft((row.tailnum, row.key) for row in rows if known(row.tailnum))
        for aircraft, flights in wanted.items():
            found = self.applied.get(aircraft, ())
            if list(found) != flights:
                yield f"{aircraft} has {', '.join(found) or 'no flights'}; expected {', '.join(flights)}"
            if GROUNDED in flights and list(self.before_release) != flights[: flights.index(GROUNDED)]:
                yield f"{aircraft} went on while it was grounded: {', '.join(self.before_release)}"
        without = [row.key for row in rows if not known(row.tailnum)]
        named = [key for key, why in zip(without, self.refused, strict=False) if key in why]
        if named != without or len(self.refused) != len(without):
            yield f"refused: {'; '.join(self.refused) or 'nothing'}; expected {', '.join(without)}"


def by_aircraft(flights: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for aircraft, flight in flights:
        if flight not in found[aircraft]:
            found[aircraft].append(flight)
    return dict(found)


async def run(url: str, rows: Sequence[Row], folder: Path, show: Callable[[int], None]) -> Kept:
    """Ends when every row that has an aircraft is applied; `folder` holds the ledger."""
    in_memory = url.startswith("memory://")
    url = "memory://aircraft" if in_memory else url
    journal = Journal(folder)
    journal.ground()

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            show(len(set(journal.applied())))
            await asyncio.sleep(0.02)
        show(len(set(journal.applied())))

    async with AsyncExitStack() as running:
        mq = await running.enter_async_context(acemq.connect(url, name="ledger-desk"))
        await remove_queues(mq)
        aircraft = await described(mq).declare()
        processes: list[Process] = []
        for name in ("first", "second"):
            started = await (InThisOne.start(url, folder, name) if in_memory else OfItsOwn.start(url, folder))
            running.push_async_callback(started.kill)
            processes.append(started)

        refused: list[str] = []
        try:
            await aircraft.send_many(rows)
        except BatchPublishError as error:
            refused = [str(why) for why in error.results if isinstance(why, Exception)]
        sent = aircraft.counters.sent
        await until(lambda: len(journal.applied()) >= sent // 2)
        await processes[0].kill()

        # All goes on but for one partition, at whose head is the row that cannot be applied.
        (grounded,) = (row.tailnum for row in rows if row.key == GROUNDED)
        stands = aircraft.partition_of(grounded)
        others = {row.key for row in rows if known(row.tailnum) and aircraft.partition_of(row.tailnum) != stands}
        await until(lambda: others <= {flight for _, flight in journal.applied()} and bool(journal.halts()))
        before = by_aircraft(journal.applied())
        journal.release()
        await until(lambda: len(set(journal.applied())) == sent)
        while sum((await aircraft.depths()).values()):
            await asyncio.sleep(0.02)
    return Kept(
        refused=refused,
        halted=journal.halts()[-1],
        before_release=before.get(grounded, []),
        applied=by_aircraft(journal.applied()),
        repeated=len(journal.applied()) - sent,
        by_process=Counter(entry.process for entry in journal.read() if entry.what == "applied"),
    )


async def remove_queues(mq: AceMQ) -> None:
    """Of an earlier run: what lies in them would be applied in this one."""
    for queue in described(mq).topology().queues:
        for kind in ("", ".dlq", ".parked"):
            await mq.delete(queue.name + kind)


async def as_a_process(folder: Path) -> None:
    """Until standard input ends, as it does when whoever has started this one is gone."""
    orphaned = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, orphaned.set)
    keeping = asyncio.create_task(keep(os.environ["ACEMQ_URL"], Journal(folder, str(os.getpid()))))
    await asyncio.wait({keeping, asyncio.create_task(orphaned.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if keeping.done():
        keeping.result()


if __name__ == "__main__":
    logging.getLogger("acemq").setLevel(logging.CRITICAL)
    asyncio.run(as_a_process(Path(sys.argv[1])))
