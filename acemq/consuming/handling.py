"""What a handler may be, and how it is called."""

from __future__ import annotations

import asyncio
import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextvars import copy_context
from datetime import timedelta
from typing import Any

from acemq.clock import Clock
from acemq.errors import HandlerTimeoutError, HandlerTypeError
from acemq.message import Message


class Call:
    """A handler, made awaitable: coroutines run on the loop, plain functions in a bounded pool of threads."""

    def __init__(self, handler: Callable[[Any], Any], pool: Executor) -> None:
        self.name = name_of(handler)
        self.handler, self.pool = handler, pool
        self._leaving = False
        self._async = is_async(handler)

    def __call__(self, given: Any) -> Awaitable[object]:
        """`given`: the one argument of the handler, a message or a batch."""
        return self.handler(given) if self._async else self._in_thread(given)

    def leave_threads(self) -> None:
        """From now on a cancelled call no longer waits for its thread, which nothing can cancel."""
        self._leaving = True

    async def _in_thread(self, given: Any) -> object:
        context = copy_context()
        thread = asyncio.get_running_loop().run_in_executor(self.pool, lambda: context.run(self.handler, given))
        cancelled: asyncio.CancelledError | None = None
        while not thread.done():
            try:
                await asyncio.shield(thread)
            except asyncio.CancelledError as error:
                if self._leaving:
                    raise
                # The slot stays taken as long as the thread runs, or more of them would run than were allowed.
                cancelled = error
            except Exception:
                break
        if cancelled is not None:
            thread.exception()
            raise cancelled
        answer = thread.result()
        return await answer if inspect.isawaitable(answer) else answer


async def in_time(handling: Awaitable[object], limit: timedelta, clock: Clock, *, stuck: Callable[[], None]) -> object:
    """Cancelled at its limit. A handler that swallows that keeps its slot, and `stuck` is called at twice the limit."""
    twice = clock.call_later(2 * limit.total_seconds(), stuck)
    task = asyncio.current_task()
    assert task is not None
    late = False

    def expire() -> None:
        nonlocal late
        late = True
        task.cancel()

    once = clock.call_later(limit.total_seconds(), expire)
    try:
        answer = await handling
    except asyncio.CancelledError:
        if late and task.uncancel() == 0:
            raise HandlerTimeoutError(limit) from None
        raise
    else:
        if late:
            task.uncancel()
            raise HandlerTimeoutError(limit)
        return answer
    finally:
        once.cancel()
        twice.cancel()


def is_async(call: Any) -> bool:
    """Whether calling it gives a coroutine: functions, methods, partials and objects with an async `__call__`."""
    while isinstance(call, functools.partial):
        call = call.func
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004


def name_of(call: Any) -> str:
    while isinstance(call, functools.partial):
        call = call.func
    return getattr(call, "__name__", None) or type(call).__name__


def check_handler(handler: Any, payload: Any, given: type = Message) -> None:
    """Refuse a handler that cannot take what it is given: not callable, not one argument, or annotated otherwise."""
    if not callable(handler):
        raise HandlerTypeError(f"{handler!r} is no handler; give a function that takes one {given.__name__}")
    try:
        signature = inspect.signature(handler)
    except ValueError:
        return  # a builtin without a signature: let it try
    try:
        signature.bind(None)
    except TypeError as error:
        raise HandlerTypeError(
            f"handler {name_of(handler)!r} must take one argument, the {given.__name__}: {error}"
        ) from None
    parameter = next(iter(signature.parameters.values()))
    annotated = resolved(handler).get(parameter.name)
    if annotated is None or annotated is Any:
        return
    origin = typing.get_origin(annotated) or annotated
    if not (isinstance(origin, type) and (issubclass(given, origin) or issubclass(origin, given))):
        if isinstance(origin, type):
            raise HandlerTypeError(
                f"handler {name_of(handler)!r} takes {origin.__name__}, but is given a {given.__name__}; "
                f"the payload of a message is its .payload"
            )
        return
    (wanted,) = typing.get_args(annotated) or (Any,)
    if not fits(payload, wanted):
        raise HandlerTypeError(
            f"handler {name_of(handler)!r} takes {origin.__name__}[{shown(wanted)}], "
            f"but the payload class is {shown(payload)}"
        )


def fits(gives: Any, takes: Any) -> bool:
    """Whether a `gives` may be passed as `takes`, as far as classes tell; what they do not tell is let through."""
    if gives is Any or takes is Any:
        return True
    if typing.get_origin(takes) in _UNIONS:
        return any(fits(gives, kind) for kind in typing.get_args(takes))
    if typing.get_origin(gives) in _UNIONS:
        return all(fits(kind, takes) for kind in typing.get_args(gives))
    if not (isinstance(gives, type) and isinstance(takes, type)):
        return True
    if typing.is_typeddict(gives) or typing.is_typeddict(takes):
        return gives is takes or takes in (object, dict)
    return issubclass(gives, takes)


_UNIONS = (typing.Union, types.UnionType)


def resolved(handler: Any) -> Mapping[str, Any]:
    """The annotations of a callable, as classes; empty where they cannot be resolved."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    target = handler if inspect.isroutine(handler) else getattr(handler, "__call__", handler)  # noqa: B004
    try:
        return typing.get_type_hints(target)
    except Exception:  # an annotation that cannot be resolved is the checker's affair; the payload class decides
        return {}


def shown(kind: Any) -> str:
    return getattr(kind, "__name__", None) or str(kind)
