"""Prove a transport with the scenarios that ours pass.

    class TestMine(TransportConformance):
        def make(self, **options: object) -> MyTransport:
            return MyTransport("mine://localhost:7000/test", **options)

Then run pytest. Scenarios are inherited plain test functions; each runs an event loop of its own, in debug mode and
with warnings as errors. What the transport declares is run, what it does not declare must be refused, and what a hook
is missing for is skipped, loudly.
"""

# ruff: noqa: E402 (what is rewritten has to be said before it is imported)

from pkgutil import iter_modules

import pytest

# So that a scenario that fails says what it saw.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))

from acemq.testing.conformance.hooks import Faults, Hooks, Impossible, NotSupplied, Transaction
from acemq.testing.conformance.report import KIT
from acemq.testing.conformance.suite import SmallConformance, TransportConformance
from acemq.testing.conformance.tcp_faults import TcpFaults
from acemq.testing.conformance.timing import Timing

__all__ = [
    "KIT",
    "Faults",
    "Hooks",
    "Impossible",
    "NotSupplied",
    "SmallConformance",
    "TcpFaults",
    "Timing",
    "Transaction",
    "TransportConformance",
]
