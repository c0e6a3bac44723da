"""Carries out what was decided about a delivery: copy, confirm, then accept; never the other way round.

Every move of a message is made here: back to its own queue, onto a rung, to the dead letters, to the parked ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Literal

from msgspec.structs import replace
from opentelemetry import trace

from acemq import headers as h
from acemq import transport as port
from acemq.clock import Clock, Pauses
from acemq.consuming.leasing import Leases
from acemq.consuming.settling import Case, ConsumerCounters, Decision
from acemq.envelope import Envelope, to_millis
from acemq.headers import HeaderValue
from acemq.message import Handled, envelope_of
from acemq.publishing.outbound import Outbound
from acemq.retry import RetryPolicy, has_rung
from acemq.telemetry import (
    MOVE_FAILED,
    RUNG_MISSING,
    SETTLE_STALE,
    Diagnostic,
    Reporter,
    Telemetry,
)
from acemq.topology import dead_letters_of, parked_of, rung_of
from acemq.transport import Delivery, Outgoing, Published, Settled, Settlement, Transport, Verb

IN_CONSUMER_LIMIT = timedelta(minutes=15)
"""The longest wait that is spent in a prefetch slot because its rung is missing."""

_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before a copy that did not land is tried again, by how often it has not; the last one from then on."""
_REMEMBERED = 1_000
"""Messages of which is known how often their copies did not land; with more of them at once, one begins anew."""


def copy_of(
    delivery: Delivery, envelope: Envelope, decision: Decision, *, origin: str, now_ms: int, queue: str | None = None
) -> Outgoing:
    """The copy that a decision makes. Every header that arrived is kept, unknown reserved ones included.

    Left out is what the broker counts by itself.
    """
    own = decision.row.copy == "own queue"
    wire: dict[str, HeaderValue] = {name: value for name, value in delivery.headers.items() if name not in _REWRITTEN}
    attempt = envelope.attempt + 1 if decision.row.attempt == "+1" else envelope.attempt
    wire.update(
        envelope.replace(
            attempt=attempt, error=envelope.error if decision.text is None else decision.text, headers={}
        ).to_headers()
    )
    if own:
        # A copy on its way through a rung may carry no expiration of its own (CONTRACT.md section 2).
        if delivery.expires_in is not None:
            wire.setdefault(h.EXPIRES_AT, to_millis(envelope.first_seen + delivery.expires_in))
        target = queue or delivery.queue
    else:
        wire.pop(h.EXPIRES_AT, None)
        wire.update(_forensics(delivery, decision, origin, now_ms))
        home = queue or delivery.queue
        target = parked_of(home) if decision.row.copy == ".parked" else dead_letters_of(home)
    return Outgoing(
        exchange="",
        routing_key=target,
        body=delivery.body,
        headers=wire,
        message_id=envelope.id,
        content_type=delivery.content_type,
        reply_to=delivery.reply_to,
        priority=delivery.priority if own else None,
        ordering_key=delivery.ordering_key,
    )


_REWRITTEN = frozenset(
    {
        *(h.ID, h.TYPE, h.VERSION, h.CORRELATION, h.CAUSATION, h.ATTEMPT, h.FIRST_SEEN, h.ORIGIN, h.ERROR, h.CLAIM),
        *(h.ROUTE, h.ROUTE_POSITION, h.ROUTE_ID),
        *h.FORENSICS,
        h.DELIVERY_COUNT,
    }
)


def _forensics(delivery: Delivery, decision: Decision, origin: str, now_ms: int) -> dict[str, HeaderValue]:
    found: dict[str, HeaderValue] = {
        h.FAILED_QUEUE: delivery.queue,
        h.FAILED_AT: now_ms,
        h.FAILED_AS: decision.row.how,
        h.FAILED_BY: origin,
    }
    if decision.error is not None:
        kind = type(decision.error)
        found[h.FAILED_WITH] = f"{kind.__module__}.{kind.__qualname__}"
    return found


class GivenBack(Exception):
    """A wait was cut short by a stop."""


class Mover:
    """Carries out the decisions of one consumer."""

    def __init__(
        self,
        *,
        transport: Transport,
        outbound: Outbound,
        telemetry: Telemetry,
        report: Reporter,
        clock: Clock,
        origin: str,
        policy: RetryPolicy,
        home: str | None = None,
        in_place: bool = False,
        leases: Leases | None = None,
    ) -> None:
        """`home`: whose `.dlq` and `.parked` take what is given up; the delivery's own queue unless given.

        `in_place`: what a copy that does not land leaves behind is held and tried again, for a requeue might put it
        behind others.
        """
        self.transport, self.outbound, self.telemetry, self.report = transport, outbound, telemetry, report
        self.clock, self.policy = clock, policy
        self.leases = leases
        """`None`: deliveries are held until their link dies."""
        self.counters = ConsumerCounters()
        self._origin, self._home, self._in_place = origin, home, in_place
        self._rungs = frozenset(policy.rungs())
        self.moves_failed_in_row = 0
        self._failed: dict[str, int] = {}
        """How often in a row the copy of a message did not land, by its id: it may be delivered again in between."""
        self._pauses = Pauses(clock)
        self._stopping = False
        self._under_way = 0
        self._rested: asyncio.Future[None] | None = None

    def stop_waiting(self) -> None:
        """End every wait, now and from now on, with `GivenBack`. Copies under way still finish."""
        self._stopping = True
        self._pauses.end()

    async def at_rest(self) -> None:
        """Return when nothing is carried out any more."""
        if self._under_way:
            if self._rested is None:
                self._rested = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._rested)

    async def accept(self, delivery: Delivery) -> bool:
        """The short way for what needs no copy. False: the broker no longer held it."""
        return self._held(await self._settle(Settlement(delivery, Verb.ACCEPT)), delivery)

    async def _settle(self, settlement: Settlement) -> Settled:
        if self.leases is not None:
            self.leases.let_go(settlement.delivery)
        (settled,) = await self.transport.settle((settlement,))
        if self.telemetry.metering:
            self.telemetry.settled(settlement.delivery.queue, settlement.verb, settled)
        return settled

    async def accept_all(self, deliveries: Collection[Delivery]) -> None:
        """The same for many, in one call."""
        settled = await self.settle([Settlement(delivery, Verb.ACCEPT) for delivery in deliveries])
        for each, delivery in zip(settled, deliveries, strict=True):
            if self.telemetry.metering:
                self.telemetry.settled(delivery.queue, Verb.ACCEPT, each)
            self._held(each, delivery)

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        """What needs neither a copy nor a count."""
        if self.leases is not None:
            for settlement in batch:
                self.leases.let_go(settlement.delivery)
        return await self.transport.settle(batch)

    async def put_back(self, delivery: Delivery) -> bool:
        """As it is, after a moment, so that a fault that lasts does not go round in circles."""
        await self._pause(_PAUSES[0])
        return self._held(await self._settle(Settlement(delivery, Verb.REQUEUE)), delivery)

    async def carry_out(self, decision: Decision, delivery: Delivery) -> tuple[Handled, bool]:
        """What happened, and whether the broker still held the delivery. Waits of a retry are spent in here.

        Cancelled before the copy, or ended by `GivenBack`, it leaves the delivery unsettled and its attempt as it was.
        """
        self._under_way += 1
        try:
            return await self._carry_out(decision, delivery)
        finally:
            self._under_way -= 1
            if not self._under_way and self._rested is not None:
                self._rested.set_result(None)
                self._rested = None

    async def _carry_out(self, decision: Decision, delivery: Delivery) -> tuple[Handled, bool]:
        envelope = envelope_of(delivery, self.clock)
        row = decision.row
        match row.copy:
            case "none":
                verb = Verb.REQUEUE if row.original == "requeued" else Verb.ACCEPT
                settled = await self._settle(Settlement(delivery, verb))
                handled, held = _ended(decision, envelope), self._held(settled, delivery)
            case "own queue":
                handled, held = await self._send_back(decision, delivery, envelope)
            case ".dlq" | ".parked":
                handled, held = await self._move(decision, delivery, self._copy(decision, delivery, envelope))
        self.tell(decision, handled, delivery, envelope)
        return handled, held

    def stale(self, delivery: Delivery) -> None:
        """Count and report a decision that came too late to change anything: the delivery comes again."""
        self.counters.stale += 1
        self._report(SETTLE_STALE, "warning", "settled too late: the broker no longer holds this delivery", delivery)

    # Back to its own queue

    async def _send_back(self, decision: Decision, delivery: Delivery, envelope: Envelope) -> tuple[Handled, bool]:
        can = self.transport.capabilities_of("queue", delivery.queue)
        copy = self._copy(decision, delivery, envelope)
        policy = decision.policy or self.policy
        delay = policy.jittered(decision.delay) if decision.row.case is Case.RETRY else decision.delay
        rewrites = decision.row.attempt == "unchanged" or can.requeue_rewrites
        if can.requeue_delay is not None and delay <= can.requeue_delay and rewrites:
            headers = copy.headers if can.requeue_rewrites else None
            settled = await self._settle(Settlement(delivery, Verb.REQUEUE, delay, headers))
            return _ended(decision, envelope, delivery.queue, delay), self._held(settled, delivery)
        if delay and can.publish_delay is not None and delay <= can.publish_delay:
            return await self._move(decision, delivery, replace(copy, delay=delay), delay)
        if decision.rung and can.dead_letter_routes and has_rung(decision.delay):
            # Exact, never jittered: the wait names a queue.
            through_rung = await self._through_rung(decision, delivery, copy)
            if through_rung is not None:
                return through_rung
            delay = min(decision.delay, IN_CONSUMER_LIMIT)
        elif policy is not self.policy:
            delay = min(delay, IN_CONSUMER_LIMIT)  # the waits of the consumer's own were checked when it was made
        await self._pause(delay.total_seconds())
        return await self._move(decision, delivery, copy, delay)

    async def _through_rung(
        self, decision: Decision, delivery: Delivery, copy: Outgoing
    ) -> tuple[Handled, bool] | None:
        """Through the waiting queue of this delay; `None` where there is none."""
        rung = rung_of(delivery.queue, decision.delay)
        if decision.delay in self._rungs:
            waiting = replace(copy, routing_key=rung)
            result = await self.outbound.move(waiting)
            if result.outcome is Published.ROUTED:
                return await self._landed(decision, delivery, waiting, decision.delay)
            if result.outcome is not Published.UNROUTABLE:
                return await self._move(decision, delivery, waiting, decision.delay, tried=result)
        self.telemetry.rung_missing(delivery.queue, rung)
        self._report(
            RUNG_MISSING,
            "warning",
            f"{rung} is not there; the wait of {decision.delay} is spent in the consumer. "
            f"Name the delay with RetryPolicy.with_rungs() and start the consumer again",
            delivery,
            destination=rung,
        )
        return None

    # A copy elsewhere

    async def _move(
        self,
        decision: Decision,
        delivery: Delivery,
        copy: Outgoing,
        delay: timedelta | None = None,
        *,
        tried: port.PublishResult | None = None,
    ) -> tuple[Handled, bool]:
        while True:
            result = tried or await self.outbound.move(copy)
            tried = None
            if result.outcome is Published.ROUTED:
                # Confirmed first, accepted second: a crash in between sends twice, never loses.
                return await self._landed(decision, delivery, copy, delay)
            self.moves_failed_in_row += 1
            if self.moves_failed_in_row == 1 or not will_pass(result):
                self._move_failed(delivery, copy, result)
            await self._pause(self._pause_after_failure(copy))
            if not will_pass(result):
                self.counters.count("move_failed")
                if not self._in_place:
                    break
        settled = await self._settle(Settlement(delivery, Verb.REQUEUE))
        envelope = envelope_of(delivery, self.clock)
        return _ended(decision, envelope, copy.routing_key, delay, landed=False), self._held(settled, delivery)

    def _pause_after_failure(self, copy: Outgoing) -> float:
        """Its own: what one blip has done to twenty copies is one failure of each."""
        failed = self._failed.pop(copy.message_id, 0) + 1
        self._failed[copy.message_id] = failed
        if len(self._failed) > _REMEMBERED:
            del self._failed[next(iter(self._failed))]
        return _PAUSES[min(failed, len(_PAUSES)) - 1]

    async def _landed(
        self, decision: Decision, delivery: Delivery, copy: Outgoing, delay: timedelta | None
    ) -> tuple[Handled, bool]:
        self.moves_failed_in_row = 0
        self._failed.pop(copy.message_id, None)
        held = await self.accept(delivery)
        return _ended(decision, envelope_of(delivery, self.clock), copy.routing_key, delay), held

    def _copy(self, decision: Decision, delivery: Delivery, envelope: Envelope) -> Outgoing:
        now_ms = to_millis(self.clock.now())
        home = None if decision.row.copy == "own queue" else self._home
        return copy_of(delivery, envelope, decision, origin=self._origin, now_ms=now_ms, queue=home)

    async def _pause(self, seconds: float) -> None:
        if not self._stopping:
            await self._pauses.pause(seconds)
        if self._stopping:
            raise GivenBack

    # Saying so

    def _held(self, settled: Settled, delivery: Delivery) -> bool:
        if settled is not Settled.STALE:
            return settled is Settled.DONE
        self.stale(delivery)
        return False

    def tell(self, decision: Decision, handled: Handled, delivery: Delivery, envelope: Envelope) -> None:
        row = decision.row
        if row.also:
            self.counters.count(row.also)
        if row.case is not Case.RELEASED:
            self.counters.count(row.counted)
        if not handled.landed:
            return
        if row.case is Case.RETRY:
            if self.telemetry.metering:
                self.telemetry.retried(delivery.queue, envelope.type)
            if self.telemetry.tracing:
                trace.get_current_span().add_event(
                    "message.retried",
                    {
                        "messaging.destination.name": handled.target or "",
                        "messaging.acemq.retry_delay_ms": round((handled.delay or timedelta()).total_seconds() * 1000),
                        "messaging.acemq.reason": decision.reason or "",
                    },
                )
        if row.diagnostic:
            if self.telemetry.metering and row.case is not Case.REJECTED:
                self.telemetry.dead_lettered(delivery.queue, envelope.type, row.counted)
            if self.telemetry.tracing:
                trace.get_current_span().add_event(
                    "message.dead_lettered",
                    {
                        "messaging.destination.name": handled.target or "",
                        "messaging.acemq.reason": decision.reason or "",
                    },
                )
            self._report(
                row.diagnostic,
                "warning",
                f"moved to {handled.target}: {decision.text}",
                delivery,
                destination=handled.target,
                failure=decision.error,
            )

    def _move_failed(self, delivery: Delivery, copy: Outgoing, result: port.PublishResult) -> None:
        self.telemetry.set_aside_failed(delivery.queue, copy.routing_key)
        self._report(
            MOVE_FAILED,
            "error",
            f"a copy to {copy.routing_key} did not land ({result.outcome}: {result.error}); the original stays",
            delivery,
            destination=copy.routing_key,
            failure=result.error,
        )

    def _report(
        self,
        name: str,
        level: Literal["info", "warning", "error"],
        message: str,
        delivery: Delivery,
        *,
        destination: str | None = None,
        failure: BaseException | None = None,
    ) -> None:
        envelope = envelope_of(delivery, self.clock)
        self.report(
            Diagnostic(name, level, message, delivery.queue, destination, envelope.id, envelope.attempt, failure)
        )


def will_pass(result: port.PublishResult) -> bool:
    """Nothing was written, and for a reason that goes away by itself."""
    return result.outcome is Published.REFUSED and isinstance(
        result.error, port.Blocked | port.NotConnected | port.TimedOut
    )


def _ended(
    decision: Decision,
    envelope: Envelope,
    target: str | None = None,
    delay: timedelta | None = None,
    *,
    landed: bool = True,
) -> Handled:
    return Handled(decision.row.counted, target, decision.reason, envelope.attempt, delay, landed)
