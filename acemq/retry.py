"""When a failed message is tried again, and where it waits until then (CONTRACT.md section 2)."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import Literal

import msgspec
from msgspec.structs import replace

from acemq.clock import check_duration
from acemq.errors import ConfigurationError

LONGEST = timedelta(hours=24)
"""The ceiling of a policy that names none."""

_SHOWN = 100
_MILLISECOND = timedelta(milliseconds=1)


class AfterFailure(msgspec.Struct, frozen=True):
    """What a policy says after attempt n has failed."""

    delay: timedelta = timedelta()
    where: Literal["consumer", "broker"] = "consumer"
    gave_up: Literal["attempts", "age"] | None = None


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and after which waits. The same value serves consumers and the steps of a pipeline.

    `max_attempts` counts deliveries and includes the first; `None` is no limit. The wait after attempt n is
    `first × factor^(n−1)`, at most `ceiling` (24 h unless given). Waits of `broker_from` and more are spent in
    the broker where it can, exactly and in no prefetch slot; shorter ones in the consumer, spread by `jitter`.
    """

    max_attempts: int | None
    first: timedelta
    factor: float = 2.0
    ceiling: timedelta | None = None
    jitter: float = 0.0
    max_age: timedelta | None = None
    broker_from: timedelta = timedelta(seconds=30)
    never_for: tuple[type[BaseException], ...] = ()
    extra_rungs: tuple[timedelta, ...] = ()
    waits: tuple[timedelta, ...] = ()

    def __post_init__(self) -> None:
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ConfigurationError(
                f"attempts={self.max_attempts} must be 1 or more; it counts the first delivery too"
            )
        check_duration("first", self.first, zero=True)
        check_duration("broker_from", self.broker_from, zero=True)
        if not self.factor >= 1 or math.isinf(self.factor):
            raise ConfigurationError(f"factor={self.factor} must be 1 or more: waits never get shorter")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"jitter={self.jitter} must lie between 0 and 1")
        if self.ceiling is not None:
            check_duration("ceiling", self.ceiling)
        if self.max_age is not None:
            check_duration("age", self.max_age)
        for wait in self.waits:
            check_duration("delays", wait, zero=True)
        for rung in self.extra_rungs:
            if not check_duration("rungs", rung) >= self.broker_from or not has_rung(rung):
                raise ConfigurationError(
                    f"a rung of {rung} is never used: it must be whole seconds and {self.broker_from} or more"
                )

    @staticmethod
    def exponential(
        attempts: int, *, first: timedelta, ceiling: timedelta | None = None, factor: float = 2.0, jitter: float = 0.2
    ) -> RetryPolicy:
        return RetryPolicy(max_attempts=attempts, first=first, ceiling=ceiling, factor=factor, jitter=jitter)

    @staticmethod
    def fixed(attempts: int, delay: timedelta) -> RetryPolicy:
        return RetryPolicy(max_attempts=attempts, first=delay, factor=1.0)

    @staticmethod
    def delays(*waits: timedelta, jitter: float = 0.0) -> RetryPolicy:
        """Exactly these waits, and so one attempt more than there are waits."""
        return RetryPolicy(max_attempts=len(waits) + 1, first=timedelta(), waits=waits, jitter=jitter)

    @staticmethod
    def forever(*, first: timedelta = timedelta(seconds=1), ceiling: timedelta = timedelta(minutes=1)) -> RetryPolicy:
        return RetryPolicy(max_attempts=None, first=first, ceiling=ceiling, jitter=0.2)

    @staticmethod
    def none() -> RetryPolicy:
        """One attempt."""
        return RetryPolicy(max_attempts=1, first=timedelta())

    def give_up_after(self, age: timedelta) -> RetryPolicy:
        """Also give up once the message is this old, counted from its first publish. An unknown age retries."""
        return replace(self, max_age=age)

    def wait_in_broker_from(self, threshold: timedelta) -> RetryPolicy:
        """Zero: never wait in the broker."""
        return replace(self, broker_from=threshold)

    def with_jitter(self, factor: float) -> RetryPolicy:
        return replace(self, jitter=factor)

    def except_for(self, *errors: type[BaseException]) -> RetryPolicy:
        """Never retry these: their messages go to the dead letters at once."""
        return replace(self, never_for=(*self.never_for, *errors))

    def with_rungs(self, *delays: timedelta) -> RetryPolicy:
        """Further waiting queues, for delays that a handler asks for."""
        return replace(self, extra_rungs=(*self.extra_rungs, *delays))

    def wait_after(self, attempt: int) -> timedelta:
        """The wait after attempt n has failed, without jitter; whole milliseconds, never above the ceiling."""
        if self.waits:
            return self.waits[min(attempt, len(self.waits)) - 1]
        ceiling = self.ceiling or LONGEST
        try:
            seconds = self.first.total_seconds() * self.factor ** (attempt - 1)
        except OverflowError:  # attempt 5,000 of a doubling policy is beyond any float
            return ceiling if self.first else timedelta()
        if seconds >= ceiling.total_seconds():
            return ceiling
        return round(timedelta(seconds=seconds) / _MILLISECOND) * _MILLISECOND

    def schedule(self) -> tuple[timedelta, ...]:
        """All waits in order, without jitter; the first 100 where there is no limit."""
        count = _SHOWN if self.max_attempts is None else self.max_attempts - 1
        return tuple(self.wait_after(attempt) for attempt in range(1, count + 1))

    def rungs(self) -> tuple[timedelta, ...]:
        """The distinct waits that have a queue of their own on a broker, in the order of the schedule."""
        waits = (wait for wait in self.schedule() if waits_in_broker(wait, self.broker_from) and has_rung(wait))
        return tuple(dict.fromkeys((*waits, *self.extra_rungs)))

    def decide(self, attempt: int, age: timedelta | None) -> AfterFailure:
        """After attempt `attempt`, counted from 1, has failed. `age` of `None` is unknown and never gives up."""
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return AfterFailure(gave_up="attempts")
        if self.max_age is not None and age is not None and age >= self.max_age:
            return AfterFailure(gave_up="age")
        delay = self.wait_after(attempt)
        where: Literal["consumer", "broker"] = "broker" if waits_in_broker(delay, self.broker_from) else "consumer"
        return AfterFailure(delay=delay, where=where)

    def jittered(self, delay: timedelta) -> timedelta:
        """`delay` spread over ± `jitter`, at least a millisecond. Not for waits in the broker: they name a queue."""
        if not delay or not self.jitter:
            return delay
        low, high = jitter_bounds(delay, self.jitter)
        spread = timedelta(seconds=random.uniform(low.total_seconds(), high.total_seconds()))
        return spread if self.waits else min(spread, self.ceiling or LONGEST)


DEFAULT = RetryPolicy.exponential(5, first=timedelta(seconds=1), ceiling=timedelta(minutes=1))
"""A connection's policy unless it is given another: waits of 1, 2, 4 and 8 s, none of them in the broker."""


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Pauses between dials: full jitter, so that a thousand clients do not return in one wave.

    The nth pause is drawn evenly from 0 to `first × 2ⁿ`, at most `ceiling`, and never below 50 ms.
    """

    first: timedelta = timedelta(milliseconds=250)
    ceiling: timedelta = timedelta(seconds=30)

    def __post_init__(self) -> None:
        check_duration("first", self.first)
        check_duration("ceiling", self.ceiling)

    def pause(self, tries: int) -> float:
        """Seconds before the next dial, after `tries` failed ones (from 0)."""
        most = min(self.ceiling.total_seconds(), self.first.total_seconds() * 2 ** min(tries, 30))
        return max(random.uniform(0, most), 0.05)


def waits_in_broker(delay: timedelta, threshold: timedelta) -> bool:
    return timedelta() < threshold <= delay


def has_rung(delay: timedelta) -> bool:
    # Libraries disagree on the name of a rung with fractions of a second, so nobody declares one.
    return not delay % timedelta(seconds=1)


def jitter_bounds(delay: timedelta, factor: float) -> tuple[timedelta, timedelta]:
    return max(delay * (1 - factor), _MILLISECOND), delay * (1 + factor)
