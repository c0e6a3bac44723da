"""Exchanges, queues and bindings on the broker: looked at, compared, created; never deleted or migrated by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from aiormq import Channel

from acemq.clock import Clock
from acemq.errors import DriftError, TopologyError
from acemq.lacking import refuse_lacking
from acemq.plan import Finding, Plan, problem, refuse_drift
from acemq.topology import Declaration, Topology
from acemq.transport import (
    AccessDenied,
    ApplyMode,
    Depth,
    ExchangeMissing,
    Kind,
    NotConnected,
    QueueMissing,
    TimedOut,
    TransportError,
)

from . import capabilities, questions
from .drift import UNLISTED, bindings_seen, drift_of, name_of
from .link import Link
from .session import ANSWER_LIMIT, Session, ask

T = TypeVar("T")

log = logging.getLogger("acemq.rabbitmq")

NOT_FOUND, LOCKED, PRECONDITION_FAILED, ACCESS_REFUSED = 404, 405, 406, 403

_Key = tuple[str, str, str, str]
_Question = Callable[[Channel], Awaitable[T]]


class BrokerTopology:
    """What there is, and what this transport has made of it."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link, self._clock = link, clock
        self._known: dict[_Key, Declaration] = {}
        self._applied: dict[_Key, Declaration] = {}
        self._seen_at: dict[str, float] = {}
        """When an exchange of ours was last there, by the time of the loop."""
        self._restored_for: Session | None = None
        self._restoring: asyncio.Task[None] | None = None

    # What is known without asking

    def known(self, kind: Kind, name: str) -> Declaration | None:
        """As this transport has declared it or found it."""
        return self._known.get(_key_of(kind, name))

    def counts_deliveries(self, queue: str) -> bool | None:
        declared = self.known("queue", queue)
        return None if declared is None else declared.type == "quorum"

    # apply

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        refuse_lacking(topology, capabilities.OWN)
        declarations = topology.describe()
        async with self._questions() as broker:
            findings = [await _look(broker, declared) for declared in declarations if declared.kind != "binding"]
            findings += bindings_seen(declarations, findings)
            match mode:
                case ApplyMode.REPORT:
                    pass
                case ApplyMode.VERIFY:
                    refuse_drift(findings, nor_missing=True)
                case ApplyMode.CREATE:
                    refuse_drift(findings)
                    findings = [
                        await _create(broker, declared, finding)
                        for declared, finding in zip(declarations, findings, strict=True)
                    ]
                    self._applied |= {_key(declared): declared for declared in declarations}
                    now = asyncio.get_running_loop().time()
                    self._seen_at |= {each.name: now for each in declarations if each.kind == "exchange"}
        for declared, finding in zip(declarations, findings, strict=True):
            if finding.verdict in ("present", "created"):
                self._known[_key(declared)] = declared
        return findings

    async def restore(self, session: Session, queue: str, *, was_deleted: bool) -> bool:
        """Declare again everything that `apply` has made, once a connection, since it does not find this queue.

        False if that is not for us to do: the queue is not ours, or somebody has deleted it while we looked. One that
        never outlives its connection is always made again.
        """
        declared = self._applied.get(_key_of("queue", queue))
        if declared is None or (was_deleted and not (declared.exclusive or declared.auto_delete)):
            return False
        await self._restore_on(session)
        return True

    async def _restore_on(self, session: Session) -> None:
        if self._restored_for is not session:
            self._restored_for = session
            self._restoring = self._link.start(self._declare_again(session))
        if self._restoring is not None:
            await asyncio.wait({self._restoring})

    async def _declare_again(self, session: Session) -> None:
        log.warning("%s: what was declared here is gone; declaring it again", session.endpoint)
        refusals: list[str] = []
        try:
            async with asyncio.timeout(ANSWER_LIMIT), _Questions(session) as broker:
                for declared in sorted(self._applied.values(), key=_order):
                    try:
                        await broker.ask(partial(questions.declare, declared=declared))
                    except TransportError as refusal:
                        refusals.append(f"{name_of(declared)}: {refusal}")
        except TimeoutError:
            refusals.append("no answer")
        if refusals:
            self._restored_for = None  # so that the next try, in its turn, tries this again
            log.error("%s: not everything could be declared again: %s", session.endpoint, "; ".join(refusals))

    # Single questions

    async def look_at_exchange(self, session: Session, name: str) -> None:
        """Raise `ExchangeMissing` or another `TransportError` if it cannot be published to.

        One of ours that went while there was no connection is made again, as a queue is, once a connection.
        """
        there = await self._sees_exchange(session, name)
        if not there and self._seen_at.get(name, session.began) < session.began:
            await self._restore_on(self._link.session or session)
            there = await self._sees_exchange(session, name)
        if name in self._seen_at:
            self._seen_at[name] = asyncio.get_running_loop().time()
        if not there:
            raise ExchangeMissing(f"exchange {name!r} does not exist; declare it first", code=NOT_FOUND)

    async def _sees_exchange(self, session: Session, name: str) -> bool:
        async with session.scratch() as channel:
            try:
                await ask(questions.look(channel, "exchange", name))
            except TransportError as error:
                if error.code == NOT_FOUND:
                    return False
                raise _denied(error, f"exchange {name!r}") from None
        return True

    async def depth(self, queue: str) -> Depth:
        found = await self._ask(lambda channel: questions.count(channel, queue), f"queue {queue!r}")
        if found is None:
            raise QueueMissing(f"queue {queue!r} does not exist; declare it first", code=NOT_FOUND)
        return Depth(ready=found.message_count or 0, held=None, delayed=None, exact=False, at=self._clock.now())

    async def exists(self, name: str, kind: Kind) -> bool:
        async with self._questions() as broker:
            try:
                await broker.ask(lambda channel: questions.look(channel, kind, name))
            except TransportError as error:
                if error.code == NOT_FOUND:
                    return False
                if error.code != LOCKED:  # a queue that is another connection's own exists, too
                    raise _denied(error, f"{kind} {name!r}") from None
        return True

    async def delete(self, name: str, kind: Kind, *, only_if_empty: bool) -> bool:
        # RabbitMQ says yes to deleting what is not there, so that is asked first.
        if not await self.exists(name, kind):
            return False
        known = self.known(kind, name)
        if_empty = only_if_empty and known is not None and known.type == "classic"
        if only_if_empty and kind == "queue" and not if_empty and (await self.depth(name)).ready:
            # A quorum queue cannot be asked in one: RabbitMQ would close the whole connection with 540. So it is looked
            # at first, and what comes in between goes with the queue.
            return False
        try:
            await self._ask(
                lambda channel: questions.delete(channel, kind, name, if_empty=if_empty), f"{kind} {name!r}"
            )
        except TransportError as error:
            if error.code == PRECONDITION_FAILED and only_if_empty:
                return False
            raise
        for memory in (self._known, self._applied):
            for key in [key for key, declared in memory.items() if _belongs_to(declared, kind, name)]:
                del memory[key]
        if kind == "exchange":
            self._seen_at.pop(name, None)
        return True

    async def purge(self, queue: str) -> int | None:
        done = await self._ask(lambda channel: questions.purge(channel, queue), f"queue {queue!r}")
        if done is None:
            raise QueueMissing(f"queue {queue!r} does not exist; declare it first", code=NOT_FOUND)
        return done.message_count

    async def _ask(self, question: _Question[T], what: str) -> T | None:
        """The broker's answer; `None` when it has no such thing."""
        async with self._questions() as broker:
            try:
                return await broker.ask(question)
            except TransportError as error:
                if error.code == NOT_FOUND:
                    return None
                raise _denied(error, what) from None

    @asynccontextmanager
    async def _questions(self) -> AsyncGenerator[_Questions]:
        try:
            async with asyncio.timeout(ANSWER_LIMIT) as limit:
                session = await self._link.live()
                async with _Questions(session) as broker:
                    broker.answered = lambda: limit.reschedule(asyncio.get_running_loop().time() + ANSWER_LIMIT)
                    yield broker
        except TimeoutError:
            if self._link.session is None:
                raise NotConnected(
                    f"no link to the broker within {ANSWER_LIMIT:g} s: {self._link.last_error}"
                ) from None
            raise TimedOut(f"no answer from the broker within {ANSWER_LIMIT:g} s") from None


class _Questions:
    """A scratch channel, replaced whenever a refusal has closed it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._channels = AsyncExitStack()
        self._channel: Channel | None = None
        self.answered: Callable[[], None] = lambda: None

    async def ask(self, question: _Question[T]) -> T:
        if self._channel is None:
            self._channel = await self._channels.enter_async_context(self._session.scratch())
        try:
            answer = await ask(question(self._channel))
        except TransportError:
            self._channel = None
            await self._channels.aclose()
            self.answered()
            raise
        self.answered()
        return answer

    async def __aenter__(self) -> _Questions:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channels.aclose()


# Looking and comparing


async def _look(broker: _Questions, declared: Declaration) -> Finding:
    """Passive first: whether it is there may be asked without the right to declare it, and creates nothing.

    To compare it with what is wanted, AMQP knows no other way than to declare it once more.
    """
    kind, name = declared.kind, declared.name
    try:
        await broker.ask(lambda channel: questions.look(channel, kind, name))
    except TransportError as error:
        match error.code:
            case 404:
                return Finding(verdict="missing", kind=kind, name=name)
            case 405:
                return Finding(verdict="drift", kind=kind, name=name, argument="exclusive", wanted=False, found=True)
            case _:
                raise _denied(error, f"{kind} {name!r}") from None
    try:
        await broker.ask(partial(questions.declare, declared=declared))
    except TransportError as error:
        match error.code:
            case 406:
                return drift_of(declared, str(error))
            case 403:
                return Finding(verdict="present", kind=kind, name=name, note="not compared: no right to declare it")
            case 404:
                return Finding(verdict="missing", kind=kind, name=name)  # deleted between the two questions
            case _:
                raise
    return Finding(verdict="present", kind=kind, name=name)


async def _create(broker: _Questions, declared: Declaration, finding: Finding) -> Finding:
    if finding.verdict == "present" and declared.kind != "binding":
        return finding
    try:
        await broker.ask(partial(questions.declare, declared=declared))
    except TransportError as error:
        if error.code == PRECONDITION_FAILED:
            # Somebody else has just made it, otherwise; or it cannot be made so at all.
            drift = drift_of(declared, str(error))
            raise (
                DriftError(Plan((drift,)), problem(drift)) if drift.argument else TopologyError(f"{declared}: {error}")
            ) from None
        if error.code == NOT_FOUND:
            raise TopologyError(f"{declared}: {error}") from None
        raise _denied(error, f"{declared.kind} {declared.name!r}") from None
    if finding.verdict == "missing":
        return Finding(verdict="created", kind=declared.kind, name=name_of(declared))
    return Finding(verdict="present", kind=declared.kind, name=name_of(declared), note=UNLISTED)


def _denied(error: TransportError, what: str) -> TransportError:
    return AccessDenied(f"{what}: {error}", code=ACCESS_REFUSED) if error.code == ACCESS_REFUSED else error


def _key(declared: Declaration) -> _Key:
    return declared.kind, declared.name, declared.exchange, declared.routing_key


def _key_of(kind: Kind, name: str) -> _Key:
    return kind, name, "", ""


def _order(declared: Declaration) -> int:
    return ("exchange", "queue", "binding").index(declared.kind)


def _belongs_to(declared: Declaration, kind: Kind, name: str) -> bool:
    if declared.kind == "binding":
        return name == (declared.name if kind == "queue" else declared.exchange)
    return declared.kind == kind and declared.name == name
