"""Over TLS the certificate decides: PostgreSQL and MariaDB with certificates of their own, by each driver."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import trustme

import acemq
from acemq import AceMQ, Credentials, Message, Opening, SecurityError, Tls, Topology, security
from acemq.errors import ConnectionFailedError
from tests.services import Database, LocalDatabase, MariaDB, PostgreSQL
from tests.waiting import until

PATIENT = timedelta(seconds=20)
AT_ONCE = 8.0
"""Seconds within which what waiting does not mend has ended."""
USER = Credentials("secured", "hush")
"""Whom the server lets in over TLS only."""


class Secured:
    """A server, the authority that has signed its certificate for the name `broker`, and a URL of it."""

    def __init__(self, server: Database, url: str, folder: Path, authority: trustme.CA) -> None:
        self.server, self.url, self.folder, self.authority = server, f"{url}?create_schema=true", folder, authority
        self.ca_file = str(folder / "ca.pem")


@pytest.fixture(scope="module")
def certified() -> Iterator[tuple[Path, trustme.CA]]:
    """A folder that servers may read from, which run as users of their own."""
    folder, authority = Path(tempfile.mkdtemp(prefix="acemq-tls-")), trustme.CA()
    folder.chmod(0o755)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    yield folder, authority
    shutil.rmtree(folder)


def certificate(folder: Path, authority: trustme.CA, who: str) -> dict[str, str]:
    issued = authority.issue_cert("127.0.0.1", "broker")
    key, chain = folder / f"{who}.key", folder / f"{who}.crt"
    issued.private_key_pem.write_to_path(key)
    chain.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
    key.chmod(0o600)
    if os.geteuid() == 0:
        shutil.chown(key, who, who)
    return {"cert": str(chain), "key": str(key)}


@pytest.fixture(scope="module")
def secured_postgres(
    certified: tuple[Path, trustme.CA], start_postgresql_for_module: Callable[..., PostgreSQL]
) -> Secured:
    folder, authority = certified
    files = certificate(folder, authority, "postgres")
    server = start_postgresql_for_module(ssl="on", ssl_cert_file=files["cert"], ssl_key_file=files["key"])
    return _secured(server, certified)


@pytest.fixture(scope="module")
def secured_mariadb(certified: tuple[Path, trustme.CA], start_mariadb_for_module: Callable[..., MariaDB]) -> Secured:
    folder, authority = certified
    files = certificate(folder, authority, "mysql")
    server = start_mariadb_for_module(ssl_cert=files["cert"], ssl_key=files["key"])
    server.execute(f"CREATE USER {USER.user}@'%' IDENTIFIED BY '{USER.password}' REQUIRE SSL")
    server.execute(f"GRANT ALL ON *.* TO {USER.user}@'%'")
    return _secured(server, certified)


def _secured(server: Database, certified: tuple[Path, trustme.CA]) -> Secured:
    if not isinstance(server, LocalDatabase):
        pytest.skip("a server in a container has no way to our certificates")
    return Secured(server, server.create_database("mine"), *certified)


@pytest.fixture(params=["secured_postgres", "secured_mariadb"])
def secured(request: pytest.FixtureRequest) -> Secured:
    found: Secured = request.getfixturevalue(request.param)
    return found


async def is_refused_at_once(opening: Opening[AceMQ], setting: str) -> SecurityError:
    began = time.monotonic()
    with pytest.raises(SecurityError) as refused:
        await opening
    assert time.monotonic() - began < AT_ONCE
    assert refused.value.setting == setting
    return refused.value


async def uses_it(url: str, tls: Tls) -> None:
    got: list[int] = []

    async def take(message: Message[int]) -> None:
        got.append(message.payload)

    async with acemq.connect(url, tls=tls) as mq:
        await mq.declare(Topology().queue("q"))
        async with mq.consume("q", int, take):
            await mq.send_many("q", range(3))
            await until(lambda: got == [0, 1, 2])


async def test_with_its_authority_it_is_accepted_and_messages_flow(secured: Secured) -> None:
    await uses_it(secured.url, Tls(ca_file=secured.ca_file))


async def test_an_unknown_authority_is_refused_at_once(secured: Secured) -> None:
    refusal = await is_refused_at_once(acemq.connect(secured.url, tls=Tls(), connect_timeout=PATIENT), "ca_file")
    assert "127.0.0.1" in str(refusal)


async def test_a_wrong_name_is_refused_at_once(secured: Secured) -> None:
    tls = Tls(ca_file=secured.ca_file, server_name="elsewhere.example")
    refusal = await is_refused_at_once(acemq.connect(secured.url, tls=tls, connect_timeout=PATIENT), "server_name")
    assert "elsewhere.example" in str(refusal)


async def test_the_server_name_is_checked_in_place_of_the_hosts(secured: Secured) -> None:
    await uses_it(secured.url, Tls(ca_file=secured.ca_file, server_name="broker"))


async def test_unverified_for_testing_takes_any_and_says_so(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    await uses_it(secured.url, Tls.unverified_for_testing())
    said = [record.getMessage() for record in caplog.records if "unverified_for_testing" in record.getMessage()]
    assert len(said) == 1
    assert any(
        "unverified_for_testing" in note
        for note in AceMQ(secured.url, tls=Tls.unverified_for_testing()).capabilities.notes
    )


async def test_a_development_certificate_is_refused_verified_or_not(
    secured_postgres: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "is_for_development", lambda certificate: True)
    for tls in (Tls(ca_file=None), Tls.unverified_for_testing()):
        await is_refused_at_once(
            acemq.connect(secured_postgres.url, tls=tls, connect_timeout=PATIENT),
            "tls" if not tls.is_verified else "ca_file",
        )
    monkeypatch.setenv(security.ALLOW_DEVELOPMENT, "1")
    await uses_it(secured_postgres.url, Tls.unverified_for_testing())


async def test_every_connection_is_encrypted_that_which_listens_too(secured_postgres: Secured) -> None:
    async with acemq.connect(secured_postgres.url, tls=Tls(ca_file=secured_postgres.ca_file)) as mq:
        await mq.declare(Topology().queue("q"))
        seen = secured_postgres.server.execute(
            "SELECT ssl, count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
            "WHERE datname = 'mine' GROUP BY ssl"
        )
        assert [line.split("\t")[0] for line in seen.splitlines()] == ["t"]
        assert int(seen.split("\t")[1]) >= 2


async def test_without_tls_a_user_who_must_have_it_is_refused(secured_mariadb: Secured) -> None:
    with pytest.raises(acemq.AuthenticationError):
        await acemq.connect(secured_mariadb.url, credentials=USER, connect_timeout=PATIENT)
    async with acemq.connect(secured_mariadb.url, credentials=USER, tls=Tls(ca_file=secured_mariadb.ca_file)) as mq:
        await mq.declare(Topology().queue("q"))


@pytest.mark.parametrize("kind", ["postgres_url", "mariadb_url"])
async def test_a_server_without_tls_is_not_spoken_to_in_the_clear(kind: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(kind)
    with pytest.raises(ConnectionFailedError) as failed:
        await acemq.connect(url, tls=Tls(), connect_timeout=timedelta(seconds=3))
    assert "missing" not in str(failed.value)  # the tables, which only who came in can miss


# psycopg, which has OpenSSL of its own


def by_psycopg(secured: Secured) -> str:
    return secured.url.replace("postgresql:", "postgresql+psycopg:")


async def test_psycopg_accepts_the_right_authority(secured_postgres: Secured) -> None:
    await uses_it(by_psycopg(secured_postgres), Tls(ca_file=secured_postgres.ca_file))


async def test_psycopg_refuses_an_unknown_authority_at_once(secured_postgres: Secured) -> None:
    await is_refused_at_once(acemq.connect(by_psycopg(secured_postgres), tls=Tls(), connect_timeout=PATIENT), "ca_file")


async def test_psycopg_refuses_a_wrong_name_at_once(secured_postgres: Secured) -> None:
    url, tls = by_psycopg(secured_postgres).replace("127.0.0.1", "localhost"), Tls(ca_file=secured_postgres.ca_file)
    await is_refused_at_once(acemq.connect(url, tls=tls, connect_timeout=PATIENT), "server_name")


def test_psycopg_cannot_check_another_name_and_says_so(secured_postgres: Secured) -> None:
    with pytest.raises(SecurityError, match="psycopg"):
        acemq.connect(by_psycopg(secured_postgres), tls=Tls(server_name="broker"))
