"""A connection, its broker and its clock for one test, and what came of the messages in it."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack, cast, get_origin

from acemq import headers as h
from acemq.clock import MovableClock, check_duration
from acemq.codec import BytesCodec, Codecs, Payload, Reader
from acemq.connect_options import ConnectOptions
from acemq.consuming.consumer import Consumer
from acemq.consuming.registry import AnyConsumer
from acemq.envelope import Envelope, EnvelopeChanges
from acemq.errors import ConfigurationError, EncodeError, TopologyError
from acemq.headers import Headers
from acemq.interceptors import ConsumeInterceptor, PublishInterceptor
from acemq.message import Handled, Message
from acemq.mq import AceMQ
from acemq.opening import transport_for
from acemq.publishing.draft import Draft
from acemq.publishing.outbound import Receipt
from acemq.topology import dead_letters_of, parked_of
from acemq.transport import Delivery, Transport
from acemq.transports.memory import MemoryBroker, Profile, StoredMessage

__all__ = ["Handling", "MessageHarness", "Sent", "message"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Sent(Generic[T_co]):
    """A publish that the broker has confirmed, as it left the last hook."""

    payload: T_co
    envelope: Envelope
    exchange: str
    """Empty: straight into the queue that `routing_key` names."""
    routing_key: str


@dataclass(frozen=True)
class Handling(Generic[T_co]):
    """One attempt, and what became of it."""

    message: Message[T_co]
    handled: Handled


class MessageHarness:
    """A connection to a private memory broker on a clock that stands until the test moves it.

    `options` are those of `connect`, but for `clock`; `close_timeout` is 2 s of real time here, and is used up only
    by a handler that does not end. Leaving the block drains, and raises `AssertionError` for a task that failed unseen
    and for a handler that never ended. An error of the block itself goes first, with those as its notes.

    It takes no `App`, since there is none yet.
    """

    def __init__(
        self,
        *,
        profile: Profile = Profile.FULL,
        at: datetime = datetime(2027, 1, 1, tzinfo=UTC),
        **options: Unpack[ConnectOptions],
    ) -> None:
        if "clock" in options:
            raise ConfigurationError("clock= is the harness's own, h.clock; say with at= where it begins")
        self.clock = MovableClock(at)
        self.broker = MemoryBroker(clock=self.clock, profile=profile)
        self._log = _Log()
        # First in the row: it then also learns of what a hook behind it refuses.
        ours = (_Published(self._log), _Handled(self._log))
        options["interceptors"] = (*ours, *options.get("interceptors", ()))
        options.setdefault("close_timeout", timedelta(seconds=2))
        options["clock"] = self.clock
        self.mq: AceMQ = _OnBroker(self.broker, options)
        self._log.consumers = self.mq.consumers
        self._opening = self.mq.opening()
        self._errors = _LoopErrors(self._log)

    async def __aenter__(self) -> Self:
        await self._opening
        self._errors.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.mq.close()
            await self.clock.rest()
            gc.collect(1)  # a task that failed unseen is told of when it is collected
        finally:
            self._errors.stop()
        problems = self._log.problems()
        if error is not None:
            for problem in problems:
                error.add_note(problem)
        elif problems:
            raise AssertionError("; ".join(problems)) from next(iter(self._log.failures.values()), None)

    async def advance(self, by: timedelta) -> None:
        """Move the clock on. Retries, delays and expiries on the way happen at their own time, each in its order."""
        await self.clock.advance(by)

    async def run_until_idle(self, bound: timedelta = timedelta(seconds=10)) -> None:
        """Move the clock, by `bound` at most, until nothing is ready, held, delayed or running.

        What was set aside, in `{queue}.dlq` and `{queue}.parked`, is at rest. `AssertionError` names what is still
        open. Threads are not waited for, so a handler that is a plain `def` may be named as running.
        """
        left = check_duration("bound", bound, zero=True)
        await self.clock.rest()
        while open := self._open():
            ahead = self.clock.next()
            if ahead is None or ahead > left + timedelta.resolution:
                raise AssertionError(f"not idle after {bound}: {'; '.join(open)}")
            left -= min(ahead, left)
            await self.clock.advance(ahead)

    def published(self, payload: type[T], *, exchange: str | None = None, queue: str | None = None) -> list[Sent[T]]:
        """What the program has published of this class, in the order of the confirms.

        `queue`: only what was sent straight into it. Retries, dead letters and other copies of the library's own are
        no publishes.
        """
        kind = _class_of(payload)
        return [
            sent
            for sent in self._log.sent
            if isinstance(sent.payload, kind)
            and exchange in (None, sent.exchange)
            and (queue is None or (sent.exchange, sent.routing_key) == ("", queue))
        ]

    def handled(self, payload: type[T], *, queue: str | None = None) -> list[Handling[T]]:
        """Every attempt at a message of this class, in the order of settlement.

        What no handler was given, undecodable or expired, is not among them; look at the dead letters.
        """
        kind = _class_of(payload)
        return [
            handling
            for handling in self._log.handled
            if isinstance(handling.message.payload, kind) and queue in (None, handling.message.queue)
        ]

    async def dead_letters(self, queue: str, payload: Payload[T]) -> list[Message[T]]:
        """What lies in `{queue}.dlq`, looked at and left in place. Raises `DecodeError` for what is no `payload`."""
        return await self._look(dead_letters_of(queue), queue, Reader(self.mq.codecs, payload))

    async def parked(self, queue: str) -> list[Message[bytes]]:
        """What lies in `{queue}.parked`, looked at and left in place."""
        return await self._look(parked_of(queue), queue, Reader(Codecs.of(BytesCodec()), bytes))

    async def _look(self, aside: str, queue: str, reader: Reader[T]) -> list[Message[T]]:
        stored = [each for each in self.broker.snapshot() if each.queue == aside]
        if not stored and not self.broker.queues.keys() & {aside, queue}:
            raise TopologyError(f"there is no queue {queue!r}; declare it first")
        deliveries = [_delivery(each) for each in stored]
        return [
            Message(
                await reader.read_async(each.body, each.content_type, h.text(each.headers.get(h.TYPE)) or ""),
                each,
                self.clock,
            )
            for each in deliveries
        ]

    def _open(self) -> list[str]:
        consumed = {queue for consumer in self.mq.consumers for queue in consumer.queues}
        counts = Counter(
            (each.queue, each.state)
            for each in self.broker.snapshot()
            if each.queue in consumed or not each.queue.endswith(_ASIDE) or each.state == "held"
        )
        open = [f"{count} {state} in {queue!r}" for (queue, state), count in counts.items()]
        return open + [f"{self._log.name(each)} runs with {each!r}" for each in self._log.running]


_ASIDE = (".dlq", ".parked")


def message(payload: T, *, queue: str = "test", **envelope: Unpack[EnvelopeChanges]) -> Message[T]:
    """A message as a handler is given it, so that a handler is tested as the function that it is.

    What `envelope` leaves out is as on a first attempt, and `type` is the queue. `body` is the payload in the default
    codecs, and empty where those cannot write it.
    """
    fields: dict[str, Any] = {"type": queue, **envelope}
    made = Envelope.of(**fields)
    try:
        body, content_type = Codecs.default().write(payload)
    except EncodeError:
        body, content_type = b"", None
    wire = made.to_headers()
    if not made.age_known:
        del wire[h.FIRST_SEEN]
    return Message(
        payload,
        Delivery(
            queue=queue,
            body=body,
            headers=wire,
            message_id=made.id,
            content_type=content_type,
            exchange="",
            routing_key=queue,
        ),
    )


def _delivery(stored: StoredMessage) -> Delivery:
    headers: Headers = stored.headers
    return Delivery(
        queue=stored.queue,
        body=stored.body,
        headers=headers,
        message_id=stored.message_id,
        content_type=stored.content_type,
        exchange=stored.exchange,
        routing_key=stored.routing_key,
        priority=stored.priority,
    )


def _class_of(payload: Any) -> type[Any]:
    return cast("type[Any]", object if payload is Any else get_origin(payload) or payload)


class _Log:
    """What one harness has seen."""

    consumers: Iterable[AnyConsumer] = ()
    """Those that are open."""

    def __init__(self) -> None:
        self.sent: list[Sent[Any]] = []
        self.handled: list[Handling[Any]] = []
        self.running: dict[Message[Any], None] = {}
        self.failures: dict[str, BaseException | None] = {}
        """Of tasks, by what is said of them."""
        self.handlers: dict[str, list[str]] = {}
        """Their names, by the queue that they were for when something was taken from it."""
        self.workers: dict[asyncio.Task[Any], Message[Any]] = {}
        """What each worker took last."""

    def name(self, message: Message[Any]) -> str:
        return f"handler {' or '.join(self.handlers[message.queue])} of {message.queue!r}"

    def problems(self) -> list[str]:
        never = [f"{self.name(each)} never ended; it had {each!r} in hand" for each in self.running]
        return [*self.failures, *never]

    def took(self, message: Message[Any]) -> None:
        self.running[message] = None
        here = (each for each in self.consumers if isinstance(each, Consumer) and message.queue in each.queues)
        self.handlers[message.queue] = list(dict.fromkeys(consumer.handler for consumer in here))
        worker = asyncio.current_task()
        if worker is not None:
            if worker not in self.workers:
                worker.add_done_callback(self._ended)
            self.workers[worker] = message

    def _ended(self, worker: asyncio.Task[Any]) -> None:
        message = self.workers.pop(worker)
        if worker.cancelled() or (error := worker.exception()) is None:
            return
        # No Exception, which the consumer would have taken for a failed attempt: as pytest.fail() raises it.
        self.running.pop(message, None)
        self.failed(f"{self.name(message)} ended its worker with {message!r} in hand", error)

    def failed(self, what: str, error: BaseException | None) -> None:
        self.failures[f"{what}: {type(error).__name__}: {error}" if error else what] = error


class _Published(PublishInterceptor):
    def __init__(self, log: _Log) -> None:
        self._log = log

    def after_publish(self, draft: Draft, receipt: Receipt, /) -> None:
        self._log.sent.append(Sent(draft.payload, draft.envelope, draft.exchange, draft.routing_key))


class _Handled(ConsumeInterceptor):
    def __init__(self, log: _Log) -> None:
        self._log = log

    def before_handle(self, message: Message[Any], /) -> None:
        self._log.took(message)

    def after_handle(self, message: Message[Any], decision: object, /) -> None:
        self._log.running.pop(message, None)

    def handle_failed(self, message: Message[Any], error: BaseException, /) -> None:
        self._log.running.pop(message, None)

    def when_settled(self, message: Message[Any], handled: Handled, /) -> None:
        self._log.running.pop(message, None)
        self._log.handled.append(Handling(message, handled))


class _OnBroker(AceMQ):
    """A connection to the harness's broker, whatever a URL would say."""

    def __init__(self, broker: MemoryBroker, options: ConnectOptions) -> None:
        self._broker = broker
        super().__init__("memory://", **options)

    def make_transport(self, url: str, **options: object) -> Transport:
        return transport_for(url, broker=self._broker, **options)


class _LoopErrors:
    """Hears what the event loop is told of while the block is open: tasks that failed, and nobody asked."""

    def __init__(self, log: _Log) -> None:
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object] | None = None

    def listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._before = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._hear)

    def stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None and loop.get_exception_handler() == self._hear:
            loop.set_exception_handler(self._before)

    def _hear(self, loop: asyncio.AbstractEventLoop, told: dict[str, Any]) -> None:
        if self._loop is None:  # a harness that was opened later still has us as the one before it
            if self._before is None:
                loop.default_exception_handler(told)
            else:
                self._before(loop, told)
            return
        task = told.get("task") or told.get("future")
        name = f"task {task.get_name()!r} failed" if isinstance(task, asyncio.Task) else told.get("message", "")
        self._log.failed(name, told.get("exception"))
