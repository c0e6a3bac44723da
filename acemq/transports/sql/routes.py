"""Exchanges, queues and bindings as they stand in the tables at one version, and where a message goes by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import msgspec
import sqlalchemy as sa

from acemq.topology import Binding, ExchangeKind, Queue, dead_letters_of, matches

from .dialects import Statements, text_of

_REMEMBERED = 4096
"""Routing keys an exchange keeps the answer for; keys may hold ids, so it forgets them all beyond that."""

NOTHING = ""
"""The version before anything was applied."""


class Place(msgspec.Struct, frozen=True):
    """A queue as it stands in the table."""

    id: int
    described: Queue
    levels: int
    ttl: int
    """Microseconds, 0 for none."""


class Routes:
    """`version` is `{epoch}:{number}`: the epoch is drawn anew where the tables have been emptied."""

    def __init__(
        self,
        version: str = NOTHING,
        queues: Mapping[str, Place] | None = None,
        exchanges: Mapping[str, ExchangeKind] | None = None,
        bindings: tuple[tuple[str, str, int], ...] = (),
    ) -> None:
        """A binding is an exchange, a pattern and a queue's number."""
        self.version = version
        self.queues: Mapping[str, Place] = queues or {}
        self.exchanges: Mapping[str, ExchangeKind] = exchanges or {}
        self.by_id = {place.id: place for place in self.queues.values()}
        self._bound: dict[str, list[tuple[str, Place]]] = {}
        for exchange, pattern, queue in bindings:
            if queue in self.by_id:
                self._bound.setdefault(exchange, []).append((pattern, self.by_id[queue]))
        self._known: dict[tuple[str, str], tuple[Place, ...]] = {}

    @property
    def epoch(self) -> str:
        return self.version.partition(":")[0]

    @property
    def number(self) -> int:
        return int(self.version.partition(":")[2] or 0)

    def is_bound(self, binding: Binding) -> bool:
        bound = self._bound.get(binding.exchange, ())
        return any(pattern == binding.key and place.described.name == binding.queue for pattern, place in bound)

    def to(self, exchange: str, key: str) -> tuple[Place, ...] | None:
        """Each queue once, however many of its bindings match. `None`: there is no such exchange."""
        if not exchange:
            place = self.queues.get(key)
            return () if place is None else (place,)
        kind = self.exchanges.get(exchange)
        if kind is None:
            return None
        known = self._known.get((exchange, key))
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            takes = _TAKES[kind]
            bound = self._bound.get(exchange, ())
            found = {place.id: place for pattern, place in bound if takes(pattern, key)}
            known = self._known[exchange, key] = tuple(found.values())
        return known

    def letters_of(self, queue: str) -> int | None:
        """The number of the queue that takes what expires in this one; `None`: it is dropped."""
        place = self.queues.get(queue)
        if place is None or not place.described.dead_letter:
            return None
        letters = self.queues.get(dead_letters_of(queue))
        return None if letters is None else letters.id


_TAKES: dict[ExchangeKind, Callable[[str, str], bool]] = {
    "direct": lambda pattern, key: pattern == key,
    "topic": matches,
    "fanout": lambda pattern, key: True,
}


def load(connection: sa.Connection, statements: Statements, known: Routes | None = None) -> Routes:
    """Read inside one transaction. `known` is returned where it is still true."""
    for _ in range(10):
        version = version_in(connection, statements)
        if known is not None and version == known.version:
            return known
        queues = {
            text_of(name): _place(number, text_of(name), text_of(spec))
            for number, name, spec in connection.execute(statements["queues"])
        }
        kinds = {text_of(name): text_of(kind) for name, kind in connection.execute(statements["exchanges"])}
        bindings = tuple(
            (text_of(exchange), text_of(pattern), queue)
            for exchange, pattern, queue in connection.execute(statements["bindings"])
        )
        # At READ COMMITTED each of these may have seen another version.
        if version_in(connection, statements) == version:
            return Routes(version, queues, cast("dict[str, ExchangeKind]", kinds), bindings)
    raise TimeoutError("the topology changes faster than it can be read")


def version_in(connection: sa.Connection, statements: Statements) -> str:
    row = connection.execute(statements["topology"], _clock()).first()
    return NOTHING if row is None else text_of(row[0])


def _clock() -> dict[str, int]:
    return {"now": 0}


def _place(number: int, name: str, spec: str) -> Place:
    described = read_spec(name, spec)
    levels = described.priorities if isinstance(described.priorities, int) else 0
    return Place(number, described, levels, 0 if described.ttl is None else described.ttl // timedelta(microseconds=1))


# How a queue is described in its column: only what differs from the default


_OPTIONS = ("type", "durable", "exclusive", "auto_delete", "dead_letter", "max_length", "priorities", "ordered")
_TIMES = ("ttl", "lease")
OPTIONS = (*_OPTIONS, *_TIMES)
_PLAIN = Queue("")


def write_spec(queue: Queue) -> str:
    told: dict[str, Any] = {
        option: getattr(queue, option) for option in _OPTIONS if getattr(queue, option) != getattr(_PLAIN, option)
    }
    for option in _TIMES:
        length: timedelta | None = getattr(queue, option)
        if length is not None:
            told[option] = length // timedelta(microseconds=1)
    return msgspec.json.encode(told).decode()


def read_spec(name: str, spec: str) -> Queue:
    told: dict[str, Any] = msgspec.json.decode(spec)
    for option in _TIMES:
        if option in told:
            told[option] = timedelta(microseconds=told[option])
    return Queue(name, **{option: value for option, value in told.items() if option in OPTIONS})
