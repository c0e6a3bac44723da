"""Faults of a network, by a proxy on the loopback that stands between transport and server.

It lives in a thread of its own, so that it works whatever event loops a scenario opens and closes.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import urlsplit, urlunsplit
from weakref import WeakKeyDictionary

from acemq.testing.conformance.hooks import NotSupplied
from acemq.transport import Transport

T = TypeVar("T")
Action = Callable[[], Awaitable[object] | object]
Switch = Callable[[bool], Awaitable[object] | object]

_CHUNK = 64 * 1024


class TcpFaults:
    """`Faults` for a broker that is reached by TCP at `upstream`, a URL.

        with TcpFaults("mine://user:secret@localhost:7000/test", restart=server.restart) as faults:
            transport = faults.behind(lambda url: MyTransport(url))

    `url` is the same URL by way of the proxy. What only the server can do is passed in: `restart`, `wipe`, `block`, as
    functions, plain (they run in a thread) or `async`; without one the method raises `NotSupplied`.
    """

    def __init__(
        self, upstream: str, *, restart: Action | None = None, wipe: Action | None = None, block: Switch | None = None
    ) -> None:
        self._upstream = urlsplit(upstream)
        self._restart, self._wipe, self._block = restart, wipe, block
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="acemq conformance proxy", daemon=True)
        self._doors: list[_Door] = []
        self._owners: WeakKeyDictionary[object, _Door] = WeakKeyDictionary()
        self._swallows = self._refuses = False
        self._url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._url = self._url_of(self._call(self._new_door))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._call(self._shut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """Where `make` dials."""
        return self._url

    def behind(self, make: Callable[[str], T]) -> T:
        """What `make` returns dials through a door of its own, so that it alone can be abandoned."""
        door = self._call(self._new_door)
        made = make(self._url_of(door))
        self._owners[made] = door
        return made

    @property
    def dials(self) -> list[float]:
        """When somebody dialled, by the monotonic clock, also while it was refused: a refusal is seen as one."""
        return sorted(at for door in self._doors for at in door.dialled)

    # Faults

    async def cut(self) -> None:
        def cut() -> None:
            for door in self._doors:
                door.cut()

        await self._do(cut)

    async def refuse(self, on: bool) -> None:
        def refuse() -> None:
            self._refuses = on
            for door in self._doors:
                door.refuses = on

        await self._do(refuse)

    async def swallow(self, on: bool) -> None:
        def swallow() -> None:
            self._swallows = on
            for door in self._doors:
                door.swallow(on)

        await self._do(swallow)

    async def restart(self) -> None:
        await _supplied("restart", self._restart)

    async def wipe(self) -> None:
        await _supplied("wipe", self._wipe)

    async def block(self, on: bool) -> None:
        block = self._block
        await _supplied("block", None if block is None else lambda: block(on))

    async def abandon(self, transport: Transport) -> None:
        """Its connections end without a word, and it is let in no more."""
        door = self._owners.get(transport)
        if door is None:
            raise NotSupplied("no faults: abandon, for a transport that was not made by behind()")

        def abandon() -> None:
            door.refuses = door.abandoned = True
            door.cut()

        await self._do(abandon)

    # The thread

    def _call(self, what: Callable[[], T]) -> T:
        async def call() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)

    async def _do(self, what: Callable[[], object]) -> None:
        await asyncio.to_thread(self._call, what)

    def _new_door(self) -> _Door:
        host, port = self._upstream.hostname, self._upstream.port
        if host is None or port is None:
            raise ValueError("upstream must be a URL with a host and a port")
        door = _Door(host, port)
        door.refuses = self._refuses
        door.swallow(self._swallows)
        self._doors.append(door)
        return door

    def _url_of(self, door: _Door) -> str:
        user, at, _ = self._upstream.netloc.rpartition("@")
        return urlunsplit(self._upstream._replace(netloc=f"{user}{at}127.0.0.1:{door.port}"))

    def _shut(self) -> None:
        for door in self._doors:
            door.shut()


class _Door:
    """A port, and what came in by it. All of it runs on the loop of the proxy."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self.refuses = self.abandoned = False
        self.dialled: list[float] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(128)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def swallow(self, on: bool) -> None:
        (self._flowing.clear if on else self._flowing.set)()

    def cut(self) -> None:
        for writer in tuple(self._writers):
            _reset(writer)
        for task in tuple(self._tasks):
            task.cancel()

    def shut(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self.cut()

    def _accept(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            return
        self.dialled.append(asyncio.get_running_loop().time())
        if self.refuses:
            # It keeps the port, which else could be given to somebody: the client sees a reset instead of a refusal.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        task = asyncio.ensure_future(self._serve(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        mine: list[asyncio.StreamWriter] = []
        try:
            from_client, to_client = await asyncio.open_connection(sock=client)
            mine.append(to_client)
            self._writers.add(to_client)
            from_server, to_server = await asyncio.open_connection(*self._target)
            mine.append(to_server)
            self._writers.add(to_server)
            await asyncio.gather(self._carry(from_client, to_server), self._carry(from_server, to_client))
        except (OSError, asyncio.CancelledError):
            pass  # one side broke, or was cut
        finally:
            for writer in mine:
                self._writers.discard(writer)
                _reset(writer)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(_CHUNK):
            await self._flowing.wait()
            writer.write(chunk)
            await writer.drain()
        await self._flowing.wait()
        with suppress(OSError):
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, AttributeError):
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _supplied(fault: str, act: Action | None) -> None:
    if act is None:
        raise NotSupplied(f"no faults: {fault}")
    answer = await asyncio.to_thread(act)
    if isinstance(answer, Awaitable):
        await answer
