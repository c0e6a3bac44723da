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
_WITHIN = 60.0


def make_fresh(url: str, queue: str) -> None:
    """An empty, durable, classic queue."""

    async def make(channel: Channel) -> None:
        await channel.queue_delete(queue)
        await channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})

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
        await _until(channel, queue, lambda depth: depth == count)

    _on_channel(url, copy)


def check_depth(url: str, queue: str, *, least: int = 0, most: int) -> None:
    """Raise `RunFailed` unless the queue soon holds between `least` and `most`: what the client counted must be so."""
    _on_channel(url, lambda channel: _until(channel, queue, lambda depth: least <= depth <= most))


async def _until(channel: Channel, queue: str, holds: Callable[[int], bool]) -> None:
    deadline = time.monotonic() + _WITHIN
    while True:
        depth = (await channel.queue_declare(queue, passive=True)).message_count or 0
        if holds(depth):
            return
        if time.monotonic() > deadline:
            raise RunFailed(f"{queue!r} holds {depth} messages, which is not what was counted")
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

    return asyncio.run(run())
