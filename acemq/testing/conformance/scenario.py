"""A scenario: its id, what it needs, and how capabilities choose it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from acemq.transport import Capabilities

if TYPE_CHECKING:
    from acemq.testing.conformance.bench import Bench

DECLARED: dict[str, Callable[[Capabilities], object]] = {
    "durable": lambda can: can.durable,
    "ordering": lambda can: can.ordering == "fifo",
    "ordered_queues": lambda can: can.ordered_queues,
    "unroutable": lambda can: can.unroutable != "unknown",
    "publish_delay": lambda can: can.publish_delay,
    "requeue_delay": lambda can: can.requeue_delay,
    "requeue_rewrites": lambda can: can.requeue_rewrites,
    "dead_letter_routes": lambda can: can.dead_letter_routes,
    "expiry": lambda can: can.expiry,
    "priorities": lambda can: can.priorities,
    "lease": lambda can: can.lease,
    "hold_limit": lambda can: can.hold_limit,
    "fenced": lambda can: can.fenced,
    "counts_deliveries": lambda can: can.counts_deliveries,
    "delivery_limit": lambda can: can.delivery_limit,
    "exclusive": lambda can: can.exclusive,
    "consumer_priority": lambda can: can.consumer_priority,
    "consumer_arguments": lambda can: can.consumer_arguments,
    "transactions": lambda can: can.transactions,
    "max_length": lambda can: can.max_length,
    "streams": lambda can: can.streams,
    "topic_patterns": lambda can: can.topic_patterns != "none",
    "max_message": lambda can: can.max_message,
    "max_batch": lambda can: can.max_batch,
    "max_batch_bytes": lambda can: can.max_batch_bytes,
    "depth": lambda can: can.depth != "none",
}
"""Whether a capability is declared, by the name of its field."""

KEY = "acemq-conformance"
"""Of the property of a test report that holds the result of a scenario."""


class Scenario(msgspec.Struct, frozen=True):
    id: str
    """For ever: a changed meaning gets a new id, and the kit a new number."""
    title: str
    needs: tuple[str, ...] = ()
    """Capabilities that must be declared. What it needs of the hooks it finds out when it asks for it."""
    small: bool = False
    """Part of `SmallConformance`."""

    @property
    def group(self) -> str:
        number = int(self.id[2:5])
        return next(group for group, last in _LAST.items() if number <= last)

    def undeclared(self, can: Capabilities) -> list[str]:
        return [need for need in self.needs if not DECLARED[need](can)]


_LAST = {
    **{"A": 10, "B": 25, "C": 36, "D": 44, "E": 51, "F": 67, "G": 78, "H": 88, "I": 98},
    **{"J": 108, "K": 111, "L": 114, "M": 119, "N": 121, "O": 127},
}
"""The last number of each group (the specification's headings)."""

Body: TypeAlias = "Callable[[Any, Bench], Coroutine[Any, Any, None]]"
Test: TypeAlias = Callable[[Any, Callable[[str, object], None]], None]


def scenario(id: str, title: str, *needs: str, small: bool = False) -> Callable[[Body], Test]:
    """Make a plain test function of it, which runs an event loop of its own."""
    for need in needs:
        DECLARED[need]  # a need that nobody can declare is a slip of the pen

    def wrap(body: Body) -> Test:
        this = Scenario(id, title, needs, small)

        def test(self: Any, record_property: Callable[[str, object], None]) -> None:
            from acemq.testing.conformance.running import execute

            result = execute(self, this, body)
            record_property(KEY, result.told())
            result.conclude()

        test.__name__, test.__qualname__, test.__module__ = body.__name__, body.__qualname__, body.__module__
        test.__doc__ = f"{id}: {title}"
        test.scenario, test.body = this, body  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return test

    return wrap


def scenarios_of(suite: type) -> dict[str, tuple[Scenario, Body]]:
    """Of a suite, by id."""
    found: dict[str, tuple[Scenario, Body]] = {}
    for name in dir(suite):
        test: Any = getattr(suite, name)
        this: object = getattr(test, "scenario", None)
        if isinstance(this, Scenario):
            found[this.id] = this, test.body
    return dict(sorted(found.items()))
