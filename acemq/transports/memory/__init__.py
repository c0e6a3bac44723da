"""A broker in this process: for tests, examples and programs of one process. The same port as any other, no mock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict, Unpack
from urllib.parse import unquote

from acemq.clock import SYSTEM, Clock
from acemq.errors import ConfigurationError, SecurityError
from acemq.retry import Backoff
from acemq.topology import check_name
from acemq.transport import Transport, TransportState
from acemq.transports.memory.faults import delay, raises
from acemq.transports.memory.port import MemoryTransport
from acemq.transports.memory.profiles import Profile
from acemq.transports.memory.switches import MemoryBroker, StoredMessage

__all__ = ["MemoryBroker", "Profile", "StoredMessage", "delay", "raises", "transport"]


_NO_USE = frozenset({"credentials", "tls"})


class Options(TypedDict, total=False):
    name: str
    clock: Clock | None
    reconnect: Backoff
    on_change: Callable[[TransportState], None] | None
    profile: Profile | None
    broker: MemoryBroker | None


def transport(url: str, /, **options: Unpack[Options]) -> Transport:
    """A client of the private broker of `memory://`, of the shared one of `memory://name`, or of `broker`.

    No I/O. Clock and profile are the broker's; what is asked for and differs from a broker that exists is refused.
    """
    for option in _NO_USE & options.keys():
        raise SecurityError(
            f"{option}= has no use with memory://, where nothing leaves the process; leave it out", setting=option
        )
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise ConfigurationError(f"memory has no option {min(unknown)!r}; known: {', '.join(Options.__annotations__)}")
    shared = _name_in(url)
    clock, profile, broker = options.get("clock"), options.get("profile"), options.get("broker")
    if broker is None and not shared:
        broker = MemoryBroker(clock=clock or SYSTEM, profile=profile)
    if broker is not None:
        _check_same(broker, name=shared or None, clock=clock, profile=profile)
        find = _always(broker)
    else:
        find = _by_name(shared, clock, profile)
    return MemoryTransport(
        find,
        endpoint=f"memory://{shared}",
        name=options.get("name", "acemq"),
        reconnect=options.get("reconnect", Backoff()),
        on_change=options.get("on_change"),
    )


def _name_in(url: str) -> str:
    scheme, _, name = url.partition("://")
    if scheme.lower() != "memory":
        raise ConfigurationError(f"scheme {scheme!r} is not memory; write memory:// or memory://name")
    for sign, what in _NOTHING_ELSE.items():
        if sign in name:
            # A text with '@' in it may be a password and is not repeated.
            shown = "" if "@" in name else f", as in {sign + name.partition(sign)[2]!r}"
            raise ConfigurationError(
                f"a memory URL takes a name and nothing else, no {what}{shown}; write memory://name"
            )
    return check_name("broker", unquote(name)) if name else ""


_NOTHING_ELSE = {"@": "user", "?": "query", "#": "fragment", "/": "path", ":": "port"}


def _check_same(broker: MemoryBroker, **asked: object) -> None:
    for option, wanted in asked.items():
        found: object = getattr(broker, option)
        if wanted is not None and wanted != found:
            raise ConfigurationError(
                f"{option}={wanted!r} is not that of the broker given, which has {found!r}; leave it out"
            )


def _always(broker: MemoryBroker) -> Callable[[], MemoryBroker]:
    return lambda: broker


def _by_name(name: str, clock: Clock | None, profile: Profile | None) -> Callable[[], MemoryBroker]:
    return lambda: MemoryBroker.named(name, clock=clock, profile=profile)
