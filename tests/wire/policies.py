"""A retry policy of the fixtures as one of ours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from acemq.retry import RetryPolicy


def millis(value: float) -> timedelta:
    return timedelta(milliseconds=value)


def in_millis(value: timedelta) -> int:
    assert not value % timedelta(milliseconds=1)
    return value // timedelta(milliseconds=1)


def policy_of(given: dict[str, Any]) -> RetryPolicy:
    """Made by the library's own factories, whose defaults have to be those of the case."""
    attempts, first = given["max_attempts"], millis(given["initial_delay_ms"])
    ceiling = millis(given["max_delay_ms"]) if given["max_delay_ms"] else None
    match given["kind"]:
        case "exponential":
            policy = RetryPolicy.exponential(attempts, first=first, ceiling=ceiling)
        case "fixed":
            policy = RetryPolicy.fixed(attempts, first)
        case _:
            policy = RetryPolicy.none()
    assert given["kind"] == "none" or policy.factor == given["multiplier"]
    assert policy.jitter == given["jitter"]
    threshold = millis(given["broker_wait_threshold_ms"])
    if threshold != policy.broker_from:
        policy = policy.wait_in_broker_from(threshold)
    return policy.give_up_after(millis(given["max_message_age_ms"])) if given["max_message_age_ms"] else policy
