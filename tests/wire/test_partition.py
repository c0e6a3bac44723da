"""CONTRACT.md section 5: which queue of an ordered set a key goes to."""

from __future__ import annotations

import acemq
from acemq import AceMQ, OrderedQueue
from acemq.patterns.ordered import keys as partition
from tests.wire.suite import Suite, Values

PARTITION = Suite("partition", others=("java", "dotnet"))


@PARTITION.parametrize
async def test_partition(case: str) -> None:
    await PARTITION.check(case)


@PARTITION.op("hash")
def hash_of(given: Values) -> Values:
    raw = given["key"].encode()
    # The file leaves out the bytes of its key of a thousand letters.
    return {"fnv1a32": partition.fnv1a(given["key"]), "utf8_hex": raw.hex() if len(raw) < 1_000 else None}


@PARTITION.op("partition")
def partition_of(given: Values) -> Values:
    return {"partition": partition.partition_of(given["key"], given["count"])}


def ordered(name: str, count: int) -> OrderedQueue[dict[str, int]]:
    return OrderedQueue(AceMQ("memory://").ordered(name, dict[str, int]).partitions(count))


@PARTITION.op("ordered_partitions")
def ordered_partitions(given: Values) -> Values:
    return {"queues": ordered("ledger", given["count"]).queues}


@PARTITION.op("queues")
def queues(given: Values) -> Values:
    described = AceMQ("memory://").ordered(given["name"], dict[str, int]).partitions(given["count"])
    for queue in described.topology().queues:
        assert (queue.type, queue.durable, dict(queue.arguments())) == ("quorum", True, {"x-queue-type": "quorum"})
    return {"queues": [queue.name for queue in described.topology().queues]}


@PARTITION.op("publish")
async def publish(given: Values) -> Values:
    async with acemq.connect("memory://") as mq:
        ledger = await mq.ordered(given["name"], dict[str, int]).partitions(given["count"]).declare()
        receipt = await ledger.send({"a": 1}, key=given["key"])
        message = await mq.pull(receipt.routing_key, dict[str, int])
        assert message is not None
        return {"exchange": receipt.exchange, "routing_key": receipt.routing_key, "default_type": message.type}


@PARTITION.op("routing_key")
def routing_key(given: Values) -> Values:
    return {"routing_key": partition.queue_of(given["base"], partition.partition_of(given["key"], given["count"]))}
