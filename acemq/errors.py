"""Everything that acemq raises.

AcemqError
├── ConfigurationError (ValueError)     a bad argument; nothing was done
│   ├── MissingExtraError               a driver is not installed            .extra
│   ├── CapabilityError                 this transport cannot do that        .transport .capability .option
│   ├── SecurityError                   credentials or TLS cannot be used    .setting
│   ├── TopologyError                   objects that cannot be declared      .problems
│   │   └── DriftError                  the broker has them otherwise        .plan
│   ├── HandlerTypeError (TypeError)    a handler or payload class of the wrong shape
│   ├── PipelineTypeError (TypeError)   two neighbouring steps do not fit    .step .takes .gives
│   └── PartitionCountError             keys would move to other partitions  .name .wanted .found
├── ConnectionFailedError               no server could be reached           .hosts .last
│   └── AuthenticationError             the server refused the credentials
├── ClosedError                         closed, or opened or settled twice
├── LoopError (RuntimeError)            used from another event loop or thread
├── PublishError                        .exchange .routing_key .message_id .outcome .code
│   ├── PublishRefusedError             nothing was written: safe to send again
│   │   ├── BlockedError                the broker takes no publishes now    .reason
│   │   ├── PublishingPausedError       the application has paused publishing
│   │   └── MessageTooLargeError        over the transport's limit           .size .limit
│   ├── UnroutableError                 confirmed, but no queue took it      .reason
│   ├── PublishFailedError              it may be there                      .nacked
│   │   └── ReplayError                 a replay stopped at this message     .result
│   └── BatchPublishError               some of a batch did not get through  .results .confirmed .failed .safe_to_resend
├── CodecError
│   ├── EncodeError                     a payload that cannot be written
│   ├── ClaimStoreError                 a store could not be reached; tried again
│   └── DecodeError (also FatalError)   a body that cannot be read           .content_type
│       └── DecryptError                it cannot be decrypted               .key_id
├── FatalError                          never retried; handlers may raise it
│   ├── RouteError                      a routing slip that cannot be followed
│   └── IdempotencyConflictError        one key, two different messages      .key
├── HandlerTimeoutError (TimeoutError)  a handler that ran over its limit    .after
├── RequestTimeoutError (TimeoutError)  no answer came within the limit      .message_id .after
├── ResponderError                      the answer is that it failed         .reason
└── LeaseLostError                      another has taken over what was ours .what .token

A transport hands up `TransportError`s (`acemq.transport`), which the engine turns into these.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acemq.plan import Plan

__all__ = [
    "AcemqError",
    "AuthenticationError",
    "BatchPublishError",
    "BlockedError",
    "CapabilityError",
    "ClaimStoreError",
    "ClosedError",
    "CodecError",
    "ConfigurationError",
    "ConnectionFailedError",
    "DecodeError",
    "DecryptError",
    "DriftError",
    "EncodeError",
    "FatalError",
    "HandlerTimeoutError",
    "HandlerTypeError",
    "IdempotencyConflictError",
    "LeaseLostError",
    "LoopError",
    "MessageTooLargeError",
    "MissingExtraError",
    "PartitionCountError",
    "PipelineTypeError",
    "PublishError",
    "PublishFailedError",
    "PublishRefusedError",
    "PublishingPausedError",
    "ReplayError",
    "RequestTimeoutError",
    "ResponderError",
    "RouteError",
    "SecurityError",
    "TopologyError",
    "UnroutableError",
]


class AcemqError(Exception):
    """The root. Facts are attributes, the text ends with the next move, and it pickles."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own way calls __init__ with `args` alone, which our keyword arguments would not survive.
        return _revive, (type(self), self.args, self.__dict__)


def _revive(kind: type[AcemqError], args: tuple[Any, ...], facts: dict[str, Any]) -> AcemqError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(facts)
    return error


class ConfigurationError(AcemqError, ValueError):
    """A bad argument, found at the call and before any I/O."""


class MissingExtraError(ConfigurationError):
    """The driver that this needs is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        self.extra = extra
        super().__init__(f'{what} needs an extra that is not installed. Install it: pip install "acemq[{extra}]"')


class CapabilityError(ConfigurationError):
    """The transport cannot do what was asked, and the engine cannot do it in its stead."""

    def __init__(self, transport: str, capability: str, option: str, advice: str = "") -> None:
        self.transport, self.capability, self.option = transport, capability, option
        super().__init__(
            f"{option} needs {capability}, which {transport} does not have{'. ' if advice else ''}{advice}"
        )


class SecurityError(ConfigurationError):
    """Credentials that cannot be had, or a certificate that is missing, unreadable, or not to be trusted.

    `setting` names what to mend: `credentials`, `tls` or a field of `Tls`. No text of it holds a secret.
    """

    def __init__(self, text: str, *, setting: str) -> None:
        self.setting = setting
        super().__init__(text)


class TopologyError(ConfigurationError):
    """Objects that do not fit together, or that the broker does not have."""

    def __init__(self, *problems: str, advice: str = "") -> None:
        self.problems = problems
        super().__init__(f"{'; '.join(problems)}{'. ' if advice else ''}{advice}")


class DriftError(TopologyError):
    """The broker holds an object of that name with other arguments. Nothing was declared."""

    def __init__(self, plan: Plan, *problems: str) -> None:
        self.plan = plan
        super().__init__(*problems)


class HandlerTypeError(ConfigurationError, TypeError):
    """A handler that cannot take the message, or a payload class that no decoder can be built for."""


class PipelineTypeError(ConfigurationError, TypeError):
    """A step that does not take what the step before it gives."""

    def __init__(self, step: str, takes: str, gives: str, text: str) -> None:
        self.step, self.takes, self.gives = step, takes, gives
        super().__init__(text)


class PartitionCountError(ConfigurationError):
    """An ordered queue is there with another number of partitions, and keys would move between its messages."""

    def __init__(self, text: str, *, name: str, wanted: int, found: int) -> None:
        self.name, self.wanted, self.found = name, wanted, found
        super().__init__(text)


class ConnectionFailedError(AcemqError):
    """No server could be reached within the time, or it is of no use."""

    def __init__(self, text: str, *, hosts: Sequence[str] = (), last: str | None = None) -> None:
        self.hosts, self.last = tuple(hosts), last
        super().__init__(text)


class AuthenticationError(ConnectionFailedError):
    """The server refused the credentials, or what they may do."""


class ClosedError(AcemqError):
    """The object is closed, or something that happens once was asked for twice."""


class LoopError(AcemqError, RuntimeError):
    """A connection belongs to the event loop that opened it."""


class PublishError(AcemqError):
    """A message that did not get where it should. `outcome` is the word counted (CONTRACT.md section 14)."""

    outcome = "failed"

    def __init__(
        self, text: str, *, exchange: str = "", routing_key: str = "", message_id: str = "", code: int | None = None
    ) -> None:
        self.exchange, self.routing_key, self.message_id, self.code = exchange, routing_key, message_id, code
        super().__init__(text)


class PublishRefusedError(PublishError):
    """Nothing was written. Sending it again cannot make a second copy."""

    outcome = "refused"


class BlockedError(PublishRefusedError):
    """The broker takes no publishes now, for the reason given. Consuming goes on."""

    def __init__(self, text: str, *, reason: str, **where: Any) -> None:
        self.reason = reason
        super().__init__(text, **where)


class PublishingPausedError(PublishRefusedError):
    """`pause_publishing()` was called. `resume_publishing()` ends that."""


class MessageTooLargeError(PublishRefusedError):
    """The encoded message, headers included, is over the limit."""

    def __init__(self, text: str, *, size: int, limit: int, **where: Any) -> None:
        self.size, self.limit = size, limit
        super().__init__(text, **where)


class UnroutableError(PublishError):
    """The broker has confirmed it, and no queue took it. Repair the topology, then send it again."""

    outcome = "unroutable"

    def __init__(self, text: str, *, reason: str = "", **where: Any) -> None:
        self.reason = reason
        super().__init__(text, **where)


class PublishFailedError(PublishError):
    """It may be there. Sending it again with the same `message_id` is what an idempotent consumer is for."""

    def __init__(self, text: str, *, nacked: bool = False, **where: Any) -> None:
        self.nacked = nacked
        super().__init__(text, **where)


class ReplayError(PublishFailedError):
    """A replay stopped because a copy did not land; that message is where it was."""

    def __init__(self, text: str, *, result: Any, **where: Any) -> None:
        self.result = result
        super().__init__(text, **where)


class BatchPublishError(PublishError):
    """Some messages of a batch did not get through; a batch is not atomic.

    `results` holds a receipt or an error for each message, in the order of the payloads.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = list(results)
        failures = [error for error in self.results if isinstance(error, Exception)]
        self.failed = len(failures)
        self.confirmed = len(self.results) - self.failed
        # What an interceptor raises before a publish is no error of ours; nothing was written for it either.
        self.safe_to_resend = all(getattr(error, "outcome", "refused") == "refused" for error in failures)
        advice = "the failed ones may be sent again safely" if self.safe_to_resend else "some may be there already"
        super().__init__(
            f"{self.failed} of {len(self.results)} messages were not published; {advice}. First: {failures[0]}"
        )


class CodecError(AcemqError):
    """Between payload and bytes."""


class EncodeError(CodecError):
    """A payload that no codec can write. Nothing was sent."""

    outcome = "refused"


class ClaimStoreError(CodecError):
    """The store that keeps large payloads could not be reached. Nothing was sent; a delivery is retried."""

    outcome = "refused"


class FatalError(AcemqError):
    """Will fail however often it is tried. Raised in a handler, the message goes to its dead letters at once."""


class DecodeError(CodecError, FatalError):
    """A body that cannot be read as the payload class. The message is parked with its bytes intact."""

    def __init__(self, text: str, *, content_type: str | None = None) -> None:
        self.content_type = content_type
        super().__init__(text)


class DecryptError(DecodeError):
    """A body that no key of the keyring opens, whatever the reason. `key_id` is what it says of itself, if it does."""

    def __init__(self, text: str, *, key_id: str | None = None, content_type: str | None = None) -> None:
        self.key_id = key_id
        super().__init__(text, content_type=content_type)


class RouteError(FatalError):
    """A routing slip that is missing, finished, malformed or leads nowhere."""


class IdempotencyConflictError(FatalError):
    """A key that is known with another fingerprint: another message under the same id, and no duplicate of it."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"idempotency key {key!r} is known with another body; its sender gives one id to two messages")


class HandlerTimeoutError(AcemqError, TimeoutError):
    """A handler that ran longer than its `handler_timeout`."""

    def __init__(self, after: timedelta) -> None:
        self.after = after
        super().__init__(f"timed out after {after.total_seconds():g} s")


class RequestTimeoutError(AcemqError, TimeoutError):
    """No answer came in time. Whether the work was done, nobody knows."""

    def __init__(self, text: str, *, message_id: str, after: timedelta) -> None:
        self.message_id, self.after = message_id, after
        super().__init__(text)


class ResponderError(AcemqError):
    """Whoever was asked has failed, and says so. The request lies in its dead letters."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the responder failed: {reason}")


class LeaseLostError(AcemqError):
    """A claim ran out while its handler ran, and another has taken it over. What the handler did may be done again."""

    def __init__(self, what: str, token: int) -> None:
        self.what, self.token = what, token
        super().__init__(f"the claim of {what} (token {token}) ran out and was taken over; give it a longer lease=")
