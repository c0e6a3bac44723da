"""What becomes of a delivery: one table from what happened to what the broker is told (CONTRACT.md section 2).

`TABLE` is the rule and `decide` finds the row; `acemq.consuming.moving` carries it out. The table in the documentation
is made from the same rows.
"""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Literal

import msgspec

from acemq.ack import DUPLICATE, Ack, Verdict
from acemq.envelope import ERROR_LIMIT
from acemq.errors import FatalError
from acemq.retry import RetryPolicy, waits_in_broker
from acemq.telemetry import DEAD_LETTERED, PARKED


class Case(StrEnum):
    """What happened to a delivery."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    RETRY = "retry"
    EXHAUSTED = "exhausted"
    TOO_OLD = "too_old"
    FATAL = "fatal"
    BAD_ANSWER = "bad_answer"
    REJECTED = "rejected"
    PARKED = "parked"
    REFUSED = "refused"
    UNDECODABLE = "undecodable"
    DELIVERY_LIMIT = "delivery_limit"
    EXPIRED = "expired"
    EXPIRED_DROPPED = "expired_dropped"
    IN_PROGRESS = "in_progress"
    RELEASED = "released"


Copy = Literal["none", "own queue", ".dlq", ".parked"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    case: Case
    when: str
    """In words, for the documentation."""
    copy: Copy = "none"
    attempt: Literal["–", "+1", "unchanged"] = "–"
    original: Literal["accepted", "requeued"] = "accepted"
    counted: str
    also: str = ""
    """A further counter of the consumer."""
    error_span: bool = False
    diagnostic: str = ""
    text: str = ""
    """`x-acemq-error` of the copy; `{n}` attempts, `{age}` and `{reason}` are filled in."""
    how: str = ""
    """`x-acemq-failed-as` of the copy."""


TABLE: dict[Case, Row] = {
    row.case: row
    for row in (
        Row(case=Case.ACCEPTED, when="`None` or `Ack.accept()`", counted="acked"),
        Row(
            case=Case.DUPLICATE,
            when="handled before, by the word of an idempotency store; no handler runs",
            counted="acked",
            also="duplicates",
        ),
        Row(
            case=Case.RETRY,
            when="`Ack.retry()` or an exception, attempts and age left",
            copy="own queue",
            attempt="+1",
            counted="retried",
        ),
        Row(
            case=Case.EXHAUSTED,
            when="the same, out of attempts",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="exhausted {n}: {reason}",
            how="exhausted",
        ),
        Row(
            case=Case.TOO_OLD,
            when="the same, older than the policy allows",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="exceeded the maximum message age of {age}: {reason}",
            how="too_old",
        ),
        Row(
            case=Case.FATAL,
            when="`FatalError` raised or inside `Ack.retry()`, or an exception named in `except_for`",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="the handler reported an unprocessable message: {reason}",
            how="fatal",
        ),
        Row(
            case=Case.BAD_ANSWER,
            when="the handler returned something that is no `Ack`",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="the handler reported an unprocessable message: {reason}",
            how="fatal",
        ),
        Row(
            case=Case.REJECTED,
            when="`Ack.reject()`",
            copy=".dlq",
            attempt="unchanged",
            counted="rejected",
            diagnostic=DEAD_LETTERED,
            text="the handler rejected it: {reason}",
            how="rejected",
        ),
        Row(
            case=Case.PARKED,
            when="`Ack.park()`",
            copy=".parked",
            attempt="unchanged",
            counted="parked",
            error_span=True,
            diagnostic=PARKED,
            text="the handler parked it: {reason}",
            how="parked",
        ),
        Row(
            case=Case.REFUSED,
            when="`before_handle` of an interceptor raised",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="an interceptor refused it: {reason}",
            how="refused",
        ),
        Row(
            case=Case.UNDECODABLE,
            when="the body cannot be decoded; never retried",
            copy=".parked",
            attempt="unchanged",
            counted="parked",
            error_span=True,
            diagnostic=PARKED,
            text="could not be decoded: {reason}",
            how="undecodable",
        ),
        Row(
            case=Case.DELIVERY_LIMIT,
            when="delivered more than `max_deliveries` times without an outcome",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="delivery limit: {reason}",
            how="delivery_limit",
        ),
        Row(
            case=Case.EXPIRED,
            when="expired before it was handled",
            copy=".dlq",
            attempt="unchanged",
            counted="dead_lettered",
            also="expired",
            error_span=True,
            diagnostic=DEAD_LETTERED,
            text="expired",
            how="expired",
        ),
        Row(
            case=Case.EXPIRED_DROPPED,
            when='the same with `expired="drop"`',
            counted="acked",
            also="expired",
        ),
        Row(
            case=Case.IN_PROGRESS,
            when="`Ack.in_progress()`, or another holds the claim, or the store of claims cannot be asked",
            copy="own queue",
            attempt="unchanged",
            counted="in_progress",
        ),
        Row(
            case=Case.RELEASED,
            when="`Ack.release()`",
            original="requeued",
            counted="rejected",
            also="released",
        ),
    )
}


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The row that applies to one delivery, and what is filled into it."""

    row: Row
    reason: str | None = None
    """The reason alone, as the handler or the exception gave it."""
    error: BaseException | None = None
    delay: timedelta = timedelta()
    """Before the message is there again, without jitter."""
    rung: bool = False
    """The wait is spent in the broker, where that has rungs."""
    policy: RetryPolicy | None = None
    """Of a retry: the one that decided."""
    text: str | None = None
    """`x-acemq-error` of the copy; `None`: as it was."""


class Refused(msgspec.Struct, frozen=True):
    """In place of a handler's answer: what stood before the handler raised this, and the handler did not run."""

    error: BaseException


def bad_answer(handler: str, answer: object) -> str:
    return f"{handler!r} returned {type(answer).__name__}, expected Ack or None"


def decide(answer: object, attempt: int, policy: RetryPolicy, age: timedelta | None, handler: str) -> Decision:
    """What follows from a handler's answer to attempt n: an `Ack`, `None`, what it raised, or anything else."""
    if answer is None:
        return Decision(row=TABLE[Case.ACCEPTED])
    if isinstance(answer, BaseException):
        return _failed(answer, None, attempt, policy, age)
    if isinstance(answer, Refused):
        return set_aside(Case.REFUSED, answer.error)
    if not isinstance(answer, Ack):
        return set_aside(Case.BAD_ANSWER, bad_answer(handler, answer))
    match answer.verdict:
        case Verdict.ACCEPT:
            return Decision(row=TABLE[Case.DUPLICATE if answer is DUPLICATE else Case.ACCEPTED])
        case Verdict.RETRY:
            return _failed(answer.reason, answer.delay, attempt, policy, age)
        case Verdict.REJECT:
            return set_aside(Case.REJECTED, answer.reason)
        case Verdict.PARK:
            return set_aside(Case.PARKED, answer.reason)
        case Verdict.IN_PROGRESS:
            return Decision(row=TABLE[Case.IN_PROGRESS], delay=answer.delay or timedelta())
        case Verdict.RELEASE:
            return Decision(row=TABLE[Case.RELEASED])


def _failed(
    why: BaseException | str | None,
    asked: timedelta | None,
    attempt: int,
    policy: RetryPolicy,
    age: timedelta | None,
) -> Decision:
    if isinstance(why, (FatalError, *policy.never_for)):
        return set_aside(Case.FATAL, why)
    decided = policy.decide(attempt, age)
    if decided.gave_up == "attempts":
        return set_aside(Case.EXHAUSTED, why, attempts=attempt)
    if decided.gave_up == "age":
        return set_aside(Case.TOO_OLD, why, age=policy.max_age)
    delay = decided.delay if asked is None else asked
    return Decision(
        row=TABLE[Case.RETRY],
        reason=reason_of(why),
        error=why if isinstance(why, BaseException) else None,
        delay=delay,
        rung=waits_in_broker(delay, policy.broker_from),
        policy=policy,
    )


def set_aside(
    case: Case, why: BaseException | str | None = None, *, attempts: int = 0, age: timedelta | None = None
) -> Decision:
    """A decision that moves the message to its dead letters or parks it."""
    row, reason = TABLE[case], reason_of(why)
    text = row.text.format(
        reason=reason,
        n=f"{attempts} attempt" if attempts == 1 else f"{attempts} attempts",
        age=f"{age.total_seconds():g} s" if age is not None else "",
    )
    return Decision(row=row, reason=reason, error=why if isinstance(why, BaseException) else None, text=text)


def reason_of(why: BaseException | str | None) -> str:
    try:
        text = "" if why is None else str(why).strip()
    except Exception:  # an exception whose own text raises must not keep its message from an end
        text = f"{type(why).__name__}, whose text cannot be read"
    return text[:ERROR_LIMIT] or "no reason given"


class ConsumerCounters(msgspec.Struct):
    """How deliveries ended, since the consumer started. Only ever grows."""

    acked: int = 0
    retried: int = 0
    rejected: int = 0
    dead_lettered: int = 0
    parked: int = 0
    in_progress: int = 0
    released: int = 0
    duplicates: int = 0
    expired: int = 0
    cancelled: int = 0
    move_failed: int = 0
    stale: int = 0

    def count(self, word: str) -> None:
        setattr(self, word, getattr(self, word) + 1)

    def __add__(self, other: ConsumerCounters) -> ConsumerCounters:
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return ConsumerCounters(*map(sum, zip(mine, theirs, strict=True)))
