"""What is sent: an order as JSON, of 256 bytes unless told otherwise, written anew for each message."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

SIZE = 256


class Customer(msgspec.Struct):
    id: int
    name: str
    email: str


class Order(msgspec.Struct):
    id: int
    t: int
    """Microseconds since 1970: sixteen digits until the year 2286."""
    kind: str
    customer: Customer
    total: float
    currency: str
    tags: list[str]
    pad: str = ""

    def stamped(self) -> Order:
        """Itself, unlike any that was sent before."""
        self.t = now()
        return self


def now() -> int:
    return time.time_ns() // 1_000


def new_order(size: int = SIZE) -> Order:
    order = Order(
        id=123456,
        t=0,
        kind="order.created",
        customer=Customer(id=9876, name="Ada Lovelace", email="ada@example.org"),
        total=129.95,
        currency="EUR",
        tags=["new", "web"],
    ).stamped()
    order.pad = "x" * (size - len(msgspec.json.encode(order)))
    return order


def orders(count: int, size: int = SIZE) -> Iterator[Order]:
    order = new_order(size)
    for _ in range(count):
        yield order.stamped()
