"""What may be said about one publish."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TypedDict, cast

from acemq.codec import AnyCodec
from acemq.envelope import Envelope
from acemq.headers import HeaderValue


class PublishOptions(TypedDict, total=False):
    """What may be said about one publish; all of it optional."""

    headers: Mapping[str, HeaderValue]
    """The application's own; names beginning with `x-acemq-` are refused."""
    message_id: str
    """A new UUID of version 4."""
    type: str
    """The routing key."""
    version: int
    """1; of the payload's shape, for readers that look at it."""
    correlation_id: str
    """That of the message in hand, else the id."""
    causation_id: str
    """The id of the message in hand."""
    claim: str
    """The application's own word about where a body lies; the library never reads it."""
    envelope: Envelope
    """Instead of the seven above; together they are refused."""
    codec: AnyCodec
    """The connection's."""
    content_type: str
    """Picks the codec; for bytes it is only the label."""
    persistent: bool
    """True: the message survives a restart of the broker."""
    mandatory: bool
    """True: a message that no queue takes is an error."""
    priority: int
    """0–255, below the levels that the queue was declared with; of a queue with lanes 0 low, 1 normal, 2 high."""
    expires_in: timedelta
    """After it the message is not handled any more."""
    delay: timedelta
    """Not before. On RabbitMQ over the ladder of the scheduler, with an envelope of its own."""
    reply_to: str
    """The queue that an answer goes to."""
    ordering_key: str
    """For queues declared ordered."""
    transaction: object
    """On a database: SQLAlchemy's session or connection, async or not. The message is there once that has committed."""
    timeout: timedelta
    """For permit, connection and confirm together; the connection's `publish_timeout`."""


OPTIONS = frozenset(PublishOptions.__annotations__)
SAID_BY_ENVELOPE = ("headers", "message_id", "type", "version", "correlation_id", "causation_id", "claim")
_ENVELOPE_OPTIONS = frozenset((*SAID_BY_ENVELOPE, "envelope"))


def carrying(envelope: Envelope, options: PublishOptions | None = None) -> PublishOptions:
    """The options with this envelope, in place of all that becomes one."""
    rest = {name: value for name, value in (options or {}).items() if name not in _ENVELOPE_OPTIONS}
    return cast("PublishOptions", {**rest, "envelope": envelope})
