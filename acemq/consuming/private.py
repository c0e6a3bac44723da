"""Consumers of queues that are the library's own: the scheduler's control queue, the queue for answers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from acemq.consuming.consumer import Consumer
from acemq.consuming.options import ConsumeOptions
from acemq.interceptors import Around
from acemq.message import Message
from acemq.retry import RetryPolicy
from acemq.transport import Delivery

AGAIN = timedelta(seconds=5)
"""Before what could not be done is tried again (CONTRACT.md section 6)."""


class PrivateConsumer(Consumer):
    """Hands on whatever comes, as it came: such a queue has no dead letters, so nothing may be set aside.

    Hooks of the application are not asked. It is drained after the others, whose handlers may wait for what it brings.
    """

    def __init__(self, queue: str, **made: Any) -> None:
        super().__init__(queue, **made)
        self._around = Around(())

    def _admit(self, delivery: Delivery) -> Message[Any]:
        self._suspects.forget_foremost()
        return Message(delivery.body, delivery, self.mover.clock)


def options(prefetch: int, concurrency: int) -> ConsumeOptions:
    return {
        "prefetch": prefetch,
        "concurrency": concurrency,
        "retry": RetryPolicy.forever(first=AGAIN, ceiling=AGAIN).with_jitter(0),
        "declare": False,
    }
