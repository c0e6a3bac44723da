"""Faults to order: how the next items of a verb are to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

from acemq.clock import check_duration
from acemq.errors import ConfigurationError

Stallable = Literal[
    "publish", "settle", "renew", "subscribe", "pull", "apply", "depth", "exists", "delete", "purge", "deliver"
]
VERBS: tuple[str, ...] = get_args(Stallable)


@dataclass(frozen=True)
class Delay:
    by: timedelta


@dataclass(frozen=True)
class Raises:
    error: BaseException


Effect = Literal["refuse", "fail", "lose_answer"] | Delay | Raises
"""`refuse` and `fail`: not done. `lose_answer`: done, and reported as failed. `delay(d)`: done after d of the broker's
clock. `raises(error)`: the verb itself raises. Only a publish can tell `refuse` from `fail`."""


def delay(by: timedelta) -> Delay:
    return Delay(check_duration("by", by))


def raises(error: BaseException) -> Raises:
    return Raises(error)


@dataclass
class _Armed:
    verb: str
    effect: Effect
    times: int
    match: Callable[[Any], bool] | None


class Faults:
    def __init__(self) -> None:
        self.armed: list[_Armed] = []

    def next(
        self, verb: Stallable, effect: Effect, *, times: int = 1, match: Callable[[Any], bool] | None = None
    ) -> None:
        """Let the next `times` items of a verb end so.

        `match` is asked about each: an `Outgoing`, `Settlement` or `Delivery`, a `Topology`, or else a name.
        """
        check_verb(verb)
        if verb == "deliver":
            raise ConfigurationError("verb='deliver' can be stalled, not failed")
        if times < 1:
            raise ConfigurationError(f"times={times} must be 1 or more")
        self.armed.append(_Armed(verb, effect, times, match))

    def meet(self, verb: str, subject: object) -> Effect | None:
        """The effect that this item meets, used up."""
        for armed in self.armed:
            if armed.verb == verb and (armed.match is None or armed.match(subject)):
                armed.times -= 1
                if not armed.times:
                    self.armed.remove(armed)
                return armed.effect
        return None


def check_verb(verb: str) -> str:
    if verb not in VERBS:
        raise ConfigurationError(f"verb={verb!r} must be one of {', '.join(VERBS)}")
    return verb
