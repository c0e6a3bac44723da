"""What is said of one queue, by what it was declared with."""

from __future__ import annotations

from typing import Any

import pytest

from acemq.topology import Topology
from acemq.transports.rabbitmq import capabilities


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 20),
        ({"native": {"rabbitmq": {"x-delivery-limit": 5}}}, 5),
        ({"native": {"rabbitmq": {"x-delivery-limit": 0}}}, 0),
        ({"native": {"rabbitmq": {"x-delivery-limit": -1}}}, None),
        ({"type": "classic"}, None),
    ],
)
def test_the_deliveries_after_which_the_broker_gives_up_are_the_queues_own(
    options: dict[str, Any], limit: int | None
) -> None:
    (declared,) = Topology().queue("q", **options).describe()
    assert capabilities.of(declared, capabilities.OWN).delivery_limit == limit
