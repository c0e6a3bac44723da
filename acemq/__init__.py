"""Messaging patterns over one compact core, for when messages must not be lost.

Every public name is imported from here. A transport is loaded when a URL first names it, a store when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from acemq import blocking
from acemq.ack import Ack
from acemq.blocking import BlockingConsumer, BlockingMQ, BlockingPulled, BlockingReplay
from acemq.claim_check import ClaimCheckCodec, ClaimStore, FileClaimStore, MemoryClaimStore
from acemq.clock import Clock, MovableClock, SystemClock
from acemq.codec import (
    AnyCodec,
    AsyncCodec,
    BytesCodec,
    Codec,
    Codecs,
    JsonCodec,
    MsgpackCodec,
    Payload,
    PayloadType,
    TextCodec,
    one_of,
)
from acemq.connect_options import ConnectOptions
from acemq.connection import Connection
from acemq.consuming.batching import Batch, BatchHandler
from acemq.consuming.consumer import Consumer, ConsumerState
from acemq.consuming.groups import ConsumerGroup
from acemq.consuming.options import ConsumeOptions
from acemq.consuming.pulling import Pulled
from acemq.consuming.receiving import Receiving
from acemq.consuming.settling import ConsumerCounters
from acemq.encryption import EncryptedCodec, Keyring
from acemq.envelope import Envelope
from acemq.errors import (
    AcemqError,
    AuthenticationError,
    BatchPublishError,
    BlockedError,
    CapabilityError,
    ClaimStoreError,
    ClosedError,
    CodecError,
    ConfigurationError,
    ConnectionFailedError,
    DecodeError,
    DecryptError,
    DriftError,
    EncodeError,
    FatalError,
    HandlerTimeoutError,
    HandlerTypeError,
    IdempotencyConflictError,
    LeaseLostError,
    LoopError,
    MessageTooLargeError,
    MissingExtraError,
    PartitionCountError,
    PipelineTypeError,
    PublishError,
    PublishFailedError,
    PublishingPausedError,
    PublishRefusedError,
    ReplayError,
    RequestTimeoutError,
    ResponderError,
    RouteError,
    SecurityError,
    TopologyError,
    UnroutableError,
)
from acemq.headers import HeaderValue
from acemq.health import Health, HealthPart
from acemq.interceptors import ConsumeInterceptor, PublishInterceptor
from acemq.message import Handled, Handler, Message, SetAside, current_message
from acemq.mq import AceMQ, connect
from acemq.opening import Opening
from acemq.patterns.once import Unit
from acemq.patterns.ordered.consumer import OrderedConsumer
from acemq.patterns.ordered.described import Ordered
from acemq.patterns.ordered.partition import Halt, OrderedCounters, PartitionFailure
from acemq.patterns.ordered.queue import OrderedQueue
from acemq.patterns.outbox import BoundOutbox, BoundSyncOutbox, Outbox
from acemq.patterns.pipeline import Pipeline, PipelineCounters, RunningPipeline, SlipForm, StepOptions
from acemq.patterns.relay import OutboxRelay, RelayCounters, RelayState, Sweep
from acemq.patterns.replay import Replay, ReplayResult, StopReason
from acemq.patterns.request_reply import RequestCounters, RequestOptions, Responder, Responding
from acemq.patterns.routing_slip import Itinerary, Route, RoutingSlip, Stop
from acemq.patterns.saga import Saga, SagaResult, SagaStep
from acemq.patterns.scheduler import Scheduled, ScheduleOptions, Scheduler, SchedulerCounters
from acemq.plan import Finding, Plan
from acemq.publishing.draft import Draft
from acemq.publishing.gate import WhenBlocked
from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import Receipt
from acemq.publishing.publisher import Publisher
from acemq.retry import Backoff, RetryPolicy
from acemq.security import Credentials, CredentialsSource, Tls
from acemq.stats import QueueStats
from acemq.stopping import Drained
from acemq.stores import (
    Claim,
    Idempotency,
    IdempotencyStore,
    OutboxBatch,
    OutboxRecord,
    OutboxStatus,
    OutboxStore,
    body_fingerprint,
    envelope_id,
)
from acemq.telemetry import Diagnostic, LogContext
from acemq.topology import Declaration, QueueOptions, Topology, TopologyMode
from acemq.transport import ApplyMode, Capabilities, Depth

if TYPE_CHECKING:
    from acemq.adapters.memory import InMemoryOutboxStore, MemoryIdempotencyStore
    from acemq.adapters.sql import DbIdempotencyStore, DbOutboxStore

__version__ = "0.1.0"

__all__ = [
    "AceMQ",
    "AcemqError",
    "Ack",
    "AnyCodec",
    "ApplyMode",
    "AsyncCodec",
    "AuthenticationError",
    "Backoff",
    "Batch",
    "BatchHandler",
    "BatchPublishError",
    "BlockedError",
    "BlockingConsumer",
    "BlockingMQ",
    "BlockingPulled",
    "BlockingReplay",
    "BoundOutbox",
    "BoundSyncOutbox",
    "BytesCodec",
    "Capabilities",
    "CapabilityError",
    "Claim",
    "ClaimCheckCodec",
    "ClaimStore",
    "ClaimStoreError",
    "Clock",
    "ClosedError",
    "Codec",
    "CodecError",
    "Codecs",
    "ConfigurationError",
    "ConnectOptions",
    "Connection",
    "ConnectionFailedError",
    "ConsumeInterceptor",
    "ConsumeOptions",
    "Consumer",
    "ConsumerCounters",
    "ConsumerGroup",
    "ConsumerState",
    "Credentials",
    "CredentialsSource",
    "DbIdempotencyStore",
    "DbOutboxStore",
    "Declaration",
    "DecodeError",
    "DecryptError",
    "Depth",
    "Diagnostic",
    "Draft",
    "Drained",
    "DriftError",
    "EncodeError",
    "EncryptedCodec",
    "Envelope",
    "FatalError",
    "FileClaimStore",
    "Finding",
    "Halt",
    "Handled",
    "Handler",
    "HandlerTimeoutError",
    "HandlerTypeError",
    "HeaderValue",
    "Health",
    "HealthPart",
    "Idempotency",
    "IdempotencyConflictError",
    "IdempotencyStore",
    "InMemoryOutboxStore",
    "Itinerary",
    "JsonCodec",
    "Keyring",
    "LeaseLostError",
    "LogContext",
    "LoopError",
    "MemoryClaimStore",
    "MemoryIdempotencyStore",
    "Message",
    "MessageTooLargeError",
    "MissingExtraError",
    "MovableClock",
    "MsgpackCodec",
    "Opening",
    "Ordered",
    "OrderedConsumer",
    "OrderedCounters",
    "OrderedQueue",
    "Outbox",
    "OutboxBatch",
    "OutboxRecord",
    "OutboxRelay",
    "OutboxStatus",
    "OutboxStore",
    "PartitionCountError",
    "PartitionFailure",
    "Payload",
    "PayloadType",
    "Pipeline",
    "PipelineCounters",
    "PipelineTypeError",
    "Plan",
    "PublishError",
    "PublishFailedError",
    "PublishInterceptor",
    "PublishOptions",
    "PublishRefusedError",
    "Publisher",
    "PublishingPausedError",
    "Pulled",
    "QueueOptions",
    "QueueStats",
    "Receipt",
    "Receiving",
    "RelayCounters",
    "RelayState",
    "Replay",
    "ReplayError",
    "ReplayResult",
    "RequestCounters",
    "RequestOptions",
    "RequestTimeoutError",
    "Responder",
    "ResponderError",
    "Responding",
    "RetryPolicy",
    "Route",
    "RouteError",
    "RoutingSlip",
    "RunningPipeline",
    "Saga",
    "SagaResult",
    "SagaStep",
    "ScheduleOptions",
    "Scheduled",
    "Scheduler",
    "SchedulerCounters",
    "SecurityError",
    "SetAside",
    "SlipForm",
    "StepOptions",
    "Stop",
    "StopReason",
    "Sweep",
    "SystemClock",
    "TextCodec",
    "Tls",
    "Topology",
    "TopologyError",
    "TopologyMode",
    "Unit",
    "UnroutableError",
    "WhenBlocked",
    "blocking",
    "body_fingerprint",
    "connect",
    "current_message",
    "envelope_id",
    "one_of",
]

_STORES = {
    "DbIdempotencyStore": "acemq.adapters.sql",
    "DbOutboxStore": "acemq.adapters.sql",
    "InMemoryOutboxStore": "acemq.adapters.memory",
    "MemoryIdempotencyStore": "acemq.adapters.memory",
}
"""Where each is, loaded when it is first asked for; some need an extra."""


def __getattr__(name: str) -> Any:
    module = _STORES.get(name)
    if module is None:
        raise AttributeError(f"module 'acemq' has no attribute {name!r}")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("acemq"):
            raise
        raise MissingExtraError(name, module.rpartition(".")[2]) from missing
