"""CONTRACT.md section 10: how a body says that its payload lies elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from acemq.claim_check import THRESHOLD, ClaimCheckCodec, FileClaimStore, MemoryClaimStore
from tests.wire.broker import bench, on_the_wire
from tests.wire.suite import Suite, Values

CLAIM_CHECK = Suite("claim_check")


@CLAIM_CHECK.parametrize
async def test_claim_check(case: str) -> None:
    await CLAIM_CHECK.check(case)


class Delegate:
    """An inner codec whose output is given, and which notes what it is asked to read."""

    content_type = "the delegate's"

    def __init__(self, output: bytes = b"") -> None:
        self.output, self.read = output, list[bytes]()

    def can_decode(self, content_type: str | None) -> bool:
        return content_type == self.content_type

    def encode(self, payload: object) -> bytes:
        return self.output

    def decode(self, body: bytes, into: Any) -> Any:
        self.read.append(body)
        return into


class Store:
    """Gives this key, and knows these payloads."""

    def __init__(self, key: str = "", payloads: dict[str, bytes] | None = None) -> None:
        self.key, self.payloads = key, payloads or {}

    async def put(self, payload: bytes) -> str:
        self.payloads[self.key] = payload
        return self.key

    async def get(self, key: str) -> bytes:
        return self.payloads[key]

    async def delete(self, key: str) -> None:
        raise AssertionError("reading never deletes")


@CLAIM_CHECK.op("encode")
async def encode(given: Values) -> Values:
    text = given["delegate_output_hex"]
    output = b"x" * given["delegate_output_length"] if text is None else bytes.fromhex(text)
    assert len(output) == given["delegate_output_length"]
    store = Store(given["store_returns_key"])
    # The default has to be that of the contract.
    codec = (
        ClaimCheckCodec(Delegate(output), store)
        if given["threshold"] == THRESHOLD
        else ClaimCheckCodec(Delegate(output), store, threshold=given["threshold"])
    )
    body = await codec.encode("payload")
    stored = bool(store.payloads)
    assert not stored or store.payloads == {given["store_returns_key"]: output}
    return {
        "body_hex": None if text is None and not stored else body.hex(),
        "body_length": len(body),
        "first_three_hex": body[:3].hex(),
        "stored": stored,
        "content_type": codec.content_type,
    }


@CLAIM_CHECK.back("encode")
def the_key_is_read_again(given: Values, expect: Values) -> None:
    if expect["body_hex"] is not None:
        key = ClaimCheckCodec.key_of(bytes.fromhex(expect["body_hex"]))
        assert key == (given["store_returns_key"] if expect["stored"] else None)


@CLAIM_CHECK.op("decode")
async def decode(given: Values) -> Values:
    delegate = Delegate()
    payloads = {key: bytes.fromhex(text) for key, text in given["store"].items()}
    codec = ClaimCheckCodec(delegate, Store(payloads=payloads))
    try:
        await codec.decode(bytes.fromhex(given["body_hex"]), dict)
    except Exception as error:
        assert delegate.read == []
        return {"error": error, "text_contains": "not-there" if "'not-there'" in str(error) else str(error)}
    return {"delegate_input_hex": delegate.read[0].hex()}


@CLAIM_CHECK.op("key_of")
def key_of(given: Values) -> Values:
    return {"key": ClaimCheckCodec.key_of(bytes.fromhex(given["body_hex"]))}


@CLAIM_CHECK.op("filesystem_key")
def filesystem_key(given: Values) -> Values:
    with TemporaryDirectory() as folder:
        inside = Path(folder, "store")
        inside.mkdir()
        (Path(folder) / "passwd").write_bytes(b"outside")
        store = FileClaimStore(inside)
        name: str = given["key"]
        if name.isascii() and "/" not in name and "\\" not in name and len(name) < 200 and name.strip():
            (inside / name).write_bytes(b"inside")
        try:
            return {"accepted": _at_once(store.get(name)) == b"inside"}
        except KeyError:
            return {"accepted": False}


def _at_once(reading: Coroutine[Any, Any, bytes]) -> bytes:
    """By a loop of its own, in a thread of its own: the case has one of its own already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, reading).result()


@CLAIM_CHECK.op("publish")
async def publish(given: Values) -> Values:
    store = MemoryClaimStore()
    async with bench(codec=ClaimCheckCodec(Delegate(b"0123456789"), store, threshold=10)) as at:
        await at.declare("q")
        await at.mq.send("q", "payload")
        (message,) = at.published
        assert (len(store) == 1) is given["offloaded"]
        return {"headers": on_the_wire(message)["headers"]}
