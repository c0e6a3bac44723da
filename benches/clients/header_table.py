"""The header table of a message, out and in together: ours by hand beside pamqp, which aiormq stands on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pamqp import decode, encode

from acemq import headers as h
from acemq.ids import new_id
from acemq.transports.rabbitmq import table
from benches.running import Figures, Task, serve

REPEATS = 5
IDENTITY = new_id()
ENTRIES: Mapping[str, Any] = {
    h.ID: IDENTITY,
    h.TYPE: "order.created",
    h.VERSION: 1,
    h.CORRELATION: IDENTITY,
    h.CAUSATION: new_id(),
    h.ATTEMPT: 1,
    h.FIRST_SEEN: 1_800_000_000_000,
    h.ORIGIN: "shop@host-17",
    "tenant": "north",
    "region": "eu-central",
}
"""Ten, as the contract has them."""


async def ours(task: Task) -> Figures:
    return _cost(lambda: table.decode(table.encode(ENTRIES)[4:]), task.count)


async def pamqp(task: Task) -> Figures:
    entries = dict(ENTRIES)
    return _cost(lambda: decode.field_table(encode.field_table(entries))[1], task.count)


def _cost(out_and_in: Callable[[], Mapping[str, Any]], count: int) -> Figures:
    """Microseconds for one, the shortest of some repeats: what is longer was somebody else's."""
    assert out_and_in() == ENTRIES
    return {"us": round(min(_once(out_and_in, count) for _ in range(REPEATS)) * 1e6, 2)}


def _once(call: Callable[[], object], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) / count


if __name__ == "__main__":
    serve({"ours": ours, "pamqp": pamqp})
