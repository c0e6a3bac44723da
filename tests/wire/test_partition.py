"""CONTRACT.md section 5: which queue of an ordered set a key goes to."""

from __future__ import annotations

from acemq import headers as h
from acemq import partition
from acemq.mq import AceMQ
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


@PARTITION.op("ordered_partitions")
def ordered_partitions(given: Values) -> Values:
    return {"queues": partition.queues_of("ledger", given["count"])}


@PARTITION.op("queues")
def queues(given: Values) -> Values:
    return {"queues": list(partition.queues_of(given["name"], given["count"]))}


@PARTITION.op("publish")
def publish(given: Values) -> Values:
    queue = partition.queue_of(given["name"], partition.partition_of(given["key"], given["count"]))
    outgoing = AceMQ("memory://").outbound.draft("", queue, {"a": 1})
    return {
        "exchange": outgoing.exchange,
        "routing_key": outgoing.routing_key,
        "default_type": outgoing.headers[h.TYPE],
    }


@PARTITION.op("routing_key")
def routing_key(given: Values) -> Values:
    return {"routing_key": partition.queue_of(given["base"], partition.partition_of(given["key"], given["count"]))}
