"""Group N: what is not declared is refused, by name and before any I/O."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from acemq.connection import Connection
from acemq.errors import CapabilityError
from acemq.testing.conformance.bench import SOON, Bench, out
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.publishing import outcomes
from acemq.testing.conformance.scenario import DECLARED, scenario
from acemq.topology import Queue, Topology
from acemq.transport import Published, Settled

HOUR = timedelta(hours=1)


class Honesty(Hooks):
    @scenario("C-120", "what is not declared is refused", small=True)
    async def test_c120_what_is_not_declared(self, bench: Bench) -> None:
        queue, refused = await bench.queue(), list[str]()
        for capability, ask in _asks(bench, queue).items():
            if not DECLARED[capability](bench.can_of(queue)):
                with pytest.raises(CapabilityError) as refusal:
                    await ask()
                assert bench.can.transport in refusal.value.transport, capability
                assert refusal.value.option, capability
                refused.append(capability)
        async with bench.connection() as mq:
            for capability, ask in _asks_of_the_engine(bench, mq, queue).items():
                if not DECLARED[capability](bench.can_of(queue)):
                    with pytest.raises(CapabilityError) as refusal:
                        await ask()
                    assert bench.can.transport in refusal.value.transport, f"{capability}, through the engine"
                    assert refusal.value.option, f"{capability}, through the engine"
        assert await bench.drain(queue) == []
        bench.measured["refused by name"] = ", ".join(refused)

    @scenario("C-121", "batches above the broker's limit are cut up", "max_batch")
    async def test_c121_batches(self, bench: Bench) -> None:
        queue, most = await bench.queue(), bench.can.max_batch or 1
        for count in (most, most + 1, 3 * most):
            sent = [b"%d" % number for number in range(count)]
            results = await bench.publish(*(out(queue, body) for body in sent))
            assert outcomes(results) == [Published.ROUTED] * count
            assert sorted(got.body for got in await bench.drain(queue, count)) == sorted(sent)


def _asks_of_the_engine(bench: Bench, mq: Connection, queue: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """The same through the engine, for what it does not do in the transport's place."""

    async def consume(**options: Any) -> None:
        async with mq.consume(queue, bytes, lambda message: None, declare=False, **options):
            pass

    def declare(**options: Any) -> Awaitable[object]:
        return mq.declare(Topology().queue(bench.name("bad"), type="classic", **options))

    # Where what expires can be sent on, the ladder stands in for a delay (C-124).
    delayed = {} if bench.can.dead_letter_routes else {"publish_delay": lambda: mq.send(queue, b"refused", delay=HOUR)}
    return {
        **delayed,
        "exclusive": lambda: consume(exclusive=True),
        "consumer_priority": lambda: consume(priority=5),
        "consumer_arguments": lambda: consume(arguments={"x-colour": "red"}),
        "lease": lambda: declare(lease=HOUR),
        "max_length": lambda: declare(max_length=5),
        "topic_patterns": lambda: mq.declare(_with_pattern(bench, queue)),
    }


def _with_pattern(bench: Bench, queue: str) -> Topology:
    exchange = bench.name("x")
    return bench.described(queue).exchange(exchange, "topic").bind(queue, exchange, "*.b.*")


def _asks(bench: Bench, queue: str) -> dict[str, Callable[[], Awaitable[object]]]:
    """By capability, how it is asked for; raises what the port answers."""

    async def publish(**options: Any) -> None:
        result = await bench.result(out(queue, b"refused", **options))
        assert result.outcome is Published.REFUSED
        assert result.error is not None
        raise result.error

    async def requeue(capability: str, **options: Any) -> None:
        await bench.send(queue, b"held")
        got = await bench.take_one(queue)
        before = len(bench.logs.records)
        assert await bench.requeue(got, **options) == [Settled.FAILED]
        said = [record for record in bench.logs.records[before:] if record.levelno >= logging.WARNING]
        assert said
        await bench.accept([got])
        raise CapabilityError(bench.can.transport, capability, str(options))  # which was logged and not raised

    async def subscribe(**options: Any) -> None:
        subscription = await bench.t.subscribe(queue, bench.sink(), prefetch=1, **options)
        await subscription.close()

    def declare(**options: Any) -> Awaitable[object]:
        described = Queue(bench.name("bad"), type="classic", **options)
        return bench.apply(Topology(queues=(described,)))

    async def transaction() -> None:
        (result,) = await bench.t.publish([out(queue)], within=SOON, transaction=object())
        assert result.error is not None
        raise result.error

    async def pattern() -> None:
        await bench.apply(_with_pattern(bench, queue))

    return {
        "publish_delay": lambda: publish(delay=HOUR),
        "expiry": lambda: publish(expires_in=HOUR),
        "requeue_delay": lambda: requeue("requeue_delay", delay=HOUR),
        "requeue_rewrites": lambda: requeue("requeue_rewrites", headers={"n": 1}),
        "exclusive": lambda: subscribe(exclusive=True),
        "consumer_priority": lambda: subscribe(options={"priority": 5}),
        "consumer_arguments": lambda: subscribe(options={"arguments": {"x-colour": "red"}}),
        "lease": lambda: subscribe(lease=HOUR),
        "max_length": lambda: declare(max_length=5),
        "transactions": transaction,
        "topic_patterns": pattern,
        "streams": lambda: subscribe(options={"offset": "first"}),
    }
