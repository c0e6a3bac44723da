"""The main example, run as its readers run it."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import acemq
from examples.flights import tables
from examples.flights.flights import Row
from examples.flights.ledger import Kept, by_aircraft
from tests.secret import assert_unprinted
from tests.services import RabbitMQ

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "flights" / "data"
FLIGHTS, MISSING_AIRPORTS = "flights-2013-01.csv", "missing-airports.csv"

REASON = re.compile(
    r"the handler reported an unprocessable message: \w\w \d+ of 2013-01-0[12] flies to (?P<code>[A-Z]{3}), "
    r"which the airport table lacks; add (?P=code) to it, then replay the dead letters"
)

HALT = re.compile(
    r"partition 7 of 'aircraft' is halted by message [0-9a-f-]{36} \(key 'N730MQ'\): "
    r"N730MQ is grounded and cannot have flown MQ 4573 of 2013-01-01\. Go on with resume\(7\)"
)

Spoilt = Callable[[str, Callable[[list[str]], list[str]]], Path]


@pytest.fixture
def spoilt(tmp_path: Path) -> Spoilt:
    """A copy of the data with the lines of one file changed."""

    def spoil(file: str, change: Callable[[list[str]], list[str]]) -> Path:
        data = Path(shutil.copytree(DATA, tmp_path / "data"))
        lines = (data / file).read_text().splitlines(keepends=True)
        (data / file).write_text("".join(change(lines)))
        return data

    return spoil


def test_every_departure_is_recorded_ended_early_or_dead_and_replay_brings_the_dead_back() -> None:
    expect_the_whole_story(run())


@pytest.mark.timeout(120)
async def test_the_very_same_on_rabbitmq_where_an_earlier_run_left_messages(rabbitmq: RabbitMQ) -> None:
    async with acemq.connect(rabbitmq.url) as mq:
        await mq.declare(acemq.Topology().queue("flights.parse").queue("flights.enrich.dlq", type="classic"))
        for queue in ("flights.parse", "flights.enrich.dlq"):
            await mq.send_many(queue, ["left behind"] * 3)
    done = await asyncio.to_thread(run, url=rabbitmq.url)
    expect_the_whole_story(done)
    assert "Queues of an earlier run, now removed: 2." in done.stdout


def test_a_departure_too_few_is_exit_code_1(spoilt: Spoilt) -> None:
    done = run("--data", str(spoilt(FLIGHTS, lambda lines: lines[:-1])))
    assert done.returncode == 1
    assert "departures in the file: 1,784, expected 1,785" in done.stderr


def test_a_departure_handled_twice_is_exit_code_1_though_the_sums_are_right(spoilt: Spoilt) -> None:
    # The first line once more in the place of another flight that was recorded.
    done = run("--data", str(spoilt(FLIGHTS, lambda lines: [*lines[:2], lines[1], *lines[3:]])))
    assert done.returncode == 1
    assert done.stderr == "Wrong:\ntwice, or not from the file: 1, UA 1545 of 2013-01-01\n"


def test_dead_letters_that_fail_again_are_exit_code_1(spoilt: Spoilt) -> None:
    done = run("--data", str(spoilt(MISSING_AIRPORTS, lambda lines: [line for line in lines if "PSE" not in line])))
    assert done.returncode == 1
    assert "recorded: 1,771, expected 1,773" in done.stderr
    assert "dead letters: 2, expected 0" in done.stderr


def test_at_the_time_limit_it_names_what_is_missing_with_exit_code_1() -> None:
    done = run("--limit", "0")
    assert done.returncode == 1
    assert "Not done after 0 s." in done.stdout
    assert re.search(r"^missing: [\d,]+, \w\w \d+ of 2013-01-0[12], ", done.stderr, re.MULTILINE)


def test_a_bad_url_is_one_line_and_exit_code_1_and_shows_no_password() -> None:
    done = run(url="amqp://user:secret@localhost:no-port")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


def test_interrupting_it_ends_it_in_order() -> None:
    with subprocess.Popen(
        command(), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("The messages are in ")
        assert child.stdout.readline().startswith("Connected to sqlite:///")
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=20)
    assert (child.returncode, told) == (130, "Stopped.\n")


ROWS = [Row(**line) for line in tables.read(DATA / FLIGHTS)]
"""Of the file, as the ledger is sent them."""


def kept(change: Callable[[dict[str, list[str]]], None], **otherwise: Any) -> Kept:
    """What a right ledger holds, but for `change`."""
    applied = by_aircraft((row.tailnum, row.key) for row in ROWS if row.tailnum != "NA")
    before = applied["N730MQ"][:3]
    change(applied)
    facts: dict[str, Any] = {
        "refused": [f"{row.key} has no tail number" for row in ROWS if row.tailnum == "NA"],
        "halted": "",
        "before_release": before,
        "applied": applied,
        "repeated": 0,
        "by_process": {},
    }
    return Kept(**facts | otherwise)


def test_a_ledger_is_right_only_if_each_aircraft_has_its_flights_in_order() -> None:
    assert not list(kept(lambda applied: None).faults(ROWS))
    for change in (
        lambda applied: applied["N730MQ"].reverse(),
        lambda applied: applied["N730MQ"].pop(),
        lambda applied: applied.pop("N304JB"),
    ):
        (fault,) = kept(change).faults(ROWS)
        assert "expected" in fault
    assert list(kept(lambda applied: None, refused=[]).faults(ROWS))
    assert list(kept(lambda applied: None, before_release=[]).faults(ROWS))


def test_stopped_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "again.db"))
    for least in (200, 900):
        with subprocess.Popen(command(*file), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as child:
            log = tmp_path / "again.log"
            deadline = time.monotonic() + 30
            while not log.exists() or len(log.read_bytes().splitlines()) < least:
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=20)
    done = run(*file)
    expect_the_whole_story(done)
    assert "An earlier run was stopped" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_on_memory_nothing_is_left(tmp_path: Path) -> None:
    expect_the_whole_story(run(url="memory://"))


def command(*arguments: str) -> list[str]:
    file = () if "--file" in arguments else ("--file", str(Path(tempfile.mkdtemp(prefix="acemq-demo-")) / "demo.db"))
    return [sys.executable, "-m", "examples.flights", *file, *arguments]


def environment(url: str = "") -> dict[str, str]:
    return os.environ | {"ACEMQ_URL": url}


def run(*arguments: str, url: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env=environment(url), capture_output=True, text=True, timeout=100, check=False
    )
    assert_unprinted(done.stdout + done.stderr, "the example")
    return done


def expect_the_whole_story(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    sent, replayed = lines_of(done.stdout, "1. "), lines_of(done.stdout, "2. ")
    for line in (
        "departures in the file 1,785 1,785 right",
        "recorded 1,721 1,721 right",
        "ended early: cancelled 12 12 right",
        "dead letters 52 52 right",
        "parse 1,785 0 0 0",
        "enrich 1,773 0 52 0",
        "record 1,721 0 0 0",
        *("SJU 40", "BQN 6", "STT 4", "PSE 2"),
    ):
        assert line in sent
    for line in (
        "departures in the file 1,785 1,785 right",
        "recorded 1,773 1,773 right",
        "ended early: cancelled 12 12 right",
        "dead letters 0 0 right",
        "parse 1,785 0 0 0",  # it did not run again; enrich did, for the 52
        "enrich 1,825 0 0 0",
        "record 1,773 0 0 0",
    ):
        assert line in replayed
    assert REASON.search(done.stdout), done.stdout
    kept = lines_of(done.stdout, "3. ")
    assert "aircraft in order 1,057" in kept
    assert "refused at the send 2" in kept
    assert len([line for line in kept if line.startswith("applied by process")]) == 2
    assert sum(line.endswith("has no tail number; so the message has no key") for line in kept) == 2
    assert HALT.search(done.stdout), done.stdout


def lines_of(output: str, stage: str) -> list[str]:
    """What is printed from this heading to the next bar, in single spaces."""
    after = output.partition(f"\n{stage}")[2].partition("━")[0]
    return [" ".join(line.split()) for line in after.splitlines()]
