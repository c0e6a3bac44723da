"""1,785 departures from New York go through a pipeline. 52 of them fail, and come back after the repair.

    make demo                                  no server: the broker is a file; stopped and begun again, it goes on
    ACEMQ_URL=amqp://localhost make demo       the very same on RabbitMQ
    ACEMQ_URL=memory:// make demo              the very same in memory

Then two processes keep a ledger of each aircraft's flights, in order; one of them is killed.

Read on from `demo()`. `flights.py` has the three steps, `account.py` the sums, `ledger.py` the ledger, `report.py`
shows them, and `logbook.py` is what a run leaves for the next.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import acemq
from acemq import AceMQ, AcemqError, Pipeline, RetryPolicy, RunningPipeline
from examples.flights import ledger, report, tables
from examples.flights.account import Sums, dead_letters_of, take_stock
from examples.flights.flights import Desk, Row, UnknownAirport
from examples.flights.logbook import Logbook, Sender, log_of, sender_to

FIRST = Sums(recorded=1_721, ended_early=12, dead=52)
AFTER_REPLAY = Sums(recorded=1_773, ended_early=12, dead=0)

WINDOW = 100
"""Departures that are sent at once."""
FILE = "sqlite:///"


async def demo(url: str, data: Path, limit: timedelta) -> None:
    """Raises `WrongSums` at the first stage that does not end as it should."""
    rows = [Row(**line) for line in tables.read(data / "flights-2013-01.csv")]
    airports = tables.read_airports(data / "airports.csv")
    database = Path(url.removeprefix(FILE)) if url.startswith(FILE) else None
    with closing(Logbook(database and log_of(database))) as logbook:
        desk = Desk(airports, logbook.note)
        logbook.read_into(desk)
        # Whoever writes in a file has it alone: while departures are sent, a step may have to wait its turn.
        patience = timedelta(seconds=60 if database else 10)
        async with acemq.connect(url, name="flights-demo", publish_timeout=patience) as mq:
            # What cannot be parsed, or is not in the table, would fail again: that goes to the dead letters at once.
            retry = RetryPolicy.fixed(3, timedelta(seconds=1)).except_for(UnknownAirport)
            flights = (
                mq.pipeline("flights", Row)
                .step("parse", desk.parse, retry=RetryPolicy.none())
                .step("enrich", desk.enrich, retry=retry)
                .step("record", desk.record)
            )
            async with sender_to(database) as sender:
                await run(mq, flights, desk, rows, airports, data, limit, sender, logbook)

    keyed = sum(tables.known(row.tailnum) is not None for row in rows)
    with tempfile.TemporaryDirectory() as folder, report.progress("ledger", keyed) as show:
        async with asyncio.timeout(limit.total_seconds()):
            kept = await ledger.run(url, rows, Path(folder), show)
    report.check_ledger("3. A ledger for each aircraft, in order", kept, rows)


async def run(
    mq: AceMQ,
    flights: Pipeline[Row, Any],
    desk: Desk,
    rows: Sequence[Row],
    airports: dict[str, tables.Airport],
    data: Path,
    limit: timedelta,
    sender: Sender | None,
    logbook: Logbook,
) -> None:
    goes_on = sender is not None and sender.sent > 0
    if goes_on:
        report.say(f"Connected to {mq.state.endpoint}. An earlier run was stopped, and this one goes on from there.")
    else:
        removed = await remove_queues(mq, flights)
        report.say(f"Connected to {mq.state.endpoint}. Queues of an earlier run, now removed: {removed}.")
    queues = [queue.name for queue in flights.topology().queues if queue.name.startswith("flights.")]
    waiting = sum([(await mq.depth(queue)).ready for queue in queues if queue.count(".") == 1]) if goes_on else 0

    async with flights.start() as running:
        before = 0
        if not logbook.replaying:
            dead = (await mq.depth(dead_letters_of(running, "enrich"))).ready
            earlier = desk.recorded.total() + desk.cancelled.total() + dead
            with report.progress("departures", len(rows)) as show:
                async with at_most(limit):
                    await send(running, rows, lambda done: show(done + earlier), sender)
                    await until_ended(running, len(rows) - earlier, lambda done: show(done + earlier))
            first = await take_stock(mq, running, desk, rows, goes_on)
            report.check("1. All departures sent", first, FIRST)
            report.show_dead_letters(first.dead_letters)
            logbook.note("replay", "all of them")
            before, waiting = ended(running), 0

        airports |= tables.read_airports(data / "missing-airports.csv")
        with report.progress("replayed", FIRST.dead) as show:
            async with at_most(limit):
                replayed = await mq.replay(dead_letters_of(running, "enrich")).run()
                await until_ended(running, waiting + replayed.replayed, show, since=before)

    # The pipeline is drained: what it had not accepted would be back in its queue, and be found there.
    last = await take_stock(mq, running, desk, rows, goes_on)
    report.check("2. Airports added, dead letters replayed", last, AFTER_REPLAY)
    report.show_arrivals(desk.arrivals.values(), tables.read_airlines(data / "airlines.csv"))


async def remove_queues(mq: AceMQ, pipeline: Pipeline[Any, Any]) -> int:
    """Of an earlier run: what lies in them would be counted in this one."""
    names = [queue.name + kind for queue in pipeline.topology().queues for kind in ("", ".dlq", ".parked")]
    return sum([await mq.delete(name) for name in names])


async def send(
    running: RunningPipeline[Row, Any], rows: Sequence[Row], show: Callable[[int], None], sender: Sender | None
) -> None:
    """Return once the broker has all of them; the steps are at work meanwhile."""
    for start in range(sender.sent if sender is not None else 0, len(rows), WINDOW):
        window = rows[start : start + WINDOW]
        if sender is not None:
            await sender.send(running, window)
        else:
            await asyncio.gather(*map(running.send, window))
        show(ended(running))


async def until_ended(
    running: RunningPipeline[Any, Any], runs: int, show: Callable[[int], None], *, since: int = 0
) -> None:
    while (done := ended(running) - since) < runs:
        show(done)
        await asyncio.sleep(0.02)
    show(done)


def ended(running: RunningPipeline[Any, Any]) -> int:
    """How often a run has ended, whichever way. One that failed and was replayed has ended twice."""
    counters = running.counters
    return counters.completed + counters.ended_early + counters.failed


@asynccontextmanager
async def at_most(limit: timedelta) -> AsyncGenerator[None, None]:
    """End the block at its limit. What is missing then, the check after it says."""
    try:
        async with asyncio.timeout(limit.total_seconds()):
            yield
    except TimeoutError:
        report.say(f"Not done after {limit.total_seconds():g} s.")


def remove_file(url: str) -> None:
    """Of a run that has come to its end; the next one begins anew."""
    if url.startswith(FILE):
        database = Path(url.removeprefix(FILE))
        for path in (
            database,
            *(database.with_name(database.name + end) for end in ("-wal", "-shm")),
            log_of(database),
        ):
            path.unlink(missing_ok=True)


def main() -> int:
    """The exit code: 1 when a sum is wrong or the broker fails."""
    parser = argparse.ArgumentParser(prog="python -m examples.flights", description="Environment: ACEMQ_URL.")
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("data"), help="folder of the CSV files")
    parser.add_argument(
        "--file", type=Path, default=Path("flights-demo.db"), help="where the messages are (%(default)s)"
    )
    parser.add_argument("--limit", type=float, default=60, help="seconds that a stage may take (60)")
    options = parser.parse_args()
    # The dead letters and the halt belong to the story, which tells them itself; each is logged otherwise.
    logging.getLogger("acemq").setLevel(logging.CRITICAL)
    began = time.monotonic()
    url = os.environ.get("ACEMQ_URL") or f"{FILE}{options.file}"
    if url.startswith(FILE):
        report.say(f"The messages are in {Path(url.removeprefix(FILE)).absolute()}")
    try:
        asyncio.run(demo(url, options.data, timedelta(seconds=options.limit)))
    except report.WrongSums as wrong:
        print(f"Wrong:\n{wrong}", file=sys.stderr)
        remove_file(url)
        return 1
    except (AcemqError, OSError) as error:  # a TimeoutError is an OSError
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130
    remove_file(url)
    report.say(f"Nothing lost, nothing twice, in {time.monotonic() - began:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
