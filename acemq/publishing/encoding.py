"""From a payload and what is said about it to the message as it stands on the wire. No I/O."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, cast

from acemq import delays, ladder
from acemq import headers as h
from acemq.clock import SYSTEM, Clock, check_duration
from acemq.codec import Codecs
from acemq.delays import Way
from acemq.envelope import Envelope, to_millis, write
from acemq.errors import CapabilityError, ConfigurationError, EncodeError
from acemq.headers import Headers, HeaderValue
from acemq.ids import new_id
from acemq.keywords import check_keywords
from acemq.message import CURRENT, Message
from acemq.publishing.options import OPTIONS, SAID_BY_ENVELOPE, PublishOptions
from acemq.topology import SCHEDULE_QUEUE, check_key, check_name, lanes_of
from acemq.transport import Capabilities, Outgoing, Transport

_NOTHING, _MILLISECOND = timedelta(), timedelta(milliseconds=1)


class Encoder:
    """Writes the messages of one connection, and refuses what its broker could not do with them."""

    def __init__(self, transport: Transport, *, codecs: Codecs, origin: str, correlate: bool, clock: Clock) -> None:
        """`correlate`: what a handler publishes belongs to what it handles."""
        self._transport, self.codecs, self._origin, self._clock = transport, codecs, origin, clock
        self.correlate = correlate

    def encode(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        options: PublishOptions | None = None,
        encoded: tuple[bytes, str] | None = None,
    ) -> Outgoing:
        """The message as it will stand on the wire. Refuses bad arguments and what cannot be encoded; no I/O.

        `encoded`: body and content type, where a codec had to be awaited for them.
        """
        check_place(exchange, routing_key)
        if options:
            delay = options.get("delay") if len(options) == 1 else None
            if type(delay) is timedelta and delay > _NOTHING and self._climbs():
                # Nothing else is left to refuse: this is what a scheduler sends, much of it.
                return self._onto_ladder(exchange, routing_key, delay, *(encoded or self.codecs.write(payload)))
            return self._encode_with(exchange, routing_key, payload, options, encoded)
        return self._plain(exchange, routing_key, *self.codecs.write(payload), self._handled())

    def encode_many(
        self, exchange: str, routing_key: str, payloads: Iterable[object], options: PublishOptions | None = None
    ) -> Iterator[Outgoing | EncodeError]:
        """The same for each. What cannot be encoded ends its own message, and not the batch."""
        check_place(exchange, routing_key)
        if options:
            for payload in payloads:
                try:
                    yield self.encode(exchange, routing_key, payload, options)
                except EncodeError as error:
                    yield error
            return
        encode_payload, handled = self.codecs.write, self._handled()
        for payload in payloads:
            try:
                yield self._plain(exchange, routing_key, *encode_payload(payload), handled)
            except EncodeError as error:
                yield error

    def _handled(self) -> Message[Any] | None:
        return CURRENT.get() if self.correlate else None

    def _plain(
        self, exchange: str, routing_key: str, body: bytes, content_type: str, handled: Message[Any] | None
    ) -> Outgoing:
        identity = new_id()
        correlation, causation = identity, None
        if handled is not None:
            correlation, causation = handled.correlation_id, handled.id
        return Outgoing(
            exchange=exchange,
            routing_key=routing_key,
            body=body,
            headers=write(
                id=identity,
                type=routing_key,
                correlation_id=correlation,
                causation_id=causation,
                first_seen_ms=self._now_ms(),
                origin=self._origin,
            ),
            message_id=identity,
            content_type=content_type,
        )

    def into_lane(self, queue: str, options: PublishOptions) -> tuple[str, PublishOptions]:
        """Of a queue with lanes: the one of this priority, and what else there is to say of a publish into it."""
        priority, lanes = options.get("priority"), lanes_of(queue)
        if priority not in (0, 1, 2):
            raise ConfigurationError(f"priority={priority!r}: queue {queue!r} has lanes: 0 low, 1 normal, 2 high")
        lane = lanes[priority]
        rest = cast("PublishOptions", {name: value for name, value in options.items() if name != "priority"})
        if "envelope" not in rest and self.way("", lane, rest.get("delay")) is not Way.LADDER:
            rest.setdefault("type", queue)
        return lane, rest

    def codecs_of(self, options: PublishOptions | None) -> Codecs:
        return Codecs.of(options["codec"]) if options and "codec" in options else self.codecs

    def _encode_with(
        self,
        exchange: str,
        routing_key: str,
        payload: object,
        options: PublishOptions,
        encoded: tuple[bytes, str] | None,
    ) -> Outgoing:
        way = self.check_options(exchange, routing_key, options)
        body, content_type = encoded or self.codecs_of(options).write(payload, options.get("content_type"))
        delay = options.get("delay") or None
        if way is Way.LADDER and delay is not None:
            return self._onto_ladder(exchange, routing_key, delay, body, content_type)
        headers: Headers = self._headers_with(routing_key, options)
        identity = str(headers[h.ID])
        expires_in = options.get("expires_in")
        if expires_in is not None and (way is Way.HOPS or not self._transport.capabilities.expiry):
            headers = {**headers, h.EXPIRES_AT: self._now_ms() + expires_in // _MILLISECOND}
            expires_in = None
        if way is Way.PUT_BACK and delay is not None:
            longest = self.can(exchange, routing_key).publish_delay or _NOTHING
            headers, delay = delays.first_leg(headers, delay, longest, self._now_ms())
        outgoing = Outgoing(
            exchange=exchange,
            routing_key=routing_key,
            body=body,
            headers=headers,
            message_id=identity,
            content_type=content_type,
            reply_to=options.get("reply_to"),
            mandatory=options.get("mandatory", True),
            persistent=options.get("persistent", True),
            delay=delay,
            expires_in=expires_in,
            priority=options.get("priority"),
            ordering_key=options.get("ordering_key"),
        )
        if way is Way.HOPS and delay is not None:
            now_ms, longest = self._now_ms(), self._control().publish_delay or _NOTHING
            waiting = ladder.Waiting(exchange, routing_key, now_ms + delay // _MILLISECOND, content_type)
            return delays.first_hop(waiting, outgoing, now_ms=now_ms, longest=longest)
        return outgoing

    def _climbs(self) -> bool:
        """Whether whatever is delayed goes over the ladder here, wherever it goes to."""
        can = self._transport.capabilities
        return can.publish_delay is None and can.dead_letter_routes and can.unroutable != "unknown"

    def _onto_ladder(
        self, exchange: str, routing_key: str, delay: timedelta, body: bytes, content_type: str
    ) -> Outgoing:
        now_ms = self._now_ms()
        waiting = ladder.Waiting(exchange, routing_key, now_ms + delay // _MILLISECOND, content_type)
        return ladder.onward(waiting, body, now_ms=now_ms, origin=self._origin)

    def envelope(self, type: str, options: PublishOptions) -> Envelope:
        """What a publish with these options would carry, `type` unless they name one; for slips, which add to it."""
        headers = self._headers_with(type, options)
        return Envelope.from_headers(headers, routing_key=type, message_id=None, now=self._clock.now())

    def _headers_with(self, routing_key: str, options: PublishOptions) -> dict[str, HeaderValue]:
        envelope = options.get("envelope")
        if envelope is not None:
            given = [name for name in SAID_BY_ENVELOPE if name in options]
            if given:
                raise ConfigurationError(
                    f"envelope= says it all: leave out {', '.join(given)}, or use envelope.replace()"
                )
            return (envelope if envelope.origin else envelope.replace(origin=self._origin)).to_headers()
        application = h.check_application(options["headers"]) if "headers" in options else None
        identity = options.get("message_id") or new_id()
        correlation, causation = options.get("correlation_id"), options.get("causation_id")
        handled = CURRENT.get() if self.correlate and correlation is None and causation is None else None
        if handled is not None:
            correlation, causation = handled.correlation_id, handled.id
        return write(
            id=check_key("message_id", identity),
            type=check_key("type", options.get("type", routing_key)),
            version=options.get("version", 1),
            correlation_id=correlation or identity,
            causation_id=causation,
            first_seen_ms=self._now_ms(),
            origin=self._origin,
            claim=options.get("claim"),
            headers=application,
        )

    def check_options(self, exchange: str, routing_key: str, options: PublishOptions) -> Way:
        """Refuse options that are unknown, bad, or beyond what the target can do; gives how its delay is waited out.

        No I/O.
        """
        check_keywords("publish", options, OPTIONS)
        can = self.can(exchange, routing_key)
        if options.get("version", 1) < 1:
            raise ConfigurationError(f"version={options.get('version')} must be 1 or more")
        priority = check_priority(options)
        if priority is not None and priority >= max(can.priorities, 1) and not (exchange and can.priorities):
            levels = f"{priority + 1} priority levels"
            advice = "" if exchange else _advice(routing_key, priority)
            where = can.transport if exchange else f"queue {routing_key!r} on {can.transport}"
            raise CapabilityError(where, levels, f"priority={priority}", advice)
        if "timeout" in options:
            check_duration("timeout", options["timeout"])
        if "expires_in" in options:
            check_duration("expires_in", options["expires_in"])
        delay = check_duration("delay", options["delay"], zero=True) if "delay" in options else None
        way = delays.way(exchange, delay, can, self._control) if delay else Way.NATIVE
        if way is None:
            raise CapabilityError(can.transport, "delayed publishes of this length", f"delay={delay}")
        if way is not Way.NATIVE:
            delays.refuse_lost(way, options, can.transport)
        if not options.get("mandatory", True) or can.unroutable != "unknown" or not exchange:
            return way
        raise CapabilityError(
            can.transport, "a word about unroutable messages", "mandatory=True", "Publish with mandatory=False"
        )

    def way(self, exchange: str, routing_key: str, delay: timedelta | None) -> Way | None:
        """How such a delay is waited out; `None`: nothing waits for so long. No I/O."""
        if not delay:
            return Way.NATIVE
        return delays.way(exchange, delay, self.can(exchange, routing_key), self._control)

    def _control(self) -> Capabilities:
        return self.can("", SCHEDULE_QUEUE)

    def can(self, exchange: str, routing_key: str) -> Capabilities:
        can = self._transport.capabilities_of
        return can("exchange", exchange) if exchange else can("queue", routing_key)

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 if self._clock is SYSTEM else to_millis(self._clock.now())


def check_priority(options: PublishOptions) -> int | None:
    priority = options.get("priority")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 255):
        raise ConfigurationError(f"priority={priority!r} must be a whole number from 0 to 255")
    return priority


def _advice(queue: str, priority: int) -> str:
    lanes = ", or priorities='lanes'" if priority < 3 else ""
    return f"Declare it with .queue({queue!r}, priorities={priority + 1}){lanes}"


def check_place(exchange: str, routing_key: str) -> None:
    check_key("routing key", routing_key)
    if exchange:
        check_name("exchange", exchange)
    elif not routing_key:
        raise ConfigurationError("the queue name is empty; send() names the queue that takes the message")
