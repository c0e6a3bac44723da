"""What whoever proves a transport supplies: how it is made, and what only its broker can do."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import ClassVar, NoReturn, Protocol

from acemq.clock import MovableClock
from acemq.ids import new_id
from acemq.testing.conformance.timing import Timing
from acemq.topology import QueueOptions
from acemq.transport import Transport


class NotSupplied(Exception):
    """A hook is missing: its scenarios are skipped, and fail where `ACEMQ_REQUIRE_SERVICES=1`."""


class Impossible(NotSupplied):
    """What is asked for cannot happen on this broker, so that its scenarios are skipped everywhere."""


class Faults(Protocol):
    """What goes wrong between a client and its broker. Each may raise `NotSupplied("reason")`."""

    async def cut(self) -> None:
        """Close every connection now."""
        ...

    async def refuse(self, on: bool) -> None:
        """New connections fail; open ones are left alone."""
        ...

    async def swallow(self, on: bool) -> None:
        """Sockets stay open, nothing passes either way."""
        ...

    async def restart(self) -> None:
        """The server, keeping its data."""
        ...

    async def wipe(self) -> None:
        """Everything is gone, topology included; the server is up."""
        ...

    async def block(self, on: bool) -> None:
        """The broker stops taking publishes."""
        ...

    async def abandon(self, transport: Transport) -> None:
        """As if its process had been killed: it is heard of no more, and has said nothing."""
        ...


class Transaction(Protocol):
    """A caller's own transaction, and what `publish(…, transaction=)` is given."""

    @property
    def handle(self) -> object: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...
    def rolled_back(self) -> AbstractAsyncContextManager[object]:
        """A savepoint that is rolled back where the block ends."""
        ...


class Hooks:
    """The base of every suite: one method must be given, everything else has a default that skips loudly."""

    timing: ClassVar[Timing] = Timing()
    known_gaps: ClassVar[Mapping[str, str]] = {}
    """`{"C-066": "why, and a link"}`: expected failures. The day that one passes the run fails."""
    slow: ClassVar[frozenset[str]] = frozenset()
    """Scenarios that take more than ten seconds on this broker; they get the marker `slow`."""
    label: ClassVar[str] = ""
    """How the report calls what is proved; the transport's own name unless given."""
    version: ClassVar[str] = ""
    length_slack: ClassVar[int] = 0
    """How many messages a queue may take beyond its `max_length` before it refuses."""
    one_writer: ClassVar[bool] = False
    """The broker takes one write at a time, so that a transaction left open keeps every other from writing."""
    queues: ClassVar[QueueOptions] = {}
    """Options of every queue that a scenario declares, such as the type to prove."""

    def make(self, **options: object) -> Transport:
        """A fresh transport, not opened. Called several times it stands for several processes."""
        raise NotImplementedError(f"{type(self).__name__} must define make(**options)")

    def server(self) -> str:
        """Name and version of the broker, for the report."""
        return ""

    def faults(self) -> Faults:
        _missing("faults")

    async def put_raw(self, queue: str, body: bytes) -> None:
        """A message without anything of ours, put there by the broker's own client."""
        _missing("put_raw")

    async def put_malformed(self, queue: str) -> bytes:
        """A message that cannot be taken apart; its body."""
        _missing("put_malformed")

    def no_access(self) -> tuple[Transport, str]:
        """A transport with a wrong password, and that password, which must never be printed."""
        _missing("no_access")

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        _missing("transaction")

    def clock(self) -> MovableClock | None:
        """A clock that the transport takes its time from: waits are then moved and not slept."""
        return None

    def name(self, word: str) -> str:
        """A name that no other scenario and no other run uses."""
        return f"{word}-{new_id()[:8]}"


def _missing(hook: str) -> NoReturn:
    raise NotSupplied(f"no {hook}")


NOW = timedelta()
