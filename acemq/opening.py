"""What `connect()`, `consume()` and their like return, and the way from a URL to its transport."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from importlib import import_module
from types import TracebackType
from typing import Any, Generic, TypeVar

from acemq.errors import ClosedError, ConfigurationError
from acemq.transport import Factory, Transport

T = TypeVar("T")


class Opening(Generic[T]):
    """Something that is about to be opened: `await` it, or enter it with `async with`, which also closes it.

    Nothing happens before that, and it happens once: a second time is `ClosedError`. It may be made where no event
    loop runs.
    """

    def __init__(self, what: str, open: Callable[[], Awaitable[T]], close: Callable[[T], Awaitable[object]]) -> None:
        self._what, self._open, self._close = what, open, close
        self._used = False
        self._opened: list[T] = []

    def __await__(self) -> Generator[Any, None, T]:
        if self._used:
            raise ClosedError(f"{self._what} was opened already; make a new one")
        self._used = True
        return self._open().__await__()

    async def __aenter__(self) -> T:
        opened = await self
        self._opened.append(opened)
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(self._opened.pop())

    def __repr__(self) -> str:
        return f"<{self._what}, {'opened' if self._used else 'not opened yet'}>"


_OURS = {
    "memory": "acemq.transports.memory",
    "amqp": "acemq.transports.rabbitmq",
    "amqps": "acemq.transports.rabbitmq",
    **dict.fromkeys(
        ("sqlite", "postgresql", "postgresql+asyncpg", "postgresql+psycopg", "mariadb", "mysql", "mysql+asyncmy"),
        "acemq.transports.sql",
    ),
}
_GROUP = "acemq.transports"


def transport_for(url: str, **options: object) -> Transport:
    """The transport that this URL names, made and not opened. Refuses what is wrong with the URL; no I/O."""
    if not isinstance(url, str) or "://" not in url:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"{_shown(url)} is no URL; it begins with a scheme, for example memory:// or amqp://host"
        )
    scheme = url.partition("://")[0].lower()
    return _factory_of(scheme)(url, **options)


def _factory_of(scheme: str) -> Factory:
    module = _OURS.get(scheme)
    if module is not None:
        factory: Factory = import_module(module).transport
        return factory
    from importlib.metadata import entry_points  # 20 ms that most programs never need

    for entry in entry_points(group=_GROUP, name=scheme):
        loaded: Factory = entry.load()
        return loaded
    known = sorted({*_OURS, *(entry.name for entry in entry_points(group=_GROUP))})
    raise ConfigurationError(f"unknown scheme {scheme!r}; known: {', '.join(known)}")


def _shown(url: object) -> str:
    # A URL may carry a password, and a text without a scheme may be a URL that somebody mistyped.
    return "the text" if isinstance(url, str) and "@" in url else repr(url)
