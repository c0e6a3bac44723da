"""One registration of a subscription with the broker: a channel, its prefetch, its consumer tag."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec
from aiormq.abc import DeliveredMessage

from acemq.errors import CapabilityError, ConfigurationError
from acemq.headers import HeaderValue, check
from acemq.transport import Delivery, Settlement, Verb

from . import frames, questions
from .incoming import IncomingChannel
from .lane import End
from .ledger import settle
from .session import ANSWER_LIMIT, Session, ask, close_channel

_OPTIONS = ("name", "priority", "arguments")


class ConsumeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `options` of `subscribe` may hold."""

    name: str | None = None
    """The consumer tag, the same after a recovery."""
    priority: int | None = None
    arguments: Mapping[str, HeaderValue] = msgspec.field(default_factory=dict[str, HeaderValue])

    @staticmethod
    def read(given: Mapping[str, object]) -> ConsumeOptions:
        """Refuse what is not known or cannot be used; `None` is the default."""
        given = {key: value for key, value in given.items() if value is not None or key not in _OPTIONS}
        for key, value in given.items():
            match key, value:
                case "name", str() if 1 <= len(value.encode()) <= frames.SHORT_LIMIT:
                    pass
                case "priority", int() if not isinstance(value, bool) and -(2**31) <= value < 2**31:
                    pass
                case "arguments", Mapping():
                    for name, argument in cast("Mapping[str, object]", value).items():
                        check(name, argument)
                case "offset", _:
                    raise CapabilityError("rabbitmq", "streams", "offset", "They are not built yet")
                case "name" | "priority" | "arguments", _:
                    raise ConfigurationError(f"{key}={value!r} of a subscription cannot be used")
                case _:
                    raise ConfigurationError(
                        f"option {key!r} of a subscription is not known; there are {', '.join(_OPTIONS)}"
                    )
        return ConsumeOptions(**cast("dict[str, Any]", given))

    def consume_arguments(self) -> Mapping[str, HeaderValue]:
        return self.arguments if self.priority is None else {**self.arguments, "x-priority": self.priority}


class Topology(Protocol):
    """What a subscription asks about its queue."""

    def counts_deliveries(self, queue: str) -> bool | None: ...

    async def restore(self, session: Session, queue: str, *, was_deleted: bool) -> bool:
        """Make again what this transport had made and a new connection does not find; False if that is not done."""
        ...


class Registrant(Protocol):
    """The subscription that a consumer serves."""

    @property
    def queue(self) -> str: ...
    @property
    def name(self) -> str:
        """The consumer tag."""
        ...

    @property
    def prefetch(self) -> int: ...
    @property
    def options(self) -> ConsumeOptions: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def is_paused(self) -> bool: ...
    def room(self, consumer: Consumer, /) -> int:
        """How many deliveries may be handed out now."""
        ...

    def deliver(self, batch: Sequence[Delivery], /) -> None: ...
    def lost_queue(self, consumer: Consumer, /) -> None: ...
    def lost_channel(self, consumer: Consumer, end: End, /) -> None: ...


class Consumer(IncomingChannel):
    """The channel of a subscription, from its opening to its end."""

    is_patient = True

    def __init__(self, session: Session, registrant: Registrant) -> None:
        queue = registrant.queue
        super().__init__(session, queue, counts=registrant.topology.counts_deliveries(queue))
        self.is_registered = False
        self.was_cancelled = False
        """By the broker: the queue is gone, or its leader has moved."""
        self._registrant = registrant
        self._waiting: list[Delivery] = []
        """Arrived, and not handed out yet."""

    async def prepare(self) -> None:
        """Open the channel if it is not open yet."""
        if not self.is_open:
            async with asyncio.timeout(ANSWER_LIMIT):
                await self.open()
                await ask(self.channel.basic_qos(prefetch_count=self._registrant.prefetch))

    async def register(self) -> None:
        """Open the channel if it is not open yet, and ask for deliveries."""
        wanted = self._registrant
        await self.prepare()
        async with asyncio.timeout(ANSWER_LIMIT):
            self.channel.consumers[wanted.name] = _never_called
            arguments = wanted.options.consume_arguments()
            await ask(questions.consume(self.channel, self.queue, wanted.name, arguments))
        self.is_registered = True

    @property
    def is_usable(self) -> bool:
        return self.end is None and not self.was_cancelled

    @property
    def handed_out(self) -> int:
        return len(self.ledger.held) - len(self._waiting) if self.is_open else 0

    def cancel(self) -> None:
        """Ask for nothing more, from now on and without waiting for an answer."""
        if self.is_registered and self.is_usable:
            self.session.lane.write(frames.cancel(self.channel.number, self._registrant.name))
            self.channel.consumers.pop(self._registrant.name, None)  # else aiormq would not register it again
        self.is_registered = False

    def give_back(self) -> None:
        """What has arrived and was not handed out, for somebody else."""
        waiting, self._waiting = self._waiting, []
        if self.is_usable:
            for delivery in waiting:
                settle(Settlement(delivery, Verb.REQUEUE))

    def method(self, method: int, arguments: bytes) -> bool:
        if method == frames.BASIC_CANCEL:
            self.was_cancelled = True
            self._registrant.lost_queue(self)
        return super().method(method, arguments)

    def arrived(self, tag: int, delivery: Delivery) -> None:
        if self._registrant.is_paused:
            self.ledger.settle(tag, Verb.REQUEUE)  # was on its way when we cancelled: for somebody else
            return
        if not self._waiting:
            self.session.lane.after_chunk(self.hand_out)
        self._waiting.append(delivery)

    def hand_out(self) -> None:
        """What has come together, in one call. It waits while the subscription is not open, and above its prefetch.

        The broker keeps to the prefetch by itself; after a pause it does not count what was out before it.
        """
        room = self._registrant.room(self)
        if room > 0 and self._waiting:
            batch, self._waiting = self._waiting[:room], self._waiting[room:]
            self._registrant.deliver(batch)
        self.ledger.after_turn = self._hand_out_soon if self._waiting else None

    def _hand_out_soon(self) -> None:
        # In a turn of its own, since settlements may be written from within `deliver`.
        asyncio.get_running_loop().call_soon(self.hand_out)

    def flush(self) -> None:
        """What was settled leaves now, if the broker still takes it."""
        if self.is_open and self.end is None:
            self.ledger.flush()

    def lose(self) -> Sequence[Delivery]:
        """Everything that was handed out and not settled; from now on settling it is stale."""
        unseen = {id(delivery) for delivery in self._waiting}
        self._waiting = []
        return [delivery for delivery in self.ledger.lose() if id(delivery) not in unseen] if self.is_open else ()

    def ended(self, end: End) -> None:
        super().ended(end)
        self.is_registered = False
        self._registrant.lost_channel(self, end)

    async def close(self) -> None:
        """Give back in place all that is held, after what was settled: both by closing the channel."""
        if self.is_open and self.end is None:
            self.flush()
            self.lose()  # before the close is sent: an acknowledgement behind it would cost the whole link
            await close_channel(self.channel)


async def _never_called(message: DeliveredMessage) -> None:
    """aiormq wants a callback; the lane takes all deliveries before it."""
