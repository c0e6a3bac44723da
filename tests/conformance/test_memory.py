"""The memory transport, with every profile, on a clock that is moved."""

from __future__ import annotations

from datetime import timedelta

from acemq.testing.conformance.memory import MemoryConformance
from acemq.transports.memory import Profile


class TestFull(MemoryConformance):
    label = "memory"
    lease = timedelta(seconds=30)


class TestUnleased(MemoryConformance):
    label = "memory, unleased"


class TestLikeRabbitMQ(MemoryConformance):
    label = "memory, as RabbitMQ"
    profile = Profile.RABBITMQ


class TestBare(MemoryConformance):
    label = "memory, bare"
    profile = Profile.BARE
