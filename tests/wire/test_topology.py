"""CONTRACT.md sections 2 and 3: what is declared, under which names, with which arguments."""

from __future__ import annotations

from typing import Any, cast

from acemq import topology as t
from acemq.ack import Ack
from acemq.errors import DriftError
from acemq.message import Message
from acemq.mq import AceMQ
from acemq.patterns.ordered import keys as partition
from acemq.topology import Queue, QueueOptions, QueueType, Topology
from acemq.transport import ApplyMode
from tests.wire.broker import bench, declared
from tests.wire.policies import millis, policy_of
from tests.wire.suite import Suite, Values

TOPOLOGY = Suite("topology")


@TOPOLOGY.parametrize
async def test_topology(case: str) -> None:
    await TOPOLOGY.check(case)


@TOPOLOGY.op("rung")
def rung(given: Values) -> Values:
    delay = millis(given["delay_ms"])
    (queue,) = declared(t.rungs(given["queue"], [delay]).describe())["queues"]
    assert queue["name"] == t.rung_of(given["queue"], delay)
    return queue


@TOPOLOGY.op("names")
def names(given: Values) -> Values:
    return {"dead_letter": t.dead_letters_of(given["queue"]), "parked": t.parked_of(given["queue"])}


@TOPOLOGY.op("consumer_start")
async def consumer_start(given: Values) -> Values:
    async def handle(message: Message[bytes]) -> Ack | None: ...

    queue = given["queue"]
    async with bench() as at:
        await at.declare(queue)
        options: dict[str, Any] = {"retry": policy_of(given["policy"])} if "policy" in given else {}
        async with at.mq.consume(queue, bytes, handle, declare=not given.get("private"), **options):
            found = at.mq.declared()
        for made in found.queues:
            assert await at.mq.exists(made.name)
        return dict(declared(found.describe()))


@TOPOLOGY.op("topology")
def topology(given: Values) -> Values:
    options: dict[str, Any] = {name: given[name] for name in ("type", "dead_letter") if name in given}
    if "retry" in given:
        options["retry"] = policy_of(given["retry"])
    whole = Topology().queue(given["queue"], **cast("QueueOptions", options))
    whole.validate()
    return dict(declared(whole.describe()))


@TOPOLOGY.op("declare_arguments")
def declare_arguments(given: Values) -> Values:
    return {kind: Queue("q", type=cast("QueueType", kind)).arguments() for kind in given["types"]}


@TOPOLOGY.op("default_type")
def default_type(given: Values) -> Values:
    options: dict[str, Any] = {name: given[name] for name in ("exclusive", "auto_delete") if name in given}
    if given.get("transient"):
        options["durable"] = False
    whole = Topology().queue("q", **cast("QueueOptions", options))
    whole.validate()
    return {"type": declared(whole.describe())["queues"][0]["type"]}


@TOPOLOGY.op("pipeline")
def pipeline(given: Values) -> Values:
    described = AceMQ("memory://").pipeline(given["name"], str)
    for step in given["steps"]:
        described = described.elsewhere(step, str)
    described.topology().validate()
    return dict(declared(described.topology().describe()))


@TOPOLOGY.op("ordered")
def ordered(given: Values) -> Values:
    whole = Topology()
    for queue in partition.queues_of(given["name"], given["partitions"]):
        whole = whole.queue(queue)
    return dict(declared(whole.describe()))


@TOPOLOGY.op("stream")
def stream(given: Values) -> Values:
    """A stream has no options of its own yet; what RabbitMQ alone knows goes through `native`, as on any queue."""
    native = {
        "x-max-age": f"{given['max_age_s']}s",
        "x-max-length-bytes": given["max_length_bytes"],
        "x-stream-max-segment-size-bytes": given["segment_bytes"],
    }
    queue = Queue(given["name"], type="stream", native={"rabbitmq": native})
    return {"name": queue.name, "durable": queue.durable, "arguments": queue.arguments()}


@TOPOLOGY.op("redeclare")
async def redeclare(given: Values) -> Values:
    async with bench() as at:
        for arguments in (given["first"], given["second"]):
            asked = Topology().queue("jobs.in.retry.40s", type="classic", native={"rabbitmq": arguments})
            try:
                await at.mq.transport.apply(asked, ApplyMode.CREATE)
            except DriftError:
                assert arguments == given["second"]
                return {"error": "PRECONDITION_FAILED"}
    return {}
