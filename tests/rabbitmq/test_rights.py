"""A user who may not do everything, and a server that proves who it is."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import trustme

from acemq.topology import Topology
from acemq.transport import AccessDenied, ApplyMode, NotConnected, Published
from acemq.transports.rabbitmq import transport
from tests.conftest import StartRabbitMQ
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import SOON, Recorder, fill, out, port_of, send, settle
from tests.services import RabbitMQ, free_ports


@pytest.fixture
async def restricted(rabbitmq: RabbitMQ, name: str) -> AsyncIterator[str]:
    """The URL of a user who may write and read what begins with the test's name and `-mine`, and configure nothing."""
    user = name[-16:]

    def prepare() -> None:
        rabbitmq.ctl("add_user", user, "pw")
        rabbitmq.ctl("set_permissions", user, "^$", f"^({name}-mine.*|amq\\.default)$", f"^{name}-mine.*$")

    await asyncio.to_thread(prepare)
    yield f"amqp://{user}:pw@127.0.0.1:{port_of(rabbitmq.url)}"
    await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)


async def test_a_forbidden_exchange_refuses_its_messages_and_the_others_go_on(
    restricted: str, dial: Dial, declare: Declare, name: str
) -> None:
    admin, one, queue = await dial(), await dial(restricted), await declare("mine")
    await admin.apply(Topology().exchange(f"{name}-theirs"), ApplyMode.CREATE)
    results = await send(one, out(queue), out("k", exchange=f"{name}-theirs"))
    assert results[0].outcome in (Published.ROUTED, Published.FAILED)
    assert results[1].outcome is Published.REFUSED
    assert isinstance(results[1].error, AccessDenied)
    assert results[1].error.code == 403
    # The next tries cost no channel.
    good, bad = await asyncio.gather(send(one, out(queue)), send(one, out("k", exchange=f"{name}-theirs")))
    assert (good[0].outcome, bad[0].outcome) == (Published.ROUTED, Published.REFUSED)
    assert one.state.generation == 1
    await admin.delete(f"{name}-theirs", "exchange")


async def test_a_queue_that_may_not_be_read_is_told(restricted: str, dial: Dial, declare: Declare) -> None:
    one, queue = await dial(restricted), await declare("theirs")
    with pytest.raises(AccessDenied, match="theirs"):
        await one.subscribe(queue, Recorder(), prefetch=1)
    with pytest.raises(AccessDenied, match="theirs"):
        await one.pull(queue, most=1, wait=timedelta())


async def test_what_is_there_needs_no_right_to_declare_it(
    restricted: str, dial: Dial, declare: Declare, name: str
) -> None:
    one, queue = await dial(restricted), await declare("mine")
    (found,) = await one.apply(Topology().queue(queue, type="classic"), ApplyMode.CREATE)
    assert (found.verdict, found.note) == ("present", "not compared: no right to declare it")
    with pytest.raises(AccessDenied, match=f"{name}-mine-new"):
        await one.apply(Topology().queue(f"{name}-mine-new", type="classic"), ApplyMode.CREATE)


async def test_over_tls_the_certificate_decides(
    start_rabbitmq: StartRabbitMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    server_certificate = authority.issue_cert("127.0.0.1")
    server_certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    (port,) = free_ports(1)
    await asyncio.to_thread(
        start_rabbitmq,
        ssl_listeners=f'[{{"127.0.0.1", {port}}}]',
        ssl_options=f'[{{certfile, "{tmp_path}/server.pem"}}, {{keyfile, "{tmp_path}/server.pem"}}]',
    )
    one = transport(f"amqps://127.0.0.1:{port}")
    began = time.monotonic()
    with pytest.raises(NotConnected, match="certificate") as refused:
        await one.open(within=timedelta(seconds=10))
    assert time.monotonic() - began < 3
    assert not refused.value.retryable

    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, str(tmp_path / "ca.pem"))
    await one.open(within=SOON)
    await one.apply(Topology().queue(name, type="classic"), ApplyMode.CREATE)
    await fill(one, name, 3)
    await settle(one, await one.pull(name, most=3, wait=SOON))
    assert (await send(one, out(name, b"x" * 500_000)))[0].outcome is Published.ROUTED
    began = time.monotonic()
    await one.close(timedelta(seconds=1))
    assert time.monotonic() - began < 2
