"""Retry policies: pure arithmetic, so properties rather than examples. The examples are in fixtures/wire/retry.json."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.errors import ConfigurationError
from acemq.retry import DEFAULT, LONGEST, Backoff, RetryPolicy, has_rung, jitter_bounds, waits_in_broker

MS = timedelta(milliseconds=1)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)

DELAYS = st.integers(1, 30 * 24 * 3_600_000).map(lambda millis: millis * MS)
FACTORS = st.floats(1, 100)
ATTEMPTS = st.integers(1, 5_000)


# O-13: backoff at attempt 60 and beyond

FOREVER = RetryPolicy.forever(first=SECOND, ceiling=HOUR)


def test_waits_of_attempts_1_to_5000_stay_within_the_ceiling_and_never_shrink() -> None:
    waits = [FOREVER.wait_after(attempt) for attempt in range(1, 5_001)]
    assert all(timedelta() < wait <= HOUR for wait in waits)
    assert all(earlier <= later for earlier, later in pairwise(waits))


def test_waits_of_attempts_1_to_5000_stay_within_the_ceiling_with_jitter_too() -> None:
    policy = FOREVER.with_jitter(0.2)
    waits = [policy.jittered(policy.wait_after(attempt)) for attempt in range(1, 5_001)]
    assert min(waits) > timedelta()
    assert max(waits) <= HOUR


def test_without_a_ceiling_of_its_own_a_policy_waits_a_day_at_most() -> None:
    policy = RetryPolicy(max_attempts=None, first=timedelta(seconds=30), factor=10)
    waits = [policy.wait_after(attempt) for attempt in range(1, 5_001)]
    assert max(waits) == LONGEST == timedelta(hours=24)
    assert all(earlier <= later for earlier, later in pairwise(waits))


@given(DELAYS, FACTORS, DELAYS, ATTEMPTS)
def test_no_wait_is_zero_or_above_its_ceiling(
    first: timedelta, factor: float, ceiling: timedelta, attempt: int
) -> None:
    policy = RetryPolicy(max_attempts=None, first=first, factor=factor, ceiling=ceiling)
    wait = policy.wait_after(attempt)
    assert timedelta() < wait <= ceiling
    assert not wait % MS
    assert wait <= policy.wait_after(attempt + 1)


@given(DELAYS, FACTORS, st.floats(0, 1), ATTEMPTS)
def test_jitter_spreads_within_its_bounds(first: timedelta, factor: float, jitter: float, attempt: int) -> None:
    policy = RetryPolicy(max_attempts=None, first=first, factor=factor, jitter=jitter)
    wait = policy.wait_after(attempt)
    low, high = jitter_bounds(wait, jitter)
    assert MS <= low <= wait <= high
    spread = policy.jittered(wait)
    assert low - MS <= spread <= high + MS
    assert spread > timedelta()


def test_jitter_goes_both_ways() -> None:
    policy = RetryPolicy.delays(SECOND, jitter=0.5)
    spread = [policy.jittered(SECOND) for _ in range(500)]
    assert min(spread) < 0.7 * SECOND < 1.3 * SECOND < max(spread)


def test_a_wait_of_zero_is_not_jittered() -> None:
    assert RetryPolicy.delays(timedelta(), jitter=1.0).jittered(timedelta()) == timedelta()


# Giving up


@given(st.integers(1, 50), st.integers(1, 100))
def test_max_attempts_counts_the_first_delivery(attempts: int, attempt: int) -> None:
    policy = RetryPolicy.fixed(attempts, SECOND)
    decided = policy.decide(attempt, None)
    assert decided.gave_up == (None if attempt < attempts else "attempts")
    assert len(policy.schedule()) == attempts - 1


@given(DELAYS, DELAYS)
def test_an_age_limit_gives_up_at_the_limit_and_never_for_an_unknown_age(limit: timedelta, age: timedelta) -> None:
    policy = FOREVER.give_up_after(limit)
    assert policy.decide(1, age).gave_up == (None if age < limit else "age")
    assert policy.decide(1, None).gave_up is None


def test_forever_never_gives_up() -> None:
    assert FOREVER.decide(10**9, timedelta(days=10_000)).gave_up is None
    assert len(FOREVER.schedule()) == 100


def test_none_is_one_attempt() -> None:
    assert RetryPolicy.none().decide(1, None).gave_up == "attempts"
    assert RetryPolicy.none().schedule() == ()


def test_exact_waits_mean_one_attempt_more() -> None:
    policy = RetryPolicy.delays(SECOND, MINUTE)
    assert policy.schedule() == (SECOND, MINUTE)
    assert policy.max_attempts == 3


def test_the_policy_of_a_connection_waits_1_2_4_and_8_seconds_in_the_consumer() -> None:
    assert DEFAULT.schedule() == (1 * SECOND, 2 * SECOND, 4 * SECOND, 8 * SECOND)
    assert DEFAULT.rungs() == ()


# Where a wait is spent


@given(DELAYS | st.just(timedelta()), DELAYS | st.just(timedelta()))
def test_a_wait_goes_to_the_broker_from_the_threshold_on_and_never_with_threshold_0(
    delay: timedelta, threshold: timedelta
) -> None:
    assert waits_in_broker(delay, threshold) is (bool(threshold) and delay >= threshold)


@given(st.integers(1, 12), DELAYS, FACTORS, DELAYS | st.just(timedelta()))
def test_rungs_are_the_distinct_waits_of_whole_seconds_at_or_above_the_threshold(
    attempts: int, first: timedelta, factor: float, threshold: timedelta
) -> None:
    policy = RetryPolicy(max_attempts=attempts, first=first, factor=factor, broker_from=threshold)
    rungs = policy.rungs()
    assert len(set(rungs)) == len(rungs)
    assert set(rungs) == {w for w in policy.schedule() if waits_in_broker(w, threshold) and has_rung(w)}
    assert list(rungs) == sorted(rungs)


def test_a_wait_with_a_fraction_of_a_second_has_no_rung() -> None:
    assert RetryPolicy.delays(timedelta(seconds=40.5), timedelta(seconds=41)).rungs() == (timedelta(seconds=41),)


def test_rungs_for_delays_that_a_handler_asks_for_come_last_and_once() -> None:
    policy = RetryPolicy.delays(MINUTE).with_rungs(HOUR).with_rungs(MINUTE, 2 * HOUR)
    assert policy.rungs() == (MINUTE, HOUR, 2 * HOUR)


@pytest.mark.parametrize("rung", [timedelta(seconds=29), timedelta(seconds=40.5), timedelta()])
def test_a_rung_that_would_never_be_used_is_refused(rung: timedelta) -> None:
    with pytest.raises(ConfigurationError):
        FOREVER.with_rungs(rung)


# A value


def test_each_verb_gives_a_new_policy() -> None:
    policy = RetryPolicy.fixed(3, SECOND)
    changed = policy.give_up_after(HOUR).with_jitter(0.1).except_for(KeyError).wait_in_broker_from(MINUTE)
    assert policy == RetryPolicy.fixed(3, SECOND)
    assert (changed.max_age, changed.jitter, changed.never_for, changed.broker_from) == (HOUR, 0.1, (KeyError,), MINUTE)
    assert changed.except_for(ValueError).never_for == (KeyError, ValueError)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_attempts": 0}, "attempts=0"),
        ({"first": timedelta(seconds=-1)}, "first="),
        ({"first": 5}, "first=5"),
        ({"factor": 0.5}, "factor=0.5"),
        ({"factor": float("inf")}, "factor=inf"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"jitter": 1.1}, "jitter=1.1"),
        ({"jitter": -0.1}, "jitter=-0.1"),
        ({"ceiling": timedelta()}, "ceiling="),
        ({"max_age": timedelta()}, "age="),
        ({"broker_from": timedelta(seconds=-1)}, "broker_from="),
        ({"waits": (timedelta(seconds=-1),)}, "delays="),
    ],
)
def test_a_bad_number_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        RetryPolicy(**{"max_attempts": 3, "first": SECOND, **fields})


@given(st.integers(0, 10_000))
def test_pauses_between_dials_are_bounded_for_ever(tries: int) -> None:
    assert 0.05 <= Backoff().pause(tries) <= 30


def test_a_dial_follows_another_after_50_ms_at_least_and_its_ceiling_at_most() -> None:
    backoff = Backoff(first=timedelta(milliseconds=250), ceiling=timedelta(seconds=30))
    for tries, most in enumerate((0.25, 0.5, 1, 2, 4, 8, 16, 30, 30)):
        pauses = [backoff.pause(tries) for _ in range(500)]
        assert min(pauses) >= 0.05
        assert most * 0.8 < max(pauses) <= most
    assert backoff.pause(100_000) <= 30
