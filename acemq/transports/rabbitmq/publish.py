"""Publishing: one confirm channel on a connection of its own, every message answered for, nothing written twice.

A message is *refused* as long as no byte of it can have left, *failed* afterwards. What was refused is never written.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence

from acemq.clock import Clock, Timer
from acemq.errors import AcemqError
from acemq.transport import (
    AccessDenied,
    Blocked,
    LostBy,
    NotConnected,
    Outgoing,
    Published,
    PublishResult,
    TimedOut,
    TransportError,
    Unroutable,
)

from . import frames
from .bell import Bell
from .confirms import Call, Confirms
from .frames import PublishFrames
from .lane import End
from .link import Link
from .session import ANSWER_LIMIT, Session

log = logging.getLogger("acemq.rabbitmq")

_NEVER = float("inf")
_EXCHANGE = re.compile(r"exchange '(.*)' in vhost")
_DEFAULT_EXCHANGE = "amq.default"
"""As the broker calls the exchange without a name when it refuses it."""
_TOO_LATE = 10_000
"""Publishes out of time and still unanswered, at which the link is given up: a broker that owes so many never pays."""
_FORBIDDEN_FOR = 5.0
"""Seconds for which a refused exchange is not tried again, as each try costs the channel and all that is on it."""


class _PublishChannel:
    """A confirm channel from its opening to its end; what is published on it, and what is known of its exchanges."""

    def __init__(self, session: Session, clock: Clock) -> None:
        self.session, self.lane = session, session.lane
        self.confirms = Confirms()
        self.exchanges: set[str] = set()
        """Those that exist: writing to a missing one costs the channel and everything that is under way on it."""
        self.end: End | None = None
        self.over = asyncio.Event()
        self._clock = clock
        self._sweep_at = _NEVER
        self._timer: Timer | None = None
        self._returned = Unroutable(""), ("", "")

    async def open(self) -> None:
        channel = await self.session.channel(self, confirms=True)
        self._frames = PublishFrames(channel.number, self.session.frame_max)

    # As the taker of its channel

    def method(self, method: int, arguments: bytes) -> bool:
        if method == frames.BASIC_ACK:
            self.confirms.answered(frames.u64_at(arguments, 0)[0], arguments[8] & 1 == 1, positive=True)
        elif method == frames.BASIC_NACK:
            self.confirms.answered(frames.u64_at(arguments, 0)[0], arguments[8] & 1 == 1, positive=False)
        elif method == frames.BASIC_RETURN:
            self._returned = frames.returned(arguments)
        else:
            return False
        return True

    def content(self, properties: bytes, body: bytes) -> None:
        error, route = self._returned
        self.confirms.was_returned(error, route, frames.read_properties(properties).message_id)

    def ended(self, end: End) -> None:
        self.end = end
        if self._timer is not None:
            self._timer.cancel()
        self.confirms.fail(_unanswered(end))
        self.over.set()

    # Writing

    def write(self, call: Call, at: int) -> int:
        """Write the messages of a call from `at` on, until the socket is full; the place of the next one."""
        batch, results, out, add = call.batch, call.results, self.lane.out, self.confirms.add
        # Who publishes one by one has nobody to share a write with, and would wait a turn of the loop for it.
        is_alone = len(batch) == 1 and not self.confirms.open
        while at < len(batch):
            message = batch[at]
            if results[at] is None:
                try:
                    size = self._frames.append_to(out, message)
                except frames.REFUSALS as refusal:
                    call.settle(at, PublishResult(Published.REFUSED, refusal))
                else:
                    add(call, at)
                    self.lane.gathered(size, at_once=is_alone)
            at += 1
            if self.lane.is_congested:
                break
        if call.deadline < self._sweep_at:
            self._sweep_by(call.deadline)
        return at

    def _sweep_by(self, deadline: float) -> None:
        """One timer for all: at the earliest time limit everything is looked through, and it is set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._sweep_at = deadline
        self._timer = self._clock.call_later(max(deadline - self._clock.monotonic(), 0), self._sweep)

    def _sweep(self) -> None:
        self._sweep_at, self._timer = _NEVER, None
        following = self.confirms.expire(self._clock.monotonic())
        if self.confirms.late > _TOO_LATE:
            self.lane.abort(f"{self.confirms.late} publishes were never answered")
        elif following is not None:
            self._sweep_by(following)


def _unanswered(end: End) -> Callable[[Outgoing], PublishResult]:
    """What a channel's end means for what had no answer: it may be there, unless the broker refused it by name."""
    text = "the link was lost" if end.by is LostBy.CONNECTION else "the channel was closed"
    unknown = f"{text} before the broker answered: {end}; the message may be there"
    failed = PublishResult(Published.FAILED, TransportError(unknown, code=end.code))
    denied = PublishResult(Published.REFUSED, AccessDenied(end.text, code=end.code))
    found = _EXCHANGE.search(end.text) if end.code == 403 else None
    named = found[1] if found else None

    def result_of(message: Outgoing) -> PublishResult:
        return denied if named == (message.exchange or _DEFAULT_EXCHANGE) else failed

    return result_of


class Publisher:
    """Keeps a confirm channel for as long as the transport lives."""

    def __init__(
        self,
        link: Link,
        clock: Clock,
        *,
        look: Callable[[Session, str], Awaitable[None]],
    ) -> None:
        """`look` raises for an exchange that cannot be published to."""
        self._link, self._clock, self._look = link, clock, look
        self._channel: _PublishChannel | None = None
        self._arrival = Bell()
        self._is_closing = False
        self._unwritten = 0
        self._looking: dict[str, asyncio.Task[AcemqError | None]] = {}
        self._forbidden: dict[str, tuple[float, AccessDenied]] = {}

    @property
    def outstanding(self) -> int:
        """Messages without a result, those that wait for a link included."""
        return self._unwritten + (self._channel.confirms.open if self._channel is not None else 0)

    async def keep(self) -> None:
        """Open the channel, and another whenever it is gone."""
        while True:
            session = await self._link.live()
            channel = _PublishChannel(session, self._clock)
            try:
                async with asyncio.timeout(ANSWER_LIMIT):
                    await channel.open()
            except (TransportError, TimeoutError) as error:
                # A link on which no channel can be opened is of no use.
                session.lane.abort(f"no channel to publish on: {error or 'no answer'}")
                continue
            self._channel = channel
            self._arrival.ring()
            await channel.over.wait()
            if channel.end is not None and channel.end.by is LostBy.CHANNEL:
                log.warning("%s: the channel for publishing was closed: %s", self._link.name, channel.end)
                if channel.end.code == 403 and (named := _EXCHANGE.search(channel.end.text)):
                    name = "" if named[1] == _DEFAULT_EXCHANGE else named[1]
                    refusal = AccessDenied(channel.end.text, code=403)
                    self._forbidden[name] = (self._clock.monotonic() + _FORBIDDEN_FOR, refusal)

    async def ready(self) -> None:
        while self._channel is None:
            await self._arrival.heard()

    async def idle(self) -> None:
        """Return once nothing waits for a confirm."""
        if self._channel is not None:
            await self._channel.confirms.idle()

    def close(self) -> None:
        """What waits for a link is refused."""
        self._is_closing = True
        self._arrival.ring()

    async def publish(self, batch: Sequence[Outgoing], within: float) -> Sequence[PublishResult]:
        call = Call(batch, self._clock.monotonic() + within)
        at = 0
        while at < len(batch):
            channel = self._channel
            if channel is None or channel.end is not None:
                if self._is_closing:
                    call.refuse(at, NotConnected("the transport is closing"))
                    break
                if not await self._heard(self._arrival, call, at):
                    call.refuse(at, NotConnected(f"no link to publish on within {within:g} s: {self._link.last_error}"))
                    break
            elif channel.session.blocked is not None:
                call.refuse(at, Blocked(channel.session.blocked))
                break
            elif not channel.exchanges.issuperset(call.exchanges):
                await self._look_at(channel, call)
            elif channel.lane.is_congested:
                if not await self._heard(channel.lane.writable, call, at):
                    call.refuse(at, TimedOut(f"the broker took no more bytes; not written within {within:g} s"))
                    break
            else:
                at = channel.write(call, at)
        return await call.answers()

    async def _heard(self, bell: Bell, call: Call, at: int) -> bool:
        waiting = len(call.batch) - at
        self._unwritten += waiting
        try:
            return await bell.heard(call.deadline - self._clock.monotonic())
        finally:
            self._unwritten -= waiting

    # Exchanges

    async def _look_at(self, channel: _PublishChannel, call: Call) -> None:
        """Learn whether they exist, once a channel; refuse the messages to those that do not."""
        looks = {name: self._look_once(channel, name) for name in call.exchanges - channel.exchanges}
        await asyncio.wait(looks.values(), timeout=max(0, call.deadline - self._clock.monotonic()))
        for name, look in looks.items():
            unknown = TimedOut(f"the broker did not say in time whether exchange {name!r} exists")
            error = look.result() if look.done() and not look.cancelled() else unknown
            if error is None:
                channel.exchanges.add(name)
            elif channel.end is None:  # else the link went meanwhile, and the next one is asked
                call.refuse_exchange(name, error)

    def _look_once(self, channel: _PublishChannel, name: str) -> asyncio.Task[AcemqError | None]:
        # In a task of its own: several calls may wait for the answer, and one that is cancelled must not take it away.
        if name not in self._looking:
            self._looking[name] = self._link.start(self._error_of(channel.session, name))
            self._looking[name].add_done_callback(lambda _: self._looking.pop(name, None))
        return self._looking[name]

    async def _error_of(self, session: Session, name: str) -> AcemqError | None:
        until, error = self._forbidden.get(name, (0.0, None))
        if error is not None and self._clock.monotonic() < until:
            return error
        self._forbidden.pop(name, None)
        if not name:
            return None  # the default exchange is always there
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                await self._look(session, name)
        except TimeoutError:
            return TimedOut(f"the broker did not say within {ANSWER_LIMIT:g} s whether exchange {name!r} exists")
        except TransportError as refusal:
            return refusal
        return None
