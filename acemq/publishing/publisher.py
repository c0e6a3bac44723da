"""One payload class to one place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar, Unpack

from acemq.publishing.options import PublishOptions
from acemq.publishing.outbound import Outbound, Receipt

T_contra = TypeVar("T_contra", contravariant=True)


class Publisher(Generic[T_contra]):
    """An exchange, a routing key and a payload class, named once. No I/O to make, holds nothing, shared freely."""

    def __init__(self, outbound: Outbound, exchange: str, routing_key: str, options: PublishOptions) -> None:
        self._outbound, self._exchange, self._routing_key, self._options = outbound, exchange, routing_key, options

    async def publish(
        self, payload: T_contra, *, routing_key: str | None = None, **options: Unpack[PublishOptions]
    ) -> Receipt:
        return await self._outbound.publish(self._exchange, self._key(routing_key), payload, self._with(options))

    async def publish_many(
        self, payloads: Iterable[T_contra], *, routing_key: str | None = None, **options: Unpack[PublishOptions]
    ) -> list[Receipt]:
        return await self._outbound.publish_many(self._exchange, self._key(routing_key), payloads, self._with(options))

    def _key(self, routing_key: str | None) -> str:
        return self._routing_key if routing_key is None else routing_key

    def _with(self, options: PublishOptions) -> PublishOptions:
        return {**self._options, **options} if options else self._options
