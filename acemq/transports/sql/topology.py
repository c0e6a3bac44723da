"""`apply`, `delete`, `purge` and `depth`: plain functions of a connection, each in a transaction of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Literal

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from acemq.errors import CapabilityError
from acemq.ids import new_id
from acemq.lacking import refuse_lacking
from acemq.plan import Finding, refuse_drift
from acemq.topology import Queue, Topology, aside_of
from acemq.transport import AccessDenied, ApplyMode, Capabilities, ExchangeMissing, QueueMissing

from .dialects import Statements, text_of
from .routes import OPTIONS, Place, Routes, load, write_spec

OWNED_FOR = timedelta(seconds=60)
"""For so long a private queue outlives its owner."""
COUNTED = 100_000
"""Messages up to which a depth is exact."""
SOME = 500
"""Rows of one statement that removes many."""


class Desk:
    """What the functions here need to know of the transport they work for."""

    def __init__(self, statements: Statements, can: Capabilities, instance: str) -> None:
        self.statements, self.can, self.instance = statements, can, instance


def spelled_out(topology: Topology) -> Topology:
    """With the queues that `dead_letter` stands for."""
    for queue in topology.queues:
        if queue.dead_letter:
            topology |= aside_of(queue.name, exchanges=False)
    return topology


def check(topology: Topology, can: Capabilities) -> None:
    """Refuse what cannot be honoured, before any I/O."""
    refuse_lacking(topology, can)
    for queue in topology.queues:
        if queue.native.get("sql"):
            raise CapabilityError("sql", "native arguments", f"native={{'sql': …}} of queue {queue.name!r}")


def apply(connection: sa.Connection, now: int, desk: Desk, topology: Topology, mode: ApplyMode) -> list[Finding]:
    """All or nothing: whatever is raised, nothing was made."""
    statements, clock = desk.statements, {"now": now}
    creating = mode is ApplyMode.CREATE
    if creating:
        connection.execute(statements["lock_topology"])
    routes = load(connection, statements)
    findings = list(_look(connection, desk, routes, topology, now))
    if mode is ApplyMode.REPORT:
        return findings
    refuse_drift(findings, nor_missing=mode is ApplyMode.VERIFY)
    if not creating:
        return findings
    _check_ends(routes, topology)
    if all(finding.verdict == "present" for finding in findings):
        _own(connection, desk, routes, topology, clock)
        return findings
    for exchange in topology.exchanges:
        if exchange.name not in routes.exchanges:
            connection.execute(statements["add_exchange"], {"name": exchange.name, "kind": exchange.kind})
    for queue in topology.queues:
        if queue.name not in routes.queues:
            connection.execute(statements["add_queue"], {"name": queue.name, "spec": write_spec(queue)})
    numbers = {text_of(name): number for number, name, _ in connection.execute(statements["queues"])}
    for binding in topology.bindings:
        if not routes.is_bound(binding):
            bound = {"exchange": binding.exchange, "pattern": binding.key, "queue": numbers[binding.queue]}
            connection.execute(statements["add_binding"], bound)
    _count_up(connection, desk, routes)
    _own(connection, desk, load(connection, statements), topology, clock)
    return [replace(each, verdict="created") if each.verdict == "missing" else each for each in findings]


def _count_up(connection: sa.Connection, desk: Desk, routes: Routes) -> None:
    value = f"{routes.epoch or new_id()[:8]}:{routes.number + 1}"
    connection.execute(desk.statements["set_topology"], {"value": value})


def _look(connection: sa.Connection, desk: Desk, routes: Routes, topology: Topology, now: int) -> Iterator[Finding]:
    for exchange in topology.exchanges:
        kind = routes.exchanges.get(exchange.name)
        found: dict[str, object] | None = None if kind is None else {"kind": kind}
        yield from _compare("exchange", exchange.name, {"kind": exchange.kind}, found)
    for queue in topology.queues:
        place = routes.queues.get(queue.name)
        if place is not None and place.described.exclusive:
            check_owner(connection, desk, place, now)
        found_queue = None if place is None else _facts(place.described)
        yield from _compare("queue", queue.name, _facts(queue), found_queue)
    for binding in topology.bindings:
        yield Finding(
            verdict="present" if routes.is_bound(binding) else "missing",
            kind="binding",
            name=f"{binding.queue} <- {binding.exchange} on {binding.key!r}",
        )


def _facts(queue: Queue) -> dict[str, object]:
    # A database keeps all order: a queue that was made before anybody called it ordered is the same queue.
    return {option: getattr(queue, option) for option in OPTIONS if option != "ordered"}


def _compare(
    kind: Literal["queue", "exchange"], name: str, wanted: dict[str, object], found: dict[str, object] | None
) -> Iterator[Finding]:
    if found is None:
        yield Finding(verdict="missing", kind=kind, name=name)
        return
    differing = [argument for argument in wanted if wanted[argument] != found.get(argument)]
    for argument in differing:
        yield Finding(
            verdict="drift",
            kind=kind,
            name=name,
            argument=argument,
            wanted=wanted[argument],
            found=found.get(argument),
        )
    if not differing:
        yield Finding(verdict="present", kind=kind, name=name)


def _check_ends(routes: Routes, topology: Topology) -> None:
    queues = routes.queues.keys() | {queue.name for queue in topology.queues}
    exchanges = routes.exchanges.keys() | {exchange.name for exchange in topology.exchanges}
    for binding in topology.bindings:
        if binding.queue not in queues:
            raise QueueMissing(f"binding to {binding.exchange!r}: there is no queue {binding.queue!r}; declare it too")
        if binding.exchange not in exchanges:
            raise ExchangeMissing(
                f"binding of {binding.queue!r}: there is no exchange {binding.exchange!r}; declare it too"
            )


# Private queues, which go with the last transport that declared them


def is_private(queue: Queue) -> bool:
    return queue.exclusive or queue.auto_delete


def _own(connection: sa.Connection, desk: Desk, routes: Routes, topology: Topology, clock: dict[str, int]) -> None:
    for queue in topology.queues:
        if not is_private(queue):
            continue
        owned = {
            **clock,
            "queue": routes.queues[queue.name].id,
            "holder": desk.instance,
            "lease": OWNED_FOR // timedelta(microseconds=1),
        }
        connection.execute(desk.statements["delete_owner"], owned)
        connection.execute(desk.statements["add_owner"], owned)


def check_owner(connection: sa.Connection, desk: Desk, place: Place, now: int) -> None:
    """Refuse a queue that is exclusive to another transport which still lives."""
    owners = connection.execute(desk.statements["owners"], {"queue": place.id, "now": now})
    if any(left > 0 and text_of(holder) != desk.instance for holder, left in owners):
        raise AccessDenied(f"queue {place.described.name!r} is exclusive to another connection")


def leave(connection: sa.Connection, now: int, desk: Desk) -> None:
    """Give up what is private to this transport; what nobody else owns is deleted."""
    mine = [row[0] for row in connection.execute(desk.statements["owner_queues"], {"holder": desk.instance})]
    if not mine:
        return
    connection.execute(desk.statements["lock_topology"])
    for number in mine:
        connection.execute(desk.statements["delete_owner"], {"queue": number, "holder": desk.instance})
        owners = connection.execute(desk.statements["owners"], {"queue": number, "now": now})
        if not any(left > 0 for _, left in owners):
            remove_queue(connection, now, desk, number)
    _count_up(connection, desk, load(connection, desk.statements))


def renew_owned(connection: sa.Connection, now: int, desk: Desk) -> None:
    lease = OWNED_FOR // timedelta(microseconds=1)
    connection.execute(desk.statements["renew_owner"], {"now": now, "lease": lease, "holder": desk.instance})


# Deleting and counting


def delete_queue(connection: sa.Connection, now: int, desk: Desk, name: str, only_if_empty: bool) -> bool:
    connection.execute(desk.statements["lock_topology"])
    routes = load(connection, desk.statements)
    place = routes.queues.get(name)
    if place is None:
        return False
    if only_if_empty and connection.execute(desk.statements["any_message"], {"queue": place.id}).first() is not None:
        return False
    remove_queue(connection, now, desk, place.id)
    _count_up(connection, desk, routes)
    return True


def remove_queue(connection: sa.Connection, now: int, desk: Desk, number: int) -> None:
    """Its messages are removed by the sweep, so that a large queue is gone as quickly as a small one."""
    for each in ("delete_queue", "delete_queue_bindings", "delete_queue_exclusive", "delete_queue_owners"):
        connection.execute(desk.statements[each], {"queue": number})
    connection.execute(desk.statements["add_tombstone"], {"name": f"gone:{number}", "value": str(now)})


def remove_queues(connection: sa.Connection, now: int, desk: Desk, numbers: list[int]) -> None:
    """Of owners that live no more."""
    connection.execute(desk.statements["lock_topology"])
    routes = load(connection, desk.statements)
    for number in numbers:
        remove_queue(connection, now, desk, number)
    _count_up(connection, desk, routes)


def delete_exchange(connection: sa.Connection, desk: Desk, name: str) -> bool:
    connection.execute(desk.statements["lock_topology"])
    routes = load(connection, desk.statements)
    if name not in routes.exchanges:
        return False
    connection.execute(desk.statements["delete_exchange"], {"name": name})
    connection.execute(desk.statements["delete_exchange_bindings"], {"name": name})
    _count_up(connection, desk, routes)
    return True


class Counts(msgspec.Struct, frozen=True):
    ready: int
    held: int
    delayed: int
    exact: bool


def depth(connection: sa.Connection, now: int, desk: Desk, name: str) -> Counts:
    asked = {"queue": queue_of(connection, desk, name).id, "now": now, "most": COUNTED + 1}
    ready: int = connection.execute(desk.statements["count_ready"], asked).scalar_one()
    waiting: dict[tuple[int, int], int] = {
        (state, due): count for state, due, count in connection.execute(desk.statements["count_waiting"], asked)
    }
    over = ready > COUNTED or sum(waiting.values()) > COUNTED
    # What a dead consumer held, and what has come due, is had by whoever asks.
    ready += sum(count for (_, due), count in waiting.items() if due)
    return Counts(ready, waiting.get((1, 0), 0), waiting.get((2, 0), 0), not over)


def queue_of(connection: sa.Connection, desk: Desk, name: str) -> Place:
    place = load(connection, desk.statements).queues.get(name)
    if place is None:
        raise QueueMissing(f"there is no queue {name!r}; declare it first")
    return place


def purge_some(connection: sa.Connection, now: int, desk: Desk, number: int) -> int:
    """Remove some of what is ready; how many that were."""
    asked = {"queue": number, "now": now, "most": SOME}
    seqs: list[int] = [row[0] for row in connection.execute(desk.statements["some_ready"], asked)]
    if len(seqs) < SOME:
        seqs += [row[0] for row in connection.execute(desk.statements["some_due"], asked)]
    if seqs:
        connection.execute(desk.statements["remove"], {"seqs": seqs})
    return len(seqs)
