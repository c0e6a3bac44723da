"""The command line in a real terminal: it asks, shows a bar, and ends cleanly when Ctrl-C is pressed."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from acemq import AceMQ
from acemq.cli.running import ExitCode
from tests.cli import screens
from tests.cli.terminal import CTRL_C, Pty
from tests.foreign.client import Foreign
from tests.services import CannotBeHad, RabbitMQ
from tests.waiting import until, until_async

SCREENS = Path(__file__).parents[2] / "docs" / "screens"


@pytest.fixture
def foreign(rabbit_url: str) -> Iterator[Foreign]:
    with Foreign(rabbit_url) as foreign:
        yield foreign


class Open(Protocol):
    def __call__(self, *words: str, url: str = ...) -> Pty: ...


@pytest.fixture
def terminal(rabbit_url: str, tmp_path: Path) -> Iterator[Open]:
    """`acemq` with these words, in a terminal."""
    with ExitStack() as opened:

        def open(*words: str, url: str = rabbit_url) -> Pty:
            return opened.enter_context(Pty(*words, url=url, output=tmp_path / "output"))

        yield open


@pytest.fixture
async def many(mq: AceMQ, queue: str) -> str:
    """Two thousand dead letters."""
    await mq.send_many(f"{queue}.dlq", range(2_000))
    return f"{queue}.dlq"


@pytest.mark.parametrize(("answer", "code", "moved"), [("y", ExitCode.DONE, 3), ("n", ExitCode.REFUSED, 0)])
async def test_at_a_terminal_it_asks_and_does_what_is_answered(
    terminal: Open, foreign: Foreign, queue: str, dead: str, answer: str, code: int, moved: int
) -> None:
    shown = terminal("replay", dead)
    shown.shows(f"Replay the 3 messages of {dead} into {queue}? [y/N]: ")
    assert foreign.depth(dead) == 3
    shown.press(f"{answer}\n")
    assert shown.ended() == code, shown.output
    assert (foreign.depth(queue), foreign.depth(dead)) == (moved, 3 - moved)


async def test_ctrl_c_at_the_question_does_nothing(terminal: Open, foreign: Foreign, queue: str, dead: str) -> None:
    shown = terminal("replay", dead)
    shown.shows("[y/N]: ")
    shown.press(CTRL_C)
    assert shown.ended() == ExitCode.INTERRUPTED, shown.output
    assert "Traceback" not in shown.output
    assert (foreign.depth(queue), foreign.depth(dead)) == (0, 3)


@pytest.mark.parametrize("more", [(), ("--batch", "20"), ("--rate", "40"), ("--where", "body~1")], ids=" ".join)
async def test_a_replay_interrupted_by_sigint_counts_what_a_foreign_client_finds(
    terminal: Open, foreign: Foreign, mq: AceMQ, queue: str, many: str, more: tuple[str, ...]
) -> None:
    every = [letter.id for letter in foreign.look(many)]

    def is_back() -> bool:
        return foreign.depth(many) == 2_000

    await until(is_back)
    shown = terminal("replay", many, "--yes", *more)
    shown.shows("━")
    shown.shows("/2000")

    def something_has_moved() -> bool:
        return foreign.depth(queue) >= 3

    await until(something_has_moved)
    shown.press(CTRL_C)
    assert shown.ended() == ExitCode.PARTLY, shown.output
    assert "Traceback" not in shown.output
    found = re.search(r"(\d+) of (\d+) replayed into .*; (\d+) put back; stopped: (\w+)", shown.output)
    assert found is not None, shown.output
    replayed, looked_at, put_back = int(found[1]), int(found[2]), int(found[3])
    assert replayed + put_back == looked_at

    def are_all_back() -> bool:  # the broker takes its time to sort back in what was given back
        return foreign.depth(queue) + foreign.depth(many) >= 2_000

    await until(are_all_back)
    gone, left = [letter.id for letter in foreign.look(queue)], [letter.id for letter in foreign.look(many)]
    assert (len(gone), len(left)) == (replayed, 2_000 - replayed)
    assert left == [id for id in every if id not in gone], "what stayed keeps its order"
    assert found[4] == "cancelled"
    assert "may be in both queues" not in shown.output


async def test_ctrl_c_while_it_dials_ends_at_once(terminal: Open) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"amqp://127.0.0.1:{silent.getsockname()[1]}"
        shown = terminal("health", "--timeout", "60s", url=url)
        connection, _ = await asyncio.to_thread(silent.accept)
        with connection:
            shown.press(CTRL_C)
            assert shown.ended() == ExitCode.INTERRUPTED, shown.output
    assert "Traceback" not in shown.output


async def test_an_apply_interrupted_by_sigint_says_what_was_made(terminal: Open, foreign: Foreign, mq: AceMQ) -> None:
    shown = terminal("topology", "apply", "--topology", "tests.cli.shop:many", "--yes", "--json")
    try:
        await until_async(lambda: mq.exists("cli-many.20"), within=30)
        shown.press(CTRL_C)
        assert shown.ended() == ExitCode.PARTLY, shown.output
        assert "Traceback" not in shown.output
        found = json.loads(shown.output[shown.output.index("{") :])["found"]
        names = [f"cli-many.{number}" for number in range(300)]
        there = [name for name in names if await mq.exists(name)]
        assert there != names, "too late to be interrupted"
        assert [name for name in names if f"queue {name}" in found["made"]] == there
        assert [name for name in names if f"queue {name}" in found["missing"]] == names[len(there) :]
        assert len(found["unknown"]) == len(there), "bindings, which cannot be listed"
    finally:
        for name in (f"cli-many.{number}" for number in range(300)):
            foreign.delete(name)
        await mq.delete("cli-many", "exchange")


async def test_a_detail_that_does_not_fit_is_broken_into_lines_and_not_cut(terminal: Open) -> None:
    for more in ((), ("--wide",)):
        shown = terminal("doctor", "--topology", "tests.cli.shop:long", *more)
        assert shown.ended() == ExitCode.ATTENTION, shown.output
        (line,) = [number for number, line in enumerate(shown.output.splitlines()) if "cli-shop.long" in line]
        detail = shown.output.splitlines()[line:]
        assert ("makes it" in detail[0]) == bool(more)
        assert "is missing; `acemq topology apply` makes it" in " ".join(" ".join(detail).split())


@pytest.mark.timeout(120)
def test_the_screens_in_the_documentation_are_what_the_commands_show(rabbitmq: RabbitMQ) -> None:
    try:
        taken = dict(screens.take(rabbitmq))
    except CannotBeHad as reason:
        pytest.skip(str(reason))
    assert taken.keys() == {path.stem for path in SCREENS.glob("*.txt")}
    for name, screen in taken.items():
        assert _same_each_time(screen) == _same_each_time((SCREENS / f"{name}.txt").read_text()), name


def _same_each_time(screen: str) -> str:
    """Without times, ports and the name of the machine."""
    for pattern, instead in (
        (r"-:--:--", "0:00:00"),
        (r"\d+", "0"),
        (r"[━╸╺]+", "━"),
        (r"shipping@\S+", "shipping@host"),
        (r" +", " "),
    ):
        screen = re.sub(pattern, instead, screen)
    return screen
