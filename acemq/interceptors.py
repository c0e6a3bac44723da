"""What belongs to every message: hooks round a publish and round a handler, with one rule for each place.

A `before_…` hook that raises stops its message; whatever another hook raises is reported, and changes nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from acemq.ack import ACCEPT, Ack
from acemq.consuming.handling import name_of
from acemq.consuming.settling import Refused, bad_answer
from acemq.errors import ConfigurationError
from acemq.message import Handled, Message
from acemq.publishing.draft import Draft
from acemq.publishing.outbound import Receipt
from acemq.telemetry import LISTENER_FAILED, Diagnostic, Reporter

T = TypeVar("T")


class PublishInterceptor:
    """Hooks round every publish; override what you need, as `async def`, or as a `def` that does not block."""

    def before_publish(self, draft: Draft, /) -> Awaitable[None] | None:
        """Everything in the draft may still change. Raising stops this publish, and its caller gets that error."""

    def after_publish(self, draft: Draft, receipt: Receipt, /) -> Awaitable[None] | None:
        """The broker has the message."""

    def publish_failed(self, draft: Draft, error: BaseException, /) -> Awaitable[None] | None:
        """It was not confirmed, or could not be encoded."""


class ConsumeInterceptor:
    """Hooks round every handling; override what you need, as `async def`, or as a `def` that does not block.

    Nothing in the message can be changed; `message.state` carries values to the handler.
    """

    def before_handle(self, message: Message[Any], /) -> Awaitable[None] | None:
        """Raising refuses the message: no handler runs, and it goes to its dead letters."""

    def after_handle(self, message: Message[Any], decision: Ack, /) -> Awaitable[None] | None:
        """The handler has returned, and this is what it asked for."""

    def handle_failed(self, message: Message[Any], error: BaseException, /) -> Awaitable[None] | None:
        """The handler has raised."""

    def when_settled(self, message: Message[Any], handled: Handled, /) -> None:
        """What really became of the message. Not called for what was stopped by us."""


Interceptor = PublishInterceptor | ConsumeInterceptor


class PublishChain:
    """The publish interceptors of a connection at one moment. Never changed: a new one takes its place."""

    def __init__(self, interceptors: Sequence[PublishInterceptor], report: Reporter) -> None:
        back = interceptors[::-1]
        self._before = tuple(i.before_publish for i in interceptors if _has(i, PublishInterceptor, "before_publish"))
        self._after = tuple(i.after_publish for i in back if _has(i, PublishInterceptor, "after_publish"))
        self._failed = tuple(i.publish_failed for i in back if _has(i, PublishInterceptor, "publish_failed"))
        self._report = report

    async def before(self, draft: Draft) -> None:
        for hook in self._before:
            await _called(hook(draft))

    def before_now(self, draft: Draft) -> None:
        """The same where nothing can be awaited. Refused: a hook that has to be."""
        for hook in self._before:
            answer = hook(draft)
            if inspect.iscoroutine(answer):
                answer.close()
            if answer is not None:
                who = f"{type(getattr(hook, '__self__', hook)).__name__}.{name_of(hook)}"
                raise ConfigurationError(f"{who} is asynchronous, and nothing awaits it here; make it a plain `def`")

    async def told(self, draft: Draft, ended: Receipt | BaseException) -> None:
        """Last to first. Only for a draft that every `before_publish` has let through."""
        if isinstance(ended, BaseException):
            calls = [partial(hook, draft, ended) for hook in self._failed]
        else:
            calls = [partial(hook, draft, ended) for hook in self._after]
        for call in calls:
            try:
                await _called(call())
            except (Exception, asyncio.CancelledError) as error:
                if _stopped_by_us(error):
                    raise
                _reported(self._report, call, error, draft=draft)


class ConsumeChain:
    """The consume interceptors of one consumer at one moment: the connection's, then its own."""

    def __init__(self, interceptors: Sequence[ConsumeInterceptor], report: Reporter) -> None:
        self._interceptors = tuple(interceptors)
        self._report = report

    async def answer(
        self, message: Message[Any], handle: Callable[[Message[Any]], Awaitable[object]], name: str
    ) -> object:
        """What the handler returned or raised, or `Refused`. Hooks are told, and change none of it."""
        refused = await self.before(message)
        if refused is not None:
            return refused
        try:
            answer = await handle(message)
        except (Exception, asyncio.CancelledError) as error:
            if not _stopped_by_us(error):
                await self.after(message, error, name)
            raise
        await self.after(message, answer, name)
        return answer

    async def before(self, message: Message[Any]) -> Refused | None:
        """`None`: every `before_handle` has let it through."""
        for number, interceptor in enumerate(self._interceptors):
            try:
                await _called(interceptor.before_handle(message))
            except (Exception, asyncio.CancelledError) as error:
                if _stopped_by_us(error):
                    raise
                self._listen(message, self._interceptors[:number])
                return Refused(error)
        self._listen(message, self._interceptors)
        return None

    async def after(self, message: Message[Any], answer: object, name: str) -> None:
        """What the handler of that name returned or raised, for a message that was let through."""
        if isinstance(answer, BaseException):
            await self._tell(message, "handle_failed", answer)
            return
        decision = ACCEPT if answer is None else answer
        if not isinstance(decision, Ack):
            decision = Ack.reject(bad_answer(name, answer))
        await self._tell(message, "after_handle", decision)

    async def _tell(self, message: Message[Any], place: str, said: object) -> None:
        for interceptor in reversed(self._interceptors):
            if _has(interceptor, ConsumeInterceptor, place):
                hook = getattr(interceptor, place)
                try:
                    await _called(hook(message, said))
                except (Exception, asyncio.CancelledError) as error:
                    if _stopped_by_us(error):
                        raise
                    _reported(self._report, hook, error, message=message)

    def _listen(self, message: Message[Any], told: Sequence[ConsumeInterceptor]) -> None:
        for interceptor in reversed(told):
            if _has(interceptor, ConsumeInterceptor, "when_settled"):
                message.when_settled(partial(interceptor.when_settled, message))


class Around:
    """Where a consumer looks, once a message, for what surrounds its handler."""

    __slots__ = ("__weakref__", "chain", "own")

    def __init__(self, own: Sequence[ConsumeInterceptor]) -> None:
        self.own = tuple(own)
        self.chain: ConsumeChain | None = None


class Interceptors:
    """Those of one connection, in the order of registration."""

    def __init__(self, report: Reporter) -> None:
        self.publishing: PublishChain | None = None
        """`None` as long as there is none, and then a publish is what it is without this file."""
        self._report = report
        self._all: list[Interceptor] = []
        self._consumers: WeakSet[Around] = WeakSet()

    def add(self, interceptors: Sequence[Interceptor]) -> None:
        for interceptor in interceptors:
            check_interceptor(interceptor, PublishInterceptor, ConsumeInterceptor)
        self._all += interceptors
        publishing = [each for each in self._all if isinstance(each, PublishInterceptor)]
        self.publishing = PublishChain(publishing, self._report) if publishing else None
        for around in self._consumers:
            self._chain(around)

    def around(self, own: Sequence[ConsumeInterceptor]) -> Around:
        """For one consumer: the connection's, now and later, then its own."""
        for interceptor in own:
            check_interceptor(interceptor, ConsumeInterceptor)
        around = Around(own)
        self._chain(around)
        self._consumers.add(around)
        return around

    def _chain(self, around: Around) -> None:
        whole = [*(each for each in self._all if isinstance(each, ConsumeInterceptor)), *around.own]
        around.chain = ConsumeChain(whole, self._report) if whole else None


def check_interceptor(interceptor: object, *kinds: type[Any]) -> None:
    if not isinstance(interceptor, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(f"interceptors= has {interceptor!r}; an interceptor is an instance of a {wanted}")


def tell_listeners(message: Message[Any], handled: Handled, report: Reporter) -> None:
    """What was registered with `when_settled`, each once; what one raises is reported."""
    for listener in message.listeners or ():
        try:
            listener(handled)
        except (Exception, asyncio.CancelledError) as error:
            _reported(report, listener, error, message=message)


async def _called(answer: Awaitable[None] | None) -> None:
    if inspect.isawaitable(answer):
        await answer


def _has(interceptor: object, kind: type[Any], place: str) -> bool:
    """Whether it overrides this hook."""
    return getattr(type(interceptor), place, None) is not getattr(kind, place) or place in vars(interceptor)


def _stopped_by_us(error: BaseException) -> bool:
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _reported(
    report: Reporter,
    hook: Callable[..., object],
    error: BaseException,
    *,
    message: Message[Any] | None = None,
    draft: Draft | None = None,
) -> None:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    who = f"{type(owner).__name__}.{name_of(hook)}" if isinstance(owner, Interceptor) else "a when_settled listener"
    report(
        Diagnostic(
            LISTENER_FAILED,
            "warning",
            f"{who} raised {type(error).__name__}: {error}",
            message.queue if message else None,
            (draft.exchange or draft.routing_key) if draft else None,
            message.id if message else draft.envelope.id if draft else None,
            message.attempt if message else 0,
            error,
        )
    )
