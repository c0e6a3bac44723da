from dataclasses import dataclass
from datetime import timedelta

from acemq import Message, RetryPolicy, Topology
from acemq.testing import MessageHarness


@dataclass
class Order:
    id: str


async def ship(message: Message[Order]) -> None:
    raise ConnectionError("the carrier does not answer")


async def test_the_third_failure_goes_to_the_dead_letters() -> None:
    async with MessageHarness() as h:
        await h.mq.declare(Topology().queue("orders"))
        async with h.mq.consume("orders", Order, ship, retry=RetryPolicy.fixed(3, timedelta(minutes=10))):
            await h.mq.send("orders", Order("o-1"))
            await h.advance(timedelta(minutes=20))

        assert [each.handled.outcome for each in h.handled(Order)] == ["retried", "retried", "dead_lettered"]
        assert [letter.payload for letter in await h.dead_letters("orders", Order)] == [Order("o-1")]
