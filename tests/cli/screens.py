"""The screens that the documentation shows: `python -m tests.cli.screens docs/screens` takes them anew.

Each is one command, typed into a real terminal against a real broker.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import acemq
from acemq import DbOutboxStore, Envelope, OutboxRecord, Topology
from tests.cli.terminal import Tmux
from tests.services import RabbitMQ
from tests.stores.places import place_at

HOST = "screens"
TOPOLOGY = "tests.cli.screens:topology"

topology = Topology().queue("orders", type="classic", dead_letter=True).queue("invoices", type="classic")
"""Of the shop that is shown. Nobody has made `invoices` yet."""

FAULTS = (
    ("o-1001", "acme", "timeout: the carrier did not answer within 5 s"),
    ("o-1002", "zenith", "there is no such street"),
    ("o-1003", "acme", "timeout: the carrier did not answer within 5 s"),
    ("o-1004", "acme", "timeout: the carrier did not answer within 5 s"),
    ("o-1005", "zenith", "there is no such street"),
)


def _answer_yes(terminal: Tmux) -> None:
    terminal.shows("[y/N]")
    terminal.enter("y")


def _interrupt(terminal: Tmux) -> None:
    _answer_yes(terminal)
    terminal.shows(" 1/2 ")
    terminal.press("C-c")


SCREENS: dict[str, tuple[str, Callable[[Tmux], None] | None]] = {
    "doctor": ("acemq doctor --topology shop:topology", None),
    "topology_plan": ("acemq topology plan --topology shop:topology", None),
    "queues": ("acemq queues orders", None),
    "dlq_ls": ("acemq dlq ls orders", None),
    "dlq_show": ("acemq dlq show orders.dlq", None),
    "dlq_show_one": ("acemq dlq show orders.dlq o-1002", None),
    "replay_dry_run": ("acemq replay orders.dlq --where error~timeout --dry-run", None),
    "replay": ("acemq replay orders.dlq --where error~timeout", _answer_yes),
    "replay_interrupted": ("acemq replay orders.dlq --rate 0.2", _interrupt),
    "health": ("acemq health", None),
    "outbox_status": ("acemq outbox status", None),
    "outbox_retired": ("acemq outbox retired", None),
    "outbox_retired_one": ("acemq outbox retired o-1002", None),
    "outbox_release": ("acemq outbox release o-1001 o-1002", _answer_yes),
    "outbox_discard": ('acemq outbox discard o-1003 --reason "a test order"', _answer_yes),
}
"""In the order in which they are taken, as each sees what those before it did."""


def take(server: RabbitMQ) -> Iterator[tuple[str, str]]:
    """Each screen, by name."""
    server.ctl("add_vhost", HOST)
    server.ctl("set_permissions", "-p", HOST, "guest", ".*", ".*", ".*")
    url = f"{server.url}/{HOST}"
    asyncio.run(_go_wrong(url))
    try:
        with tempfile.TemporaryDirectory() as folder, Tmux(**_environment(url, folder)) as terminal:
            for name, (command, then) in SCREENS.items():
                terminal.clear()
                terminal.enter(command.replace("shop:topology", TOPOLOGY))
                if then is not None:
                    then(terminal)
                terminal.is_at_rest()
                yield name, _as_shown(terminal.screen)
    finally:
        server.ctl("delete_vhost", HOST)


def _environment(url: str, folder: str) -> dict[str, str]:
    asyncio.run(_get_stuck(f"sqlite+aiosqlite:///{folder}/shop.db"))
    return {"ACEMQ_URL": url, "ACEMQ_DATABASE_URL": f"sqlite:///{folder}/shop.db", "TZ": "UTC"}


def _as_shown(screen: str) -> str:
    lines = screen.replace(TOPOLOGY, "shop:topology").splitlines()
    return "\n".join(line.rstrip() for line in lines[:-1]) + "\n"  # without the prompt of the next


async def _go_wrong(url: str) -> None:
    async with acemq.connect(url, name="shipping") as mq:
        await mq.declare(Topology().queue("orders", type="classic", dead_letter=True))
        for id, tenant, fault in FAULTS:
            await mq.send("orders", {"order": id}, message_id=id, type="order.placed", headers={"x-tenant": tenant})
            pulled = await mq.pull("orders", bytes)
            assert pulled is not None
            await pulled.reject(fault)


async def _get_stuck(database: str) -> None:
    """Three orders for an exchange that nobody has declared, and one that waits behind the first of them."""
    async with place_at("sqlite", database) as place, acemq.connect("memory://") as mq:
        store = DbOutboxStore(place.engine)
        await store.create()
        for id, tenant in (("o-1001", "acme"), ("o-1002", "zenith"), ("o-1003", "test"), ("o-1004", "acme")):
            envelope = Envelope.of("order.placed", id=id)
            await place.add(
                store, OutboxRecord.of("orders", "order.placed", {"order": id}, envelope=envelope, key=tenant)
            )
        for _ in range(store.max_attempts):
            await mq.outbox(store).sweep()


def main(folder: Path) -> None:
    with RabbitMQ.obtain() as server:
        for name, screen in take(server):
            (folder / f"{name}.txt").write_text(screen)
            print(folder / f"{name}.txt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
