"""What is declared on a broker that keeps it as a `Topology`, and where a message goes by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from acemq.plan import Finding
from acemq.topology import Topology
from acemq.transport import ExchangeMissing, Kind, Outgoing, QueueMissing


def as_it_is(now: Topology) -> Topology:
    return now


def has(there: Topology, name: str, kind: Kind) -> bool:
    return any(each.name == name for each in (there.queues if kind == "queue" else there.exchanges))


def compare(wanted: Topology, there: Topology, otherwise: Literal["created", "missing"]) -> Iterator[Finding]:
    """`otherwise`: what is said of that which is not there. Of a queue only its name is compared."""
    kinds = {exchange.name: exchange.kind for exchange in there.exchanges}
    for exchange in wanted.exchanges:
        name, kind = exchange.name, kinds.get(exchange.name)
        if kind is None or kind == exchange.kind:
            yield Finding(verdict="present" if kind else otherwise, kind="exchange", name=name)
        else:
            yield Finding(
                verdict="drift", kind="exchange", name=name, argument="kind", wanted=exchange.kind, found=kind
            )
    for queue in wanted.queues:
        is_there = has(there, queue.name, "queue")
        yield Finding(verdict="present" if is_there else otherwise, kind="queue", name=queue.name)
    for binding in wanted.bindings:
        name = f"{binding.queue} <- {binding.exchange} on {binding.key!r}"
        yield Finding(verdict="present" if binding in there.bindings else otherwise, kind="binding", name=name)


def lacking(wanted: Topology, there: Topology) -> Topology:
    """What is to be added. Raises `QueueMissing` or `ExchangeMissing` for a binding of what is nowhere."""
    whole = there | wanted
    for binding in wanted.bindings:
        if not has(whole, binding.queue, "queue"):
            raise QueueMissing(f"a binding names queue {binding.queue!r}, which is not declared")
        if not has(whole, binding.exchange, "exchange"):
            raise ExchangeMissing(f"a binding names exchange {binding.exchange!r}, which is not declared")
    return Topology(
        tuple(exchange for exchange in wanted.exchanges if not has(there, exchange.name, "exchange")),
        tuple(queue for queue in wanted.queues if not has(there, queue.name, "queue")),
        wanted.bindings,
    )


def without(there: Topology, name: str, kind: Kind) -> Topology:
    """Its bindings go with it."""
    is_queue = kind == "queue"
    return Topology(
        tuple(exchange for exchange in there.exchanges if is_queue or exchange.name != name),
        tuple(queue for queue in there.queues if not is_queue or queue.name != name),
        tuple(binding for binding in there.bindings if name != (binding.queue if is_queue else binding.exchange)),
    )


def targets(out: Outgoing, there: Topology) -> Sequence[str]:
    """The queues that it goes to, each once. Raises `ExchangeMissing`."""
    if not out.exchange:
        return [out.routing_key] if has(there, out.routing_key, "queue") else []
    kind = next((exchange.kind for exchange in there.exchanges if exchange.name == out.exchange), None)
    if kind is None:
        raise ExchangeMissing(f"there is no exchange {out.exchange!r}; declare it first")
    bound = (binding for binding in there.bindings if binding.exchange == out.exchange)
    return list(dict.fromkeys(each.queue for each in bound if kind == "fanout" or each.key == out.routing_key))
