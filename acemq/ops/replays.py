"""Putting set-aside messages back: described in words, shown before it is done."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta

import msgspec

from acemq.errors import ConfigurationError, TopologyError
from acemq.mq import AceMQ
from acemq.ops import filters
from acemq.ops.queues import meant_to_be_there
from acemq.patterns.replay import MOST_TOGETHER, Replay, ReplayResult, target_of


class ReplayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator asked for. Refused where it is made: a filter, a rate, a limit or a batch that cannot be."""

    source: str
    into: str | None = None
    where: tuple[str, ...] = ()
    """As in `filters.parse`; all must accept."""
    limit: int | None = None
    rate: float | None = None
    """Messages a second, at most."""
    within: timedelta | None = None
    keep_attempts: bool = False
    batch: int = 1
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.target == self.source:
            raise ConfigurationError(f"replaying {self.source!r} onto itself would never end; name another queue")
        if self.limit is not None and self.limit < 0:
            raise ConfigurationError(f"limit={self.limit} must be 0 or more")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise ConfigurationError(f"rate={self.rate:g} must be more than 0, for example 50 or 0.5")
        if not 1 <= self.batch <= MOST_TOGETHER:
            raise ConfigurationError(f"batch={self.batch} must lie between 1 and {MOST_TOGETHER:,}")
        for text in self.where:
            filters.parse(text)

    @property
    def target(self) -> str:
        return self.into if self.into is not None else target_of(self.source)

    def replay(self, mq: AceMQ) -> Replay:
        replay = mq.replay(self.source).into(self.target).in_batches(self.batch)
        for text in self.where:
            replay = replay.where(filters.parse(text))
        if self.rate is not None:
            replay = replay.at_rate(self.rate)
        if self.within is not None:
            replay = replay.until(self.within)
        return replay.keeping_attempts() if self.keep_attempts else replay


class ReplayPreview(msgspec.Struct, frozen=True):
    """What a replay would begin with."""

    source: str
    target: str
    waiting: int
    most: int
    """Looked at, or with a limit replayed."""


async def preview(mq: AceMQ, order: ReplayOrder) -> ReplayPreview:
    """How much waits. `TopologyError`: the source or the target is not there, and nothing was moved."""
    replay = order.replay(mq)
    async with meant_to_be_there(mq, order.source):
        waiting = await replay.pending()
    if not await mq.exists(order.target):
        raise TopologyError(
            f"there is no queue {order.target!r} to replay into. Nothing was moved",
            advice="Name another one with --into, or have it made first: by whoever runs its service, "
            "or by `acemq topology apply` with their topology",
        )
    most = waiting if order.limit is None else min(waiting, order.limit)
    return ReplayPreview(order.source, order.target, waiting, most)


async def carry_out(mq: AceMQ, order: ReplayOrder, progress: Callable[[ReplayResult], None]) -> ReplayResult:
    """Replay, or look with `dry_run`; `progress` is told after each message or batch, and of the end however it ends.

    What `Replay.run` raises is raised.
    """
    replay = order.replay(mq).reporting(progress, every=1)
    return await (replay.dry_run(order.limit) if order.dry_run else replay.run(order.limit))


def skipped(result: ReplayResult) -> dict[str, int]:
    """Why what was looked at was not replayed, by reason."""
    return {"put_back": result.put_back} if result.put_back else {}
