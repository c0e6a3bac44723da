"""What RabbitMQ does with a topology that is in order, and that a person should know before messages are lost by it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from acemq.topology import RETRY_EXCHANGE, Queue, Topology

from .capabilities import DELIVERY_LIMIT, delivery_limit


def advice(topology: Topology) -> Iterator[str]:
    whole = topology.spelled_out()
    rungs: dict[object, list[str]] = {}
    for queue in whole.queues:
        arguments = queue.arguments()
        if arguments.get("x-dead-letter-exchange") == RETRY_EXCHANGE:
            rungs.setdefault(arguments.get("x-dead-letter-routing-key"), []).append(queue.name)
    partitions = {
        queue.name: of[1] for queue in whole.queues if (of := _PARTITION.fullmatch(queue.name)) and queue.ordered
    }
    for name in dict.fromkeys(partitions.values()):
        yield _of_ordered(name)
    for queue in whole.queues:
        if queue.type == "quorum" and queue.name not in partitions:
            yield from _of_quorum(queue, rungs.get(queue.name, []))
    if whole.bindings:
        yield (
            "bindings are not compared, as RabbitMQ does not list them over AMQP: where both ends are there a binding "
            "is taken to be there, too; declare() makes it again, and one that is no longer described stays"
        )


_PARTITION = re.compile(r"(.+)\.\d+")
"""As an ordered queue names them (CONTRACT.md section 5)."""


def _of_ordered(name: str) -> str:
    """Of all its partitions. A limit that a policy sets cannot be seen over AMQP, so it is spoken of in any case."""
    partitions = shlex.quote(rf"^{re.escape(name)}\.[0-9]+$")
    policy = f"rabbitmqctl set_policy {shlex.quote(name)} {partitions} '{{\"delivery-limit\": -1}}' --apply-to queues"
    return (
        f"ordered queue {name!r}: RabbitMQ drops a message after its delivery limit, and the next one passes it. The "
        f"limit is {DELIVERY_LIMIT} on version 4, or what a policy says, which AMQP does not show. Each restart and "
        "each hold delivers a halted message anew, up to 15 times before its consumer moves it to the dead letters. "
        f"See that the broker is not first: {policy} (-p VHOST where it is not /). Before version 4 no policy of "
        "theirs may set a limit"
    )


def _of_quorum(queue: Queue, rungs: list[str]) -> Iterator[str]:
    arguments = queue.arguments()
    limit = delivery_limit(arguments)
    if limit is not None and "x-dead-letter-exchange" not in arguments:
        whose = "RabbitMQ 4" if "x-delivery-limit" not in arguments else "RabbitMQ"
        yield (
            f"queue {queue.name!r}: {whose} drops a message from this quorum queue after its delivery limit of "
            f"{limit}, and nothing keeps a copy; declare it with dead_letter=True, "
            "or see that every consumer gives up sooner (max_deliveries, 15 by default)"
        )
    if rungs:
        # Measured with 3.10.8: killed while rungs expired, it lost what was on its way into a quorum queue.
        yield (
            f"queue {queue.name!r}: RabbitMQ takes messages out of {', '.join(rungs)} without waiting until this "
            "quorum queue has them, so one that comes due while the broker restarts may be lost; "
            "a classic queue keeps it: use type='classic', or spend the waits in the consumer with shorter ones or "
            "wait_in_broker_from(timedelta(0))"
        )
