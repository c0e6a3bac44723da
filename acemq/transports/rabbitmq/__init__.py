"""RabbitMQ: the reference. Names, arguments, headers and bodies are those of CONTRACT.md.

It stands on aiormq's connection and channel. What comes once a message goes past them, through `lane.py`:

    port.py       the verbs, and how the parts fit together    capabilities.py  what it can do
    address.py    the URL                        login.py     credentials and TLS, at every dial
    link.py       one connection, kept                         session.py       one connection, while it lives
    lane.py       the tap in its byte stream                   frames.py, table.py  what is read and written there
    publish.py    the confirm channel                          confirms.py      who waits for which tag
    receive.py    subscriptions, kept                          consumer.py      one registration of one
    owner.py      the only consumer of a queue
    pull.py       basic.get                                    incoming.py, ledger.py  what both share
    topology.py   declaring, counting, deleting                drift.py         comparing
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from acemq.clock import SYSTEM, Clock
from acemq.errors import ConfigurationError, MissingExtraError, SecurityError
from acemq.retry import Backoff
from acemq.security import check_credentials, check_tls
from acemq.transport import Transport, TransportState

_OPTIONS = ("name", "clock", "reconnect", "on_change", "connections", "credentials", "tls")


def transport(url: str, /, **options: Any) -> Transport:
    """Read URL and options and refuse what is wrong with them; no I/O, and no event loop is needed.

    `name` ("acemq") names the connections on the broker, `connections` is 2, or 1 for accounts with a limit;
    `credentials` replace the URL's, `tls` is for amqps://; `clock`, `reconnect` (a `Backoff`) and `on_change` are the
    engine's.
    """
    try:
        from .port import RabbitMQ
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] in ("aiormq", "pamqp", "yarl"):
            raise MissingExtraError("amqp://", "rabbitmq") from None
        raise
    from .address import parse
    from .login import Login

    address = parse(url)
    for option in options:
        if option not in _OPTIONS:
            raise ConfigurationError(f"option {option!r} of RabbitMQ is not known; there are {', '.join(_OPTIONS)}")
    name, clock, reconnect = (
        options.get("name", "acemq"),
        options.get("clock", SYSTEM),
        options.get("reconnect", Backoff()),
    )
    on_change, connections = options.get("on_change"), options.get("connections", 2)
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"name={name!r} must be text")
    if not isinstance(reconnect, Backoff):
        raise ConfigurationError(f"reconnect={reconnect!r} must be a Backoff")
    if connections not in (1, 2):
        raise ConfigurationError(f"connections={connections!r} must be 2, or 1 to share one for everything")
    credentials, tls = options.get("credentials"), options.get("tls")
    if credentials is not None:
        check_credentials(credentials)
    if tls is not None:
        check_tls(tls)
        if not address.tls:
            raise SecurityError("tls= has no use with amqp://, which is plain text; write amqps://", setting="tls")
    if on_change is not None and not callable(on_change):
        raise ConfigurationError(f"on_change={on_change!r} must be a function of one TransportState")
    return RabbitMQ(
        address,
        name=name,
        login=Login(address, credentials, tls, cast("Clock", clock)),
        clock=cast("Clock", clock),
        reconnect=reconnect,
        on_change=cast("Callable[[TransportState], None] | None", on_change),
        connections=connections,
    )
