"""The runner of the benchmarks: that it takes turns, divides rightly, and writes down what it should and no more."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benches import __main__ as benches
from benches import imports, memory, page, rabbitmq
from benches.order import SIZE, new_order, orders
from benches.results import Results, conclude, read, summary, write
from benches.rounds import Measure, Run, run_rounds
from benches.running import ROOT, Figures, RunFailed, Task, run_client
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


def test_an_order_is_256_bytes_and_no_two_are_alike() -> None:
    written = [msgspec.json.encode(order) for order in orders(100)]

    assert {len(each) for each in written} == {SIZE} == {len(msgspec.json.encode(new_order()))}
    assert len(set(written)) > 1


def test_every_target_speaks_of_what_is_measured() -> None:
    for targets, measures in (
        (rabbitmq.TARGETS, rabbitmq.measures("amqp://localhost")),
        (memory.TARGETS, memory.measures()),
        (imports.TARGETS, imports.measures()),
    ):
        candidates = {measure.name: {*measure.candidates} for measure in measures}
        for target in targets:
            assert {target.ours, target.peer or target.ours} <= candidates[target.measure], target.name


def test_one_more_candidate_is_one_line() -> None:
    c = rabbitmq.Candidate(command=lambda task: ["rabbit", task.job, task.queue, str(task.count), str(task.window)])

    assert c.command(Task(job="publish", queue="q", count=3)) == ["rabbit", "publish", "q", "3", "1"]


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
    assert "| memory transport, of a bare asyncio.Queue | ≥ 0.03 |" in page.render([results])


def test_check_ends_with_1_when_a_target_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missed(rounds: int, quick: bool, only: str) -> Results:
        return conclude("memory", [OF_PEER], runs((1, 2)), rounds=rounds, quick=quick)

    monkeypatch.setitem(benches.RUN, "memory", missed)
    arguments = ["memory", "--quick", "--into", str(tmp_path)]

    assert benches.main(arguments) == 0
    assert benches.main([*arguments, "--check"]) == 1
    assert read(tmp_path / "memory.json").quick


def test_an_unknown_suite_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benches.main(["redis"])
    assert "unknown suite 'redis'; known: import, memory, rabbitmq" in capsys.readouterr().err
