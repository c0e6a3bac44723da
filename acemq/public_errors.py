"""The public error for what a transport handed up. Errors of drivers are never leaked; they are the cause."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from acemq import transport as port
from acemq.errors import (
    AcemqError,
    AuthenticationError,
    BlockedError,
    ConfigurationError,
    ConnectionFailedError,
    LoopError,
    MessageTooLargeError,
    PublishError,
    PublishFailedError,
    PublishingPausedError,
    PublishRefusedError,
    TopologyError,
    UnroutableError,
)
from acemq.transport import Outgoing, Published, PublishResult

_WORDS = {
    Published.REFUSED: "was not written, and may be sent again",
    Published.UNROUTABLE: "reached no queue; bind one to it, or publish with mandatory=False",
    Published.FAILED: "may or may not be there; send it again with the same message_id",
}


def publish_error(result: PublishResult, outgoing: Outgoing) -> PublishError:
    """The public error for what a transport answered. The transport's own is its cause."""
    error = result.error
    where: dict[str, Any] = {
        "exchange": outgoing.exchange,
        "routing_key": outgoing.routing_key,
        "message_id": outgoing.message_id,
        "code": getattr(error, "code", None),
    }
    target = (
        f"exchange {outgoing.exchange!r} with key {outgoing.routing_key!r}"
        if outgoing.exchange
        else (f"queue {outgoing.routing_key!r}")
    )
    text = f"message {outgoing.message_id} to {target} {_WORDS[result.outcome]}: {error}"
    match result.outcome, error:
        case Published.UNROUTABLE, _:
            public: PublishError = UnroutableError(text, reason=str(error), **where)
        case Published.REFUSED, port.Blocked():
            public = BlockedError(text, reason=str(error), **where)
        case Published.REFUSED, PublishingPausedError():
            public = PublishingPausedError(text, **where)
        case Published.REFUSED, port.MessageTooLarge():
            public = MessageTooLargeError(text, size=error.size, limit=error.limit, **where)
        case Published.REFUSED, _:
            public = PublishRefusedError(text, **where)
        case _:
            public = PublishFailedError(text, nacked=isinstance(error, port.Nacked), **where)
    public.__cause__ = error
    return public


@contextmanager
def made_public() -> Generator[None, None, None]:
    """What the port raises in here leaves as its public error; what is public already leaves as it is."""
    try:
        yield
    except AcemqError as error:
        public = public_error(error)
        if public is error:
            raise
        raise public from error


def public_error(error: AcemqError) -> AcemqError:
    """The public error for what a verb of the port raised."""
    match error:
        case port.AccessDenied():
            return AuthenticationError(str(error), last=str(error))
        case port.NotConnected():
            return ConnectionFailedError(str(error), hosts=error.hosts, last=error.last or str(error))
        case port.ServerTooOld() | port.SchemaMissing() | port.TimedOut() | port.Blocked():
            return ConnectionFailedError(str(error), last=str(error))
        case port.WrongLoop():
            return LoopError(str(error))
        case port.QueueMissing() | port.ExchangeMissing():
            return TopologyError(str(error))
        case port.BadHeader():
            return ConfigurationError(str(error))
        case _:
            return error
