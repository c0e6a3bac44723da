"""The kit proves itself: each mutant is the memory transport with one defect, which its scenario must see."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from msgspec.structs import replace

from acemq.errors import ClosedError, DriftError
from acemq.testing.conformance.hooks import NOW
from acemq.testing.conformance.memory import MemoryConformance
from acemq.topology import Topology, dead_letters_of
from acemq.transport import (
    ROUTED,
    ApplyMode,
    Capabilities,
    Delivery,
    Depth,
    ExchangeMissing,
    Finding,
    Kind,
    LostBy,
    Outgoing,
    Published,
    PublishResult,
    QueueFull,
    QueueMissing,
    Renewal,
    Settled,
    Settlement,
    Sink,
    Subscription,
    SubscriptionPhase,
    SubscriptionState,
    Transport,
    TransportState,
    Verb,
)
from acemq.transports.memory import MemoryBroker


class Through:
    """A transport that changes nothing. A mutant overrides one verb."""

    def __init__(self, inner: Transport, broker: MemoryBroker) -> None:
        self.inner, self.broker = inner, broker

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def capabilities_of(self, kind: Kind, name: str, /) -> Capabilities:
        return self.inner.capabilities_of(kind, name)

    @property
    def state(self) -> TransportState:
        return self.inner.state

    async def open(self, *, within: timedelta) -> None:
        await self.inner.open(within=within)

    async def close(self, grace: timedelta = timedelta(seconds=5)) -> None:
        await self.inner.close(grace)

    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        return await self.inner.apply(topology, mode)

    async def publish(
        self, batch: Sequence[Outgoing], *, within: timedelta, transaction: object | None = None
    ) -> Sequence[PublishResult]:
        return await self.inner.publish(batch, within=within, transaction=transaction)

    async def subscribe(
        self,
        queue: str,
        sink: Sink,
        *,
        prefetch: int,
        exclusive: bool = False,
        lease: timedelta | None = None,
        options: Mapping[str, object] | None = None,
    ) -> Subscription:
        return await self.inner.subscribe(
            queue, sink, prefetch=prefetch, exclusive=exclusive, lease=lease, options=options
        )

    async def pull(
        self, queue: str, *, most: int, wait: timedelta, lease: timedelta | None = None
    ) -> Sequence[Delivery]:
        return await self.inner.pull(queue, most=most, wait=wait, lease=lease)

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        return await self.inner.settle(batch)

    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        return await self.inner.renew(batch, lease)

    async def depth(self, queue: str) -> Depth:
        return await self.inner.depth(queue)

    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        return await self.inner.exists(name, kind)

    async def delete(self, name: str, kind: Kind = "queue", *, only_if_empty: bool = False) -> bool:
        return await self.inner.delete(name, kind, only_if_empty=only_if_empty)

    async def purge(self, queue: str) -> int | None:
        return await self.inner.purge(queue)


class ThroughSink:
    """A sink that changes nothing."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        self.inner.deliver(batch)

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None:
        self.inner.lost(batch, by)

    def changed(self, state: SubscriptionState, /) -> None:
        self.inner.changed(state)


class ThroughSubscription:
    """A subscription that changes nothing."""

    def __init__(self, inner: Subscription) -> None:
        self.inner = inner

    @property
    def queue(self) -> str:
        return self.inner.queue

    @property
    def state(self) -> SubscriptionState:
        return self.inner.state

    def pause(self) -> None:
        self.inner.pause()

    def resume(self) -> None:
        self.inner.resume()

    async def stop(self) -> None:
        await self.inner.stop()

    async def close(self) -> None:
        await self.inner.close()


# One defect each


class SaysNoWhenClosed(Through):
    async def exists(self, name: str, kind: Kind = "queue") -> bool:
        try:
            return await self.inner.exists(name, kind)
        except ClosedError:
            return False


class _Changing(Through, ABC):
    """What is published is changed on the way."""

    @abstractmethod
    def change(self, message: Outgoing) -> Outgoing: ...

    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        return await self.inner.publish([self.change(message) for message in batch], **options)


class LosesReplyTo(_Changing):
    def change(self, message: Outgoing) -> Outgoing:
        return replace(message, reply_to=None)


class LosesTheTypeOfAHeader(_Changing):
    def change(self, message: Outgoing) -> Outgoing:
        headers = {name: int(value) if isinstance(value, bool) else value for name, value in message.headers.items()}
        return replace(message, headers=headers)


class LowersHeaderNames(_Changing):
    def change(self, message: Outgoing) -> Outgoing:
        return replace(message, headers={name.lower(): value for name, value in message.headers.items()})


class IgnoresAnOptionItCannotHonour(_Changing):
    def change(self, message: Outgoing) -> Outgoing:
        return message if self.capabilities.publish_delay else replace(message, delay=None)


class DeliversADelayedMessageEarly(_Changing):
    def change(self, message: Outgoing) -> Outgoing:
        return message if message.delay is None else replace(message, delay=message.delay / 2)


class LosesTheLastOfABatch(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        if len(batch) < 100:
            return await self.inner.publish(batch, **options)
        return [*await self.inner.publish(batch[:-1], **options), ROUTED]


class AnswersInTheWrongOrder(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = list(await self.inner.publish(batch, **options))
        return results[1:] + results[:1]


class SaysThatAllIsRouted(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = await self.inner.publish(batch, **options)
        return [ROUTED if result.outcome is Published.UNROUTABLE else result for result in results]


class KnowsResultsByMessageId(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = await self.inner.publish(batch, **options)
        known = dict(zip((message.message_id for message in batch), results, strict=True))
        return [known[message.message_id] for message in batch]


class WritesWhatItRefused(Through):
    """A publish that got no answer is called refused, and sent once more when there is a link again."""

    def __init__(self, inner: Transport, broker: MemoryBroker) -> None:
        super().__init__(inner, broker)
        self._later: list[Outgoing] = []

    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        later, self._later = self._later, []
        results = list(await self.inner.publish([*later, *batch], **options))[len(later) :]
        for place, result in enumerate(results):
            if result.outcome is Published.FAILED:
                self._later.append(batch[place])
                results[place] = PublishResult(Published.REFUSED, result.error)
        return results


class PublishesBackwards(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        return list(await self.inner.publish(batch[::-1], **options))[::-1]


class DropsTheOldest(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = list(await self.inner.publish(batch, **options))
        for place, result in enumerate(results):
            if isinstance(result.error, QueueFull):
                oldest = await self.inner.pull(batch[place].routing_key, most=1, wait=NOW)
                await self.inner.settle([Settlement(each, Verb.DROP) for each in oldest])
                results[place : place + 1] = await self.inner.publish([batch[place]], **options)
        return results


class LosesTheLinkOverAnExchange(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = await self.inner.publish(batch, **options)
        if any(isinstance(result.error, ExchangeMissing) for result in results):
            self.broker.disconnect("a missing exchange")
            await asyncio.sleep(0)
        return results


class MakesACopyPerBinding(Through):
    async def publish(self, batch: Sequence[Outgoing], **options: Any) -> Sequence[PublishResult]:
        results = await self.inner.publish(batch, **options)
        await self.inner.publish([message for message in batch if message.exchange], **options)
        return results


class CreatesWhenAskedToLook(Through):
    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        findings = await self.inner.apply(topology, mode)
        if mode is ApplyMode.REPORT:
            await self.inner.apply(topology, ApplyMode.CREATE)
        return findings


class OverlooksDrift(Through):
    async def apply(self, topology: Topology, mode: ApplyMode) -> Sequence[Finding]:
        try:
            return await self.inner.apply(topology, mode)
        except DriftError:
            return []


class MissingQueuesAreEmpty(Through):
    async def pull(self, queue: str, **options: Any) -> Sequence[Delivery]:
        try:
            return await self.inner.pull(queue, **options)
        except QueueMissing:
            return []


class HandsOutOneTooMany(Through):
    async def subscribe(self, queue: str, sink: Sink, *, prefetch: int, **options: Any) -> Subscription:
        return await self.inner.subscribe(queue, sink, prefetch=prefetch + 1, **options)


class DoesNotPause(Through):
    async def subscribe(self, queue: str, sink: Sink, **options: Any) -> Subscription:
        class Unpaused(ThroughSubscription):
            def pause(self) -> None:
                self.inner.pause()
                asyncio.get_running_loop().call_soon(self.inner.resume)

        return Unpaused(await self.inner.subscribe(queue, sink, **options))


class KeepsWhatAClosedOneHeld(Through):
    async def subscribe(self, queue: str, sink: Sink, **options: Any) -> Subscription:
        class Unclosed(ThroughSubscription):
            async def close(self) -> None:
                await self.inner.stop()

        return Unclosed(await self.inner.subscribe(queue, sink, **options))


class ForgetsTheBellAfterALoss(Through):
    """After a lost link nobody is told of new messages any more."""

    async def subscribe(self, queue: str, sink: Sink, **options: Any) -> Subscription:
        held: list[Subscription] = []

        class Deaf(ThroughSink):
            def changed(self, state: SubscriptionState, /) -> None:
                self.inner.changed(state)
                if state.phase is SubscriptionPhase.ACTIVE and state.generation > 1:
                    held[0].pause()

        held.append(await self.inner.subscribe(queue, Deaf(sink), **options))
        return held[0]


class HidesARedelivery(Through):
    async def pull(self, queue: str, **options: Any) -> Sequence[Delivery]:
        return [replace(each, redelivered=False) for each in await self.inner.pull(queue, **options)]


class RequeuesAtOnce(Through):
    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        return await self.inner.settle([replace(each, delay=NOW) for each in batch])


class KeepsARetryInItsHands(Through):
    """It takes the message from the broker, and brings it back when it is due."""

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        return await self.inner.settle([self._kept(each) if each.delay else each for each in batch])

    def _kept(self, each: Settlement) -> Settlement:
        got = each.delivery
        again = Outgoing(
            exchange="",
            routing_key=got.queue,
            body=got.body,
            headers=got.headers if each.headers is None else each.headers,
            message_id=got.message_id or "",
            content_type=got.content_type,
        )

        def bring_back() -> None:
            self.broker.publish([again])

        self.broker.clock.call_later(each.delay.total_seconds(), bring_back)
        return Settlement(got, Verb.ACCEPT)


class DeadLettersADrop(Through):
    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        for each in batch:
            if each.verb is Verb.DROP:
                got = each.delivery
                letter = Outgoing(
                    exchange="",
                    routing_key=dead_letters_of(got.queue),
                    body=got.body,
                    headers=got.headers,
                    message_id=got.message_id or "",
                    content_type=got.content_type,
                )
                await self.inner.publish([letter], within=timedelta(seconds=1))
        return await self.inner.settle(batch)


class SaysThatAllIsDone(Through):
    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        return [Settled.DONE for _ in await self.inner.settle(batch)]


class TakesAStaleSettlement(Through):
    """It removes the message from whoever holds it now."""

    async def settle(self, batch: Sequence[Settlement]) -> Sequence[Settled]:
        results = list(await self.inner.settle(batch))
        for place, result in enumerate(results):
            if result is Settled.STALE and self.broker.remove(batch[place].delivery.queue, 1):
                results[place] = Settled.DONE
        return results


class EndsALeaseEarly(Through):
    async def subscribe(
        self, queue: str, sink: Sink, *, lease: timedelta | None = None, **options: Any
    ) -> Subscription:
        return await self.inner.subscribe(queue, sink, lease=lease and lease / 2, **options)


class RenewsWhatIsLost(Through):
    async def renew(self, batch: Sequence[Delivery], lease: timedelta) -> Sequence[Renewal]:
        return [replace(renewal, outcome="renewed", until=1e9) for renewal in await self.inner.renew(batch, lease)]


class LosesWhatACancelledPullTook(Through):
    async def pull(self, queue: str, **options: Any) -> Sequence[Delivery]:
        taken = await self.inner.pull(queue, **options)
        await asyncio.sleep(0)  # cancelled here, what was taken is held for ever
        return taken


class CountsWhatIsHeldAsReady(Through):
    async def depth(self, queue: str) -> Depth:
        depth = await self.inner.depth(queue)
        return replace(depth, ready=depth.ready + (depth.held or 0))


class TellsASinkWhatItRaised(Through):
    """What a sink has refused is taken off its hands."""

    async def subscribe(self, queue: str, sink: Sink, **options: Any) -> Subscription:
        transport, dropping = self.inner, list[asyncio.Future[Sequence[Settled]]]()

        class Careful(ThroughSink):
            def deliver(self, batch: Sequence[Delivery], /) -> None:
                try:
                    self.inner.deliver(batch)
                except Exception:
                    dropping.append(
                        asyncio.ensure_future(transport.settle([Settlement(each, Verb.DROP) for each in batch]))
                    )
                    raise

        return await self.inner.subscribe(queue, Careful(sink), **options)


MUTANTS: dict[str, Callable[[Transport, MemoryBroker], Transport]] = {
    "C-004": SaysNoWhenClosed,
    "C-011": LosesReplyTo,
    "C-012": LosesTheLastOfABatch,
    "C-013": AnswersInTheWrongOrder,
    "C-014": SaysThatAllIsRouted,
    "C-016": LosesTheLinkOverAnExchange,
    "C-017": KnowsResultsByMessageId,
    "C-022": WritesWhatItRefused,
    "C-024": PublishesBackwards,
    "C-025": DropsTheOldest,
    "C-028": LosesTheTypeOfAHeader,
    "C-029": LowersHeaderNames,
    "C-038": CreatesWhenAskedToLook,
    "C-039": OverlooksDrift,
    "C-048": MakesACopyPerBinding,
    "C-054": MissingQueuesAreEmpty,
    "C-057": HandsOutOneTooMany,
    "C-061": DoesNotPause,
    "C-063": KeepsWhatAClosedOneHeld,
    "C-067": TellsASinkWhatItRaised,
    "C-069": HidesARedelivery,
    "C-070": RequeuesAtOnce,
    "C-073": DeadLettersADrop,
    "C-074": SaysThatAllIsDone,
    "C-079": EndsALeaseEarly,
    "C-081": TakesAStaleSettlement,
    "C-082": RenewsWhatIsLost,
    "C-089": DeliversADelayedMessageEarly,
    "C-099": ForgetsTheBellAfterALoss,
    "C-109": LosesWhatACancelledPullTook,
    "C-112": CountsWhatIsHeldAsReady,
    "C-120": IgnoresAnOptionItCannotHonour,
    "C-122": KeepsARetryInItsHands,
    "C-125": HandsOutOneTooMany,
}
"""The most telling ones: a defect for its scenario."""


class MutantConformance(MemoryConformance):
    """The suite on a mutant."""

    mutant: ClassVar[Callable[[Transport, MemoryBroker], Transport]] = Through

    def make(self, **options: object) -> Transport:
        inner = super().make(**options)
        made = type(self).mutant(inner, self.broker())
        self._names[id(made)] = self._names[id(inner)]
        return made
