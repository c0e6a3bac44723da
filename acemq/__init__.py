"""Messaging patterns over one compact core, for when messages must not be lost.

Every public name is imported from here. A transport is loaded when a URL first names it.
"""

from acemq import blocking
from acemq.ack import Ack
from acemq.batching import Batch, BatchHandler
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
from acemq.consume_options import ConsumeOptions
from acemq.consuming import Consumer, ConsumerState
from acemq.draft import Draft
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
from acemq.gate import WhenBlocked
from acemq.groups import ConsumerGroup
from acemq.headers import HeaderValue
from acemq.health import Health, HealthPart
from acemq.interceptors import ConsumeInterceptor, PublishInterceptor
from acemq.message import Handled, Handler, Message, SetAside, current_message
from acemq.mq import AceMQ, connect
from acemq.opening import Opening
from acemq.patterns.ordered.consumer import OrderedConsumer
from acemq.patterns.ordered.described import Ordered
from acemq.patterns.ordered.partition import Halt, OrderedCounters, PartitionFailure
from acemq.patterns.ordered.queue import OrderedQueue
from acemq.patterns.pipeline import Pipeline, PipelineCounters, RunningPipeline, SlipForm, StepOptions
from acemq.patterns.replay import Replay, ReplayResult, StopReason
from acemq.patterns.request_reply import RequestCounters, RequestOptions, Responder, Responding
from acemq.patterns.routing_slip import Itinerary, Route, RoutingSlip, Stop
from acemq.patterns.saga import Saga, SagaResult, SagaStep
from acemq.patterns.scheduler import Scheduled, ScheduleOptions, Scheduler, SchedulerCounters
from acemq.plan import Finding, Plan
from acemq.publish_options import PublishOptions
from acemq.publisher import Publisher
from acemq.publishing import Receipt
from acemq.pulling import Pulled
from acemq.receiving import Receiving
from acemq.retry import Backoff, RetryPolicy
from acemq.security import Credentials, CredentialsSource, Tls
from acemq.settling import ConsumerCounters
from acemq.stats import QueueStats
from acemq.stopping import Drained
from acemq.telemetry import Diagnostic, LogContext
from acemq.topology import Declaration, QueueOptions, Topology, TopologyMode
from acemq.transport import ApplyMode, Capabilities, Depth

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
    "BytesCodec",
    "Capabilities",
    "CapabilityError",
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
    "Itinerary",
    "JsonCodec",
    "Keyring",
    "LogContext",
    "LoopError",
    "MemoryClaimStore",
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
    "SystemClock",
    "TextCodec",
    "Tls",
    "Topology",
    "TopologyError",
    "TopologyMode",
    "UnroutableError",
    "WhenBlocked",
    "blocking",
    "connect",
    "current_message",
    "one_of",
]
