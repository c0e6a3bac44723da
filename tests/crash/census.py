"""What is alive: in this process, and on the broker."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from typing import Any

from tests.services import RabbitMQ

PACKAGES = ("acemq", "aiormq")


def objects() -> Counter[str]:
    """Live objects of the library's classes and of its driver's, by class."""
    gc.collect()
    names = (f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())
    return Counter(name for name in names if name.partition(".")[0] in PACKAGES)


def tasks() -> int:
    return len(asyncio.all_tasks())


async def on_broker(server: RabbitMQ) -> dict[str, Any]:
    """Connections, channels and consumers; under their names where they have one."""

    def ask() -> dict[str, Any]:
        rows = {
            what: json.loads(server.ctl(f"list_{what}", "--formatter", "json", *columns))
            for what, *columns in (
                ("connections", "client_properties"),
                ("channels", "pid"),
                ("consumers", "queue_name", "consumer_tag"),
            )
        }
        return {
            "connections": sorted(_name(row) for row in rows["connections"]),
            "channels": len(rows["channels"]),
            "consumers": sorted((row["queue_name"], row["consumer_tag"]) for row in rows["consumers"]),
        }

    return await asyncio.to_thread(ask)


def _name(row: dict[str, Any]) -> str:
    properties = {name: value for name, _, value in row["client_properties"]}
    return str(properties.get("connection_name", ""))
