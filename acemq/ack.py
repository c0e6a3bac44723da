"""The decision about one delivery, as a value that a handler returns."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from acemq.clock import check_duration
from acemq.errors import ConfigurationError

IN_PROGRESS_LIMIT = timedelta(minutes=15)
"""The longest wait that may be spent in a consumer's prefetch slot: half of RabbitMQ's limit on holding a delivery."""


class Verdict(StrEnum):
    ACCEPT = "accept"
    RETRY = "retry"
    REJECT = "reject"
    PARK = "park"
    IN_PROGRESS = "in_progress"
    RELEASE = "release"


class Ack:
    """What becomes of a message. `None` from a handler accepts; an exception is a retry with that error.

    Made by the six methods below, compared by value, never changed.
    """

    __slots__ = ("delay", "reason", "verdict")

    def __init__(
        self, verdict: Verdict, reason: BaseException | str | None = None, delay: timedelta | None = None
    ) -> None:
        self.verdict, self.reason, self.delay = verdict, reason, delay

    @staticmethod
    def accept() -> Ack:
        """Done. The message is gone."""
        return ACCEPT

    @staticmethod
    def retry(error: BaseException | str | None = None, *, delay: timedelta | None = None) -> Ack:
        """Again, by the policy: after its wait or `delay` (zero: at once), within its limits.

        A `FatalError` is not retried: the message goes to its dead letters.
        """
        return Ack(Verdict.RETRY, error, None if delay is None else check_duration("delay", delay, zero=True))

    @staticmethod
    def reject(reason: BaseException | str | None = None) -> Ack:
        """Never. The message goes to its dead letters."""
        return Ack(Verdict.REJECT, reason)

    @staticmethod
    def park(reason: BaseException | str | None = None) -> Ack:
        """A person, or another version of the program, has to look at it."""
        return Ack(Verdict.PARK, reason)

    @staticmethod
    def in_progress(delay: timedelta = timedelta(seconds=5)) -> Ack:
        """Somebody else is at it: back to the queue after `delay` (15 minutes at most), with its attempt unchanged."""
        if check_duration("delay", delay, zero=True) > IN_PROGRESS_LIMIT:
            raise ConfigurationError(f"delay={delay} of in_progress must be {IN_PROGRESS_LIMIT} or less")
        return Ack(Verdict.IN_PROGRESS, None, delay)

    @staticmethod
    def release() -> Ack:
        """Give it back at once, for anybody. The broker decides where it comes again."""
        return Ack(Verdict.RELEASE)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ack):
            return NotImplemented
        return (self.verdict, self.reason, self.delay) == (other.verdict, other.reason, other.delay)

    def __hash__(self) -> int:
        return hash((self.verdict, self.reason, self.delay))

    def __repr__(self) -> str:
        given = [f"{self.reason!r}"] if self.reason is not None else []
        if self.delay is not None:
            given.append(f"delay={self.delay!r}")
        return f"Ack.{self.verdict}({', '.join(given)})"


ACCEPT = Ack(Verdict.ACCEPT)

DUPLICATE = Ack(Verdict.ACCEPT, "duplicate")
"""Accepted because it was handled before. For the library's own handlers; told apart by identity."""
