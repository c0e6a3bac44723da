"""The memory transport, with every profile, on a clock that is moved."""

from __future__ import annotations

from datetime import timedelta

import pytest
from msgspec.structs import replace

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


@pytest.mark.slow
class TestOfShortDelays(OnMemory):
    """What waits longer is put back until it is due, or hops; exchanges do not delay at all."""

    label = "memory, of short delays"
    profile = replace(
        Profile.FULL,
        name="SHORT",
        capabilities=replace(
            Profile.FULL.capabilities,
            publish_delay=timedelta(minutes=6),
            requeue_delay=timedelta(minutes=7),
            requeue_rewrites=False,
        ),
        of_exchanges={"publish_delay": None},
    )


@pytest.mark.slow
class TestOfShortPublishDelays(OnMemory):
    """Nothing can be put back for a while: whatever waits longer hops."""

    label = "memory, of short publish delays"
    profile = replace(
        Profile.FULL,
        name="SHORT TO PUBLISH",
        capabilities=replace(
            Profile.FULL.capabilities,
            publish_delay=timedelta(minutes=6),
            requeue_delay=None,
            requeue_rewrites=False,
        ),
    )
