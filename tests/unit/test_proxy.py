from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.proxy import WAYS, Proxy, Way

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server that sends back what it gets, in order and to the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.fixture
async def proxy(echo: int) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", echo) as proxy:
        yield proxy


@asynccontextmanager
async def client(proxy: Proxy) -> AsyncGenerator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_passes_bytes_both_ways_to_the_end_and_counts_them(proxy: Proxy) -> None:
    sent = bytes(range(256)) * 4096
    async with client(proxy) as (reader, writer):
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        await until(lambda: proxy.open_connections == 0)
    assert proxy.passed == proxy.taken == {"to_server": len(sent), "to_client": len(sent)}
    assert proxy.accepted == 1


async def test_cut_resets_every_connection_and_takes_new_ones(proxy: Proxy) -> None:
    async with client(proxy) as one, client(proxy) as another:
        for reader, writer in (one, another):
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
        proxy.cut()
        for reader, _ in (one, another):
            with pytest.raises(ConnectionResetError):
                await reader.read()
    async with client(proxy) as (reader, writer):
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
    assert proxy.accepted == 3


@pytest.mark.parametrize("turns", range(8))
async def test_a_connection_may_be_cut_at_any_turn_of_its_beginning(proxy: Proxy, turns: int) -> None:
    failed: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:  # accepted later than it is connected
        client.settimeout(5)
        while not proxy.open_connections:
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        proxy.cut()
        await until(lambda: proxy.open_connections == 0)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert not failed


async def test_refuse_turns_new_connections_away_and_leaves_the_open_ones_alone(proxy: Proxy) -> None:
    async with client(proxy) as (reader, writer):
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        proxy.refuse()
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"pong")
        assert await reader.readexactly(4) == b"pong"
        proxy.refuse(False)
        async with client(proxy):
            await until(lambda: proxy.open_connections == 2)


async def test_delay_holds_bytes_back_each_way_without_holding_up_those_behind(proxy: Proxy) -> None:
    async def taken(count: int) -> None:
        await until(lambda: proxy.taken["to_server"] == count)

    loop = asyncio.get_running_loop()
    async with client(proxy) as (reader, writer):
        proxy.delay(0.1)
        begun = loop.time()
        for number in range(5):
            writer.write(bytes([number]))
            await taken(number + 1)
        assert await reader.readexactly(5) == bytes(range(5))
        assert 0.2 <= loop.time() - begun < 1  # there and back, once and not five times


@pytest.mark.parametrize("way", WAYS)
async def test_swallow_holds_one_way_until_release(proxy: Proxy, way: Way) -> None:
    async with client(proxy) as (reader, writer):
        proxy.swallow(way)
        writer.write(b"ping")
        writer.write_eof()
        await until(lambda: proxy.taken[way] == 4)
        assert proxy.passed[way] == 0
        proxy.release()
        assert await reader.read() == b"ping"


async def test_what_is_swallowed_when_the_line_is_cut_is_lost(proxy: Proxy) -> None:
    async with client(proxy) as (reader, writer):
        proxy.swallow("to_client")
        writer.write(b"order")
        await until(lambda: proxy.taken["to_client"] == 5)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
    assert proxy.passed == {"to_server": 5, "to_client": 0}


@pytest.mark.parametrize("way", WAYS)
async def test_cut_after_lets_exactly_so_many_bytes_through(proxy: Proxy, way: Way) -> None:
    async with client(proxy) as (reader, writer):
        cut = proxy.cut_after(6, way)
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert not cut.is_set()
        writer.write(b"pong")
        async with asyncio.timeout(30):
            await cut.wait()
        assert proxy.passed[way] == 6
        if way == "to_client":
            assert await reader.read() == b"po"
        else:
            with pytest.raises(ConnectionResetError):
                await reader.read()
    async with client(proxy) as (reader, writer):
        writer.write(b"once only")
        assert await reader.readexactly(9) == b"once only"


async def test_an_absent_target_ends_the_connection(proxy: Proxy) -> None:
    async with Proxy("127.0.0.1", proxy.port) as before:
        proxy.refuse()
        async with client(before) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await reader.read()


async def test_a_client_that_breaks_off_breaks_the_connection_to_the_target(proxy: Proxy) -> None:
    async with client(proxy) as (_, writer):
        await until(lambda: proxy.open_connections == 1)
        writer.transport.abort()
        await until(lambda: proxy.open_connections == 0)
