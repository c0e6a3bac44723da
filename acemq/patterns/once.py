"""The unit of work: the claim on a message, what its handler writes and what it announces, in one commit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, Unpack

from acemq.ack import DUPLICATE, Ack, Verdict
from acemq.clock import check_duration
from acemq.consuming.handling import is_async, name_of
from acemq.errors import ConfigurationError, FatalError, HandlerTypeError
from acemq.message import Message
from acemq.patterns.outbox import BoundOutbox, Outbox
from acemq.publishing.options import PublishOptions
from acemq.stores import PUT_BACK_AFTER, Claim, OutboxRecord, check_claim_key

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

T = TypeVar("T")


class Inbox(Protocol):
    """A store that claims in the caller's transaction."""

    async def claim_within(
        self, key: str, within: Any, /, *, retention: timedelta = ..., fingerprint: bytes | None = ...
    ) -> Claim: ...

    def check_same(self, engine: Any, what: str) -> None:
        """Refuse an engine of another database."""
        ...


class Unit:
    """What a handler works with: one transaction, which is committed when it has accepted its message."""

    def __init__(self, session: AsyncSession, token: int, outbox: BoundOutbox | None) -> None:
        self.session, self.token, self._outbox = session, token, outbox
        """`token`: of the claim, for whatever fences its writes."""

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        *,
        key: str | None = None,
        **options: Unpack[PublishOptions],
    ) -> OutboxRecord:
        """Write a message down in this transaction; a relay publishes it after the commit. As `BoundOutbox.publish`."""
        if self._outbox is None:
            raise ConfigurationError(
                "once() was given no outbox; give it outbox=, the store that a relay publishes from"
            )
        return await self._outbox.publish(exchange, routing_key, payload, key=key, **options)

    async def send(
        self, queue: str, payload: object, *, key: str | None = None, **options: Unpack[PublishOptions]
    ) -> OutboxRecord:
        """The same, straight into one queue."""
        return await self.publish("", queue, payload, key=key, **options)


UnitHandler: TypeAlias = Callable[[Message[T], Unit], Awaitable[Ack | None]]


class Once(Generic[T]):
    """A handler whose effects in one database happen once for each key."""

    def __init__(
        self,
        handler: UnitHandler[T],
        *,
        session: async_sessionmaker[AsyncSession],
        inbox: Inbox,
        outbox: Outbox | None,
        key: Callable[[Message[Any]], str],
        retention: timedelta,
    ) -> None:
        if not is_async(handler):
            raise HandlerTypeError(f"{name_of(handler)!r} must be `async def`, and take a message and a Unit")
        self.__name__ = name_of(handler)
        self._handler, self._session, self._inbox, self._outbox = handler, session, inbox, outbox
        self._key, self._retention = key, check_duration("retention", retention)
        bind = session.kw.get("bind")
        if bind is not None:
            inbox.check_same(getattr(bind, "engine", bind), "session= is on")

    async def __call__(self, message: Message[T]) -> Ack | None:
        try:
            key = check_claim_key(self._key(message))
        except Exception as error:  # no key, today or tomorrow
            raise FatalError(f"no idempotency key: {error}") from error
        async with self._session() as session:
            claim = await self._inbox.claim_within(key, session, retention=self._retention)
            match claim.answer:
                case "duplicate":
                    return DUPLICATE
                case "in_progress":
                    return Ack.in_progress(PUT_BACK_AFTER)
                case "claimed":
                    return await self._work(message, session, claim.token)

    async def _work(self, message: Message[T], session: AsyncSession, token: int) -> Ack | None:
        transaction = session.sync_session.get_transaction()
        outbox = None if self._outbox is None else self._outbox.bind(session)
        with _held_open(session) as tried:
            answer = await self._handler(message, Unit(session, token, outbox))
        if tried or session.sync_session.get_transaction() is not transaction:
            # What it wrote after the end of its transaction is not in the one with the claim.
            raise FatalError(f"handler {self.__name__!r} {_ENDED}")
        if answer is not None and (not isinstance(answer, Ack) or answer.verdict is not Verdict.ACCEPT):  # pyright: ignore[reportUnnecessaryIsInstance]
            await session.rollback()
            return answer
        # A crash before this leaves nothing. After it, or when its answer is lost, the redelivery finds the claim.
        await session.commit()
        return answer


_ENDED = "ended the transaction of its unit by itself; leave commit and rollback to once(), and return or raise"


class _held_open:
    """Refuse a commit by anybody but us; savepoints may come and go."""

    def __init__(self, session: AsyncSession) -> None:
        self._session, self._tried = session.sync_session, list[str]()

    def __enter__(self) -> list[str]:
        from sqlalchemy import event

        event.listen(self._session, "before_commit", self._refuse)
        return self._tried

    def __exit__(self, *_: object) -> None:
        from sqlalchemy import event

        event.remove(self._session, "before_commit", self._refuse)

    def _refuse(self, session: Any) -> None:
        if not session.in_nested_transaction():
            self._tried.append("commit")
            raise FatalError(f"a handler {_ENDED}")
