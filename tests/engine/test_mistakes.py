"""What a mistake costs, in a handler or inside the library: never a worker in silence, never a prefetch slot."""

from __future__ import annotations

import asyncio

import pytest

import acemq
from acemq import AceMQ, Ack, Batch, ClosedError, Diagnostic, LoopError, Message, Topology
from acemq import transport as port
from acemq.transports.memory import MemoryBroker, Profile, raises
from tests.waiting import until


class Odd(BaseException):
    """Not an `Exception`, and nobody's word to end the program."""


async def nothing_held(consumer: acemq.Consumer) -> None:
    def is_free() -> bool:
        subscription = consumer.subscription
        return subscription is not None and subscription.held == consumer.held == consumer.in_flight == 0

    await until(is_free)


@pytest.fixture
def broker(name: str) -> MemoryBroker:
    return MemoryBroker.named(name, profile=Profile.RABBITMQ)


@pytest.fixture
def mistake() -> RuntimeError:
    return RuntimeError("a mistake of ours")


@pytest.mark.parametrize("batches", [False, True])
async def test_a_fault_while_settling_gives_the_delivery_back(
    broker: MemoryBroker, name: str, mistake: RuntimeError, batches: bool
) -> None:
    handled: list[int] = []

    async def handle(message: Message[int]) -> None:
        handled.append(message.payload)

    async def handle_all(batch: Batch[int]) -> None:
        handled.extend(message.payload for message in batch)

    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        broker.faults.next("settle", raises(mistake))
        opening = (
            mq.consume_batches("q", int, handle_all, most=1, prefetch=1)
            if batches
            else mq.consume("q", int, handle, concurrency=1, prefetch=1)
        )
        async with opening as consumer:
            await mq.send("q", 1)
            await mq.send("q", 2)
            await until(lambda: sorted(handled) == [1, 1, 2])
            await nothing_held(consumer)


async def test_a_fault_while_moving_gives_the_delivery_back(
    broker: MemoryBroker, name: str, mistake: RuntimeError
) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        broker.faults.next("publish", raises(mistake), match=lambda outgoing: outgoing.routing_key == "q.dlq")
        async with mq.consume("q", int, lambda message: Ack.reject("bad"), concurrency=1, prefetch=1) as consumer:
            await mq.send("q", 1)
            await until(lambda: consumer.counters.rejected == 1)
            await nothing_held(consumer)
        letter = await mq.pull("q.dlq", int)
        assert letter is not None
        assert (letter.payload, letter.attempt) == (1, 1)


async def test_a_stop_does_not_wait_for_what_is_given_back_after_a_fault(
    broker: MemoryBroker, name: str, mistake: RuntimeError
) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        broker.faults.next("settle", raises(mistake))
        consumer = await mq.consume("q", int, lambda message: None)
        await mq.send("q", 1)
        await until(lambda: consumer.held == 1)
        drained = await consumer.close()
        assert (drained.finished, drained.given_back) == (True, 1)
        assert (await mq.depth("q")).ready == 1


async def test_a_fault_in_a_partition_that_is_paused_gives_back_and_goes_on_when_it_is_resumed(
    name: str, mistake: RuntimeError
) -> None:
    broker, handled, gate = MemoryBroker.named(name), list[int](), asyncio.Event()

    async def handle(message: Message[int]) -> None:
        await gate.wait()
        handled.append(message.payload)

    async with acemq.connect(f"memory://{name}") as mq:
        described = mq.ordered("o", int).partitions(1).keyed_by(str)
        async with described.declare() as ordered, ordered.consume(handle) as consuming:
            partition = consuming.partitions[0]
            await ordered.send(1)
            await ordered.send(2)
            await until(lambda: partition.in_flight == 1)
            partition.pause()
            broker.faults.next("settle", raises(mistake))
            gate.set()
            await until(lambda: partition.subscription is not None and partition.subscription.held == 0)
            assert handled == [1]
            partition.resume()
            await until(lambda: handled == [1, 1, 2])


async def test_a_worker_that_is_ended_by_what_is_no_exception_is_reported_and_its_consumer_down(
    url: str, queue: str, diagnostics: list[Diagnostic]
) -> None:
    async def handle(message: Message[int]) -> None:
        if message.payload == 0:
            raise Odd("no Exception")

    async with acemq.connect(url, on_diagnostic=diagnostics.append) as mq:
        async with mq.consume(queue, int, handle, concurrency=2, name="one") as consumer:
            await mq.send_many(queue, range(4))
            await until(lambda: consumer.counters.acked == 3 and consumer.in_flight == 0)
            (down,) = [part for part in (await mq.health()).parts if part.name == "consumer one"]
            assert (down.status, "1 of 2 workers have ended" in down.detail) == ("down", True)
            assert [(told.name, told.level, type(told.failure)) for told in diagnostics] == [
                ("acemq.worker.ended", "error", Odd)
            ]
        again = await mq.pull(queue, int)
        assert again is not None
        assert (again.payload, again.attempt) == (0, 1)


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_handler_that_ends_the_program_ends_it_and_where_the_loop_goes_on_its_consumer_is_down(
    name: str, end: type[BaseException], diagnostics: list[Diagnostic]
) -> None:
    loop = asyncio.new_event_loop()

    async def leave(message: Message[int]) -> None:
        raise end("enough")

    async def start() -> AceMQ:
        mq = await acemq.connect(f"memory://{name}", on_diagnostic=diagnostics.append)
        await mq.declare(Topology().queue("q"))
        await mq.consume("q", int, leave, concurrency=2)
        await mq.send("q", 1)
        return mq

    try:
        mq = loop.run_until_complete(start())
        with pytest.raises(end):
            loop.run_until_complete(asyncio.sleep(10))
        health = loop.run_until_complete(mq.health())
        (down,) = [part for part in health.parts if part.status != "up"]
        assert (down.status, "1 of 2 workers have ended" in down.detail) == ("down", True)
        assert [(told.name, told.level, told.queue) for told in diagnostics] == [("acemq.worker.ended", "error", "q")]
        assert loop.run_until_complete(mq.close()).finished
    finally:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.mark.parametrize("verb", ["pull", "subscribe"])
async def test_no_error_is_its_own_cause(broker: MemoryBroker, name: str, verb: str) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("q"))
        broker.faults.next("pull" if verb == "pull" else "subscribe", raises(ClosedError("closed")))
        with pytest.raises(ClosedError) as raised:
            await (mq.pull("q", int) if verb == "pull" else mq.consume("q", int, lambda message: None))
        assert raised.value.__cause__ is None


async def test_a_pulled_message_settled_from_another_loop_is_a_loop_error(mq: AceMQ, queue: str) -> None:
    await mq.send(queue, 1)
    pulled = await mq.pull(queue, int)
    assert pulled is not None
    with pytest.raises(LoopError) as raised:
        await asyncio.to_thread(asyncio.run, pulled.accept())
    assert isinstance(raised.value.__cause__, port.WrongLoop)
    assert await pulled.accept()
