"""The runner of the benchmarks: that it takes turns, divides rightly, and writes down what it should and no more."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest

from benches import __main__ as benches
from benches import c_client, costs, databases, imports, memory, million, outbox, page, patterns, peers, rabbitmq
from benches.order import SIZE, new_order, now, orders
from benches.results import Results, conclude, read, summary, write
from benches.rounds import Measure, Run, run_rounds
from benches.running import ROOT, Arrivals, Figures, RunFailed, Task, run_client, run_pair
from benches.targets import Target, judge

OF_PEER = Target(name="speed, of the peer", measure="speed", ours="we", peer="they", at_least=0.9)


def runs(*rates: tuple[float, float]) -> list[Run]:
    """A round for each pair, ours first."""
    return [
        Run("speed", candidate, number, {"rate": rate})
        for number, pair in enumerate(rates)
        for candidate, rate in zip(("we", "they"), pair, strict=True)
    ]


def test_a_verdict_is_the_median_of_the_ratios_of_each_round() -> None:
    verdict = judge(OF_PEER, runs((50, 100), (300, 100), (95, 100)))

    assert verdict.per_round == [0.5, 3.0, 0.95]
    assert (verdict.median, verdict.lowest, verdict.highest, verdict.met) == (0.95, 0.5, 3.0, True)


@pytest.mark.parametrize(("at_least", "at_most", "met"), [(2.0, None, True), (2.1, None, False), (None, 1.9, False)])
def test_a_target_has_a_floor_or_a_ceiling(at_least: float | None, at_most: float | None, met: bool) -> None:
    target = msgspec.structs.replace(OF_PEER, at_least=at_least, at_most=at_most)

    assert judge(target, runs((200, 100))).met is met


def test_without_a_peer_the_figure_itself_counts() -> None:
    target = Target(name="growth", measure="speed", ours="we", figure="rate", at_most=20)

    assert judge(target, runs((19, 1), (21, 1), (18, 1))).median == 19


def test_a_round_in_which_one_of_both_failed_does_not_count_and_no_round_is_not_met() -> None:
    assert judge(OF_PEER, [*runs((100, 100)), Run("speed", "we", 1, {"rate": 1})]).per_round == [1.0]
    assert judge(OF_PEER, []).met is False
    assert judge(msgspec.structs.replace(OF_PEER, at_least=None), []).met is None


def test_candidates_take_turns_and_a_failed_run_is_said_and_left_out() -> None:
    said: list[str] = []

    def runs_at(rate: float) -> Callable[[], Figures]:
        return lambda: {"rate": rate}

    def fails() -> Figures:
        raise RunFailed("no broker")

    speed = Measure(name="speed", candidates={"a": runs_at(1), "b": runs_at(2), "c": fails})
    once = Measure(name="once", candidates={"a": runs_at(3)}, most_rounds=1)
    done = list(run_rounds((speed, once), 2, said.append))

    assert [(run.round, run.measure, run.candidate) for run in done] == [
        (0, "speed", "a"),
        (0, "speed", "b"),
        (0, "once", "a"),
        (1, "speed", "b"),
        (1, "speed", "a"),
    ]
    assert [line for line in said if "FAILED" in line] == [
        "round 1, speed, c: FAILED, no broker",
        "round 2, speed, c: FAILED, no broker",
    ]


def test_a_client_that_fails_or_never_ends_gives_no_figures() -> None:
    with pytest.raises(RunFailed, match="ended with 1: "):
        run_client(["sh", "-c", "echo no use >&2; exit 1"], 5)
    with pytest.raises(RunFailed, match="no figures within"):
        run_client(["sleep", "5"], 0.1)


def test_of_a_pair_the_sender_starts_when_the_receiver_receives_and_the_figures_are_the_receivers(
    tmp_path: Path,
) -> None:
    sent = tmp_path / "sent"
    receiver = ["sh", "-c", f"until test -e {sent}; do :; done; echo '{{\"rate\": 7}}'"]
    sender = ["sh", "-c", f"echo > {sent}; echo '{{\"rate\": 9}}'"]

    assert run_pair(receiver, sender, lambda: None, 5) == {"rate": 7}


def test_of_a_pair_nothing_is_left_when_one_fails() -> None:
    def never() -> None:
        raise RunFailed("nobody receives")

    with pytest.raises(RunFailed, match="nobody receives"):
        run_pair(["sleep", "50"], ["true"], never, 5)
    with pytest.raises(RunFailed, match="ended with 1: no broker"):
        run_pair(["sleep", "50"], ["sh", "-c", "echo no broker >&2; exit 1"], lambda: None, 5)


async def test_arrivals_are_timed_from_the_sending() -> None:
    meter = Arrivals(count=100, limit=60)
    began = now() - 2_000_000
    for number in range(100):
        meter.hit(began + 10_000 * number)

    assert meter.over.is_set()
    figures = meter.figures()
    assert 45 < figures["rate"] < 51  # a hundred in the two seconds since the first was sent
    assert figures["p50_ms"] == pytest.approx(1_500, abs=100)
    assert figures["p99_ms"] == pytest.approx(2_000, abs=100)


def test_an_order_has_its_size_and_no_two_are_alike() -> None:
    written = [msgspec.json.encode(order) for order in orders(100)]

    assert {len(each) for each in written} == {SIZE} == {len(msgspec.json.encode(new_order()))}
    assert len(set(written)) > 1
    assert len(msgspec.json.encode(new_order(4096))) == 4096


def test_every_target_speaks_of_what_is_measured() -> None:
    for targets, measures in (
        (rabbitmq.TARGETS, rabbitmq.measures("amqp://localhost", c=Path("client"))),
        (costs.TARGETS, costs.measures("amqp://localhost")),
        (patterns.TARGETS, patterns.measures("amqp://localhost")),
        (outbox.TARGETS, outbox.measures("amqp://localhost", {outbox.POSTGRESQL: "", outbox.SQLITE: ""})),
        (peers.TARGETS, peers.measures("amqp://localhost")),
        (million.TARGETS, million.measures("amqp://localhost")),
        (databases.TARGETS, databases.measures(databases.Places({}, Path()))),
        (memory.TARGETS, memory.measures()),
        (imports.TARGETS, imports.measures()),
    ):
        candidates = {measure.name: {*measure.candidates} for measure in measures}
        for target in (each for each in targets if each.peer not in databases.left_out()):
            assert {target.ours, target.peer or target.ours} <= candidates[target.measure], target.name


def test_what_a_measure_asks_of_a_candidate_is_changed_by_what_the_candidate_is() -> None:
    task = Task(job="publish", queue="q", count=400, window=256)
    every = rabbitmq.candidates(Path("client"))

    assert every[rabbitmq.OURS].task(task) == task
    assert every[rabbitmq.UVLOOP].task(task).loop == "uvloop"
    assert (every[rabbitmq.MANY].task(task).window, every[rabbitmq.MANY].task(task).batch) == (1, 200)


def test_each_step_of_the_costs_has_all_promises_of_those_before_it() -> None:
    for measure in costs.measures("amqp://localhost"):
        tasks = [cast("partial[Figures]", run).args[0] for run in measure.candidates.values()]
        for before, task in pairwise(tasks):
            assert {*before.promises} < {*task.promises}
        assert {task.queue_type for task in tasks if "quorum" in task.promises} == {"quorum"}
        assert tasks[-1].queue_type == "quorum"


# The client in C


def test_the_client_in_c_is_told_everything_in_its_order() -> None:
    task = Task(job="publish", url="amqp://ada:pa%2Fss@host:5673", queue="q", count=3, window=2, limit=8)

    assert c_client.command(Path("c"), task) == [
        *("c", "publish", "host", "5673", "ada", "pa/ss", "q"),
        *("3", "256", "2", "200", "1", "0", "8"),
    ]


def test_without_a_compiler_or_the_headers_there_is_no_client_in_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(c_client.CannotBeBuilt, match="no C compiler"):
        c_client.build(tmp_path)

    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'fatal error: amqp.h: No such file' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(c_client.CannotBeBuilt, match="librabbitmq-dev"):
        c_client.build(tmp_path)


def test_what_is_left_out_is_said_and_nothing_is_judged_beside_it() -> None:
    of_c = msgspec.structs.replace(OF_PEER, name="speed, of C", peer="C")
    done = runs((95, 100))
    results = conclude(
        "rabbitmq", [OF_PEER, of_c], done, rounds=5, quick=False, left_out={"C": "there is no C compiler"}
    )

    assert [verdict.target for verdict in results.verdicts] == [OF_PEER]
    assert "C is left out: there is no C compiler" in summary(results)


# The pages


def test_the_page_says_when_there_are_no_results(tmp_path: Path) -> None:
    assert "no results" in page.benchmarks(tmp_path)
    assert "no results" in page.costs(tmp_path)


def test_the_page_shows_a_target_that_is_missed_and_who_is_left_out(tmp_path: Path) -> None:
    target = msgspec.structs.replace(OF_PEER, name="speed, of they")
    missing = {"C": "there is no C compiler"}
    write(conclude("rabbitmq", [target], runs((80, 100)), rounds=5, quick=False, left_out=missing), tmp_path)
    shown = page.benchmarks(tmp_path)

    assert "| speed | they | ≥ 0.9 | 0.8 | 0.8 – 0.8 | **no** |" in shown
    assert "| we | 80 |" in shown
    assert "**C** is left out: there is no C compiler." in shown


def test_the_page_of_costs_shows_what_each_step_leaves(tmp_path: Path) -> None:
    before, after = list(costs.STEPS[costs.CONSUME])[:2]
    done = [
        Run(costs.CONSUME, step, 0, {"rate": rate, "cpu_per_10k": 0.25}) for step, rate in ((before, 200), (after, 150))
    ]
    write(conclude("costs", costs.TARGETS, done, rounds=5, quick=False), tmp_path)

    assert f"| {before} | 200 | – | 0.25 |\n| + {after} | 150 | 0.75 | 0.25 |" in page.costs(tmp_path)


# From the processes to the file


def test_memory_runs_from_the_processes_to_the_file_which_tells_nothing_of_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    done = list(run_rounds(memory.measures(count=300), 1, said.append))
    results = conclude("memory", memory.TARGETS, done, rounds=1, quick=True)
    path = write(results, tmp_path)

    assert not [line for line in said if "FAILED" in line]
    assert {(run.measure, run.candidate) for run in done} == {
        (memory.THROUGH, "asyncio.Queue"),
        (memory.THROUGH, "acemq"),
        (memory.STANDING, "1,000 waiting"),
        (memory.STANDING, "100,000 waiting"),
        (memory.GROWTH, "acemq"),
    }
    assert all(run.figures["messages"] == 300 for run in done if run.measure != memory.GROWTH)
    assert all(verdict.median is not None for verdict in results.verdicts)

    text = path.read_text()
    assert read(path) == results
    assert {*json.loads(text)} == {*Results.__struct_fields__}
    assert str(ROOT) not in text
    assert socket.gethostname() not in text
    assert "memory transport, of a bare asyncio.Queue" in summary(results)
    assert "| memory transport, of a bare asyncio.Queue | asyncio.Queue | ≥ 0.03 |" in page.benchmarks(tmp_path)


def test_check_ends_with_1_when_a_target_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(rounds: int, quick: bool, only: str) -> Results:
        return conclude("memory", [OF_PEER], runs((1, 2)), rounds=rounds, quick=quick)

    monkeypatch.setitem(benches.RUN, "memory", missed)
    arguments = ["memory", "--quick", "--into", str(tmp_path)]

    assert benches.main(arguments) == 0
    assert benches.main([*arguments, "--check"]) == 1
    assert read(tmp_path / "memory.json").quick


def test_a_look_at_some_measures_judges_them_alone_and_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "HERE", tmp_path)
    monkeypatch.setattr(memory, "measures", lambda quick: (_measure("a"), _measure("b")))
    targets = [Target(name=each, measure=each, ours="we", at_least=1) for each in "ab"]
    monkeypatch.setitem(benches.RUN, "memory", benches._in_process("memory", memory.measures, targets))

    assert benches.main(["memory", "--only", "b"]) == 0
    (path,) = tmp_path.rglob("*.json")
    assert path.parent.name == "scratch"
    assert [verdict.target.name for verdict in read(path).verdicts] == ["b"]


def _measure(name: str) -> Measure:
    return Measure(name=name, candidates={"we": lambda: {"rate": 2.0}})


def test_an_unknown_suite_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benches.main(["redis"])
    known = "import, memory, rabbitmq, databases, ordered, patterns, outbox, costs, million, peers"
    assert f"unknown suite 'redis'; known: {known}" in capsys.readouterr().err
