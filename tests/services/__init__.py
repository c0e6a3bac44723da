"""Private, disposable servers for tests: on free ports of the loopback, with their data in a folder of their own.

    with RabbitMQ.obtain(consumer_timeout=timedelta(seconds=2)) as server:
        ...  # server.url, server.kill(), server.restart(), server.ctl("list_queues")

    with PostgreSQL.obtain() as server:
        url = server.create_database("mine")

A server that somebody else started is never used and never touched: what is killed here is killed by the id under
which it was started here. All calls block; in a coroutine use `asyncio.to_thread(server.restart)`.
"""

from __future__ import annotations

from tests.services.databases import Database, LocalDatabase, MariaDB, PostgreSQL
from tests.services.rabbitmq import RIPE, LocalRabbitMQ, RabbitMQ, Setting
from tests.services.server import CannotBeHad, LocalServer, Server, free_ports, install, nearest

__all__ = [
    "RIPE",
    "CannotBeHad",
    "Database",
    "LocalDatabase",
    "LocalRabbitMQ",
    "LocalServer",
    "MariaDB",
    "PostgreSQL",
    "RabbitMQ",
    "Server",
    "Setting",
    "free_ports",
    "install",
    "nearest",
]
