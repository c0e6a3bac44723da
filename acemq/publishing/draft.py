"""A message before it is encoded: what hooks may change, and what batches of mixed destinations are made of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Unpack, cast

from acemq.codec import AnyCodec
from acemq.envelope import Envelope
from acemq.errors import ConfigurationError
from acemq.keywords import check_keywords
from acemq.message import CURRENT
from acemq.publishing.options import OPTIONS, PublishOptions, carrying


class Draft:
    """A message before it is encoded, and mutable until then.

    Made for `publish_batch`, one a message; made by the library for the hooks of a `PublishInterceptor`. The envelope
    is frozen, so a hook gives the draft another: `draft.envelope = draft.envelope.replace(headers=…)`.
    """

    __slots__ = (
        "_codec",
        "_envelope",
        "_options",
        "_type",
        "exchange",
        "mandatory",
        "payload",
        "persistent",
        "routing_key",
    )

    def __init__(self, exchange: str, routing_key: str, payload: object, **options: Unpack[PublishOptions]) -> None:
        """The options of a publish, but for `timeout`, which is that of the batch."""
        check_keywords("Draft", options, OPTIONS)
        if "timeout" in options:
            raise ConfigurationError("timeout= is not one message's; give it to publish_batch(timeout=…)")
        if "transaction" in options:
            raise ConfigurationError("transaction= is not for batches of drafts; use send, publish or their _many")
        self.exchange, self.routing_key, self.payload = exchange, routing_key, payload
        self.persistent, self.mandatory = options.get("persistent", True), options.get("mandatory", True)
        self._type = routing_key
        self._codec = options.get("codec")
        self._envelope = options.get("envelope")
        self._options = options

    @property
    def envelope(self) -> Envelope:
        """Read before the draft was handed over, it is made at that moment; its origin is written when it is sent."""
        if self._envelope is None:
            self._envelope = _envelope(self._type, self._options)
        return self._envelope

    @envelope.setter
    def envelope(self, envelope: Envelope) -> None:
        self._envelope = envelope

    @property
    def codec(self) -> AnyCodec | None:
        """What it will be encoded with; `None`: the connection's."""
        return self._codec

    @codec.setter
    def codec(self, codec: AnyCodec) -> None:
        self._codec = codec

    @property
    def given(self) -> PublishOptions:
        """The options as they were given."""
        return self._options

    @property
    def delay(self) -> timedelta | None:
        return self._options.get("delay")

    def complete(self, envelope: Callable[[str, PublishOptions], Envelope], codec: AnyCodec) -> None:
        """Fill in what the connection decides. Options that contradict each other are refused here."""
        made = envelope(self._type, self._options) if self._envelope is None or "envelope" in self._options else None
        self._envelope, self._codec = self._envelope or made, self._codec or codec

    def options(self) -> PublishOptions:
        """As a publish takes them: the envelope says what it says, whatever it was made from."""
        options = carrying(self.envelope, self._options)
        options["persistent"], options["mandatory"] = self.persistent, self.mandatory
        if self._codec is not None:
            options["codec"] = self._codec
        return options

    def options_without_envelope(self) -> PublishOptions:
        """The same for a message that gets another envelope on its way: what was given, and what hooks have added."""
        options = self._options.copy()
        if self.envelope.headers:
            options["headers"] = self.envelope.headers
        options["persistent"], options["mandatory"] = self.persistent, self.mandatory
        if self._codec is not None:
            options["codec"] = self._codec
        return options

    def __repr__(self) -> str:
        return f"<Draft for {self.exchange or 'queue'} {self.routing_key!r}>"


def draft_of(exchange: str, routing_key: str, payload: object, options: PublishOptions | None) -> Draft:
    """Of one publish, whose time limit and transaction are not the draft's."""
    rest = {name: value for name, value in options.items() if name not in _OF_THE_CALL} if options else {}
    return Draft(exchange, routing_key, payload, **cast("PublishOptions", rest))


def _envelope(type: str, options: PublishOptions) -> Envelope:
    given: dict[str, Any] = {name: value for name, value in options.items() if name in _FIELDS}
    if "message_id" in options:
        given["id"] = options["message_id"]
    handled = CURRENT.get() if not given.keys() & {"correlation_id", "causation_id"} else None
    if handled is not None:
        given |= {"correlation_id": handled.correlation_id, "causation_id": handled.id}
    return Envelope.of(options.get("type", type), **given)


_OF_THE_CALL = frozenset({"timeout", "transaction"})
"""Options that no draft has."""
_FIELDS = frozenset({"headers", "version", "correlation_id", "causation_id", "claim"})
