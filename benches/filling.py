"""The queue of one run: fresh, filled in the wire format of the candidate, and counted afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiormq
from aiormq.abc import ChannelFrame
from aiormq.channel import Channel
from pamqp import body, commands, frame, header

from benches.running import RunFailed

T = TypeVar("T")

_AT_ONCE = 500
_WITHIN = 30.0


def remove(url: str, queue: str) -> None:
    """The next client declares it."""

    async def delete(channel: Channel) -> None:
        await channel.queue_delete(queue)

    _on_channel(url, delete)


def make_fresh(url: str, queue: str, queue_type: str = "classic") -> None:
    """An empty, durable queue."""

    async def make(channel: Channel) -> None:
        await channel.queue_delete(queue)
        await channel.queue_declare(queue, durable=True, arguments={"x-queue-type": queue_type})

    _on_channel(url, make)


def clone(url: str, queue: str, count: int) -> None:
    """Make `count` of the one message that is in the queue: the same body, properties and headers."""

    async def copy(channel: Channel) -> None:
        found = await channel.basic_get(queue, no_ack=True)
        if found.header is None or not found.body:
            raise RunFailed(f"no message in {queue!r} to make more of")
        frames = (
            commands.Basic.Publish(exchange="", routing_key=queue),
            header.ContentHeader(body_size=len(found.body), properties=found.header.properties),
            body.ContentBody(found.body),
        )
        # All are alike: written once, and sent as often as wanted without a word from the broker in between.
        one = b"".join(frame.marshal(each, channel.number) for each in frames)
        for begin in range(0, count, _AT_ONCE):
            await channel.write_queue.put(ChannelFrame(one * min(_AT_ONCE, count - begin), should_close=False))
        await _until(channel, queue, lambda depth, _: depth == count)

    _on_channel(url, copy)


def check_depth(url: str, queue: str, *, least: int = 0, most: int) -> None:
    """Raise `RunFailed` unless the queue soon holds between `least` and `most`: what the client counted must be so."""
    _on_channel(url, lambda channel: _until(channel, queue, lambda depth, _: least <= depth <= most))


def await_consumer(url: str, queue: str) -> None:
    """Return once somebody consumes from it."""
    _on_channel(url, lambda channel: _until(channel, queue, lambda _, consumers: consumers > 0))


async def _until(channel: Channel, queue: str, holds: Callable[[int, int], bool]) -> None:
    """Until its depth and the number of its consumers are as wanted."""
    deadline = time.monotonic() + _WITHIN
    while True:
        found = await channel.queue_declare(queue, passive=True)
        depth, consumers = found.message_count or 0, found.consumer_count or 0
        if holds(depth, consumers):
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"{queue!r} has {depth} messages and {consumers} consumers, which is not what was expected")
        await asyncio.sleep(0.05)


def _on_channel(url: str, act: Callable[[Channel], Coroutine[Any, Any, T]]) -> T:
    async def run() -> T:
        connection = await aiormq.connect(url)
        try:
            channel = await connection.channel(publisher_confirms=False)
            assert isinstance(channel, Channel)
            return await act(channel)
        finally:
            await connection.close()

    try:
        return asyncio.run(run())
    except (aiormq.exceptions.AMQPError, OSError) as error:
        raise RunFailed(f"the broker: {type(error).__name__} {error}") from None
