"""A TCP proxy on the loopback with which a test breaks the line between a client and a server.

    async with Proxy("127.0.0.1", 5672) as proxy:
        client = await connect(port=proxy.port)
        proxy.swallow("to_client")  # confirms are under way and never arrive
        ...
        proxy.cut()

Every verb acts at once, on all connections, and none of them waits.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from types import TracebackType
from typing import Literal, Self

Way = Literal["to_server", "to_client"]
WAYS: tuple[Way, Way] = ("to_server", "to_client")

_CHUNK = 64 * 1024
_AHEAD = 64
"""Chunks read and not yet passed on, per connection and way; beyond that the sender feels it."""


class Proxy:
    """Passes bytes between whoever connects to `port` and the target, until told otherwise."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._claim: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._links: dict[asyncio.Task[None], _Link] = {}
        self._delay = 0.0
        self._flowing: dict[Way, asyncio.Event] = {}
        self._fuses: dict[Way, tuple[int, asyncio.Event]] = {}
        self.port = 0
        self.accepted = 0
        """Connections taken since the start."""
        self.taken: dict[Way, int] = dict.fromkeys(WAYS, 0)
        """Bytes read from the sender; what is taken and not passed is held here."""
        self.passed: dict[Way, int] = dict.fromkeys(WAYS, 0)
        """Bytes handed on to the receiver."""

    @property
    def open_connections(self) -> int:
        return len(self._links)

    def cut(self) -> None:
        """Reset every connection on both sides; what is held or under way is lost. New ones are welcome."""
        for task, link in list(self._links.items()):
            link.reset()
            task.cancel()

    def refuse(self, on: bool = True) -> None:
        """Refuse new connections, as if nobody listened, or take them again. Open ones are left alone."""
        loop = asyncio.get_running_loop()
        if on and self._listener is not None:
            loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        elif not on and self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(128)
            loop.add_reader(self._listener, self._accept, self._listener)

    def delay(self, seconds: float) -> None:
        """Pass every byte that is read from now on that much later, each way; the order is kept."""
        self._delay = seconds

    def swallow(self, way: Way) -> None:
        """Hold back what goes that way, the end of the connection too, until `release` or for ever."""
        self._flowing[way].clear()

    def release(self) -> None:
        """Pass on what was held back, and whatever comes."""
        for flowing in self._flowing.values():
            flowing.set()

    def cut_after(self, n_bytes: int, way: Way) -> asyncio.Event:
        """Let exactly so many more bytes through that way, over all connections, and cut then.

        Whoever receives them gets all of them before the end. The event is set when it has happened.
        """
        cut = asyncio.Event()
        self._fuses[way] = (n_bytes, cut)
        return cut

    async def __aenter__(self) -> Self:
        self._claim = _bound(0)
        self.port = self._claim.getsockname()[1]
        self._flowing = {way: asyncio.Event() for way in WAYS}
        self.release()
        self.refuse(False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.refuse()
        if self._claim is not None:
            self._claim.close()
        tasks = list(self._links)
        self.cut()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # it has gone away again
            return
        self.accepted += 1
        link = _Link(connection)
        task = asyncio.create_task(self._serve(link))
        self._links[task] = link
        task.add_done_callback(self._links.pop)

    async def _serve(self, link: _Link) -> None:
        try:
            from_client, to_client = await link.adopt_client()
            from_server, to_server = await link.dial(self._target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(from_client, to_server, "to_server"))
                group.create_task(self._carry(from_server, to_client, "to_client"))
            await link.close()  # both have said that they are done
        except* OSError:
            pass  # one side broke, or the target is away; the other learns of it below
        finally:
            link.reset()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        ahead = _Ahead(_AHEAD)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(reader, ahead, way))
            group.create_task(self._pass(ahead, writer, way))

    async def _take(self, reader: asyncio.StreamReader, ahead: _Ahead, way: Way) -> None:
        loop = asyncio.get_running_loop()
        while True:
            chunk = await reader.read(_CHUNK)
            self.taken[way] += len(chunk)
            await ahead.put((loop.time() + self._delay, chunk))
            if not chunk:
                return

    async def _pass(self, ahead: _Ahead, writer: asyncio.StreamWriter, way: Way) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, chunk = await ahead.get()
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._flowing[way].wait()
            if not chunk:
                writer.write_eof()
                return
            left, cut = self._fuses.pop(way, (len(chunk) + 1, None))
            writer.write(chunk[:left])
            self.passed[way] += min(left, len(chunk))
            if cut is None:
                await writer.drain()
            elif left > len(chunk):
                self._fuses[way] = (left - len(chunk), cut)
                await writer.drain()
            else:
                # Closed in order, not reset: a reset may overtake the last bytes.
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
                self.cut()
                cut.set()


_Ahead = asyncio.Queue[tuple[float, bytes]]


class _Link:
    """A client's connection and its twin to the target."""

    def __init__(self, client: socket.socket) -> None:
        self._client: socket.socket | None = client
        self._writers: list[asyncio.StreamWriter] = []

    async def adopt_client(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._client is not None
        client, self._client = self._client, None  # only asyncio may close it from here on
        try:
            streams = await asyncio.open_connection(sock=client)
        except BaseException:
            _reset_when_closed(client)
            raise
        self._writers.append(streams[1])
        return streams

    async def dial(self, target: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        streams = await asyncio.open_connection(*target)
        self._writers.append(streams[1])
        return streams

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()
            await writer.wait_closed()

    def reset(self) -> None:
        if self._client is not None:
            _reset_when_closed(self._client)
            self._client.close()
            self._client = None
        for writer in self._writers:
            _reset_when_closed(writer.get_extra_info("socket"))
            writer.transport.abort()


def _reset_when_closed(end: socket.socket) -> None:
    """No lingering: the peer sees a reset, as after a crash, and not an orderly end."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _bound(port: int) -> socket.socket:
    """A socket on this port of the loopback that does not listen yet.

    The proxy keeps one all the time. So the port stays its own while it refuses: nobody else is given it, and a client
    that dials it again and again cannot be given it for its own end and so reach itself.
    """
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    bound.setblocking(False)
    return bound
