"""A transport on a file as if its process had been killed: nothing of it runs any more, and it has said nothing."""

from __future__ import annotations

from acemq.transport import Transport
from acemq.transports.sql.port import SqlTransport


def abandon(transport: Transport) -> None:
    assert isinstance(transport, SqlTransport)
    running = transport._running
    assert running is not None
    running.die()
