"""What a handler may answer."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from acemq.ack import Ack, Verdict
from acemq.errors import ConfigurationError

BROKEN = ValueError("broken")
EACH = {
    Verdict.ACCEPT: Ack.accept(),
    Verdict.RETRY: Ack.retry("later", delay=timedelta(seconds=3)),
    Verdict.REJECT: Ack.reject(BROKEN),
    Verdict.PARK: Ack.park("look at it"),
    Verdict.IN_PROGRESS: Ack.in_progress(),
    Verdict.RELEASE: Ack.release(),
}


def test_there_is_one_factory_for_each_verdict() -> None:
    assert list(EACH) == list(Verdict)
    assert all(ack.verdict is verdict for verdict, ack in EACH.items())


def test_acks_are_compared_by_value() -> None:
    assert Ack.retry("why") == Ack.retry("why") != Ack.retry("why", delay=timedelta())
    assert Ack.reject("why") != Ack.park("why")
    assert len({Ack.release(), Ack.release(), Ack.accept()}) == 2
    assert Ack.accept() != "accept"


def test_an_ack_prints_as_the_call_that_made_it() -> None:
    assert repr(Ack.accept()) == "Ack.accept()"
    assert repr(Ack.retry(BROKEN)) == "Ack.retry(ValueError('broken'))"
    assert repr(Ack.retry("x", delay=timedelta(seconds=3))) == "Ack.retry('x', delay=datetime.timedelta(seconds=3))"


def test_a_retry_may_ask_for_no_wait_at_all() -> None:
    assert Ack.retry(delay=timedelta()).delay == timedelta()
    assert Ack.retry().delay is None


@pytest.mark.parametrize("delay", [timedelta(seconds=-1), 5, "5s"])
def test_a_delay_that_is_no_length_of_time_is_refused(delay: Any) -> None:
    with pytest.raises(ConfigurationError, match="delay="):
        Ack.retry(delay=delay)
    with pytest.raises(ConfigurationError, match="delay="):
        Ack.in_progress(delay)


def test_in_progress_waits_5_seconds_and_15_minutes_at_most() -> None:
    assert Ack.in_progress().delay == timedelta(seconds=5)
    Ack.in_progress(timedelta(minutes=15))
    with pytest.raises(ConfigurationError, match="must be 0:15:00 or less"):
        Ack.in_progress(timedelta(minutes=15, seconds=1))


@pytest.mark.parametrize("ack", [ack for ack in EACH.values() if ack.reason is not BROKEN], ids=repr)
def test_an_ack_pickles(ack: Ack) -> None:
    assert pickle.loads(pickle.dumps(ack)) == ack
