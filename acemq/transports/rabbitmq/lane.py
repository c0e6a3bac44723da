"""The tap in the byte stream between aiormq and the broker, through which goes all that comes once a message.

aiormq reads and writes frames one at a time, with a task, a lock and three turns of the loop for each. So whoever
claims a channel here is handed its deliveries, returns and confirms straight from the received bytes, and writes its
publishes and acknowledgements straight to the socket, gathered once a turn. Everything else passes on to aiormq
unchanged, and aiormq writes to the same socket: both only ever write whole frames, so nothing gets mixed up.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import BufferedProtocol, StreamReader, StreamReaderProtocol, StreamWriter, Transport
from collections.abc import Callable
from struct import error as StructError
from typing import Protocol, cast

import msgspec

from acemq.transport import LostBy

from . import frames
from .bell import Bell
from .frames import BEAT, BODY, END_BYTE, HEADER, HEARTBEAT, METHOD, Malformed

log = logging.getLogger("acemq.rabbitmq")

_ROOM = 16 * 1024
"""Bytes gathered before they are written without waiting for the end of the turn.

So that the broker works on the first of many publishes while we encode the rest: with 256 outstanding a fifth more of
them a second than with 256 KiB; below 8 KiB the system calls cost more than that gives.
"""
_RECEIVED = 64 * 1024
"""Bytes received in one go, at the most."""
_HIGH, _LOW = 1024 * 1024, 256 * 1024
"""Bytes in the socket's buffer at which publishers stop, and go on."""
CLOSED_HERE = "the connection was closed on our side"
_SHORTEST_FRAME = 8
_LEAST = {METHOD: 4, HEADER: 12, BODY: 0, BEAT: 0}
"""Bytes in a frame, at the least, by its type."""
_BEFORE_TUNING = 128 * 1024
"""Bytes of a frame that are believed of a server with which none were agreed yet."""


class End(msgspec.Struct, frozen=True):
    """Why a channel or a link is no more."""

    by: LostBy
    text: str
    code: int | None = None

    def __str__(self) -> str:
        return self.text if self.code is None else f"{self.code} {self.text}"


class Taker(Protocol):
    """Whoever has claimed a channel. Called from the loop, frame by frame, in order."""

    def method(self, method: int, arguments: bytes) -> bool:
        """Take this method and the content that follows it. What is not taken passes on to aiormq, with its content.

        `IndexError` and `struct.error`, here and in `content`: it is broken, and so is the link.
        """
        ...

    def content(self, properties: bytes, body: bytes) -> None:
        """What followed the last method taken: properties from the flags on, and the body."""
        ...

    def ended(self, end: End) -> None:
        """The channel or its link is gone; nothing is called after it."""
        ...


class _Claim:
    """A claimed channel, and how much of a content has come so far."""

    __slots__ = ("body", "channel", "expects", "left", "properties", "taker", "taking")

    def __init__(self, channel: int, taker: Taker) -> None:
        self.channel, self.taker = channel, taker
        self.taking = False
        self.expects = METHOD
        """The only kind of frame that may come next."""
        self.left = 0
        self.properties = b""
        self.body = bytearray()


class Lane(StreamReaderProtocol, BufferedProtocol):
    """One socket. Dead as soon as `end` is set; what is written after that is dropped."""

    def __init__(self, heartbeat: int, on_control: Callable[[int, bytes], None]) -> None:
        """`on_control` is shown the methods of channel 0, which pass on all the same."""
        loop = asyncio.get_running_loop()
        self.reader = StreamReader(limit=1024 * 1024, loop=loop)
        super().__init__(self.reader, loop=loop)
        self.end: End | None = None
        self.finished = asyncio.Event()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.heard_at = loop.time()
        """When the last byte came, by the loop's clock."""
        self._loop = loop
        self._transport: Transport | None = None
        self._on_control = on_control
        self._claims: dict[int, _Claim] = {}
        self._after_chunk: list[Callable[[], None]] = []
        self.longest_frame = _BEFORE_TUNING
        """Bytes; what announces more is not waited for."""
        self._began = False
        self._broken = False
        self._received = memoryview(bytearray(_RECEIVED))
        self._cut_off = bytearray()
        """The beginning of a frame whose end has not come."""
        self._missing = 0
        """Bytes without which it is not worth looking again."""
        self._feed_every = heartbeat / 2
        self._fed_at = self.heard_at
        self._out: list[bytes] = []
        self._gathered = 0
        self._before_flush: list[Callable[[], None]] = []
        self._is_flush_due = False
        self._paused = False
        self.writable = Bell()
        """Rings when it is worth looking again: there is room, the link is gone, the broker has blocked or freed it."""

    def streams(self) -> tuple[StreamReader, StreamWriter]:
        """The two ends that aiormq works with."""
        assert self._transport is not None
        return self.reader, StreamWriter(self._transport, self, self.reader, self._loop)

    # Claiming

    def claim(self, channel: int, taker: Taker) -> None:
        """Until the channel is closed, by whom ever."""
        if self.end is not None:
            taker.ended(self.end)
        else:
            self._claims[channel] = _Claim(channel, taker)

    def after_chunk(self, call: Callable[[], None]) -> None:
        """Call once, when all of what was received together has been taken apart."""
        self._after_chunk.append(call)

    # Reading

    # Into a buffer of ours: asyncio would make one of 256 KiB each time, which takes longer than all that follows.

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._received[:nbytes].tobytes())

    def data_received(self, data: bytes) -> None:
        self.heard_at = now = self._loop.time()
        if self._broken:
            return
        self._missing -= len(data)
        if self._missing > 0:
            self._cut_off += data
        else:
            if self._cut_off:
                data = b"".join((self._cut_off, data))
                self._cut_off.clear()
            try:
                self._cut(data, now)
            except (Malformed, IndexError, StructError) as error:
                self._broken = True
                self.abort(str(error) if isinstance(error, Malformed) else "the broker sent a frame that ends too soon")
        if now - self._fed_at > self._feed_every and not self._broken:
            # aiormq judges the link by the frames that it sees; under load the broker sends none but those we take.
            super().data_received(HEARTBEAT)
            self._fed_at = now
        while self._after_chunk:
            self._after_chunk.pop()()

    def _cut(self, data: bytes, now: float) -> None:
        """Into frames: each to whom it is meant for. The beginning of another is kept."""
        length = len(data)
        at = passed = 0  # everything before `passed` has been taken by us or handed to aiormq
        wanted = _SHORTEST_FRAME
        while length - at >= _SHORTEST_FRAME:
            kind, channel, size = frames.head_at(data, at)
            wanted = _SHORTEST_FRAME + size
            least = _LEAST.get(kind)
            if least is None or size < least or wanted > self.longest_frame:
                raise self._no_frame(data[at : at + 8], kind, size)
            end = at + wanted
            if end > length:
                break
            if data[end - 1] != END_BYTE:
                raise Malformed("the broker sent a frame without its end")
            self._began = True
            claim = self._claims.get(channel)
            if claim is not None and self._take(claim, kind, data, at + 7, end - 1):
                if passed < at:
                    super().data_received(data[passed:at])
                    self._fed_at = now
                passed = end
            elif channel == 0 and kind == METHOD:
                self._on_control(frames.u32_at(data, at + 7)[0], data[at + 11 : end - 1])
            at = end
            wanted = _SHORTEST_FRAME
        if passed < at:
            super().data_received(data[passed:at])
            self._fed_at = now
        if at < length:
            self._cut_off += data[at:]
        self._missing = at + wanted - length

    def _no_frame(self, head: bytes, kind: int, size: int) -> Malformed:
        if not self._began:
            return Malformed(f"the server does not speak AMQP 0-9-1: it began with {head!r}")
        # Later without the bytes: they may be of anybody's message.
        if kind not in _LEAST:
            return Malformed(f"the broker sent a frame of the unknown type {kind}")
        most = self.longest_frame - _SHORTEST_FRAME
        return Malformed(f"the broker sent {size} bytes in a frame of type {kind}, which has {_LEAST[kind]} to {most}")

    def _take(self, claim: _Claim, kind: int, data: bytes, at: int, end: int) -> bool:
        if kind != claim.expects:
            raise Malformed(f"the broker sent a frame of type {kind} where one of type {claim.expects} is due")
        if kind == METHOD:
            method = frames.u32_at(data, at)[0]
            arguments = data[at + 4 : end]
            claim.taking = claim.taker.method(method, arguments)
            if method in frames.WITH_CONTENT:
                claim.expects = HEADER
            elif method == frames.CHANNEL_CLOSE:
                code, text = frames.reason(arguments)
                self._end_channel(claim, End(LostBy.CHANNEL, text, code))
            elif method == frames.CHANNEL_CLOSE_OK:
                self._end_channel(claim, End(LostBy.CHANNEL, "closed by us"))
            return claim.taking
        if kind == HEADER:
            claim.properties = data[at + 12 : end]
            claim.left = frames.u64_at(data, at + 4)[0]
            if claim.left > frames.LARGEST_BODY:
                raise Malformed(
                    f"the broker announced a body of {claim.left} bytes; RabbitMQ carries {frames.LARGEST_BODY}"
                )
            claim.expects = BODY if claim.left else METHOD
            if not claim.left and claim.taking:
                claim.taker.content(claim.properties, b"")
            return claim.taking
        claim.left -= end - at
        if claim.left < 0:
            raise Malformed("the broker sent more of a body than it had announced")
        if not claim.left:
            claim.expects = METHOD
        if claim.taking:
            self._take_body(claim, data[at:end])
        return claim.taking

    def _take_body(self, claim: _Claim, part: bytes) -> None:
        if claim.left:
            claim.body += part
        elif claim.body:
            claim.body += part
            body = bytes(claim.body)
            claim.body.clear()
            claim.taker.content(claim.properties, body)
        else:
            claim.taker.content(claim.properties, part)

    def _end_channel(self, claim: _Claim, end: End) -> None:
        # Before aiormq can answer: until then the broker throws away what comes on this channel, afterwards
        # it closes the whole connection for it.
        self.flush()
        self._claims.pop(claim.channel, None)
        claim.taker.ended(end)

    # Writing

    def write(self, frame: bytes) -> None:
        """Whole frames only. They leave at the end of this turn of the loop, in order, with all others of the turn."""
        self._out.append(frame)
        self.gathered(len(frame))

    @property
    def out(self) -> list[bytes]:
        """Where whole frames are appended, to be followed at once by `gathered`."""
        return self._out

    def gathered(self, size: int, *, at_once: bool = False) -> None:
        """`at_once`: nobody else is expected to write in this turn, so do not wait for its end."""
        self._gathered += size
        if at_once or self._gathered > _ROOM:
            self.flush()
        else:
            self._flush_soon()

    def before_flush(self, call: Callable[[], None]) -> None:
        """Call once, at the end of this turn, to add what was put together in it."""
        self._flush_soon()
        self._before_flush.append(call)

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_turn)

    def _flush_turn(self) -> None:
        self.flush()
        self._is_flush_due = False

    def flush(self) -> None:
        while self._before_flush:
            self._before_flush.pop()()
        # A socket that has just failed says so to us in the next turn; until then asyncio would log each write.
        if self._out and self.end is None and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()
        self._gathered = 0

    @property
    def is_congested(self) -> bool:
        """The socket does not keep up: write no more messages before `writable` rings."""
        return self._paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self._paused = False
        self.writable.ring()

    # Beginning and end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport = cast("Transport", transport)
        self._transport.set_write_buffer_limits(_HIGH, _LOW)

    def eof_received(self) -> bool:
        super().eof_received()
        self.finish(End(LostBy.CONNECTION, "the server closed the connection"))
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish(End(LostBy.CONNECTION, str(exc) or type(exc).__name__ if exc else CLOSED_HERE))
        super().connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(None)

    def finish(self, end: End) -> None:
        """From here on nothing is written or handed out. The socket may still live for aiormq's last words."""
        if self.end is not None:
            return
        self.end = end
        self._out.clear()
        self._before_flush.clear()
        claims, self._claims = self._claims, {}
        for claim in claims.values():
            try:
                claim.taker.ended(end)
            except Exception:
                log.exception("what a lost link held could not be told")
        self.finished.set()
        self.writable.ring()

    def abort(self, why: str) -> None:
        """Hang up, whatever is still to be sent."""
        self.finish(End(LostBy.CONNECTION, why))
        if self._transport is not None:
            self._transport.abort()

    async def hang_up(self, why: str) -> None:
        """The same, and no socket is left when it returns."""
        self.abort(why)
        if self._transport is not None:
            await asyncio.wait({self.closed}, timeout=1)
