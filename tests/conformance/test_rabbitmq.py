"""RabbitMQ, a private node of it: quorum queues, which are the library's choice, and classic ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from functools import cache

import pytest

import acemq
from acemq.testing.conformance import Impossible, TcpFaults, Timing, TransportConformance
from acemq.transport import Transport
from acemq.transports.rabbitmq import transport
from tests.conftest import StartRabbitMQ
from tests.foreign.client import Foreign, Wire
from tests.secret import PASSWORD
from tests.services import RabbitMQ

pytestmark = pytest.mark.timeout(150)

HEARTBEAT = 2
"""Seconds; a link is given up after two of them without a byte."""


class OnRabbitMQ(TransportConformance):
    version = acemq.__version__
    slow = frozenset({"C-101", "C-104", "C-105", "C-110", "C-111"})
    timing = Timing(
        step=timedelta(milliseconds=50), silence=timedelta(seconds=12), takeover=timedelta(seconds=3 * HEARTBEAT)
    )

    @pytest.fixture(autouse=True)
    def between(self, node: RabbitMQ) -> Iterator[None]:
        self.server_node = node
        with TcpFaults(node.url, restart=self._restart, wipe=self._wipe, block=self._block) as tcp:
            self.tcp = tcp
            yield

    def make(self, **options: object) -> Transport:
        return self.tcp.behind(lambda url: transport(f"{url}?heartbeat={HEARTBEAT}", **options))

    def server(self) -> str:
        return f"RabbitMQ {_version(self.server_node)}"

    def faults(self) -> TcpFaults:
        return self.tcp

    async def put_raw(self, queue: str, body: bytes) -> None:
        def put() -> None:
            with Foreign(self.server_node.url) as foreign:
                foreign.put(queue, body)

        await asyncio.to_thread(put)

    async def put_malformed(self, queue: str) -> bytes:
        raise Impossible("RabbitMQ takes every message apart itself, and closes the connection of a malformed one")

    def no_access(self) -> tuple[Transport, str]:
        secret = "not-the-password"
        return self.tcp.behind(lambda url: transport(url.replace(PASSWORD, secret))), secret

    def _block(self, on: bool) -> None:
        """The alarm goes off at the next look at the memory, not at once."""
        self.server_node.set_memory_alarm(on)
        while ("memory" in self.server_node.ctl("eval", "rabbit_alarm:get_alarms().")) is not on:
            pass

    def _restart(self) -> None:
        """In order: a quorum queue of RabbitMQ 3.10 that is only just made does not survive a kill (tests/crash)."""
        self.server_node.stop()
        self.server_node.start()

    def _wipe(self) -> None:
        """Everything in the virtual host goes, as when it was deleted and made again; links stay."""
        self.server_node.ctl("stop_app")
        self.server_node.ctl("reset")
        self.server_node.ctl("start_app")


@cache
def _version(node: RabbitMQ) -> str:
    return node.ctl("version").strip()


@pytest.fixture(scope="module")
def node(start_rabbitmq_for_module: StartRabbitMQ) -> RabbitMQ:
    return start_rabbitmq_for_module()


class TestQuorum(OnRabbitMQ):
    label = "rabbitmq"
    length_slack = 1


@pytest.mark.slow
class TestClassic(OnRabbitMQ):
    label = "rabbitmq, classic queues"
    queues = {"type": "classic"}  # noqa: RUF012 (a TypedDict that nobody changes)


@pytest.mark.parametrize("raw", [b"\x80\x00\xc8ab", b"\x20\x00\x00\x00\x00\x04\x01a?x"], ids=["a property", "a header"])
def test_the_broker_refuses_a_malformed_message(node: RabbitMQ, raw: bytes) -> None:
    """Hence no hook for one: nobody can put it there."""
    wire = Wire(node.url)
    try:
        with pytest.raises(AssertionError, match=r"Connection\.Close"):
            wire.put_properties("nowhere", b"x", raw)
    finally:
        wire.hang_up()
