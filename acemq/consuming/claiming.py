"""Idempotent handling: a claim on each message before its handler runs, beside the work (CONTRACT.md section 13)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import msgspec

from acemq.clock import Timer, sleep
from acemq.consuming.moving import Mover
from acemq.consuming.settling import TABLE, Case, Decision, set_aside
from acemq.errors import IdempotencyConflictError, LeaseLostError
from acemq.message import Message
from acemq.stores import Claim, Idempotency, check_claim_key
from acemq.telemetry import CLAIM_FAILED, LEASE_LOST, Diagnostic

R = TypeVar("R")

_ENDING = 0.5
"""Seconds that a stop waits for claims to be ended; what is not, runs out by its lease."""


class Held(msgspec.Struct, eq=False):
    """A claim that is ours."""

    message: Message[Any]
    key: str
    token: int
    is_lost: bool = False


class Claims:
    """The claims of one consumer."""

    def __init__(self, given: Idempotency, mover: Mover) -> None:
        self._given, self._store = given, given.store
        self._telemetry, self._report, self._clock = mover.telemetry, mover.report, mover.clock
        self.failed_in_row = 0
        """Times that the store could not be asked; 0: it answers."""
        self._ending: set[asyncio.Task[Any]] = set()
        """What goes on although its handler was cut off."""

    async def take(self, message: Message[Any]) -> Held | Decision:
        """The claim, or what becomes of the message without its handler."""
        given = self._given
        try:
            key = check_claim_key(given.key(message))
            fingerprint = None if given.fingerprint is None else given.fingerprint(message)
        except Exception as error:  # no key, today or tomorrow
            return set_aside(Case.FATAL, error)
        try:
            claim = await self._claim(message, key, fingerprint)
        except IdempotencyConflictError as error:
            return set_aside(Case.FATAL, error)
        except Exception as error:
            # It may be a duplicate and it may not: whoever does not know does neither.
            self._failed(message, "claim", error)
            return self._put_back()
        self.failed_in_row = 0
        self._count(message, claim.answer)
        match claim.answer:
            case "claimed":
                return Held(message, key, claim.token)
            case "duplicate":
                return Decision(row=TABLE[Case.DUPLICATE])
            case "in_progress":
                return self._put_back()

    async def _claim(self, message: Message[Any], key: str, fingerprint: bytes | None) -> Claim:
        claiming = self._start(self._store.claim(key, lease=self._given.lease, fingerprint=fingerprint))
        try:
            return await asyncio.shield(claiming)
        except asyncio.CancelledError:

            def let_go(made: asyncio.Task[Claim]) -> None:
                if not made.cancelled() and made.exception() is None and made.result().answer == "claimed":
                    self._start(self._release(Held(message, key, made.result().token)))

            claiming.add_done_callback(let_go)
            raise

    async def hold(self, held: Held, handling: Awaitable[object]) -> object:
        """What the handler answers, the claim renewed while it runs. `LeaseLostError`: it was cancelled for that."""
        task = asyncio.current_task()
        assert task is not None
        every = self._given.lease.total_seconds() / 3
        keeper: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal keeper
            keeper = asyncio.create_task(self._renew(held, every, task))

        # Most handlers are over before it fires, and cost no task.
        timer: Timer = self._clock.call_later(every, begin)
        try:
            answer = await handling
        except asyncio.CancelledError:
            if held.is_lost and task.uncancel() == 0:
                return LeaseLostError(held.key, held.token)
            raise
        else:
            if held.is_lost:
                task.uncancel()
                return LeaseLostError(held.key, held.token)
            return answer
        finally:
            timer.cancel()
            if keeper is not None:
                keeper.cancel()

    async def _renew(self, held: Held, every: float, handling: asyncio.Task[Any]) -> None:
        """Until it is cancelled, or the claim is lost: then the handler is."""
        until = self._clock.monotonic() + 2 * every
        while True:
            asked = self._clock.monotonic()
            try:
                ours = await self._store.renew(held.key, held.token, lease=self._given.lease)
            except Exception as error:
                # Not known: it is ours as long as the lease runs.
                self._failed(held.message, "renew", error)
                ours = asked < until
            else:
                until = asked + 3 * every
            if not ours:
                break
            await sleep(self._clock, min(every, max(until - self._clock.monotonic(), 0.01)))
        held.is_lost = True
        if self._telemetry.metering:
            self._telemetry.claim_lost(held.message.queue)
        self._say(LEASE_LOST, held.message, "its claim ran out while its handler ran; the handler is cancelled", None)
        handling.cancel()

    async def end(self, held: Held, decision: Decision) -> Decision:
        """Confirm what is about to be accepted, release whatever else; gives what is to be carried out."""
        if held.is_lost:
            return self._put_back()
        accepted = decision.row.case is Case.ACCEPTED
        await asyncio.shield(self._start(self._confirm(held) if accepted else self._release(held)))
        return decision

    def let_go(self, held: Held) -> None:
        """Release it for a handler that was cut off, whose own task has no time left."""
        self._start(self._release(held))

    async def at_rest(self) -> None:
        """Return when what was cut off is confirmed or released, or half a second later."""
        while self._ending and (await asyncio.wait(self._ending, timeout=_ENDING))[0]:
            pass

    async def _confirm(self, held: Held) -> None:
        try:
            confirmed = await self._store.confirm(held.key, held.token, retention=self._given.retention)
        except Exception as error:
            self._failed(held.message, "confirm", error)
            confirmed = False
        if not confirmed:
            # The work is done all the same, so the message is accepted.
            self._count(held.message, "confirm_failed")

    async def _release(self, held: Held) -> None:
        try:
            await self._store.release(held.key, held.token)
        except Exception as error:
            self._failed(held.message, "release", error)

    def _start(self, ending: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    def _put_back(self) -> Decision:
        return Decision(row=TABLE[Case.IN_PROGRESS], delay=self._given.put_back_after)

    def _failed(self, message: Message[Any], verb: str, error: BaseException) -> None:
        if verb == "claim":
            self._count(message, "failed")
        self.failed_in_row += 1
        if self.failed_in_row == 1:
            text = f"the store of claims could not {verb}: {type(error).__name__}: {error}"
            self._say(CLAIM_FAILED, message, text, error)

    def _count(self, message: Message[Any], answer: str) -> None:
        if self._telemetry.metering:
            self._telemetry.claimed(message.queue, answer)

    def _say(self, name: str, message: Message[Any], text: str, error: BaseException | None) -> None:
        self._report(
            Diagnostic(
                name, "error", text, message.queue, message_id=message.id, attempt=message.attempt, failure=error
            )
        )
