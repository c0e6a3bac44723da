"""Servers and names for every test.

A server that cannot be had skips its tests in plain sight; with `ACEMQ_REQUIRE_SERVICES=1`, as in CI, they fail.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from typing import Protocol, TypeVar

import pytest

from acemq.telemetry import Diagnostic
from tests import secret
from tests.foreign.client import Foreign
from tests.proxy import Proxy
from tests.services import CannotBeHad, MariaDB, PostgreSQL, RabbitMQ, Server, Setting

pytest_plugins = [
    "acemq.testing.conformance.plugin",  # where acemq is installed, pytest finds it by itself
    "tests.wire.counting",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Run in the background of a shell; the programs that tests start and interrupt would ignore it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

S = TypeVar("S", bound=Server)

NO_SYNC_POSTGRESQL = {"fsync": "off"}
NO_SYNC_MARIADB = {"innodb_flush_log_at_trx_commit": "2", "sync_binlog": "0"}
"""What a killed server has written is with the operating system. Only a machine that goes down needs the disk."""

OBTAIN: dict[str, Callable[[], Server]] = {
    "rabbitmq": RabbitMQ.obtain,
    "start_rabbitmq": RabbitMQ.obtain,
    "start_rabbitmq_for_module": RabbitMQ.obtain,
    "postgresql": PostgreSQL.obtain,
    "start_postgresql": PostgreSQL.obtain,
    "start_postgresql_for_module": PostgreSQL.obtain,
    "mariadb": MariaDB.obtain,
    "start_mariadb": MariaDB.obtain,
    "start_mariadb_for_module": MariaDB.obtain,
}
"""Fixtures that need a real server, and how it is had."""


@pytest.fixture(scope="session", autouse=True)
def no_error_shows_a_password() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        secret.watch_errors(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    secret.watch_report(report)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not OBTAIN.keys().isdisjoint(_fixtures(item)):
            item.add_marker("services")


def pytest_collection_finish(session: pytest.Session) -> None:
    # A server that must be installed first takes longer than any test may, so that is done before the first test.
    if session.config.option.collectonly:
        return
    wanted = {OBTAIN[fixture] for item in session.items for fixture in _fixtures(item) if fixture in OBTAIN}
    for obtain in wanted:
        with suppress(CannotBeHad):  # said by the tests that need it
            obtain().discard()


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []


def _or_skip(obtain: Callable[[], S]) -> S:
    try:
        return obtain()
    except CannotBeHad as reason:
        if os.environ.get("ACEMQ_REQUIRE_SERVICES") == "1":
            pytest.fail(str(reason), pytrace=False)
        pytest.skip(str(reason))


class StartRabbitMQ(Protocol):
    def __call__(self, **settings: Setting) -> RabbitMQ:
        """A private node with these settings, started; thrown away after the test or the module."""
        ...


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """The node that all tests share: they may cut its connections, not kill it."""
    with _or_skip(RabbitMQ.obtain) as server:
        yield server


@pytest.fixture
def rabbit_url(rabbitmq: RabbitMQ) -> str:
    return rabbitmq.url


def _starter() -> Iterator[StartRabbitMQ]:
    with ExitStack() as servers:

        def start(**settings: Setting) -> RabbitMQ:
            return servers.enter_context(_or_skip(lambda: RabbitMQ.obtain(**settings)))

        yield start


start_rabbitmq = pytest.fixture(_starter, name="start_rabbitmq")
start_rabbitmq_for_module = pytest.fixture(_starter, scope="module", name="start_rabbitmq_for_module")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """The server that all tests share: they may end its sessions, not kill it."""
    with _or_skip(lambda: PostgreSQL.obtain(**NO_SYNC_POSTGRESQL)) as server:
        yield server


@pytest.fixture
def postgres_url(postgresql: PostgreSQL) -> Iterator[str]:
    """A database of the test's own on the shared server."""
    database = f"test_{secrets.token_hex(6)}"
    yield postgresql.create_database(database)
    postgresql.drop_database(database)


def _starter_of_postgresql() -> Iterator[Callable[..., PostgreSQL]]:
    """Private servers, started, with settings as in `postgresql.conf`: these a test may kill."""
    with ExitStack() as servers:

        def start(**settings: str) -> PostgreSQL:
            return servers.enter_context(_or_skip(lambda: PostgreSQL.obtain(**{**NO_SYNC_POSTGRESQL, **settings})))

        yield start


start_postgresql = pytest.fixture(_starter_of_postgresql, name="start_postgresql")
start_postgresql_for_module = pytest.fixture(_starter_of_postgresql, scope="module", name="start_postgresql_for_module")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """The server that all tests share: they may end its sessions, not kill it."""
    with _or_skip(lambda: MariaDB.obtain(**NO_SYNC_MARIADB)) as server:
        yield server


@pytest.fixture
def mariadb_url(mariadb: MariaDB) -> Iterator[str]:
    """A database of the test's own on the shared server."""
    database = f"test_{secrets.token_hex(6)}"
    yield mariadb.create_database(database)
    mariadb.drop_database(database)


def _starter_of_mariadb() -> Iterator[Callable[..., MariaDB]]:
    """Private servers, started, with options as of `mariadbd`: these a test may kill."""
    with ExitStack() as servers:

        def start(**settings: str) -> MariaDB:
            return servers.enter_context(_or_skip(lambda: MariaDB.obtain(**{**NO_SYNC_MARIADB, **settings})))

        yield start


start_mariadb = pytest.fixture(_starter_of_mariadb, name="start_mariadb")
start_mariadb_for_module = pytest.fixture(_starter_of_mariadb, scope="module", name="start_mariadb_for_module")


@pytest.fixture
def foreign(rabbit_url: str) -> Iterator[Foreign]:
    with Foreign(rabbit_url) as foreign:
        yield foreign


@pytest.fixture
async def proxy(rabbitmq: RabbitMQ) -> AsyncIterator[Proxy]:
    async with Proxy("127.0.0.1", rabbitmq.port) as between:
        yield between


@pytest.fixture
def proxied(rabbitmq: RabbitMQ, proxy: Proxy) -> str:
    """The shared node, through `proxy`."""
    return rabbitmq.url_through(proxy.port)


@pytest.fixture
def diagnostics() -> list[Diagnostic]:
    """For `on_diagnostic=diagnostics.append`."""
    return []


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A prefix for queues and exchanges that no other test of any run uses."""
    test = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return f"{test[:60]}-{secrets.token_hex(4)}"
