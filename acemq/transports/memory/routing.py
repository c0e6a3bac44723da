"""Exchanges and bindings as data, and which queues a message goes to."""

from __future__ import annotations

from collections.abc import Callable

from acemq.topology import Exchange, ExchangeKind, matches

_REMEMBERED = 4096
"""Routing keys an exchange keeps the answer for; keys may hold ids, so it forgets them all beyond that."""


class MemoryExchange:
    def __init__(self, described: Exchange) -> None:
        self.described = described
        self.bindings: dict[tuple[str, str], None] = {}
        """(queue, key), in the order of binding."""
        self._known: dict[str, tuple[str, ...]] = {}

    def bind(self, queue: str, key: str) -> None:
        self.bindings[queue, key] = None
        self._known.clear()

    def unbind(self, queue: str) -> None:
        if any(binding[0] == queue for binding in self.bindings):
            self.bindings = {binding: None for binding in self.bindings if binding[0] != queue}
            self._known.clear()

    def route(self, key: str) -> tuple[str, ...]:
        """Each queue once, however many of its bindings match."""
        queues = self._known.get(key)
        if queues is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            takes = _TAKES[self.described.kind]
            queues = tuple(dict.fromkeys(queue for queue, pattern in self.bindings if takes(pattern, key)))
            self._known[key] = queues
        return queues


_TAKES: dict[ExchangeKind, Callable[[str, str], bool]] = {
    "direct": lambda pattern, key: pattern == key,
    "topic": matches,
    "fanout": lambda pattern, key: True,
}
