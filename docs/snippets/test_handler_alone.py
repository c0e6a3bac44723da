from acemq import Ack, Message
from acemq.testing import message


async def ship(message: Message[str]) -> Ack | None:
    if message.attempt > 3 and message.headers.get("carrier") == "slow":
        return Ack.park("ask the customer")
    return None


async def test_a_slow_carrier_is_given_up_after_three_attempts() -> None:
    assert await ship(message("o-1")) is None
    assert await ship(message("o-1", attempt=4, headers={"carrier": "slow"})) == Ack.park("ask the customer")
