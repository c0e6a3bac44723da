from dataclasses import dataclass

from acemq import Message


@dataclass
class Order:
    id: str
    cents: int


def price(order: Order) -> int:
    return order.cents if order.cents > 50_00 else order.cents + 4_90


async def on_order(message: Message[Order]) -> None:
    print(message.payload.id, "costs", price(message.payload))


def test_small_orders_pay_for_shipping() -> None:
    assert price(Order("o-1", 10_00)) == 14_90
