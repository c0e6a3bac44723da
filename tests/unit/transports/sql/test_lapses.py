"""When a lease is over is known without a look at each of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from acemq.clock import MovableClock
from acemq.topology import Topology
from acemq.transport import ApplyMode, Delivery, LostBy, Outgoing, SubscriptionState
from acemq.transports.sql import transport
from tests.waiting import until

SOON = timedelta(seconds=5)


class Told:
    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.gone: list[LostBy] = []

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.deliveries.extend(batch)

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        self.gone.extend(by for _ in batch)

    def changed(self, state: SubscriptionState, /) -> None: ...


async def test_a_lease_that_is_renewed_for_less_is_lost_at_its_new_end(tmp_path: Path) -> None:
    clock, told = MovableClock(), Told()
    port: Any = transport(f"sqlite:///{tmp_path / 'mq.db'}?lease=60", clock=clock)
    await port.open(within=SOON)
    await port.apply(Topology().queue("q"), ApplyMode.CREATE)
    message = Outgoing(exchange="", routing_key="q", body=b"x", headers={}, message_id="1", content_type=None)
    await port.publish([message], within=SOON)
    subscription = await port.subscribe("q", told, prefetch=1)
    await until(lambda: len(told.deliveries) == 1)
    (renewal,) = await port.renew(told.deliveries, timedelta(seconds=20))
    assert renewal.outcome == "renewed"
    await clock.advance(timedelta(seconds=21))
    subscription.bell.ring()
    await until(lambda: told.gone == [LostBy.LEASE])
    await port.close(SOON)
