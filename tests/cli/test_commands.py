"""What each command shows and does, how it ends, and what it leaves where it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from acemq import AceMQ, Topology, TopologyError
from acemq.cli.running import ExitCode
from tests.cli.conftest import Run
from tests.services import free_ports

ROOT = Path(__file__).parents[2]


async def ids(mq: AceMQ, queue: str) -> list[str]:
    """What is in a queue, in order; it is given back."""
    held = await mq.pull_many(queue, bytes, most=100)
    for each in held:
        await each.release()
    return [each.id for each in held]


# Looking


async def test_queues_shows_what_waits_and_what_was_set_aside(run: Run, queue: str, dead: str) -> None:
    shown = await run("queues", queue)
    assert shown.code == ExitCode.DONE
    assert re.search(rf"^{queue} +0 +3 +0$", shown.out, re.MULTILINE)
    told = (await run("queues", queue, "--json")).json
    assert (told["acemq"], told["kind"], told["next"]) == (1, "queues", None)
    assert told["items"] == [{"queue": queue, "ready": 0, "dead": 3, "parked": 0}]


async def test_dlq_ls_shows_where_something_lies(run: Run, queue: str, dead: str) -> None:
    shown = await run("dlq", "ls", queue)
    assert re.search(rf"^{dead} +3  {queue}$", shown.out, re.MULTILINE)
    told = (await run("dlq", "ls", dead, "--json")).json
    assert told["items"] == [{"source": dead, "waiting": 3, "of": queue}]


async def test_dlq_ls_of_a_queue_that_never_set_anything_aside_says_so(run: Run, mq: AceMQ, name: str) -> None:
    await mq.declare(Topology().queue(name, type="classic"))
    shown = await run("dlq", "ls", name)
    assert (shown.code, "nothing was ever set aside" in shown.out) == (ExitCode.DONE, True)
    await mq.delete(name)


async def test_dlq_show_says_what_lies_there_and_why_and_leaves_it_there(run: Run, mq: AceMQ, dead: str) -> None:
    shown = await run("dlq", "show", dead, "--wide")
    assert shown.code == ExitCode.DONE
    for number in (1, 2, 3):
        line = rf"^ *{number} +o-{number} +order.placed +1 +0 +\d{{4}}.* +rejected +the handler rejected it: no street"
        assert re.search(line, shown.out, re.MULTILINE), shown.out
    told = (await run("dlq", "show", dead, "--most", "2", "--json")).json
    assert [each["id"] for each in told["items"]] == ["o-1", "o-2"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", told["items"][0]["failed_at"])
    assert await ids(mq, dead) == ["o-1", "o-2", "o-3"]


async def test_dlq_show_of_one_message_has_its_headers_and_body(run: Run, mq: AceMQ, dead: str) -> None:
    shown = await run("dlq", "show", dead, "o-2")
    assert '{\n  "order": 2\n}' in shown.out
    assert re.search(r"^x-tenant +other$", shown.out, re.MULTILINE)
    assert await ids(mq, dead) == ["o-1", "o-2", "o-3"]
    for unknown, text in (("o-9", "no message 'o-9' is among the first 3"), ("o-", "3 messages of")):
        refused = await run("dlq", "show", dead, unknown)
        assert (refused.code, text in refused.err) == (ExitCode.USAGE, True)


async def test_what_a_message_holds_does_not_steer_the_terminal(run: Run, mq: AceMQ, queue: str) -> None:
    evil = "\x1b]0;owned\x07\x1b[31mred"
    await mq.send(f"{queue}.dlq", evil, message_id="evil", headers={"x-note": evil})
    for words in (("dlq", "show", f"{queue}.dlq"), ("dlq", "show", f"{queue}.dlq", "evil")):
        shown = await run(*words)
        assert shown.code == ExitCode.DONE
        assert "\x1b" not in shown.out
        assert "\x07" not in shown.out


async def test_so_many_as_cannot_be_looked_at_are_refused_before_the_broker_is_dialled(run: Run) -> None:
    (port,) = free_ports(1)
    for words in (("--most", "0"), ("--most", "1001"), ("o-1", "--most", "0")):
        refused = await run("dlq", "show", "orders.dlq", *words, "--url", f"amqp://127.0.0.1:{port}/")
        assert (refused.code, f"most={words[-1]} must lie between 1 and 1,000" in refused.err) == (ExitCode.USAGE, True)


# Putting back


async def test_replay_puts_back_and_says_how_many(run: Run, mq: AceMQ, queue: str, dead: str) -> None:
    shown = await run("replay", dead, "--yes")
    assert shown.code == ExitCode.DONE
    assert f"3 of 3 replayed into {queue}; 0 put back; stopped: drained" in shown.out
    assert await ids(mq, queue) == ["o-1", "o-2", "o-3"]
    assert await ids(mq, dead) == []


async def test_replay_of_some_leaves_the_rest_in_its_order(run: Run, mq: AceMQ, queue: str, dead: str) -> None:
    told = (await run("replay", dead, "--where", "header.x-tenant=acme", "--limit", "1", "--yes", "--json")).json
    assert (told["kind"], told["affected"], told["skipped"]) == ("acted", 1, {})
    assert told["replay"]["stopped"] == "limit"
    assert isinstance(told["took"], float)
    assert await ids(mq, dead) == ["o-2", "o-3"]
    told = (
        await run("replay", dead, "--where", "header.x-tenant=acme", "--where", "error~STREET", "-y", "--json")
    ).json
    assert (told["affected"], told["skipped"]) == (1, {"put_back": 1})
    assert await ids(mq, queue) == ["o-1", "o-3"]


async def test_a_dry_run_asks_nobody_and_moves_nothing(run: Run, mq: AceMQ, queue: str, dead: str) -> None:
    shown = await run("replay", dead, "--where", "header.x-tenant=acme", "--dry-run")
    assert (shown.code, "2 of 3 would go into" in shown.out) == (ExitCode.DONE, True)
    assert (await ids(mq, dead), await ids(mq, queue)) == (["o-1", "o-2", "o-3"], [])


async def test_a_dry_run_says_that_it_needs_no_rate(run: Run, dead: str) -> None:
    shown = await run("replay", dead, "--rate", "0.1", "--dry-run")
    assert "--rate did not slow it down" in shown.out
    assert "--rate" not in (await run("replay", dead, "--dry-run")).out


async def test_one_is_told_as_one(run: Run, mq: AceMQ, queue: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cli import shop

    await mq.send(f"{queue}.dlq", 1)
    assert "Replay the 1 message of" in (await run("replay", f"{queue}.dlq")).err
    monkeypatch.setattr(shop, "topology", Topology().queue(queue, type="classic", dead_letter=True))
    found = await run("doctor", "--topology", "tests.cli.shop:topology")
    assert re.search(rf"^queue {queue} +look +1 dead letter, 0 parked", found.out, re.MULTILINE)
    monkeypatch.setattr(shop, "topology", Topology().queue("cli-no", type="classic"))
    asked = await run("topology", "apply", "--topology", "tests.cli.shop:topology")
    assert (asked.code, "Make what is missing, 1 object?" in asked.err) == (ExitCode.REFUSED, True)


async def test_where_nobody_can_be_asked_nothing_is_done_without_yes(
    run: Run, mq: AceMQ, queue: str, dead: str
) -> None:
    refused = await run("replay", dead)
    assert (refused.code, "add --yes" in refused.err) == (ExitCode.REFUSED, True)
    told = await run("replay", dead, "--json")
    assert json.loads(told.err)["error"] == "NotConfirmed"
    assert (await ids(mq, dead), await ids(mq, queue)) == (["o-1", "o-2", "o-3"], [])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--where", "colour=red"), "there is no field 'colour'"),
        (("--where", "rubbish"), "write FIELD=VALUE"),
        (("--into", "{dead}"), "onto itself"),
        (("--into", "nowhere-at-all"), "there is no queue 'nowhere-at-all' to replay into"),
        (("--limit", "-1"), "limit=-1"),
        (("--rate", "0"), "rate=0 must be more than 0"),
        (("--batch", "0"), "batch=0"),
        (("--within", "soon"), "is no length of time"),
    ],
)
async def test_a_replay_that_would_go_wrong_is_refused_and_nothing_moves(
    run: Run, mq: AceMQ, dead: str, words: tuple[str, ...], text: str
) -> None:
    refused = await run("replay", dead, "--yes", *(word.format(dead=dead) for word in words))
    assert refused.code == ExitCode.USAGE
    assert text in refused.err
    assert await ids(mq, dead) == ["o-1", "o-2", "o-3"]


@pytest.mark.parametrize(("option", "value"), [("--rate", "0"), ("--rate", "nan"), ("--batch", "1001")])
async def test_a_replay_that_cannot_be_is_refused_before_the_broker_is_dialled(
    run: Run, option: str, value: str
) -> None:
    (port,) = free_ports(1)
    refused = await run("replay", "orders.dlq", option, value, "--url", f"amqp://127.0.0.1:{port}/")
    assert (refused.code, f"{option[2:]}={value} must" in refused.err) == (ExitCode.USAGE, True), refused.err


async def test_a_source_without_a_known_suffix_needs_a_target(run: Run, queue: str) -> None:
    refused = await run("replay", queue, "--yes")
    assert (refused.code, "does not end in .dlq" in refused.err) == (ExitCode.USAGE, True)
    assert "--into" in refused.err


async def test_a_replay_that_stops_in_the_middle_shows_how_far_it_came(
    run: Run, mq: AceMQ, queue: str, dead: str
) -> None:
    full = f"{queue}.full"
    await mq.declare(Topology().queue(full, type="classic", max_length=2))
    stopped = await run("replay", dead, "--into", full, "--yes", "--json")
    assert stopped.code == ExitCode.PARTLY
    assert json.loads(stopped.err)["error"] == "ReplayError"
    assert (stopped.json["affected"], stopped.json["replay"]["in_doubt"]) == (2, 0)
    assert (await ids(mq, full), await ids(mq, dead)) == (["o-1", "o-2"], ["o-3"])
    await mq.delete(full)


# What is not there


@pytest.mark.parametrize(
    "words",
    [
        ("queues", "no-such-queue"),
        ("dlq", "ls", "no-such-queue"),
        ("dlq", "show", "no-such-queue.dlq"),
        ("replay", "no-such-queue.dlq", "--yes"),
    ],
    ids=" ".join,
)
async def test_an_unknown_queue_is_refused_by_name(run: Run, words: tuple[str, ...]) -> None:
    refused = await run(*words)
    assert refused.code == ExitCode.USAGE
    assert "no-such-queue" in refused.err
    assert "`acemq topology apply`" in refused.err, "which a person at a terminal can do"
    assert "declare" not in refused.err
    assert refused.out == ""


async def test_a_target_that_is_not_there_is_told_to_an_operator(run: Run, dead: str) -> None:
    refused = await run("replay", dead, "--into", "nowhere-at-all", "--yes")
    assert ("`acemq topology apply`" in refused.err, "declare" in refused.err) == (True, False)


@pytest.mark.parametrize("words", [("rewind",), ("dlq", "rewind"), ("queues", "--colour"), ("dlq", "show")])
async def test_an_unknown_command_option_or_missing_name_is_wrong_usage(run: Run, words: tuple[str, ...]) -> None:
    assert (await run(*words)).code == ExitCode.USAGE


async def test_who_names_no_queue_is_told_what_to_do(run: Run) -> None:
    refused = await run("queues")
    assert (refused.code, "--topology" in refused.err) == (ExitCode.USAGE, True)


async def test_a_broker_that_does_not_answer_is_a_code_of_its_own(run: Run) -> None:
    (port,) = free_ports(1)
    url = f"amqp://amy:secret@127.0.0.1:{port}/shop"
    for words in (("queues", "orders"), ("health",), ("doctor",), ("replay", "orders.dlq", "--yes")):
        for more in ((), ("--json",)):
            failed = await run(*words, "--url", url, "--timeout", "500ms", *more)
            assert failed.code == ExitCode.UNREACHABLE
            assert "secret" not in failed.out + failed.err
            assert f"127.0.0.1:{port}" in failed.out + failed.err


@pytest.mark.parametrize("url", ["kafka://amy:secret@h", "amqp://amy:secret@h?hartbeat=5", "amy:secret@h"])
async def test_a_wrong_url_is_refused_without_its_password(run: Run, url: str) -> None:
    for words in (("queues", "orders"), ("health",), ("topology", "plan", "--topology", "tests.cli.shop:topology")):
        refused = await run(*words, "--url", url)
        assert refused.code == ExitCode.USAGE
        assert "secret" not in refused.err


async def test_no_broker_named_says_where_it_may_be_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ACEMQ_URL")
    monkeypatch.chdir(tmp_path)
    refused = await run("health")
    assert (refused.code, "ACEMQ_URL" in refused.err, "[tool.acemq]" in refused.err) == (ExitCode.USAGE, True, True)


async def test_broker_and_topology_may_stand_in_pyproject(
    run: Run, rabbit_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("ACEMQ_URL")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.acemq]\nurl = "{rabbit_url}"\ntopology = "tests.cli.shop:topology"\n'
    )
    assert (await run("health")).code == ExitCode.DONE
    assert (await run("topology", "show")).code == ExitCode.DONE
    (tmp_path / "pyproject.toml").write_text("[tool.acemq]\nurl = 5\n")
    assert "must be text" in (await run("health")).err


# Topology


async def test_topology_show_needs_no_broker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACEMQ_URL")
    shown = await run("topology", "show", "--topology", "tests.cli.shop:topology")
    assert re.search(r"^queue +cli-shop.orders.dlq +classic$", shown.out, re.MULTILINE)
    told = (await run("topology", "show", "--topology", "tests.cli.shop:make", "--json")).json
    assert {each["name"] for each in told["items"]} >= {"cli-shop.orders", "acemq.dlx"}


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("shop", "must be module:name"),
        ("no_such_module:topology", "ModuleNotFoundError"),
        ("tests.cli.shop:nothing", "AttributeError"),
        ("tests.cli.shop:NUMBER", "is a int; a Topology is wanted"),
    ],
)
async def test_a_topology_that_cannot_be_had_is_refused(run: Run, where: str, text: str) -> None:
    refused = await run("topology", "plan", "--topology", where)
    assert (refused.code, text in refused.err) == (ExitCode.USAGE, True)


async def test_plan_and_apply_make_what_is_missing_once(run: Run, mq: AceMQ) -> None:
    shop = ("--topology", "tests.cli.shop:topology")
    planned = await run("topology", "plan", *shop)
    assert (planned.code, "missing" in planned.out) == (ExitCode.ATTENTION, True)
    assert (await run("topology", "apply", *shop)).code == ExitCode.REFUSED
    assert not await mq.exists("cli-shop.orders")
    try:
        made = await run("topology", "apply", *shop, "--yes", "--json")
        assert made.code == ExitCode.DONE
        created = {each["name"] for each in made.json["items"] if each["verdict"] == "created"}
        assert created >= {"cli-shop.orders", "cli-shop.orders.dlq", "cli-shop.orders.parked"}
        assert (await run("topology", "plan", *shop)).code == ExitCode.DONE
        again = await run("topology", "apply", *shop, "--json")  # nothing to make, so nothing to confirm
        assert {each["verdict"] for each in again.json["items"]} == {"present"}
        assert (await run("queues", *shop)).code == ExitCode.DONE
        assert (await run("doctor", *shop)).code in (ExitCode.DONE, ExitCode.ATTENTION)

        other = ("--topology", "tests.cli.shop:otherwise")
        assert (await run("topology", "plan", *other)).code == ExitCode.ATTENTION
        drifted = await run("topology", "apply", *other, "--yes")
        assert drifted.code == ExitCode.REFUSED
        assert "x-message-ttl" in drifted.err
        assert not await mq.exists("cli-shop.new")
    finally:
        for each in ("cli-shop.orders", "cli-shop.orders.dlq", "cli-shop.orders.parked"):
            await mq.delete(each)


# How it is


async def test_health_of_a_broker_that_answers(run: Run) -> None:
    shown = await run("health")
    assert (shown.code, "connection" in shown.out) == (ExitCode.DONE, True)
    assert (await run("health", "--json")).json["status"] == "up"


async def test_doctor_says_what_this_url_can_do(run: Run, rabbit_url: str) -> None:
    shown = await run("doctor")
    assert shown.code == ExitCode.DONE, shown.out
    assert re.search(r"^connection +ok +127\.0\.0\.1:\d+/, in [\d.]+ ms$", shown.out, re.MULTILINE)
    assert re.search(r"^exclusive consumers +yes$", shown.out, re.MULTILINE)
    told = (await run("doctor", "--json")).json
    assert (told["answered"], told["abilities"]["delivery"]) == (True, "at least once")


async def test_doctor_finds_what_is_missing_and_what_lies_set_aside(
    run: Run, mq: AceMQ, queue: str, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli import shop

    monkeypatch.setattr(shop, "topology", Topology().queue(queue, type="classic", dead_letter=True).queue("cli-no"))
    found = await run("doctor", "--topology", "tests.cli.shop:topology", "--wide")
    assert found.code == ExitCode.ATTENTION
    assert re.search(r"^queue cli-no +wrong +is missing", found.out, re.MULTILINE)
    assert re.search(rf"^queue {queue} +look +3 dead letters, 0 parked", found.out, re.MULTILINE)


# Stopped in the middle


async def test_an_apply_that_is_refused_in_the_middle_says_what_was_made(
    run: Run, mq: AceMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    from acemq.transports.rabbitmq import topology

    create, made = topology._create, 0

    async def refuses_the_third(*words: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise TopologyError("no more of them")
        return await create(*words)

    monkeypatch.setattr(topology, "_create", refuses_the_third)
    monkeypatch.setenv("CLI_MANY", "2")
    many = ("--topology", "tests.cli.shop:many", "--yes")
    try:
        for number, more in enumerate(((), ("--json",))):
            stopped = await run("topology", "apply", *many, *more)
            assert stopped.code == ExitCode.PARTLY
            assert "no more of them" in stopped.err
            assert await mq.exists("cli-many.0")
            assert not await mq.exists("cli-many.1")
            if number == 0:
                assert "made: exchange cli-many, queue cli-many.0; not made: queue cli-many.1" in stopped.err
                await mq.delete("cli-many.0")
                await mq.delete("cli-many", "exchange")
                made = 0
            else:
                told = json.loads(stopped.err)
                assert (told["error"], told["found"]["missing"][0]) == ("TopologyError", "queue cli-many.1")
        made = 2  # refused at once, with nothing made of what was missing
        refused = await run("topology", "apply", *many)
        assert (refused.code, "made:" in refused.err) == (ExitCode.USAGE, False)
    finally:
        await mq.delete("cli-many.0")
        await mq.delete("cli-many", "exchange")


# As a program


def command(*words: str, url: str = "", **streams: Any) -> subprocess.Popen[str]:
    """A process of its own."""
    environment = {**os.environ, "ACEMQ_URL": url or "amqp://127.0.0.1:1/"}
    python = [sys.executable, "-W", "error", "-m", "acemq.cli"]
    return subprocess.Popen([*python, *words], cwd=ROOT, env=environment, text=True, **streams)


SHOW = ("topology", "show", "--topology", "tests.cli.shop:many")


@pytest.mark.parametrize("more", [(), ("--json",)], ids=" ".join)
def test_whoever_reads_it_may_have_enough(more: tuple[str, ...]) -> None:
    """As `acemq … | head -1` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed, command(*SHOW, *more, stdout=closed, stderr=subprocess.PIPE) as ended:
        _, said = ended.communicate(timeout=30)
    assert (ended.returncode, said) == (ExitCode.CLOSED, "")


def test_whoever_reads_its_error_may_have_enough() -> None:
    """As `acemq … 2>&1 | head -0` does."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as closed, command("queues", "--url", "kafka://h", stdout=closed, stderr=closed) as ended:
        assert ended.wait(30) == ExitCode.CLOSED


@pytest.mark.parametrize("words", [("topology", "show"), ("doctor",)], ids=" ".join)
def test_what_is_logged_meanwhile_is_errors_only_and_does_not_steer_the_terminal(words: tuple[str, ...]) -> None:
    noisy = ("--topology", "tests.cli.shop:noisy")
    with command(*words, *noisy, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as ended:
        _, said = ended.communicate(timeout=30)
    assert "a warning" not in said
    assert "it went \\x1b[31mwrong" in said
    assert "LookupError: \\x1b]0;owned\\x07" in said
    assert "\x1b" not in said
    assert "\x07" not in said


async def test_programs_find_the_same_keys_for_ever(run: Run, queue: str, dead: str) -> None:
    """Keys are added, never taken away or renamed, while the first of them is 1."""
    shop = ("--topology", "tests.cli.shop:topology")
    for words, kind, keys in (
        (("queues", queue), "queues", "queue ready dead parked"),
        (("dlq", "ls", queue), "dlq", "source waiting of"),
        (
            ("dlq", "show", dead),
            "dlq.messages",
            "place id type attempt replays error how error_type failed_queue failed_at failed_by first_seen "
            "correlation_id content_type size headers body",
        ),
        (("topology", "show", *shop), "topology", "kind name type durable exclusive auto_delete arguments"),
        (("topology", "plan", *shop), "topology.plan", "verdict kind name argument wanted found note"),
        (("health",), "health", "name status detail"),
        (("doctor",), "doctor", "what verdict detail"),
    ):
        told = (await run(*words, "--json")).json
        assert {"acemq", "kind", "at", "items", "next"} <= told.keys()
        assert (told["acemq"], told["kind"]) == (1, kind)
        assert set(keys.split()) <= told["items"][0].keys()
    acted = (await run("replay", dead, "--dry-run", "--json")).json
    assert {"acemq", "kind", "at", "affected", "skipped", "took", "replay"} <= acted.keys()
    result = "source target looked_at replayed put_back stopped took dry last_error in_doubt"
    assert set(result.split()) <= acted["replay"].keys()


def test_without_its_extra_it_says_in_one_line_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from acemq.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == ExitCode.USAGE
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        'The command acemq needs an extra that is not installed. Install it: pip install "acemq[cli]"'
    ]


def test_the_library_does_not_import_what_only_the_command_needs() -> None:
    code = "import acemq, sys; print([m for m in ('typer', 'rich', 'acemq.cli', 'acemq.ops') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).parent / "acemq"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, env={**os.environ})
    assert re.fullmatch(r"acemq \d+\.\d+\.\d+\n", done.stdout)


def test_every_exit_code_is_reached_by_a_test() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [code.name for code in ExitCode if f"ExitCode.{code.name}" not in source] == []
