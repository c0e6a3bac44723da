import asyncio
from dataclasses import dataclass

from acemq import Saga


@dataclass
class Order:
    id: str
    cents: int


async def charge(order: Order) -> str:
    print(f"charge {order.cents}")
    return f"payment of {order.id}"


async def refund(order: Order, payment: str) -> None:
    print(f"refund the {payment}")


async def reserve(order: Order) -> int:
    print("reserve")
    return 3


async def release(order: Order, shelf: int) -> None:
    print(f"release shelf {shelf}")


async def book(order: Order) -> None:
    raise ConnectionError("no courier today")


place = (
    Saga("place-order", Order)
    .step("take-payment", charge)
    .undo(refund)  # with what charge returned
    .step("reserve-stock", reserve)
    .undo(release, attempts=3)
    .step("book-courier", book)  # nothing comes after it: it needs no undo
)


async def main() -> None:
    result = await place.run(Order("o-1", 350))
    print(result.failed_step, "failed:", result.error)
    print("undone:", ", ".join(result.undone))
    if result.has_unresolved:
        print("somebody must undo", ", ".join(result.unresolved))


asyncio.run(main())
