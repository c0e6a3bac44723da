"""One consumer of three queues: high first, nobody starved, and no more in hand than of one queue.

The prefetch is shared out among three subscriptions, so that a lane with a backlog never takes another's place. What
they bring lies in one buffer. A handler is given what the highest lane has, and every so often what a lower one has.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from acemq.consuming.options import ConsumeOptions
from acemq.errors import AcemqError, ConfigurationError
from acemq.stopping import CLOSING, until
from acemq.topology import lanes_of
from acemq.transport import Delivery, LostBy, Sink, Subscription, SubscriptionPhase, SubscriptionState, Transport

TURN = 10
"""Every so many starts one is a lower lane's."""
FEWEST = 3
"""Prefetched at least: one of each lane."""
MOST = 65_535


class Lanes(msgspec.Struct, frozen=True):
    """A queue with lanes, as one consumer of it has them."""

    queue: str
    prefetch: int
    turn: int = TURN

    @property
    def highest_first(self) -> tuple[str, ...]:
        return lanes_of(self.queue)[::-1]

    def shares(self) -> dict[str, int]:
        """Half of the prefetch for high and the rest evenly, one each at least."""
        high = self.prefetch // 2
        low = (self.prefetch - high) // 2
        return dict(zip(self.highest_first, (high, self.prefetch - high - low, low), strict=True))

    async def subscribe(self, transport: Transport, sink: Sink, options: Mapping[str, object]) -> LaneSubscription:
        """Registered on return, with all three; raises what one of them raises, and then none is left behind.

        The highest comes first: what is urgent is not to find every handler busy with what is not.
        """
        whole = LaneSubscription(self.queue, sink)
        try:
            for lane, share in self.shares().items():
                named = {**options, "name": f"{options['name']}{lane.removeprefix(self.queue)}"}
                part = await transport.subscribe(lane, _LaneSink(whole), prefetch=share, options=named)
                whole.parts.append(part)
        except BaseException:
            with suppress(AcemqError):
                await until(time.monotonic() + CLOSING, whole.close())
            raise
        whole.is_complete = True
        return whole


def lanes_for(
    queue: str, there: bool | None, options: ConsumeOptions, prefetch: int, *, in_hand: int, in_place: bool
) -> Lanes | None:
    """`None`: it has none, as far as is known. Refuses what cannot be had with lanes, or not without.

    `in_hand`: so many keep all handlers busy. One lane may be all that has something, and its share is a quarter.
    """
    if not there:
        if "turn" in options and there is False:
            raise ConfigurationError(f"turn={options['turn']}: queue {queue!r} has no lanes whose turn it could be")
        return None
    if in_place or options.get("exclusive"):
        wanted = "an ordered consumer" if in_place else "exclusive=True"
        raise ConfigurationError(
            f"{wanted}: queue {queue!r} has lanes, which are three queues without an order between them, and cannot be "
            "had as one; declare a queue without lanes"
        )
    if "prefetch" not in options:
        prefetch = min(max(prefetch, 4 * in_hand), MOST)
    return Lanes(queue, check_share(queue, prefetch), options.get("turn", TURN))


def check_share(queue: str, prefetch: int) -> int:
    if prefetch < FEWEST:
        raise ConfigurationError(f"prefetch={prefetch}: queue {queue!r} has lanes; {FEWEST} are the least, one of each")
    return prefetch


class LaneBuffer:
    """What was fetched and not started, as the `ready` of a `Holding`."""

    def __init__(self, lanes: Lanes, *, is_suspect: Callable[[Delivery], bool] = lambda _: False) -> None:
        """`is_suspect`: may be what kills the process. No lower lane has its turn before one: so it is known which."""
        self._lanes = {lane: deque[Delivery]() for lane in lanes.highest_first}
        self._turn, self._is_suspect = lanes.turn, is_suspect
        self._passed = 0
        """Starts since one was a lower lane's."""
        self._served: deque[Delivery] | None = None
        """The lower lane that had the last turn."""

    def popleft(self) -> Delivery:
        lane, is_lower = self._next()
        if is_lower:
            self._passed, self._served = 0, lane
        else:
            self._passed += 1
        return lane.popleft()

    def _next(self) -> tuple[deque[Delivery], bool]:
        """The lane whose message is started next, and whether one above it has to wait for that."""
        highest, *lower = (lane for lane in self._lanes.values() if lane)
        if not lower or self._passed < self._turn - 1 or self._is_suspect(highest[0]):
            return highest, False
        return lower[-1] if lower[0] is self._served else lower[0], True

    def __getitem__(self, index: int, /) -> Delivery:
        """Of 0 only: what `popleft` would give now."""
        return self._next()[0][index]

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Delivery]:
        for lane in self._lanes.values():
            yield from lane

    def extend(self, batch: Iterable[Delivery], /) -> None:
        for delivery in batch:
            self._lanes[delivery.queue].append(delivery)

    def appendleft(self, delivery: Delivery, /) -> None:
        self._lanes[delivery.queue].appendleft(delivery)

    def extendleft(self, batch: Iterable[Delivery], /) -> None:
        for delivery in batch:
            self.appendleft(delivery)

    def clear(self) -> None:
        for lane in self._lanes.values():
            lane.clear()


class LaneSubscription:
    """Three subscriptions as one. It is as well as the least well of them."""

    def __init__(self, queue: str, sink: Sink) -> None:
        self.queue = queue
        self.parts: list[Subscription] = []
        self.is_complete = False
        self.sink = sink

    @property
    def state(self) -> SubscriptionState:
        states = [part.state for part in self.parts]
        worst = max(states, key=lambda state: _SEVERITY.index(state.phase))
        return SubscriptionState(
            phase=worst.phase,
            since=worst.since,
            # From 1, and one more whenever one of them is made again.
            generation=sum(state.generation for state in states) - len(states) + 1,
            gap=any(state.gap for state in states),
            held=sum(state.held for state in states),
            last_contact=min((at for state in states if (at := state.last_contact) is not None), default=None),
            error=worst.error,
        )

    def changed(self) -> None:
        if self.is_complete:
            self.sink.changed(self.state)

    def pause(self) -> None:
        for part in self.parts:
            part.pause()

    def resume(self) -> None:
        for part in self.parts:
            part.resume()

    async def stop(self) -> None:
        await _all(part.stop() for part in self.parts)

    async def close(self) -> None:
        await _all(part.close() for part in self.parts)


_SEVERITY = (
    SubscriptionPhase.CLOSED,
    SubscriptionPhase.STOPPED,
    SubscriptionPhase.ACTIVE,
    SubscriptionPhase.PAUSED,
    SubscriptionPhase.WAITING,
    SubscriptionPhase.RECOVERING,
)


class _LaneSink:
    """What one lane brings goes to the consumer; how it is, is said of all three."""

    def __init__(self, whole: LaneSubscription) -> None:
        self._whole = whole

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self._whole.sink.deliver(batch)

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        self._whole.sink.lost(batch, by)

    def changed(self, state: SubscriptionState, /) -> None:
        self._whole.changed()


async def _all(endings: Iterable[Awaitable[Any]]) -> None:
    """Each of them to its end, whatever another raises."""
    for result in await asyncio.gather(*endings, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
