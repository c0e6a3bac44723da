"""The kit on the memory transport, whose switches supply every fault: its first user, and its proof."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, get_args

from acemq.clock import MovableClock
from acemq.headers import Headers
from acemq.testing.conformance.bench import out
from acemq.testing.conformance.hooks import Impossible
from acemq.testing.conformance.suite import TransportConformance
from acemq.testing.conformance.timing import Timing
from acemq.transport import LostBy, Transport
from acemq.transports.memory import MemoryBroker, Profile, transport
from acemq.transports.memory.faults import Stallable


class MemoryFaults:
    """`Faults`, by the switches of a broker."""

    def __init__(self, broker: MemoryBroker, names: dict[int, str]) -> None:
        self._broker, self._names = broker, names

    async def cut(self) -> None:
        self._broker.disconnect("cut by a scenario")

    async def refuse(self, on: bool) -> None:
        self._broker.refuse_dials(on)

    async def swallow(self, on: bool) -> None:
        verb: Stallable
        for verb in get_args(Stallable):
            (self._broker.stall if on else self._broker.release)(verb)

    async def restart(self) -> None:
        raise Impossible("no faults: restart, a broker in a process ends with it")

    async def wipe(self) -> None:
        self._broker.wipe()

    async def block(self, on: bool) -> None:
        if on:
            self._broker.block("blocked by a scenario")
        else:
            self._broker.unblock()

    async def abandon(self, transport: Transport) -> None:
        # Its link is gone and nobody tells it, so it never dials again.
        for link in tuple(self._broker.links):
            if link.name == self._names[id(transport)]:
                self._broker.unlink(link, LostBy.CONNECTION)


class MemoryConformance(TransportConformance):
    """On a clock that is moved. A class of its own for each profile."""

    profile: ClassVar[Profile] = Profile.FULL
    lease: ClassVar[timedelta | None] = None
    timing = Timing(late=timedelta(milliseconds=100), binding=timedelta(milliseconds=20))

    def clock(self) -> MovableClock:
        return self.broker().clock  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    def broker(self) -> MemoryBroker:
        """Of this scenario: every test has an instance of its own."""
        broker: MemoryBroker | None = getattr(self, "_broker", None)
        if broker is None:
            broker = MemoryBroker(
                clock=MovableClock(), profile=self.profile, lease=self.lease, max_message=2 * 1024 * 1024
            )
            self._broker, self._names = broker, dict[int, str]()
        return broker

    def make(self, **options: object) -> Transport:
        broker = self.broker()
        given: dict[str, Any] = {"name": f"client-{len(self._names)}", **options}
        given.pop("clock", None)
        made = transport("memory://", broker=broker, **given)
        self._names[id(made)] = given["name"]
        return made

    def faults(self) -> MemoryFaults:
        return MemoryFaults(self.broker(), self._names)

    async def put_raw(self, queue: str, body: bytes) -> None:
        self.broker().publish([out(queue, body, headers=_NOTHING, content_type=None)])

    async def put_malformed(self, queue: str) -> bytes:
        raise Impossible("memory keeps messages as objects, and none of them can be malformed")

    def no_access(self) -> tuple[Transport, str]:
        raise Impossible("memory asks nobody for a password")


_NOTHING: Headers = {}
