"""Over TLS the certificate decides: a real node with a TLS listener, and a door in front of one that shows others."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import trustme

import acemq
from acemq import AceMQ, Credentials, Opening, SecurityError, Tls
from acemq.security import ALLOW_DEVELOPMENT, DEVELOPMENT
from tests.conftest import StartRabbitMQ
from tests.services import LocalRabbitMQ, RabbitMQ, free_ports
from tests.waiting import QUICK, until

PATIENT = timedelta(seconds=20)
AT_ONCE = 5.0
"""Seconds within which what waiting does not mend has ended; on a busy machine a handshake alone takes a while."""


class Secured:
    """A node that also listens for TLS, and the authority that has signed its certificate, for the name `broker`."""

    def __init__(self, node: RabbitMQ, port: int, folder: Path, authority: trustme.CA) -> None:
        self.node, self.authority, self.folder = node, authority, folder
        self.url = node.url_through(port).replace("amqp:", "amqps:")
        self.ca_file = str(folder / "ca.pem")

    def issued(self, name: str) -> str:
        """The path of a certificate with its key, signed by the same authority."""
        path = self.folder / f"{name}.pem"
        self.authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(path)
        return str(path)


@pytest.fixture(scope="module")
def secured(start_rabbitmq_for_module: StartRabbitMQ, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost", "broker")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    (port,) = free_ports(1)
    node = start_rabbitmq_for_module(
        ssl_listeners=f'[{{"127.0.0.1", {port}}}]',
        ssl_options=f'[{{certfile, "{folder}/server.pem"}}, {{keyfile, "{folder}/server.pem"}}, '
        f'{{cacertfile, "{folder}/ca.pem"}}, {{verify, verify_peer}}, {{fail_if_no_peer_cert, false}}]',
    )
    if not isinstance(node, LocalRabbitMQ):
        pytest.skip("a node in a container has neither our certificates nor a way to its TLS port")
    return Secured(node, port, folder, authority)


async def is_refused_at_once(opening: Opening[AceMQ], setting: str) -> SecurityError:
    began = time.monotonic()
    with pytest.raises(SecurityError) as refused:
        await opening
    assert time.monotonic() - began < AT_ONCE
    assert refused.value.setting == setting
    return refused.value


# The server's certificate


async def test_m006_an_unknown_authority_is_refused_with_nothing_configured(secured: Secured) -> None:
    refusal = await is_refused_at_once(acemq.connect(secured.url, connect_timeout=PATIENT), "ca_file")
    assert secured.url.rpartition("@")[2] in str(refusal)
    assert "ca_file" in str(refusal)
    assert "guest" not in str(refusal)


async def test_m006_with_its_authority_it_is_accepted_and_messages_flow(secured: Secured, name: str) -> None:
    async with acemq.connect(secured.url, tls=Tls(ca_file=secured.ca_file)) as mq:
        await mq.declare(acemq.Topology().queue(name, type="classic"))
        await mq.send_many(name, range(3))
        await mq.send(name, b"x" * 500_000)
        assert [pulled.payload for pulled in await mq.pull_many(name, object, most=3)] == [0, 1, 2]
        began = time.monotonic()
    assert time.monotonic() - began < 2


async def test_m006_a_wrong_server_name_is_refused(secured: Secured) -> None:
    tls = Tls(ca_file=secured.ca_file, server_name="elsewhere.example")
    refusal = await is_refused_at_once(acemq.connect(secured.url, tls=tls, connect_timeout=PATIENT), "server_name")
    assert "elsewhere.example" in str(refusal)


async def test_the_server_name_is_checked_in_place_of_the_hosts(secured: Secured) -> None:
    async with acemq.connect(secured.url, tls=Tls(ca_file=secured.ca_file, server_name="broker")) as mq:
        assert mq.state.phase == "connected"


async def test_the_systems_store_is_used_where_nothing_is_configured(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ssl.get_default_verify_paths().openssl_cafile_env, secured.ca_file)
    async with acemq.connect(secured.url) as mq:
        assert mq.state.phase == "connected"


async def test_unverified_for_testing_takes_any_and_says_so(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    async with acemq.connect(secured.url, tls=Tls.unverified_for_testing()) as mq:
        assert mq.state.phase == "connected"
    said = [record.getMessage() for record in caplog.records if "unverified_for_testing" in record.getMessage()]
    assert len(said) == 1


async def test_files_are_read_at_every_dial(secured: Secured, tmp_path: Path) -> None:
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(secured.authority.cert_pem.bytes())
    async with acemq.connect(secured.url, tls=Tls(ca_file=str(ca_file)), reconnect=QUICK) as mq:
        ca_file.unlink()
        await asyncio.to_thread(secured.node.close_all_connections)
        await until(lambda: mq.state.terminal)
        assert mq.state.phase == "reconnecting"
        assert "ca_file" in (mq.state.last_error or "")


# Ours


async def test_a_client_certificate_is_shown_to_the_server(secured: Secured) -> None:
    mine = secured.issued("svc.example")
    async with acemq.connect(secured.url, tls=Tls(ca_file=secured.ca_file, cert_file=mine)):
        seen = await asyncio.to_thread(secured.node.ctl, "list_connections", "peer_cert_subject")
        assert seen.count("O=trustme") == 2


async def test_a_client_certificate_of_a_stranger_ends_the_opening_at_once(secured: Secured, tmp_path: Path) -> None:
    strange = tmp_path / "strange.pem"
    trustme.CA().issue_cert("svc.example").private_key_and_cert_chain_pem.write_to_path(strange)
    tls = Tls(ca_file=secured.ca_file, cert_file=str(strange))
    await is_refused_at_once(acemq.connect(secured.url, tls=tls, connect_timeout=PATIENT), "cert_file")


async def test_a_key_password_that_is_wrong_ends_the_opening_at_once_and_is_not_shown(
    secured: Secured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(ca_file=secured.ca_file, cert_file=str(tmp_path / "none.pem"), key_password="s3cret")
    refusal = await is_refused_at_once(acemq.connect(secured.url, tls=tls, connect_timeout=PATIENT), "cert_file")
    assert "s3cret" not in f"{refusal!r} {caplog.text} {tls!r}"


# What a door in front of the shared node shows


@asynccontextmanager
async def door(to: RabbitMQ, context: ssl.SSLContext) -> AsyncIterator[str]:
    """A TLS server that passes everything on to a plain node; the URL of it."""
    running: set[asyncio.Task[None]] = set()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        running.add(me)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", to.port)
            await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))
        finally:
            running.discard(me)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield to.url_through(server.sockets[0].getsockname()[1]).replace("amqp:", "amqps:")
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0.05)


def shown_by(certificate: trustme.LeafCert, *more: trustme.Blob, folder: Path) -> ssl.SSLContext:
    """A server that presents this certificate and, behind it, more."""
    chain = folder / "chain.pem"
    parts = (certificate.private_key_pem, *certificate.cert_chain_pems[:1], *more)
    chain.write_bytes(b"".join(part.bytes() for part in parts))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return context


async def test_m008_a_development_certificate_in_the_chain_is_refused_verified_or_not(
    rabbitmq: RabbitMQ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW_DEVELOPMENT, raising=False)
    root = trustme.CA()
    between = trustme.CA(parent_cert=root, path_length=8, organization_name=DEVELOPMENT)
    root.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = shown_by(between.issue_cert("127.0.0.1"), between.cert_pem, folder=tmp_path)
    async with door(rabbitmq, context) as url:
        for tls in (Tls(ca_file=str(tmp_path / "ca.pem")), Tls.unverified_for_testing()):
            refusal = await is_refused_at_once(acemq.connect(url, tls=tls, connect_timeout=PATIENT), "tls")
            assert DEVELOPMENT in str(refusal)
        monkeypatch.setenv(ALLOW_DEVELOPMENT, "1")
        for tls in (Tls(ca_file=str(tmp_path / "ca.pem")), Tls.unverified_for_testing()):
            async with acemq.connect(url, tls=tls) as mq:
                assert mq.state.phase == "connected"


async def test_a_server_that_asks_for_a_certificate_and_gets_none_ends_the_opening_at_once(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = shown_by(authority.issue_cert("127.0.0.1"), folder=tmp_path)
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        # Blocking sockets, because a server on asyncio hangs up without a word of why.
        with suppress(OSError):  # nobody listens any more
            while True:
                connection, _address = listener.accept()
                with connection.dup() as open_still:
                    open_still.settimeout(AT_ONCE)
                    with suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()
                    # Until the client has hung up: a reset by what was not read would overtake the word of why.
                    with suppress(OSError):
                        open_still.shutdown(socket.SHUT_WR)
                        while open_still.recv(4096):
                            pass

    with listener:
        serving = asyncio.create_task(asyncio.to_thread(serve))
        url, tls = f"amqps://127.0.0.1:{listener.getsockname()[1]}", Tls(ca_file=str(tmp_path / "ca.pem"))
        try:
            refusal = await is_refused_at_once(acemq.connect(url, tls=tls, connect_timeout=PATIENT), "cert_file")
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            await serving
        assert "certificate" in str(refusal)


async def test_credentials_are_kept_from_a_server_that_is_not_trusted(tmp_path: Path) -> None:
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            heard.extend(await reader.read(65536))
        writer.close()

    context = shown_by(trustme.CA().issue_cert("127.0.0.1"), folder=tmp_path)
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    opening = acemq.connect(f"amqps://127.0.0.1:{port}", credentials=Credentials("svc", "s3cret"))
    await is_refused_at_once(opening, "ca_file")
    server.close()
    assert not heard


# Plain text


async def test_plain_text_to_another_machine_is_warned_of_once_a_connection(
    caplog: pytest.LogCaptureFixture, rabbit_url: str
) -> None:
    caplog.set_level(logging.WARNING, "acemq")

    def warned() -> list[str]:
        return [record.getMessage() for record in caplog.records if "not encrypted" in record.getMessage()]

    async with acemq.connect(rabbit_url):
        pass
    assert warned() == []
    # RFC 5737: an address that nobody has.
    with pytest.raises(acemq.ConnectionFailedError) as failed:
        await acemq.connect("amqp://guest:s3cret@192.0.2.1,127.0.0.1:1", connect_timeout=timedelta(milliseconds=400))
    (warning,) = warned()
    assert "192.0.2.1" in warned()[0]
    assert "127.0.0.1" not in warning
    assert failed.value.hosts == ("192.0.2.1:5672/", "127.0.0.1:1/")
    assert failed.value.last
    assert "s3cret" not in f"{caplog.text} {failed.value!r} {vars(failed.value)}"
