"""How much waits in a queue, in its dead letters and among its parked messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec

from acemq.connection import Connection
from acemq.errors import ConfigurationError, TopologyError
from acemq.patterns.replay import SUFFIXES
from acemq.topology import Topology, check_name
from acemq.transport import Depth

MOST = 200
"""Queues that are asked about in one go."""


class QueueLine(msgspec.Struct, frozen=True):
    """One queue, by the broker's own word of now."""

    queue: str
    ready: int | None
    """Here and below `None`: this broker does not tell, or there is no such queue."""
    dead: int | None
    """In `{queue}.dlq`."""
    parked: int | None
    """In `{queue}.parked`."""

    @property
    def needs_somebody(self) -> bool:
        return bool(self.dead or self.parked)


class SetAsideLine(msgspec.Struct, frozen=True):
    """A queue of dead letters or parked messages that is there."""

    source: str
    waiting: int
    of: str
    """The queue that they came from."""


async def look_at_queues(mq: Connection, names: Sequence[str], topology: Topology | None = None) -> list[QueueLine]:
    """Of these, or of all queues of the topology; `TopologyError` when one is not there."""
    return await asyncio.gather(*(_look_at(mq, name) for name in named(names, topology)))


async def _look_at(mq: Connection, name: str) -> QueueLine:
    async with meant_to_be_there(mq, name):
        stats = await mq.stats(name)
    return QueueLine(stats.queue, _ready(stats.depth), _ready(stats.dead), _ready(stats.parked))


async def look_at_set_aside(
    mq: Connection, names: Sequence[str], topology: Topology | None = None
) -> list[SetAsideLine]:
    """The `.dlq` and `.parked` of these queues, as far as they are there. They may be named themselves, too."""
    there: list[str] = []
    for name in named(names, topology):
        own = name.endswith(SUFFIXES)
        found = [each for each in ([name] if own else [f"{name}.dlq", f"{name}.parked"]) if await mq.exists(each)]
        if not found and (own or not await mq.exists(name)):
            raise no_queue(name)
        there += [each for each in found if each not in there]
    depths = await asyncio.gather(*(mq.depth(source) for source in there))
    return [
        SetAsideLine(source, depth.ready, source.rpartition(".")[0])
        for source, depth in zip(there, depths, strict=True)
    ]


@asynccontextmanager
async def meant_to_be_there(mq: Connection, name: str) -> AsyncGenerator[None]:
    """To declare it first, as the library advises, is for who writes the program, and not for who looks after it."""
    try:
        yield
    except TopologyError as error:
        if await mq.exists(name):
            raise
        raise no_queue(name) from error


def no_queue(name: str) -> TopologyError:
    return TopologyError(
        f"there is no queue {name!r}",
        advice="Is the name right, and is this its broker? If it should be there, whoever runs its service makes it, "
        "or `acemq topology apply` with their topology",
    )


def named(names: Sequence[str], topology: Topology | None) -> list[str]:
    """The names given, else those of the topology that messages are consumed from."""
    found = [check_name("queue", name) for name in names] or _consumed(topology)
    if not found:
        raise ConfigurationError(
            "no queue is named, and a broker does not list its queues over this protocol: "
            "name them, or say which topology yours is (--topology module:name)"
        )
    if len(found) > MOST:
        raise ConfigurationError(f"{len(found)} queues are too many to ask about at once; name up to {MOST}")
    return found


def _consumed(topology: Topology | None) -> list[str]:
    queues: Iterable[str] = () if topology is None else (queue.name for queue in topology.queues)
    return [name for name in dict.fromkeys(queues) if not name.endswith(SUFFIXES) and ".retry." not in name]


def _ready(depth: Depth | None) -> int | None:
    return None if depth is None else depth.ready
