"""Whether a connection and what stands on it are well: asked in parallel, within a limit, leaving nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import msgspec

from acemq.clock import Clock
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.consuming.registry import AnyConsumer
from acemq.errors import AcemqError, ConfigurationError
from acemq.stats import Depths
from acemq.transport import Phase, SubscriptionPhase, Transport, TransportError

Status: TypeAlias = Literal["up", "degraded", "down"]

PROBE_LIMIT = timedelta(seconds=3)
AWAY_LIMIT = timedelta(seconds=10)
"""Without a link for longer: down."""
IDLE_LIMIT = timedelta(seconds=30)
"""Without a subscription, or with work waiting and nothing fetched, for longer: not well."""
REFUSAL_LIMIT = timedelta(seconds=1)
"""For which a subscription may still name what ended it, on a link that has just come back."""

_NOWHERE = "acemq.health"
"""A queue that nobody declares: asking whether it exists makes the broker answer and creates nothing."""
_SEVERITY: dict[Status, int] = {"up": 0, "degraded": 1, "down": 2}


class HealthPart(msgspec.Struct, frozen=True):
    """One part, and what there is to say about it. Whatever is not plainly up has a detail."""

    name: str
    status: Status
    detail: str = ""


class Health(msgspec.Struct, frozen=True):
    """The answer of `Connection.health()`."""

    status: Status
    """That of the worst part."""
    parts: tuple[HealthPart, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "status": self.status,
            "parts": [{"name": part.name, "status": part.status, "detail": part.detail} for part in self.parts],
        }


Check: TypeAlias = Callable[[], Awaitable[HealthPart] | HealthPart]


class Checks:
    """The parts of one connection. A part that raises or hangs is down by name, and keeps no other from its answer."""

    def __init__(self, transport: Transport, depths: Depths, clock: Clock, consumers: Iterable[AnyConsumer]) -> None:
        self._transport, self._depths, self._clock, self._consumers = transport, depths, clock, consumers
        self._own: dict[str, Check] = {}
        self._waiting_since: dict[AnyConsumer, float] = {}
        """Since when work was seen waiting while nothing was fetched."""

    def add(self, name: str, check: Check) -> None:
        if not name or name in self._own or name == "connection":
            taken = f"{name!r} is taken; each part has a name of its own" if name else "the name is empty"
            raise ConfigurationError(f"name={name!r}: {taken}")
        self._own[name] = check

    def has(self, name: str) -> bool:
        return name in self._own

    def drop(self, name: str) -> None:
        self._own.pop(name, None)

    async def ask(self, within: timedelta) -> Health:
        checks: list[tuple[str, Check]] = [("connection", lambda: self._connection(within))]
        checks += self._of_consumers()
        checks += self._own.items()
        asked = [(name, asyncio.ensure_future(_called(check))) for name, check in _told_apart(checks)]
        _, hanging = await asyncio.wait([task for _, task in asked], timeout=within.total_seconds())
        for task in hanging:
            task.cancel()  # and not waited for: it may swallow that, too
        parts = tuple(_part(name, task, within, hangs=task in hanging) for name, task in asked)
        return Health(max((part.status for part in parts), key=_SEVERITY.__getitem__), parts)

    # The connection

    async def _connection(self, within: timedelta) -> HealthPart:
        state = self._transport.state
        reason = f": {state.last_error}" if state.last_error else ""
        if state.phase is not Phase.CONNECTED:
            if state.phase is not Phase.RECONNECTING:
                return _said("down", f"{state.phase}, to {state.endpoint}")
            away = self._clock.now() - state.since
            if state.terminal:
                return _said("down", f"{state.endpoint} refuses us{reason}")
            return _said("down" if away >= AWAY_LIMIT else "degraded", f"no link for {_seconds(away)}{reason}")
        if state.blocked is not None:
            return _said("up", f"blocked, no publishes now: {state.blocked}")
        return await self._probe(min(within, PROBE_LIMIT))

    async def _probe(self, within: timedelta) -> HealthPart:
        try:
            async with asyncio.timeout(within.total_seconds()):
                await self._transport.exists(_NOWHERE)
        except TimeoutError:
            return _said("down", f"the broker has not answered within {_seconds(within)}")
        except TransportError as error:
            if error.code is None:
                return _said("down", f"the broker was asked in vain: {error}")
            # A refusal is an answer.
        return _said("up")

    # Consumers

    def _of_consumers(self) -> list[tuple[str, Check]]:
        open_now = [consumer for consumer in self._consumers if consumer.state is not ConsumerState.CLOSED]
        names = Counter(consumer.name for consumer in open_now)
        return [
            (f"consumer {each.name}" + (f" of {each.queue}" if names[each.name] > 1 else ""), self._check_of(each))
            for each in open_now
        ]

    def _check_of(self, consumer: AnyConsumer) -> Check:
        return lambda: self._consumer(consumer)

    async def _consumer(self, consumer: AnyConsumer) -> HealthPart:
        now, held = self._clock.now(), f"queue {consumer.queue!r}"
        subscription, link = consumer.subscription, self._transport.state
        if consumer.state is ConsumerState.STARTING or subscription is None:
            return _said("degraded", f"{held}: starting")
        if consumer.state is ConsumerState.DRAINING:
            return _said("up", f"{held}: draining")
        if isinstance(consumer, Consumer) and consumer.workers_ended:
            return _said("down", f"{held}: {consumer.workers_ended} of {consumer.concurrency} workers have ended")
        if subscription.phase is SubscriptionPhase.RECOVERING:
            without = now - subscription.since
            reason = f": {subscription.error}" if subscription.error else ""
            is_linked = link.phase is Phase.CONNECTED and now - link.since >= REFUSAL_LIMIT
            is_refused = is_linked and bool(subscription.error) and without >= REFUSAL_LIMIT
            status: Status = "down" if is_refused or without >= IDLE_LIMIT else "degraded"
            return _said(status, f"{held}: no subscription for {_seconds(without)}{reason}")
        if subscription.phase is SubscriptionPhase.WAITING:
            # For the queue, of which only one may have it: its owner's health tells of what waits there.
            others = f": {subscription.error}" if subscription.error else ""
            return _said("degraded" if others else "up", f"{held}: stands by{others}")
        if consumer.halted is not None:
            return _said("degraded", consumer.halted)
        if isinstance(consumer, Consumer) and consumer.stuck:
            return _said("degraded", f"{held}: {len(consumer.stuck)} handlers run at twice their time limit")
        if isinstance(consumer, Consumer) and consumer.claims is not None and consumer.claims.failed_in_row:
            return _said("degraded", f"{held}: the store of claims fails; {consumer.claims.failed_in_row} in a row")
        if consumer.mover.moves_failed_in_row:
            return _said("degraded", f"{held}: copies do not land; {consumer.mover.moves_failed_in_row} in a row")
        if consumer.state is ConsumerState.PAUSED:
            return _said("up", f"{held}: paused")
        idle = await self._idle_for(consumer) if link.blocked is None else 0.0
        if idle >= IDLE_LIMIT.total_seconds():
            return _said("degraded", f"{held}: work waits, and nothing was fetched for {idle:.0f} s")
        if not self._transport.capabilities_of("queue", consumer.queue).counts_deliveries:
            return _said("up", f"{held} keeps no count of deliveries: max_deliveries has no effect")
        return _said("up")

    async def _idle_for(self, consumer: AnyConsumer) -> float:
        """Seconds since work was first seen waiting without anything being fetched."""
        self._waiting_since = {
            each: at for each, at in self._waiting_since.items() if each.state is not ConsumerState.CLOSED
        }
        now = self._clock.monotonic()
        since = self._waiting_since.get(consumer)
        if since is not None and consumer.fetched_at >= since:
            del self._waiting_since[consumer]
            since = None
        if consumer.in_flight or consumer.held or now - consumer.fetched_at < IDLE_LIMIT.total_seconds():
            self._waiting_since.pop(consumer, None)
            return 0.0
        try:
            depths = [await self._depths.of(queue) for queue in consumer.queues]
        except AcemqError:
            return 0.0  # the part of the connection says so
        if not any(depth.ready for depth in depths if depth is not None) or consumer.in_flight or consumer.held:
            self._waiting_since.pop(consumer, None)
            return 0.0
        return now - self._waiting_since.setdefault(consumer, now)


def _told_apart(checks: Iterable[tuple[str, Check]]) -> Iterator[tuple[str, Check]]:
    """A name that was there already gets a number: no part may stand in for another."""
    seen = Counter[str]()
    for name, check in checks:
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), check


def _said(status: Status, detail: str = "") -> HealthPart:
    return HealthPart("", status, detail)


async def _called(check: Check) -> HealthPart:
    answer = check()
    return await answer if inspect.isawaitable(answer) else answer


def _part(name: str, task: asyncio.Future[Any], within: timedelta, *, hangs: bool) -> HealthPart:
    if hangs:
        return HealthPart(name, "down", f"no answer within {_seconds(within)}")
    if task.cancelled():
        return HealthPart(name, "down", "was cancelled")
    error = task.exception()
    if error is not None:
        return HealthPart(name, "down", without_secrets(f"{type(error).__name__}: {error}"))
    part = task.result()
    if not isinstance(part, HealthPart) or part.status not in _SEVERITY:
        return HealthPart(name, "down", f"the check returned {type(part).__name__}, expected HealthPart")
    detail = without_secrets(part.detail)
    return HealthPart(name, part.status, detail or ("" if part.status == "up" else "no detail given"))


def without_secrets(text: str) -> str:
    """A URL in it loses its user information."""
    return _USER_INFORMATION.sub("//", text)


_USER_INFORMATION = re.compile(r"//[^/\s]*@")


def _seconds(length: timedelta) -> str:
    return f"{length.total_seconds():g} s" if length < timedelta(seconds=10) else f"{length.total_seconds():.0f} s"
