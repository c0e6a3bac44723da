"""What must hold whatever a broker sends: the lane with all that takes from it, on a socket that is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pamqp.frame
from pamqp import commands

from acemq.clock import SYSTEM
from acemq.transport import Delivery, LostBy, Outgoing, Published, Settlement, Verb
from acemq.transports.rabbitmq.confirms import Call
from acemq.transports.rabbitmq.consumer import Consumer
from acemq.transports.rabbitmq.lane import End, Lane
from acemq.transports.rabbitmq.ledger import Receipt, settle
from acemq.transports.rabbitmq.publish import _PublishChannel
from acemq.transports.rabbitmq.pull import _Pulled
from tests.unit.transports.rabbitmq.kit import Socket

PUBLISHES, CONSUMES, PULLS = 1, 2, 3
"""The channels in use; all others are aiormq's."""
OUTSTANDING = 8
"""Publishes that wait for a confirm, tags 1 to 8; those of even tags may be returned."""
ASKED = 3
"""Messages pulled and not answered."""
KEPT = 3
"""Deliveries whose tag this divides are held and never settled."""


class _Session:
    """A link of which only the lane is there."""

    frame_max = 4096

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._next = 0

    async def channel(self, taker: Any, *, confirms: bool = False) -> Any:
        self._next += 1
        self.lane.claim(self._next, taker)
        return SimpleNamespace(number=self._next, consumers={})


class _Owner:
    """Accepts what it is handed, but for every third tag."""

    queue, name, prefetch, options, is_paused = "q", "c", 1000, cast("Any", None), False
    topology: Any = SimpleNamespace(counts_deliveries=lambda queue: None)

    def __init__(self) -> None:
        self.got: list[Delivery] = []
        self.handled: set[int] = set()

    def room(self, consumer: Consumer, /) -> int:
        return 1000

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.got += batch
        for delivery in batch:
            tag = tag_of(delivery)
            if tag % KEPT:
                self.handled.add(tag)
                settle(Settlement(delivery, Verb.ACCEPT))

    def lost_queue(self, consumer: Consumer, /) -> None: ...
    def lost_channel(self, consumer: Consumer, end: End, /) -> None:
        consumer.lose()


Fact = tuple[int, bytes, str, str]
"""The tag of a delivery, its body, its routing key, its headers as they were read."""


class Outcome(NamedTuple):
    """All that our side learned."""

    delivered: list[Fact]
    pulled: list[Fact]
    published: list[Published | None]
    ends: list[End | None]
    """Of the link, and of the channels for publishing, consuming and pulling."""


def tag_of(delivery: Delivery) -> int:
    return cast("Receipt", delivery.receipt).tag


def _facts(deliveries: Sequence[Delivery]) -> list[Fact]:
    return [(tag_of(each), each.body, each.routing_key, repr(each.headers)) for each in deliveries]


def _message(tag: int) -> Outgoing:
    key = "gone" if tag % 2 == 0 else "k"
    return Outgoing(exchange="", routing_key=key, body=b"x", headers={}, message_id=f"m{tag}", content_type=None)


async def receive(chunks: Sequence[bytes]) -> Outcome:
    """Feed the lane and look whether it keeps what it promises, whatever the bytes."""
    lane = Lane(15, lambda method, arguments: None)
    lane.longest_frame = 4096
    socket, owner, session = Socket(lane), _Owner(), cast("Any", _Session(lane))
    publishing, consumer, pulled = (
        _PublishChannel(session, SYSTEM),
        Consumer(session, owner),
        _Pulled(session, "q", owner.topology),
    )
    for channel in (publishing, consumer, pulled):
        await channel.open()
    consumer.is_registered = True
    call = Call([_message(tag) for tag in range(1, OUTSTANDING + 1)], float("inf"))
    publishing.write(call, 0)
    request = pulled.get(ASKED)
    lane.flush()
    socket.written.clear()

    fed = 0
    for chunk in chunks:
        fed += len(chunk)
        lane.data_received(chunk)
        lane.flush()
        assert _kept(lane) <= fed, "it keeps no more than it was given"
    outcome = Outcome(
        _facts(owner.got),
        _facts([delivery for _, delivery in request.got]),
        [None if result is None else result.outcome for result in call.results],
        [lane.end, publishing.end, consumer.end, pulled.end],
    )
    _judge(outcome, owner.handled, b"".join(socket.written))
    if lane.end is not None:
        assert lane.end.by is LostBy.CONNECTION
        assert str(lane.end)
        assert socket.is_aborted
        assert _kept(lane) == 0
        assert None not in outcome.published, "each publish has its end"
        assert request.answered.done()
        assert not consumer.ledger.held
    lane.finish(End(LostBy.CONNECTION, "the test is over"))
    return outcome


def _kept(lane: Lane) -> int:
    """Bytes of what is not whole yet."""
    return len(lane._cut_off) + sum(len(claim.body) for claim in lane._claims.values())


def _judge(outcome: Outcome, handled: set[int], written: bytes) -> None:
    tags = [tag for tag, *_ in outcome.delivered]
    assert tags == sorted(set(tags)), "no delivery twice"
    for up_to, multiple in _acknowledged(written):
        covered = [tag for tag in tags if tag <= up_to] if multiple else [up_to]
        assert handled.issuperset(covered), "no acknowledgement for what was not handled"


def _acknowledged(written: bytes) -> Iterator[tuple[int, bool]]:
    while written:
        size, channel, frame = pamqp.frame.unmarshal(written)
        written = written[size:]
        assert isinstance(frame, commands.Basic.Ack), "what we write is whole frames"
        assert channel == CONSUMES
        yield frame.delivery_tag % 2**64, frame.multiple  # pamqp reads tags as signed numbers


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """In pieces, at these places; whatever lies outside is no place."""
    edges = [0, *sorted(place for place in places if 0 < place < len(data)), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


async def receive_cut(data: bytes, places: Sequence[int]) -> Outcome:
    """The same bytes whole and in pieces: they must come to the same."""
    whole, pieces = await receive([data]), await receive(cut(data, places))
    if pieces.ends[2] is not None:
        # What arrived together with the end was never handed out, and what came before it was.
        pieces = pieces._replace(delivered=pieces.delivered[: len(whole.delivered)])
    assert pieces == whole
    return whole
