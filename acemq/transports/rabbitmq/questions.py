"""What the broker is asked about queues and exchanges, by any name that it knows.

aiormq's own calls go through pamqp, which takes names of Latin letters, digits and a few signs only, and raises
`ValueError` for every other; RabbitMQ takes 255 bytes of any UTF-8.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import cast

import aiormq
from aiormq import spec
from aiormq.abc import ArgumentsType

from acemq.headers import HeaderValue
from acemq.topology import Declaration
from acemq.transport import Kind


class _QueueDeclare(spec.Queue.Declare):
    def validate(self) -> None:
        """The broker's affair, as below."""


class _QueueBind(spec.Queue.Bind):
    def validate(self) -> None: ...


class _QueuePurge(spec.Queue.Purge):
    def validate(self) -> None: ...


class _QueueDelete(spec.Queue.Delete):
    def validate(self) -> None: ...


class _ExchangeDeclare(spec.Exchange.Declare):
    def validate(self) -> None: ...


class _ExchangeDelete(spec.Exchange.Delete):
    def validate(self) -> None: ...


class _Consume(spec.Basic.Consume):
    def validate(self) -> None: ...


def look(channel: aiormq.Channel, kind: str, name: str) -> Awaitable[object]:
    """Whether it is there; declares nothing."""
    if kind == "exchange":
        return channel.rpc(_ExchangeDeclare(exchange=name, passive=True))
    return count(channel, name)


def count(channel: aiormq.Channel, queue: str) -> Awaitable[spec.Queue.DeclareOk]:
    return channel.rpc(_QueueDeclare(queue=queue, passive=True))


def declare(channel: aiormq.Channel, declared: Declaration) -> Awaitable[object]:
    arguments = _arguments(declared.arguments)
    match declared.kind:
        case "exchange":
            return channel.rpc(
                _ExchangeDeclare(
                    exchange=declared.name,
                    exchange_type=declared.type,
                    durable=declared.durable,
                    auto_delete=declared.auto_delete,
                    arguments=arguments,
                )
            )
        case "queue":
            return channel.rpc(
                _QueueDeclare(
                    queue=declared.name,
                    durable=declared.durable,
                    exclusive=declared.exclusive,
                    auto_delete=declared.auto_delete,
                    arguments=arguments,
                )
            )
        case "binding":
            return channel.rpc(
                _QueueBind(queue=declared.name, exchange=declared.exchange, routing_key=declared.routing_key)
            )


def delete(channel: aiormq.Channel, kind: Kind, name: str, *, if_empty: bool = False) -> Awaitable[object]:
    if kind == "exchange":
        return channel.rpc(_ExchangeDelete(exchange=name))
    return channel.rpc(_QueueDelete(queue=name, if_empty=if_empty))


def purge(channel: aiormq.Channel, queue: str) -> Awaitable[spec.Queue.PurgeOk]:
    return channel.rpc(_QueuePurge(queue=queue))


def consume(
    channel: aiormq.Channel, queue: str, tag: str, arguments: Mapping[str, HeaderValue]
) -> Awaitable[spec.Basic.ConsumeOk]:
    """The deliveries are the lane's affair."""
    return channel.rpc(_Consume(queue=queue, consumer_tag=tag, arguments=_arguments(arguments)))


def _arguments(given: Mapping[str, HeaderValue]) -> ArgumentsType:
    return cast("ArgumentsType", dict(given))
