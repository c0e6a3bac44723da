"""Topologies for the command line to find."""

from __future__ import annotations

import logging
import os
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


def noisy() -> Topology:
    """Loaded by a program that logs, among other things what came over the wire."""
    logging.getLogger("shop").warning("a warning")
    try:
        raise LookupError("\x1b]0;owned\x07")
    except LookupError:
        logging.getLogger("shop").exception("it went \x1b[31mwrong")
    return topology


def many() -> Topology:
    """So many that there is time to interrupt their making."""
    whole = Topology().exchange("cli-many", "direct")
    for number in range(int(os.environ.get("CLI_MANY", "300"))):
        whole = whole.queue(f"cli-many.{number}", type="classic").bind(f"cli-many.{number}", "cli-many")
    return whole


long = Topology().queue(f"cli-shop.{'long.' * 20}name", type="classic")
