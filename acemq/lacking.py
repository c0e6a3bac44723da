"""What a topology asks of a transport that it does not have. Nothing that was asked for is ignored."""

from __future__ import annotations

from collections.abc import Callable

from acemq.errors import CapabilityError
from acemq.topology import Queue, Topology
from acemq.transport import Capabilities

_NEEDS: tuple[tuple[str, Callable[[Queue], object], Callable[[Capabilities], bool]], ...] = (
    ("streams", lambda queue: queue.type == "stream" and "type='stream'", lambda has: has.streams),
    ("expiry", lambda queue: queue.ttl and f"ttl={queue.ttl}", lambda has: has.expiry),
    ("max_length", lambda queue: queue.max_length and f"max_length={queue.max_length}", lambda has: has.max_length),
    ("leases", lambda queue: queue.lease and f"lease={queue.lease}", lambda has: has.lease is not None),
    ("order", lambda queue: queue.ordered and "ordered=True", lambda has: has.ordered_queues or has.ordering == "fifo"),
)
"""Capability, the option that needs it as it was given, whether it is there."""


def refuse_lacking(topology: Topology, has: Capabilities, *, transport: str = "") -> None:
    """Raise `CapabilityError` with the first option that a transport of these capabilities cannot honour."""
    transport = transport or has.transport
    for queue in topology.queues:
        for capability, option, there in _NEEDS:
            if option(queue) and not there(has):
                raise CapabilityError(transport, capability, f"{option(queue)} of queue {queue.name!r}")
        levels = queue.priorities if isinstance(queue.priorities, int) else 0
        option_given = f"priorities={levels} of queue {queue.name!r}"
        if levels and queue.type == "quorum":
            raise CapabilityError(transport, "levels of a quorum queue", option_given, "Use type='classic'")
        if levels > has.priorities:
            raise CapabilityError(transport, f"more than {has.priorities} levels", option_given)
