"""How a connection behaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from acemq.clock import Clock, check_duration
from acemq.codec import AnyCodec
from acemq.errors import ConfigurationError
from acemq.interceptors import ConsumeInterceptor, PublishInterceptor
from acemq.keywords import check_keywords
from acemq.publishing.gate import WhenBlocked
from acemq.retry import Backoff, RetryPolicy
from acemq.security import CredentialsSource, Tls
from acemq.telemetry import Diagnostic
from acemq.topology import TopologyMode


class ConnectOptions(TypedDict, total=False):
    """How a connection behaves; all of it optional."""

    name: str
    """acemq; the first half of the origin, `{name}@{host}`."""
    codec: AnyCodec
    """`Codecs.default()`."""
    retry: RetryPolicy
    """Five attempts after waits of 1, 2, 4 and 8 s."""
    prefetch: int
    """20; deliveries that a consumer holds unsettled."""
    credentials: CredentialsSource
    """What the URL says; a value, or a function that is asked at every dial. It replaces the URL's."""
    tls: Tls
    """With `amqps://` and databases on a server. The system's trust store, host name checked, TLS 1.2 and newer."""
    engine: Any
    """On a database: SQLAlchemy's `AsyncEngine` to use in place of one of our own. It is not disposed of."""
    interceptors: Sequence[PublishInterceptor | ConsumeInterceptor]
    """Hooks round every publish and every handler of this connection."""
    correlate: bool
    """True: what a handler publishes carries the correlation of the message in hand."""
    max_outstanding: int
    """1,000; publishes without an answer, over every path."""
    publish_timeout: timedelta
    """10 s."""
    connect_timeout: timedelta
    """30 s."""
    close_timeout: timedelta
    """20 s; one budget for the whole connection."""
    reconnect: Backoff
    """Pauses between dials: from 0.25 s, doubling to 30 s, with full jitter."""
    topology: TopologyMode
    """`CREATE`: what the library needs by itself is made. `VERIFY` looks whether it is there, `NONE` does not."""
    when_blocked: WhenBlocked
    """REFUSE: while the broker takes no publishes they raise at once; WAIT: inside their time limit they wait first."""
    threads: int
    """32; the pool for handlers that are plain functions."""
    on_diagnostic: Callable[[Diagnostic], None]
    """Told what a person should know about; the logger `acemq` has it too."""
    clock: Clock
    """The system's; a `MovableClock` in tests on memory."""


_OPTIONS = frozenset(ConnectOptions.__annotations__)


def check_connect(options: ConnectOptions) -> None:
    check_keywords("connect", options, _OPTIONS)
    given: dict[str, Any] = dict(options)
    for option in ("publish_timeout", "connect_timeout"):
        if option in given:
            check_duration(option, given[option])
    if "close_timeout" in options:
        check_duration("close_timeout", options["close_timeout"], zero=True)
    for option, most in (("prefetch", 65_535), ("max_outstanding", 1_000_000), ("threads", 1_000)):
        if option in given and not 1 <= given[option] <= most:
            raise ConfigurationError(f"{option}={given[option]} must lie between 1 and {most:,}")
    mode: object = options.get("topology", TopologyMode.CREATE)
    if not isinstance(mode, TopologyMode):
        raise ConfigurationError(f"topology={mode!r} must be one of TopologyMode: {', '.join(TopologyMode)}")
    when = options.get("when_blocked", WhenBlocked.REFUSE)
    if not isinstance(when, WhenBlocked):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"when_blocked={when!r} must be WhenBlocked.REFUSE or WhenBlocked.WAIT")
    name = options.get("name", "acemq")
    if not name or "@" in name or len(name.encode()) > 100:
        raise ConfigurationError(f"name={name!r} must have 1 to 100 bytes and no '@'")
