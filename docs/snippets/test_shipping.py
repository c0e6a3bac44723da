from datetime import timedelta

import acemq
from acemq import Message, MovableClock, RetryPolicy, Topology


async def ship(message: Message[str]) -> None:
    raise ConnectionError("the carrier does not answer")


async def test_the_third_failure_goes_to_the_dead_letters() -> None:
    clock = MovableClock()
    async with acemq.connect("memory://", clock=clock) as mq:
        await mq.declare(Topology().queue("orders"))
        async with mq.consume("orders", str, ship, retry=RetryPolicy.fixed(3, timedelta(minutes=10))):
            await mq.send("orders", "o-1")
            await clock.advance(timedelta(minutes=19))
            assert (await mq.depth("orders.dlq")).ready == 0

            await clock.advance(timedelta(minutes=1))
            letter = await mq.pull("orders.dlq", str)

    assert letter is not None
    assert (letter.payload, letter.attempt) == ("o-1", 3)
    assert letter.failure is not None
    assert letter.failure.text == "exhausted 3 attempts: the carrier does not answer"
