"""Fuzzes what the lane receives, guided by the branches taken: `make fuzz`, by hand and not in CI.

It goes on for ten minutes, or as `make fuzz ARGS="-max_total_time=60"` says, and keeps in build/fuzz what has led
somewhere new. A finding is a file there; its bytes, as `read` understands them, become an example of
tests/unit/transports/rabbitmq/test_cutter.py.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from pamqp import commands

atheris: Any = import_module("atheris")  # of the extra `fuzz`, without types

with atheris.instrument_imports(include=["acemq.transports.rabbitmq"]):
    from acemq.transports.rabbitmq import frames
    from tests.fuzz import received
    from tests.unit.transports.rabbitmq.kit import content, marshal

FOLDER = Path("build/fuzz")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
METHODS = sorted(
    value for name, value in vars(frames).items() if name.startswith(("BASIC_", "CHANNEL_", "CONNECTION_"))
)
HEADERS = {"x-acemq-id": "m", "n": 1, "f": 0.5, "t": True, "when": EPOCH, "none": None, "list": [1, {"a": "b"}]}
_PLACES = 8
"""Bytes in front that say where the stream is cut."""


def read(data: bytes) -> tuple[bytes, list[int]]:
    """A stream and the places to cut it: as it stands or, for an even first byte, as whole frames of its payloads."""
    kind, places, rest = data[0], [each * 3 for each in data[1 : 1 + _PLACES]], data[1 + _PLACES :]
    return (rest if kind % 2 else _framed(rest)), places


def _framed(rest: bytes) -> bytes:
    """Each frame from three bytes, for its type, its channel and its length, and so many bytes of payload."""
    out, at = b"", 0
    while at + 3 <= len(rest):
        what, channel, size = rest[at], rest[at + 1] % 5, rest[at + 2] % 64
        payload = rest[at + 3 : at + 3 + size]
        at += 3 + size
        match what % 4:
            case 0 | 1:
                kind, payload = frames.METHOD, METHODS[what // 4 % len(METHODS)].to_bytes(4, "big") + payload
            case 2:
                kind, payload = frames.HEADER, b"\0\x3c\0\0" + (what // 4).to_bytes(8, "big") + payload
            case _:
                kind = frames.BODY
        out += bytes((kind, 0, channel)) + len(payload).to_bytes(4, "big") + payload + frames.END
    return out


def seeds() -> list[bytes]:
    """A beginning: one of each thing that a broker sends."""
    deliver = commands.Basic.Deliver("c", 1, False, "e", "k")
    returned = commands.Basic.Return(312, "NO_ROUTE", "", "gone")
    streams = [
        b"".join(content(received.CONSUMES, deliver, b"body", split=3)),
        b"".join(content(received.CONSUMES, deliver, b"", headers=HEADERS)),
        b"".join(content(received.PULLS, commands.Basic.GetOk(1, True, "e", "k", 2), b"body")),
        b"".join(content(received.PUBLISHES, returned, b"body")) + marshal(commands.Basic.Ack(3, True), 1),
        marshal(commands.Basic.Nack(1, False), received.PUBLISHES),
        marshal(commands.Basic.Cancel("c"), received.CONSUMES),
        marshal(commands.Channel.Close(404, "NOT_FOUND", 60, 40), received.PUBLISHES),
        marshal(commands.Channel.CloseOk(), received.PULLS),
        marshal(commands.Connection.Blocked("memory"), 0) + frames.HEARTBEAT,
    ]
    return [b"\1" + bytes(range(_PLACES)) + stream for stream in (*streams, b"".join(streams))]


def main() -> None:
    logging.disable()  # what is said of a broken stream would be said a million times
    corpus = FOLDER / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    loop = asyncio.new_event_loop()
    failed: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: failed.append(context))

    def one(data: bytes) -> None:
        if data:
            loop.run_until_complete(received.receive_cut(*read(data)))
            assert not failed, failed

    limits = ["-max_total_time=600", "-max_len=2048", "-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={FOLDER}/", *sys.argv[1:], str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
