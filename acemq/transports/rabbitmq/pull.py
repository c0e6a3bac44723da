"""Pulling: `basic.get` on a channel per queue, several asked for at once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

from acemq.transport import Delivery, NotConnected, TimedOut, TransportError, Verb

from . import frames
from .consumer import Topology
from .frames import Malformed
from .incoming import IncomingChannel, refusal
from .lane import End
from .link import Link
from .session import ANSWER_LIMIT, Session, close_channel

_FIRST_LOOK, _SLOWEST_LOOK = 0.02, 0.1
"""Seconds between looks into an empty queue, growing from one to the other."""
_AT_ONCE = 200
"""Messages asked for in one go."""
_KEPT = 32
"""Queues whose channel stays open though nothing is held on it."""


class _Request:
    """Some `basic.get`s under way; the broker answers them in order."""

    def __init__(self, count: int) -> None:
        self.unanswered = count
        self.got: list[tuple[int, Delivery]] = []
        self.left = 0
        """In the queue behind the last message handed out."""
        self.answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_abandoned = False


class _Pulled(IncomingChannel):
    def __init__(self, session: Session, queue: str, topology: Topology) -> None:
        super().__init__(session, queue, counts=topology.counts_deliveries(queue))
        self._requests: deque[_Request] = deque()
        self._left = 0

    @property
    def is_idle(self) -> bool:
        return self.end is not None or not (self._requests or self.ledger.held)

    def get(self, count: int) -> _Request:
        request = _Request(count)
        if self.end is not None:
            request.answered.set_result(None)
            return request
        self._requests.append(request)
        frame = frames.get(self.channel.number, self.queue)
        # What was settled before leaves first: something given back may be what is asked for.
        self.session.lane.flush()
        for _ in range(count):
            self.session.lane.write(frame)
        return request

    def abandon(self, request: _Request) -> None:
        """Give back what it got and whatever is still to come."""
        request.is_abandoned = True
        for tag, _ in request.got:
            self.ledger.settle(tag, Verb.REQUEUE)

    def method(self, method: int, arguments: bytes) -> bool:
        if method == frames.BASIC_GET_EMPTY:
            self._answered()
            return True
        if method == frames.BASIC_GET_OK:
            (self._left,) = frames.u32_at(arguments, len(arguments) - 4)
        return super().method(method, arguments)

    def arrived(self, tag: int, delivery: Delivery) -> None:
        request = self._first_request
        if request.is_abandoned:
            self.ledger.settle(tag, Verb.REQUEUE)
        else:
            request.got.append((tag, delivery))
            request.left = self._left
        self._answered()

    @property
    def _first_request(self) -> _Request:
        if not self._requests:
            raise Malformed("the broker answered a basic.get that nobody sent")
        return self._requests[0]

    def _answered(self) -> None:
        request = self._first_request
        request.unanswered -= 1
        if not request.unanswered:
            self._requests.popleft()
            if not request.answered.done():
                request.answered.set_result(None)

    def ended(self, end: End) -> None:
        super().ended(end)
        if self.is_open:
            self.ledger.lose()
        for request in self._requests:
            request.got.clear()
            if not request.answered.done():
                request.answered.set_result(None)
        self._requests.clear()


class Pullers:
    """A channel per pulled queue. It is kept, as what was pulled is settled on it; only idle ones are given up."""

    def __init__(self, link: Link, topology: Topology) -> None:
        self._link, self._topology = link, topology
        self._by_queue: OrderedDict[str, _Puller] = OrderedDict()

    async def pull(self, queue: str, most: int, wait: float) -> Sequence[Delivery]:
        puller = self._by_queue.get(queue)
        if puller is None:
            puller = self._by_queue[queue] = _Puller(queue, self._link, self._topology)
        self._by_queue.move_to_end(queue)
        if len(self._by_queue) > _KEPT:
            self._give_up_idle()
        return await puller.pull(most, wait)

    def _give_up_idle(self) -> None:
        """Those that were not used for the longest, until few enough are left."""
        for queue in [queue for queue, puller in self._by_queue.items() if puller.is_idle][
            : len(self._by_queue) - _KEPT
        ]:
            self._link.start(self._by_queue.pop(queue).close())


class _Puller:
    def __init__(self, queue: str, link: Link, topology: Topology) -> None:
        self._queue, self._link, self._topology = queue, link, topology
        self._channel: _Pulled | None = None
        self._worked_on: Session | None = None
        """The link on which the queue was there; on a later one it may have to be made again."""
        self._under_way = 0
        self._opening: asyncio.Task[_Pulled] | None = None

    @property
    def is_idle(self) -> bool:
        return not self._under_way and (self._channel is None or self._channel.is_idle)

    async def pull(self, most: int, wait: float) -> Sequence[Delivery]:
        self._under_way += 1
        try:
            return await self._pull(most, wait)
        finally:
            self._under_way -= 1

    async def _pull(self, most: int, wait: float) -> Sequence[Delivery]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        pause, is_restored = _FIRST_LOOK, False
        while True:
            channel = await self._ready(deadline)
            got = await self._take(channel, most)
            left = deadline - loop.time()
            if got or (left <= 0 and channel.end is None):
                return got
            end = channel.end
            if end is not None and end.code is not None:
                if is_restored or not await self._restore(channel.session, end):
                    raise refusal(self._queue, TransportError(end.text, code=end.code))
                is_restored = True
                continue
            if left > 0:
                await asyncio.sleep(min(pause, left))
            pause = min(pause * 1.5, _SLOWEST_LOOK)

    async def _restore(self, session: Session, end: End) -> bool:
        """A queue missing after a reconnect, which this transport had made, is made again."""
        if end.code != 404 or self._worked_on is None:
            return False
        return await self._topology.restore(session, self._queue, was_deleted=self._worked_on is session)

    async def _take(self, channel: _Pulled, most: int) -> list[Delivery]:
        """What is there now, at most so many: one look, and then as many as the broker says are left."""
        taken: list[tuple[int, Delivery]] = []
        ask = 1
        while ask:
            request = channel.get(ask)
            try:
                async with asyncio.timeout(ANSWER_LIMIT):
                    await request.answered
            except BaseException as error:
                channel.abandon(request)
                for tag, _ in taken:
                    channel.ledger.settle(tag, Verb.REQUEUE)
                if isinstance(error, TimeoutError):
                    raise TimedOut(
                        f"queue {self._queue!r} gave no answer to a pull within {ANSWER_LIMIT:g} s"
                    ) from None
                raise
            if channel.end is None:
                self._worked_on = channel.session
            taken += request.got
            ask = min(request.left, most - len(taken), _AT_ONCE) if request.got else 0
        if channel.end is not None:
            return []  # they come again, on another channel
        return [delivery for _, delivery in taken]

    async def _ready(self, deadline: float) -> _Pulled:
        if self._channel is not None and self._channel.end is None:
            return self._channel
        try:
            async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + 0.01)):
                session = await self._link.live()
        except TimeoutError:
            raise NotConnected(f"no link to pull from {self._queue!r} on: {self._link.last_error}") from None
        if self._opening is None:
            # In a task of its own: a cancelled pull must not take the channel from another that waits for it, too.
            self._opening = self._link.start(self._open(session))
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, opening: asyncio.Task[_Pulled]) -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._channel = opening.result()

    async def _open(self, session: Session) -> _Pulled:
        channel = _Pulled(session, self._queue, self._topology)
        try:
            async with asyncio.timeout(ANSWER_LIMIT):
                await channel.open()
        except TimeoutError:
            raise TimedOut("no answer to the opening of a channel") from None
        return channel

    async def close(self) -> None:
        if self._channel is not None and self._channel.end is None:
            self._channel.session.lane.flush()
            self._channel.ledger.lose()
            await close_channel(self._channel.channel)
