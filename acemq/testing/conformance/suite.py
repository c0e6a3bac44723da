"""The suites: all scenarios, and the small part of them that a small transport passes."""

from __future__ import annotations

from typing import Any

from acemq.testing.conformance.bodies import Bodies
from acemq.testing.conformance.cancelling import Cancelling
from acemq.testing.conformance.counting import Counting
from acemq.testing.conformance.engine import Engine
from acemq.testing.conformance.honesty import Honesty
from acemq.testing.conformance.hooks import Hooks
from acemq.testing.conformance.leases import Leases
from acemq.testing.conformance.opening import Opening
from acemq.testing.conformance.publishing import Publishing
from acemq.testing.conformance.receiving import Receiving
from acemq.testing.conformance.recovery import Recovery
from acemq.testing.conformance.routing import Routing
from acemq.testing.conformance.scenario import Scenario
from acemq.testing.conformance.settling import Settling
from acemq.testing.conformance.timed import Timed
from acemq.testing.conformance.topology import TopologyScenarios
from acemq.testing.conformance.transactions import Transactions


class TransportConformance(
    Opening,
    Publishing,
    Bodies,
    TopologyScenarios,
    Routing,
    Receiving,
    Settling,
    Leases,
    Timed,
    Recovery,
    Cancelling,
    Counting,
    Transactions,
    Honesty,
    Engine,
):
    """Inherit it, define `make`, and run pytest: capabilities and hooks choose what runs."""


class SmallConformance(Hooks):
    """What any transport can pass: one message, a batch, bodies, headers, queues, settling. No faults, no time."""


for _name in dir(TransportConformance):
    _test: Any = getattr(TransportConformance, _name)
    _which: object = getattr(_test, "scenario", None)
    if isinstance(_which, Scenario) and _which.small:
        setattr(SmallConformance, _name, _test)
