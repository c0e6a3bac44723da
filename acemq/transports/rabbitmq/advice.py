"""What RabbitMQ does with a topology that is in order, and that a person should know before messages are lost by it."""

from __future__ import annotations

from collections.abc import Iterator

from acemq.topology import RETRY_EXCHANGE, Queue, Topology

DELIVERY_LIMIT = 20
"""Of a quorum queue on RabbitMQ 4 that names none."""


def advice(topology: Topology) -> Iterator[str]:
    whole = topology.spelled_out()
    rungs: dict[object, list[str]] = {}
    for queue in whole.queues:
        arguments = queue.arguments()
        if arguments.get("x-dead-letter-exchange") == RETRY_EXCHANGE:
            rungs.setdefault(arguments.get("x-dead-letter-routing-key"), []).append(queue.name)
    for queue in whole.queues:
        if queue.type == "quorum":
            yield from _of_quorum(queue, rungs.get(queue.name, []))
    if whole.bindings:
        yield (
            "bindings are not compared, as RabbitMQ does not list them over AMQP: where both ends are there a binding "
            "is taken to be there, too; declare() makes it again, and one that is no longer described stays"
        )


def _of_quorum(queue: Queue, rungs: list[str]) -> Iterator[str]:
    arguments = queue.arguments()
    limit = arguments.get("x-delivery-limit", DELIVERY_LIMIT)
    if "x-dead-letter-exchange" not in arguments and isinstance(limit, int) and limit >= 0:
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
