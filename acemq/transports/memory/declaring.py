"""`apply`: what is there, what is wanted, what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from acemq.lacking import refuse_lacking
from acemq.plan import Finding, refuse_drift
from acemq.topology import Exchange, Queue, Topology, aside_of
from acemq.transport import ApplyMode, ExchangeMissing, QueueMissing
from acemq.transports.memory.broker import Broker
from acemq.transports.memory.profiles import Profile
from acemq.transports.memory.receiving import Link
from acemq.transports.memory.routing import MemoryExchange


def apply(broker: Broker, link: Link, topology: Topology, mode: ApplyMode) -> list[Finding]:
    """All or nothing: whatever is raised, nothing was made."""
    whole = _spelled_out(topology, broker.profile)
    with broker.lock:
        _check_capabilities(broker, whole)
        findings = list(_look(broker, link, whole))
        if mode is ApplyMode.REPORT:
            return findings
        refuse_drift(findings, nor_missing=mode is ApplyMode.VERIFY)
        if mode is ApplyMode.VERIFY:
            return findings
        _check_ends(broker, whole)
        _create(broker, link, whole)
    return [_created(finding) for finding in findings]


def private(topology: Topology) -> Topology:
    """The part that goes with a link or a last consumer, and has to be made again after a new dial."""
    queues = tuple(queue for queue in topology.queues if queue.exclusive or queue.auto_delete)
    names = {queue.name for queue in queues}
    return Topology(queues=queues, bindings=tuple(binding for binding in topology.bindings if binding.queue in names))


def without(topology: Topology, kind: str, name: str) -> Topology:
    if kind == "exchange":
        return Topology(
            tuple(exchange for exchange in topology.exchanges if exchange.name != name),
            topology.queues,
            tuple(binding for binding in topology.bindings if binding.exchange != name),
        )
    return Topology(
        topology.exchanges,
        tuple(queue for queue in topology.queues if queue.name != name),
        tuple(binding for binding in topology.bindings if binding.queue != name),
    )


def _spelled_out(topology: Topology, profile: Profile) -> Topology:
    if profile.capabilities.dead_letter_routes:
        return topology.spelled_out()
    for queue in topology.queues:
        if queue.dead_letter:
            topology |= aside_of(queue.name, exchanges=False)
    return topology


# What it cannot do


def _check_capabilities(broker: Broker, topology: Topology) -> None:
    has = broker.capabilities
    refuse_lacking(topology, has, transport=broker.profile.title)
    for queue in topology.queues:
        if queue.native.get("memory"):
            raise broker.cannot("native arguments", f"native={{'memory': …}} of queue {queue.name!r}")
    exchanges = (*(known.described for known in broker.exchanges.values()), *topology.exchanges)
    topics = {exchange.name for exchange in exchanges if exchange.kind == "topic"}
    for binding in topology.bindings:
        pattern = {"*", "#"} & set(binding.key.split("."))
        if pattern and binding.exchange in topics and has.topic_patterns == "none":
            raise broker.cannot("topic patterns", f"the binding of {binding.queue!r} on {binding.key!r}")


# What differs


def _look(broker: Broker, link: Link, topology: Topology) -> Iterator[Finding]:
    for exchange in topology.exchanges:
        there = broker.exchanges.get(exchange.name)
        found = None if there is None else _facts_of_exchange(there.described)
        yield from _compare("exchange", exchange.name, _facts_of_exchange(exchange), found)
    for queue in topology.queues:
        present = broker.queues.get(queue.name)
        if present is not None:
            broker.queue(queue.name, link)  # raises where it is another link's own
        found = None if present is None else _facts_of_queue(present.described, broker.profile)
        yield from _compare("queue", queue.name, _facts_of_queue(queue, broker.profile), found)
    for binding in topology.bindings:
        bound = broker.exchanges.get(binding.exchange)
        known = bound is not None and (binding.queue, binding.key) in bound.bindings
        yield Finding(
            verdict="present" if known else "missing",
            kind="binding",
            name=f"{binding.queue} <- {binding.exchange} on {binding.key!r}",
        )


def _compare(
    kind: Literal["queue", "exchange"], name: str, wanted: dict[str, object], found: dict[str, object] | None
) -> Iterator[Finding]:
    if found is None:
        yield Finding(verdict="missing", kind=kind, name=name)
        return
    differing = [argument for argument in {**wanted, **found} if wanted.get(argument) != found.get(argument)]
    for argument in differing:
        yield Finding(
            verdict="drift",
            kind=kind,
            name=name,
            argument=argument,
            wanted=wanted.get(argument),
            found=found.get(argument),
        )
    if not differing:
        yield Finding(verdict="present", kind=kind, name=name)


_OPTIONS = (
    "type",
    "durable",
    "exclusive",
    "auto_delete",
    "dead_letter",
    "ttl",
    "max_length",
    "priorities",
    "ordered",
    "lease",
)


def _facts_of_queue(queue: Queue, profile: Profile) -> dict[str, object]:
    if profile.native == "rabbitmq":
        flags = {"durable": queue.durable, "exclusive": queue.exclusive, "auto_delete": queue.auto_delete}
        return {**flags, **queue.arguments()}
    return {option: getattr(queue, option) for option in _OPTIONS}


def _facts_of_exchange(exchange: Exchange) -> dict[str, object]:
    return {"kind": exchange.kind, "durable": exchange.durable, "ordered": exchange.ordered}


# Creating


def _check_ends(broker: Broker, topology: Topology) -> None:
    queues = broker.queues.keys() | {queue.name for queue in topology.queues}
    exchanges = broker.exchanges.keys() | {exchange.name for exchange in topology.exchanges}
    for binding in topology.bindings:
        if binding.queue not in queues:
            raise QueueMissing(
                f"binding to {binding.exchange!r}: there is no queue {binding.queue!r}; declare it too", code=404
            )
        if binding.exchange not in exchanges:
            raise ExchangeMissing(
                f"binding of {binding.queue!r}: there is no exchange {binding.exchange!r}; declare it too", code=404
            )


def _create(broker: Broker, link: Link, topology: Topology) -> None:
    for exchange in topology.exchanges:
        if exchange.name not in broker.exchanges:
            broker.exchanges[exchange.name] = MemoryExchange(exchange)
    for queue in topology.queues:
        if queue.name not in broker.queues:
            broker.create_queue(queue, link)
    for binding in topology.bindings:
        broker.exchanges[binding.exchange].bind(binding.queue, binding.key)


def _created(finding: Finding) -> Finding:
    return replace(finding, verdict="created") if finding.verdict == "missing" else finding
