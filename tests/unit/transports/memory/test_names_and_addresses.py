from __future__ import annotations

import gc
from datetime import timedelta
from typing import cast

import pytest

from acemq.clock import MovableClock
from acemq.errors import ConfigurationError
from acemq.topology import Topology
from acemq.transport import ApplyMode, Factory, Transport
from acemq.transports.memory import MemoryBroker, Profile, transport
from tests.unit.transports.memory.playing import NOW, SECOND, outgoing


async def opened(url: str) -> Transport:
    port = transport(url)
    await port.open(within=SECOND)
    return port


async def declares(port: Transport, queue: str) -> None:
    await port.apply(Topology().queue(queue), ApplyMode.CREATE)


def test_a_factory_does_no_io_and_needs_no_event_loop() -> None:
    assert transport("memory://").state.generation == 0


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("memory://shop?size=3", "size"),
        ("memory://user:secret@shop", "user"),
        ("memory://shop:5672", "port"),
        ("memory://shop/vhost", "path"),
        ("memory:///vhost", "path"),
        ("memory://shop#part", "fragment"),
        ("redis://shop", "redis"),
    ],
)
def test_anything_but_a_name_in_the_url_is_refused_by_name(url: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        transport(url)
    assert "secret" not in str(refused.value)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="prefetch"):
        cast(Factory, transport)("memory://", prefetch=3)


async def test_transports_of_one_name_share_a_broker_and_private_ones_share_nothing() -> None:
    ports = [await opened(url) for url in ("memory://a", "memory://a", "memory://b", "memory://", "memory://")]
    await declares(ports[0], "orders")
    assert [await port.exists("orders") for port in ports] == [True, True, False, False, False]
    for port in ports:
        await port.close()


async def test_a_named_broker_ends_with_its_last_holder() -> None:
    gc.disable()  # at once, not at the next collection
    try:
        port = await opened("memory://ends")
        await port.apply(Topology().queue("orders").queue("mine", exclusive=True), ApplyMode.CREATE)
        await port.publish([outgoing(delay=SECOND), outgoing()], within=SECOND)
        await port.pull("orders", most=1, wait=NOW)
        await port.close()
        again = await opened("memory://ends")
        assert not await again.exists("orders")
        await again.close()
    finally:
        gc.enable()


async def test_a_handle_keeps_a_named_broker_alive() -> None:
    handle = MemoryBroker.named("kept")
    port = await opened("memory://kept")
    await declares(port, "orders")
    await port.close()
    again = await opened("memory://kept")
    assert await again.exists("orders")
    await again.close()
    assert "orders" in handle.queues


def test_other_options_than_those_of_an_existing_name_are_refused() -> None:
    clock = MovableClock()
    handle = MemoryBroker.named("strict", clock=clock, lease=timedelta(seconds=30))
    assert MemoryBroker.named("strict", clock=clock) is handle
    with pytest.raises(ConfigurationError, match="lease"):
        MemoryBroker.named("strict", lease=None)
    with pytest.raises(ConfigurationError, match="profile"):
        MemoryBroker.named("strict", profile=Profile.BARE)
    with pytest.raises(ConfigurationError, match="clock"):
        transport("memory://strict", clock=MovableClock())


def test_a_broker_given_and_options_that_are_not_its_own_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="clock"):
        transport("memory://", broker=MemoryBroker(), clock=MovableClock())
    with pytest.raises(ConfigurationError, match="name"):
        transport("memory://shop", broker=MemoryBroker())


async def test_a_private_broker_outlives_the_closing_of_its_transport() -> None:
    port = await opened("memory://")
    await declares(port, "orders")
    await port.close()
    await port.open(within=SECOND)
    assert await port.exists("orders")
    await port.close()
