"""A transport of one's own: queues that are lists in this process. `SmallConformance` proves it."""

from collections.abc import Callable, Sequence
from typing import cast

from acemq.polling import PollingTransport
from acemq.testing.conformance import SmallConformance
from acemq.topology import Topology
from acemq.transport import Capabilities, Delivery, Outgoing

CAN = Capabilities(
    transport="lists", durable=False, requeue_place="head", unroutable="told", topic_patterns="none", depth="exact"
)


class Stored:
    """A message. It keeps its place in its list while it is taken, and leaves the list when it is settled."""

    def __init__(self, out: Outgoing) -> None:
        self.out, self.is_taken, self.redelivered = out, False, False


class Broker:
    """What the transports of one broker share."""

    def __init__(self) -> None:
        self.topology, self.queues = Topology(), dict[str, list[Stored]]()

    def ready(self, queue: str) -> list[Stored]:
        return [stored for stored in self.queues.get(queue, []) if not stored.is_taken]


class Lists(PollingTransport):
    def __init__(self, broker: Broker) -> None:
        super().__init__(CAN, endpoint="lists")
        self.broker = broker

    async def declared(self, change: Callable[[Topology], Topology]) -> Topology:
        broker, topology = self.broker, change(self.broker.topology)
        broker.queues = {queue.name: broker.queues.get(queue.name, []) for queue in topology.queues}
        broker.topology = topology
        return topology

    async def put(self, copies: Sequence[tuple[str, Outgoing]]) -> None:
        for queue, out in copies:
            self.broker.queues[queue].append(Stored(out))

    async def take(self, queue: str, most: int) -> Sequence[Delivery]:
        taken = self.broker.ready(queue)[:most]
        for stored in taken:
            stored.is_taken = True
        return [delivery(queue, stored) for stored in taken]

    async def remove(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            queue = self.broker.queues.get(each.queue, [])
            queue[:] = [stored for stored in queue if stored is not each.receipt]

    async def put_back(self, deliveries: Sequence[Delivery]) -> None:
        for each in deliveries:
            stored = cast("Stored", each.receipt)
            stored.is_taken, stored.redelivered = False, True

    async def count(self, queue: str) -> tuple[int, int]:
        ready = len(self.broker.ready(queue))
        return ready, len(self.broker.queues[queue]) - ready

    async def clear(self, queue: str) -> int:
        ready = self.broker.ready(queue)
        self.broker.queues[queue] = [stored for stored in self.broker.queues[queue] if stored.is_taken]
        return len(ready)


def delivery(queue: str, stored: Stored) -> Delivery:
    out = stored.out
    return Delivery(
        queue=queue,
        body=out.body,
        headers=dict(out.headers),
        message_id=out.message_id,
        content_type=out.content_type,
        exchange=out.exchange,
        routing_key=out.routing_key,
        reply_to=out.reply_to,
        redelivered=stored.redelivered,
        receipt=stored,
    )


class TestLists(SmallConformance):
    label = "lists"

    def make(self, **options: object) -> Lists:
        # Every test has an instance of its own, and so a broker of its own.
        self.broker = getattr(self, "broker", None) or Broker()
        return Lists(self.broker)
