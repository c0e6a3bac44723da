"""The memory transport, with every profile, on a clock that is moved."""

from __future__ import annotations

from datetime import timedelta

import acemq
from acemq.testing.conformance.memory import MemoryConformance
from acemq.transports.memory import Profile


class OnMemory(MemoryConformance):
    version = acemq.__version__


class TestFull(OnMemory):
    label = "memory"
    lease = timedelta(seconds=30)


class TestUnleased(OnMemory):
    label = "memory, unleased"


class TestLikeRabbitMQ(OnMemory):
    label = "memory, as RabbitMQ"
    profile = Profile.RABBITMQ


class TestBare(OnMemory):
    label = "memory, bare"
    profile = Profile.BARE
