"""Exchanges, queues and bindings as values: what they are called, and how they stand on a broker.

Names and arguments are those of CONTRACT.md sections 2 and 3; a broker refuses a queue that is declared with others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import msgspec
from msgspec.structs import replace

from acemq.clock import check_duration
from acemq.errors import ConfigurationError, TopologyError
from acemq.headers import HeaderValue, is_broken
from acemq.keywords import check_keywords
from acemq.retry import RetryPolicy

ExchangeKind = Literal["direct", "topic", "fanout"]
QueueType = Literal["quorum", "classic", "stream"]
Native = Mapping[str, Mapping[str, HeaderValue]]

DEAD_LETTER_EXCHANGE = "acemq.dlx"
RETRY_EXCHANGE = "acemq.retry"

NAME_LIMIT = 255
"""Bytes of UTF-8, of queues, exchanges and routing keys."""

_TRANSPORTS = ("memory", "rabbitmq", "redis", "sql", "aws")
_MILLISECOND = timedelta(milliseconds=1)
_NO_NATIVE: Native = MappingProxyType({})


class TopologyMode(StrEnum):
    """What a connection does about what the library needs by itself: dead letters and rungs, the queues of a pipeline.

    What `declare()` is told follows its own mode.
    """

    CREATE = "create"
    """Made when it is first needed."""
    VERIFY = "verify"
    """Looked up when it is first needed; what is missing is a `TopologyError` that names it."""
    NONE = "none"
    """Neither: it is taken to be there."""


# Names


def dead_letters_of(queue: str) -> str:
    return f"{check_name('queue', queue)}.dlq"


def parked_of(queue: str) -> str:
    return f"{check_name('queue', queue)}.parked"


def lanes_of(queue: str) -> tuple[str, str, str]:
    """The queues of a queue with lanes, by priority: 0 low, 1 normal, 2 high."""
    return f"{queue}.low", queue, f"{queue}.high"


def rung_of(queue: str, delay: timedelta) -> str:
    """The queue in which a copy waits `delay` before it returns to `queue`."""
    millis = delay // _MILLISECOND
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if millis % size == 0:
            return f"{queue}.retry.{millis // size}{unit}"
    return f"{queue}.retry.{millis}ms"


def check_name(kind: str, name: str) -> str:
    """Refuse a name that some broker could not hold; `amq.` belongs to RabbitMQ."""
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{kind} {name!r} must be a name of 1 to {NAME_LIMIT} bytes")
    if name.startswith("amq."):
        raise ConfigurationError(f"{kind} {name!r}: names beginning with 'amq.' belong to the broker")
    return check_key(kind, name)


def check_key(kind: str, key: str) -> str:
    if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"{kind} {key!r} must be text")
    is_ascii = key.isascii()
    if is_ascii and len(key) <= NAME_LIMIT and "\0" not in key:
        return key
    size = len(key) if is_ascii else len(key.encode(errors="replace"))
    if size > NAME_LIMIT:
        raise ConfigurationError(f"{kind} {key[:40]!r}… has {size} bytes; {NAME_LIMIT} are allowed")
    if "\0" in key or is_broken(key):
        raise ConfigurationError(f"{kind} {key!r} holds a NUL or half of a surrogate pair, which no broker can keep")
    return key


# Objects


class Exchange(msgspec.Struct, frozen=True):
    name: str
    kind: ExchangeKind = "direct"
    durable: bool = True
    ordered: bool = False


class Queue(msgspec.Struct, frozen=True):
    """As the application described it; `arguments()` says how RabbitMQ is told."""

    name: str
    type: QueueType = "quorum"
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    dead_letter: bool = False
    ttl: timedelta | None = None
    max_length: int | None = None
    priorities: int | Literal["lanes"] = 0
    ordered: bool = False
    lease: timedelta | None = None
    rungs: tuple[timedelta, ...] = ()
    native: Native = msgspec.field(default_factory=lambda: _NO_NATIVE)

    def arguments(self) -> dict[str, HeaderValue]:
        """The arguments on RabbitMQ. A classic queue says so by naming no type."""
        out: dict[str, HeaderValue] = {}
        if self.type != "classic":
            out["x-queue-type"] = self.type
        if self.dead_letter:
            out["x-dead-letter-exchange"] = DEAD_LETTER_EXCHANGE
            out["x-dead-letter-routing-key"] = dead_letters_of(self.name)
        if self.ttl is not None:
            out["x-message-ttl"] = self.ttl // _MILLISECOND
        if self.max_length is not None:
            out["x-max-length"] = self.max_length
            out["x-overflow"] = "reject-publish"
        if isinstance(self.priorities, int) and self.priorities:
            out["x-max-priority"] = self.priorities - 1
        out.update(self.native.get("rabbitmq", {}))
        return out


class Binding(msgspec.Struct, frozen=True):
    exchange: str
    queue: str
    key: str = ""


class Declaration(msgspec.Struct, frozen=True):
    """One object with everything a broker is told about it, in the order of declaring."""

    kind: Literal["exchange", "queue", "binding"]
    name: str
    """Of a binding: the queue's."""
    type: str = ""
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: Mapping[str, HeaderValue] = msgspec.field(default_factory=dict[str, HeaderValue])
    exchange: str = ""
    routing_key: str = ""

    def __str__(self) -> str:
        if self.kind == "binding":
            return f"binding   {self.name} <- {self.exchange} on {self.routing_key!r}"
        flags = [word for word, on in _flags(self) if on]
        given = [f"{name}={value!r}" for name, value in sorted(self.arguments.items()) if name != "x-queue-type"]
        return " ".join([f"{self.kind:<9} {self.name} ({', '.join([self.type, *flags])})", *given])


def _flags(declared: Declaration) -> Iterator[tuple[str, bool]]:
    yield "transient", not declared.durable
    yield "exclusive", declared.exclusive
    yield "auto-delete", declared.auto_delete


class QueueOptions(TypedDict, total=False):
    """How a queue stands on its broker; all of it optional, and none of it can be changed later."""

    type: Literal["quorum", "classic"]
    """quorum, but classic where the queue is exclusive, auto-delete or transient."""
    durable: bool
    """True; the queue outlives a restart of its broker."""
    exclusive: bool
    """False; for this connection alone, and gone with it."""
    auto_delete: bool
    """False; gone with its last consumer."""
    dead_letter: bool
    """False; lets the broker move what expires or exceeds a limit to `{queue}.dlq`; declares that and `.parked`."""
    retry: RetryPolicy
    """None; declares the rungs of this policy beforehand, and implies `dead_letter` unless that is given."""
    ttl: timedelta
    """None; how long a message may lie in the queue."""
    max_length: int
    """None; a full queue refuses, it never drops."""
    priorities: int | Literal["lanes"]
    """0; so many levels, of classic queues. `"lanes"`: three queues `{queue}.low`, `{queue}`, `{queue}.high`."""
    ordered: bool
    """False; strict order of equal ordering keys, where the transport does not keep all order anyway."""
    lease: timedelta
    """The transport's; how long a delivery is held before it comes again, where there are leases."""
    native: Native
    """`{"rabbitmq": {"x-delivery-limit": 5}}`; other transports skip what is not addressed to them."""


class Topology(msgspec.Struct, frozen=True):
    """What should exist on the broker. Each verb returns a new one; the order of calls does not matter."""

    exchanges: tuple[Exchange, ...] = ()
    queues: tuple[Queue, ...] = ()
    bindings: tuple[Binding, ...] = ()

    def exchange(
        self, name: str, kind: ExchangeKind = "direct", *, durable: bool = True, ordered: bool = False
    ) -> Topology:
        check_name("exchange", name)
        if kind not in ("direct", "topic", "fanout"):
            raise ConfigurationError(f"kind={kind!r} of exchange {name!r} must be direct, topic or fanout")
        return self | Topology(exchanges=(Exchange(name, kind, durable, ordered),))

    def queue(self, name: str, **options: Unpack[QueueOptions]) -> Topology:
        return self | Topology(queues=(make_queue(name, **options),))

    def bind(self, queue: str, exchange: str, routing_key: str = "") -> Topology:
        check_key("routing key", routing_key)
        return self | Topology(
            bindings=(Binding(check_name("exchange", exchange), check_name("queue", queue), routing_key),)
        )

    def __or__(self, other: Topology) -> Topology:
        return Topology(
            _distinct(self.exchanges + other.exchanges),
            _distinct(self.queues + other.queues),
            _distinct(self.bindings + other.bindings),
        )

    def describe(self) -> tuple[Declaration, ...]:
        """Every object with all its arguments, as RabbitMQ is told of it: exchanges, then queues, then bindings."""
        whole = self.spelled_out()
        return (
            *(Declaration("exchange", e.name, e.kind, e.durable) for e in whole.exchanges),
            *(
                Declaration("queue", q.name, q.type, q.durable, q.exclusive, q.auto_delete, q.arguments())
                for q in whole.queues
            ),
            *(Declaration("binding", b.queue, exchange=b.exchange, routing_key=b.key) for b in whole.bindings),
        )

    def in_lanes(self) -> Topology:
        """With the three queues of each that has lanes, which are ordinary ones."""
        lanes = _distinct([lane for queue in self.queues for lane in _lanes(queue)])
        return Topology(self.exchanges, lanes, self.bindings)

    def spelled_out(self) -> Topology:
        """With what `priorities="lanes"`, `dead_letter` and `retry` of its queues stand for."""
        whole = self.in_lanes()
        for queue in whole.queues:
            if queue.dead_letter:
                whole |= aside_of(queue.name)
            if queue.rungs:
                whole |= rungs(queue.name, queue.rungs)
        return whole

    def __str__(self) -> str:
        """A line for each object of `describe()`."""
        return "\n".join(map(str, self.describe()))

    def validate(self) -> None:
        """Raise one `TopologyError` with every problem that can be seen without a broker, not only the first.

        What depends on the transport is refused when a connection is told to declare it.
        """
        problems = tuple(self._problems())
        if problems:
            raise TopologyError(*problems)

    def _problems(self) -> Iterator[str]:
        unnameable = list(_unnameable(self.in_lanes()))
        if unnameable:  # nothing beside such a queue can be named either
            yield from unnameable
            return
        whole = self.spelled_out()
        yield from _unnameable(whole)
        queues, exchanges = {q.name for q in whole.queues}, {e.name for e in whole.exchanges}
        for binding in whole.bindings:
            if binding.queue not in queues and not _leads_home(binding):
                yield f"binding of queue {binding.queue!r}: no such queue is described; add .queue({binding.queue!r})"
            if binding.exchange not in exchanges:
                yield (
                    f"binding to exchange {binding.exchange!r}: no such exchange is described; "
                    f"add .exchange({binding.exchange!r})"
                )
        yield from _described_twice("exchange", whole.exchanges)
        # Spelled out, a queue with lanes is like one without; and one that is described may be another's lane.
        twice = (*_described_twice("queue", self.queues), *_described_twice("queue", whole.queues))
        yield from dict.fromkeys(twice)
        for queue in self.queues:
            yield from _queue_problems(queue)
        for exchange in self.exchanges:
            if _is_ours(exchange.name) and exchange not in LIBRARY.exchanges:  # as the contract has it, it may be
                yield f"exchange {exchange.name!r}: names beginning with 'acemq.' belong to the library"


def make_queue(name: str, **options: Unpack[QueueOptions]) -> Queue:
    check_name("queue", name)
    given: dict[str, Any] = dict(options)
    check_keywords("queue", given, QueueOptions.__annotations__)
    policy: RetryPolicy | None = given.pop("retry", None)
    if policy is not None:
        given.setdefault("dead_letter", True)
        given["rungs"] = policy.rungs()
    given.setdefault("type", default_type(given))
    for option in ("ttl", "lease"):
        if given.get(option) is not None:
            check_duration(option, given[option])
    if given.get("max_length") is not None and given["max_length"] < 1:
        raise ConfigurationError(f"max_length={given['max_length']} of queue {name!r} must be 1 or more")
    priorities = given.get("priorities", 0)
    if priorities != "lanes" and (not isinstance(priorities, int) or not 0 <= priorities <= 256):
        raise ConfigurationError(f"priorities={priorities!r} of queue {name!r} must be 0 to 256 levels, or 'lanes'")
    return Queue(name, **given)


def default_type(options: Mapping[str, Any]) -> QueueType:
    """Quorum, but for queues that live with one connection or without a disk."""
    private = options.get("exclusive") or options.get("auto_delete") or not options.get("durable", True)
    return "classic" if private else "quorum"


def _queue_problems(queue: Queue) -> Iterator[str]:
    if queue.type == "quorum" and (queue.exclusive or queue.auto_delete or not queue.durable):
        yield f"queue {queue.name!r}: a quorum queue is durable and shared; use type='classic'"
    if queue.priorities == "lanes":
        yield from (f"queue {queue.name!r}: {refused}" for refused in _refused_of_lanes(queue))
    elif queue.type == "quorum" and queue.priorities:
        yield f"queue {queue.name!r}: priorities need type='classic'"
    for transport, arguments in queue.native.items():
        if transport not in _TRANSPORTS:
            yield f"queue {queue.name!r}: native= names no transport {transport!r}; known: {', '.join(_TRANSPORTS)}"
        elif transport == "rabbitmq":
            own = replace(queue, native=_NO_NATIVE).arguments()
            for argument in own.keys() & arguments.keys():
                yield f"queue {queue.name!r}: native argument {argument!r} is set by an option already"
    if _is_ours(queue.name) and queue not in LIBRARY.queues:
        yield f"queue {queue.name!r}: names beginning with 'acemq.' belong to the library"


def _lanes(queue: Queue) -> tuple[Queue, ...]:
    if queue.priorities != "lanes":
        return (queue,)
    # High comes last: senders take it as the sign that the others are there, too.
    return tuple(replace(queue, name=lane, priorities=0) for lane in lanes_of(queue.name))


def _refused_of_lanes(queue: Queue) -> Iterator[str]:
    if queue.exclusive:
        yield "priorities='lanes' with exclusive=True: what one connection has for itself needs no lanes"
    if queue.ordered:
        yield "priorities='lanes' with ordered=True: between lanes there is no order; choose one of the two"
    if queue.type == "stream":
        yield "priorities='lanes' with type='stream': a stream is read in its order; use type='quorum' or 'classic'"


def _unnameable(topology: Topology) -> Iterator[str]:
    for kind, objects in (("exchange", topology.exchanges), ("queue", topology.queues)):
        for described in objects:
            try:
                check_name(kind, described.name)
            except ConfigurationError as error:
                yield str(error)


def _leads_home(binding: Binding) -> bool:
    """The way out of the rungs; the queue itself may be somebody else's to declare, as it is for a consumer."""
    return binding.exchange == RETRY_EXCHANGE and binding.key == binding.queue


def _is_ours(name: str) -> bool:
    return name.startswith("acemq.")


_Described = TypeVar("_Described", Exchange, Queue)


def _described_twice(kind: str, objects: Iterable[_Described]) -> Iterator[str]:
    seen: dict[str, object] = {}
    for described in objects:
        if seen.setdefault(described.name, described) != described:
            yield f"{kind} {described.name!r} is described twice, differently"


_Any = TypeVar("_Any")


def _distinct(objects: Sequence[_Any]) -> tuple[_Any, ...]:
    out: list[_Any] = []
    for described in objects:
        if described not in out:
            out.append(described)
    return tuple(out)


def latest(before: Topology, then: Topology) -> Topology:
    """Both, an object of the same kind and name as the later one has it."""

    def by_name(objects: Iterable[_Described]) -> tuple[_Described, ...]:
        return tuple({described.name: described for described in objects}.values())

    return Topology(
        by_name(before.exchanges + then.exchanges),
        by_name(before.queues + then.queues),
        _distinct(before.bindings + then.bindings),
    )


# What the library declares beside a queue


SCHEDULE_EXCHANGE, SCHEDULE_QUEUE = "acemq.schedule", "acemq.schedule.due"


def _schedule() -> Topology:
    """The ladder of the scheduler (CONTRACT.md section 6)."""
    down: Native = {
        "rabbitmq": {"x-dead-letter-exchange": SCHEDULE_EXCHANGE, "x-dead-letter-routing-key": SCHEDULE_QUEUE}
    }
    lengths = {"1h": 3600, "10m": 600, "1m": 60, "10s": 10, "1s": 1}
    rungs = tuple(
        Queue(f"{SCHEDULE_EXCHANGE}.{rung}", type="classic", ttl=timedelta(seconds=seconds), native=down)
        for rung, seconds in lengths.items()
    )
    queues = (*rungs, Queue(SCHEDULE_QUEUE, type="classic"))
    bindings = tuple(Binding(SCHEDULE_EXCHANGE, queue.name, queue.name) for queue in queues)
    return Topology((Exchange(SCHEDULE_EXCHANGE),), queues, bindings)


SCHEDULE = _schedule()
CONTROL = Topology(queues=SCHEDULE.queues[-1:])
"""All that is needed of it where the broker delays by itself, only not for long enough."""
LIBRARY = Topology(exchanges=(Exchange(DEAD_LETTER_EXCHANGE), Exchange(RETRY_EXCHANGE))) | SCHEDULE
"""All that may have a name beginning with `acemq.`."""


def aside_of(queue: str, *, exchanges: bool = True) -> Topology:
    """`{queue}.dlq` and `{queue}.parked`, and on RabbitMQ (`exchanges`) their bindings; never the queue itself."""
    names = (dead_letters_of(queue), parked_of(queue))
    queues = tuple(Queue(name, type="classic") for name in names)
    if not exchanges:
        return Topology(queues=queues)
    bindings = tuple(Binding(DEAD_LETTER_EXCHANGE, name, name) for name in names)
    return Topology((Exchange(DEAD_LETTER_EXCHANGE),), queues, bindings)


def rungs(queue: str, delays: Iterable[timedelta]) -> Topology:
    """The waiting queues of a retry policy and their way home."""
    home: Native = {"rabbitmq": {"x-dead-letter-exchange": RETRY_EXCHANGE, "x-dead-letter-routing-key": queue}}
    waiting = tuple(Queue(rung_of(queue, delay), type="classic", ttl=delay, native=home) for delay in delays)
    if not waiting:
        return Topology()
    return Topology((Exchange(RETRY_EXCHANGE),), waiting, (Binding(RETRY_EXCHANGE, queue, queue),))


# Routing


def matches(pattern: str, key: str) -> bool:
    """Whether a topic pattern matches, exactly as RabbitMQ does it.

    Words stand between dots and may be empty; an empty key has none. `*` is one word, `#` any number.
    """
    return _match(_words(pattern), _words(key))


def _words(text: str) -> list[str]:
    return text.split(".") if text else []


def _match(pattern: list[str], words: list[str]) -> bool:
    # Row by row over the pattern: linear in pattern × key; backtracking would be exponential in the number of '#'.
    reached = [True] + [False] * len(words)
    for part in pattern:
        if part == "#":
            for i in range(1, len(reached)):
                reached[i] = reached[i] or reached[i - 1]
        else:
            reached = [False, *(here and part in ("*", word) for here, word in zip(reached, words, strict=False))]
    return reached[-1]
