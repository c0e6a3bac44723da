from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import pika
import pika.exceptions
import pytest

from tests.conftest import StartRabbitMQ
from tests.services import CannotBeHad, Database, LocalServer, MariaDB, PostgreSQL, RabbitMQ, free_ports, nearest


class Sleeper(LocalServer):
    """The least of all servers."""

    def __init__(self, command: str = "echo asleep; sleep 60") -> None:
        super().__init__()
        self.command = command

    @property
    def url(self) -> str:
        return "sleep://"

    def _command(self) -> list[str]:
        return ["sh", "-c", self.command]

    def _answers(self) -> bool:
        return "asleep" in (self.home / "output").read_text()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def eventually(condition: Callable[[], bool], *, within: timedelta = timedelta(seconds=5)) -> bool:
    deadline = time.monotonic() + within.total_seconds()
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_killed_server_starts_again_on_its_data_and_a_discarded_one_leaves_nothing() -> None:
    with Sleeper() as server:
        first = server.pid
        server.kill()
        assert gone(first)
        server.restart()
        second = server.pid
        assert second != first
        assert not gone(second)
    assert gone(second)
    assert not server.home.exists()


def test_a_stopped_server_can_be_started_again() -> None:
    with Sleeper() as server:
        stopped = server.pid
        server.stop()
        assert gone(stopped)
        assert not server.is_running()
        with pytest.raises(RuntimeError, match="does not run"):
            server.kill()
        server.start()
        assert server.is_running()


def test_a_server_that_ends_at_once_says_its_last_words_and_leaves_nothing() -> None:
    server = Sleeper("echo out of sheep; exit 3")
    with pytest.raises(RuntimeError, match=r"ended with 3:\nout of sheep"), server:
        pass
    assert not server.home.exists()


def test_a_server_that_never_answers_is_not_waited_for_for_ever() -> None:
    server = Sleeper("sleep 60")
    server.starts_within = timedelta(milliseconds=100)
    with pytest.raises(TimeoutError, match="no answer from sleep://"), server:
        pass
    assert not server.is_running()


def test_servers_end_with_a_test_session_that_is_killed() -> None:
    script = """
        from tests.unit.test_services import Sleeper
        server = Sleeper()
        server.start()
        print(server.pid, server.home, flush=True)
        server._child.wait()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as session:
        assert session.stdout is not None
        pid, home = session.stdout.readline().split()
        assert not gone(int(pid))
        session.kill()
    assert eventually(lambda: gone(int(pid)))
    assert eventually(lambda: not Path(home).exists())


def test_the_nearest_route_is_taken_and_each_refusal_is_told() -> None:
    def refuse(why: str) -> Callable[[], Sleeper]:
        def route() -> Sleeper:
            raise CannotBeHad(why)

        return route

    server = nearest("sleep", refuse("no bed"), Sleeper, refuse("never asked"))
    server.discard()
    with pytest.raises(CannotBeHad, match="sleep cannot be had: no bed; no time"):
        nearest("sleep", refuse("no bed"), refuse("no time"))


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


def test_rabbitmq_answers_a_client_that_is_not_ours(rabbitmq: RabbitMQ, name: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.queue_declare(name, exclusive=True)
        channel.basic_publish("", name, b"hello")
        assert eventually(lambda: {"name": name, "messages": 1, "consumers": 0} in rabbitmq.list_queues())
        assert rabbitmq.count_connections() == 1


def test_closing_all_connections_tells_the_client_why(rabbitmq: RabbitMQ) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(rabbitmq.url))
    rabbitmq.close_all_connections("because")
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker, match="because"):
        connection.process_data_events(5)


def test_the_memory_alarm_blocks_publishers_until_it_is_off(rabbitmq: RabbitMQ, name: str) -> None:
    heard: list[str] = []

    def blocked(*_: object) -> None:
        heard.append("blocked")

    def unblocked(*_: object) -> None:
        heard.append("unblocked")

    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        connection.add_on_connection_blocked_callback(blocked)
        connection.add_on_connection_unblocked_callback(unblocked)
        channel = connection.channel()
        rabbitmq.set_memory_alarm(True)
        channel.basic_publish("", name, b"a broker says so to those who publish")
        while heard != ["blocked"]:
            connection.process_data_events(0.1)
        rabbitmq.set_memory_alarm(False)
        while heard != ["blocked", "unblocked"]:
            connection.process_data_events(0.1)


@pytest.mark.slow
def test_kill_and_restart_keep_persistent_messages_and_stop_leaves_no_process(
    start_rabbitmq: StartRabbitMQ, name: str
) -> None:
    server = start_rabbitmq(consumer_timeout=timedelta(seconds=7))
    assert server.ctl("eval", "application:get_env(rabbit, consumer_timeout).").strip() == "{ok,7000}"
    connection = pika.BlockingConnection(pika.URLParameters(server.url))
    channel = connection.channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    for number in range(20):
        channel.basic_publish("", name, str(number).encode(), pika.BasicProperties(delivery_mode=2), mandatory=True)

    server.kill()
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        connection.process_data_events(5)
    server.restart()

    with pika.BlockingConnection(pika.URLParameters(server.url)) as connection:
        channel = connection.channel()
        bodies = [channel.basic_get(name, auto_ack=True)[2] for _ in range(20)]
    assert bodies == [str(number).encode() for number in range(20)]

    server.stop()
    assert eventually(lambda: not processes_in(server))


def test_postgresql_keeps_what_was_committed_over_a_kill_and_a_stop(
    start_postgresql: Callable[..., PostgreSQL],
) -> None:
    server = start_postgresql(max_connections="7")
    assert server.execute("SHOW max_connections").strip() == "7"
    check_what_was_committed_stays(server)


def test_mariadb_keeps_what_was_committed_over_a_kill_and_a_stop(start_mariadb: Callable[..., MariaDB]) -> None:
    server = start_mariadb(max_connections="17")
    assert server.execute("SELECT @@max_connections").strip() == "17"
    check_what_was_committed_stays(server)


def check_what_was_committed_stays(server: Database) -> None:
    assert server.create_database("mine").endswith("/mine")
    server.execute("CREATE TABLE kept (n INT)", "mine")
    server.execute("INSERT INTO kept VALUES (1)", "mine")
    server.kill()
    with pytest.raises(RuntimeError, match="ended with"):
        server.execute("SELECT n FROM kept", "mine")
    server.restart()
    server.execute("INSERT INTO kept VALUES (2)", "mine")
    server.stop()
    assert not server.is_running()
    server.start()
    assert server.execute("SELECT n FROM kept ORDER BY n", "mine").split() == ["1", "2"]
    server.drop_database("mine")


def processes_in(server: RabbitMQ) -> list[str]:
    """Every process that was started with the server's folder in its environment."""
    folder = str(cast(LocalServer, server).home).encode()
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found
