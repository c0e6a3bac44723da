"""Topologies for the command line to find."""

from __future__ import annotations

from datetime import timedelta

from acemq import Topology

topology = Topology().queue("cli-shop.orders", type="classic", dead_letter=True)
otherwise = (
    Topology()
    .queue("cli-shop.new", type="classic")
    .queue("cli-shop.orders", type="classic", dead_letter=True, ttl=timedelta(minutes=1))
)
NUMBER = 5


def make() -> Topology:
    return topology
