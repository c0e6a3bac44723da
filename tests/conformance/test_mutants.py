"""Each mutant makes its scenario fail, and its scenario alone is asked."""

from __future__ import annotations

from datetime import timedelta

import pytest

from acemq.testing.conformance.mutants import MUTANTS, MutantConformance
from acemq.testing.conformance.running import execute
from acemq.testing.conformance.scenario import scenarios_of
from acemq.transports.memory import Profile

SCENARIOS = scenarios_of(MutantConformance)


@pytest.mark.parametrize("id", MUTANTS)
def test_a_mutant_makes_its_scenario_fail(id: str) -> None:
    class Suite(MutantConformance):
        mutant = MUTANTS[id]
        lease = timedelta(seconds=30) if id != "C-120" else None
        profile = Profile.RABBITMQ if id == "C-120" else Profile.FULL

    which, body = SCENARIOS[id]
    assert execute(Suite(), which, body).outcome == "failed"


@pytest.mark.parametrize("id", MUTANTS)
def test_without_its_defect_the_same_scenario_passes(id: str) -> None:
    class Suite(MutantConformance):
        lease = timedelta(seconds=30) if id != "C-120" else None
        profile = Profile.RABBITMQ if id == "C-120" else Profile.FULL

    which, body = SCENARIOS[id]
    result = execute(Suite(), which, body)
    assert (result.outcome, result.reason) == ("passed", "")


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 25
    assert MUTANTS.keys() <= SCENARIOS.keys()
