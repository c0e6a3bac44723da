"""Encrypted bodies: what a broker holds, keys that rotate, and what an error gives away."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import traceback
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pydantic
import pytest

import acemq
from acemq import (
    AceMQ,
    ClaimCheckCodec,
    Codecs,
    ConfigurationError,
    DecodeError,
    DecryptError,
    EncryptedCodec,
    JsonCodec,
    Keyring,
    MemoryClaimStore,
    Message,
    MissingExtraError,
)
from tests.waiting import until

K1, K2 = os.urandom(32), os.urandom(32)
SECRET = "the plaintext of 4,200"


@pytest.fixture
def keys() -> Keyring:
    return Keyring({"k1": K1}, current="k1")


@pytest.fixture
async def mq(url: str, keys: Keyring) -> AsyncIterator[AceMQ]:
    codec = Codecs(EncryptedCodec(JsonCodec(), keys), JsonCodec())
    async with acemq.connect(url, codec=codec) as mq:
        yield mq


async def taken(mq: AceMQ, queue: str, payload: type[Any] = str) -> acemq.Pulled[Any]:
    pulled = await mq.pull(queue, payload, wait=timedelta(seconds=2))
    assert pulled is not None
    await pulled.accept()
    return pulled


async def test_the_broker_holds_no_plaintext_and_headers_stay_readable(mq: AceMQ, queue: str) -> None:
    await mq.send(queue, SECRET, headers={"tenant": "acme"}, type="secret")
    pulled = await taken(mq, queue)
    assert pulled.payload == SECRET
    assert SECRET.encode() not in pulled.body
    assert EncryptedCodec.key_id_of(pulled.body) == "k1"
    assert (pulled.content_type, pulled.type) == ("application/vnd.acemq.encrypted", "secret")
    assert pulled.headers["tenant"] == "acme"


async def test_bytes_are_encrypted_too(mq: AceMQ, queue: str) -> None:
    await mq.send(queue, b"\x00raw", content_type="image/png")
    pulled = await taken(mq, queue, bytes)
    assert pulled.payload == b"\x00raw"
    assert b"raw" not in pulled.body
    assert pulled.content_type == "application/vnd.acemq.encrypted"


async def test_a_plain_message_is_still_read_beside_it(url: str, mq: AceMQ, queue: str) -> None:
    async with acemq.connect(url) as plain:
        await plain.send(queue, "plain")
        await plain.send(queue, b"plain bytes")
    assert (await taken(mq, queue)).payload == "plain"
    assert (await taken(mq, queue, bytes)).payload == b"plain bytes"


async def test_m066_keys_rotate_while_a_consumer_reads_both(mq: AceMQ, queue: str, keys: Keyring) -> None:
    read = asyncio.Queue[tuple[str, str | None]]()

    async def note(message: Message[str]) -> None:
        await read.put((message.payload, EncryptedCodec.key_id_of(message.body)))

    async with mq.consume(queue, str, note) as consumer:
        await mq.send(queue, "one")
        assert await read.get() == ("one", "k1")
        consumer.pause()
        await mq.send(queue, "two")
        keys.add("k2", K2)
        keys.use("k2")
        await mq.send(queue, "three")
        consumer.resume()
        assert {await read.get(), await read.get()} == {("two", "k1"), ("three", "k2")}
        consumer.pause()
        keys.use("k1")
        await mq.send(queue, "four")
        keys.use("k2")
        keys.retire("k1")
        consumer.resume()
        await until(lambda: consumer.counters.parked == 1)
    parked = await mq.pull(f"{queue}.parked", str, wait=timedelta(seconds=2))
    assert parked is not None
    assert parked.failure is not None
    assert "'k1'" in parked.failure.text
    keys.add("k1", K1)
    assert parked.payload == "four", "its bytes are intact"
    await parked.accept()


async def test_m067_one_body_changed_at_every_byte_gives_one_text_and_nothing_away(
    keys: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    codec = EncryptedCodec(JsonCodec(), keys)
    body = codec.encode(SECRET)
    assert codec.decode(body, str) == SECRET
    texts = set[str]()
    wrong = EncryptedCodec(JsonCodec(), Keyring({"k1": K2}, current="k1"))
    changed = [(codec, body[:at] + bytes((body[at] ^ 1,)) + body[at + 1 :]) for at in range(len(body))]
    for each, bad in [*changed, (wrong, body), (codec, body[:-1]), (codec, body[:20]), (codec, b"")]:
        with pytest.raises(DecryptError) as refused:
            each.decode(bad, str)
        error = refused.value
        texts.add(str(error).replace(repr(error.key_id), "…"))
        said = "".join(traceback.format_exception(error)) + repr(error.__dict__)
        assert SECRET not in said
        assert K1.hex() not in said
        assert repr(K1) not in said
        assert error.__cause__ is error.__context__ is None
    assert len(texts) == 1
    assert caplog.text == ""


async def test_a_plaintext_of_another_shape_is_an_error_that_does_not_quote_it(keys: Keyring) -> None:
    class Card(pydantic.BaseModel):
        number: int

    codec = EncryptedCodec(JsonCodec(), keys)
    with pytest.raises(DecodeError) as refused:
        codec.decode(codec.encode({"number": SECRET}), Card)
    said = "".join(traceback.format_exception(refused.value))
    assert "Card" in said
    assert SECRET not in said
    assert refused.value.__context__ is None


@pytest.mark.parametrize("outer", ["claim check", "encryption"])
async def test_with_a_claim_check_the_store_holds_ciphertext(url: str, queue: str, mq: AceMQ, outer: str) -> None:
    store, keys = MemoryClaimStore(), Keyring({"k1": K1}, current="k1")
    if outer == "encryption":
        with pytest.raises(ConfigurationError, match="awaited"):
            EncryptedCodec(ClaimCheckCodec(JsonCodec(), store), keys)  # type: ignore[arg-type]  # pyright: ignore
        return
    codec = ClaimCheckCodec(EncryptedCodec(JsonCodec(), keys), store, threshold=100)
    async with acemq.connect(url, codec=codec) as both:
        for payload in ("short", SECRET * 50, SECRET.encode() * 50):
            await both.send(queue, payload)
            pulled = await taken(both, queue, type(payload))
            assert pulled.payload == payload
            assert pulled.content_type == "application/vnd.acemq.encrypted"
            assert SECRET.encode() not in pulled.body
    kept = list(store._payloads.values())
    assert len(kept) == 2
    assert all(EncryptedCodec.key_id_of(each) == "k1" and SECRET.encode() not in each for each in kept)


async def test_requests_and_their_answers_are_encrypted_alike(mq: AceMQ, queue: str) -> None:
    seen = asyncio.Queue[tuple[str | None, str | None]]()

    async def answer(message: Message[str]) -> str:
        await seen.put((message.content_type, message.reply_to))
        return message.payload + "!"

    async with mq.respond(queue, str, answer):
        assert await mq.request("", queue, SECRET, str) == SECRET + "!"
    content_type, _ = await seen.get()
    assert content_type == "application/vnd.acemq.encrypted"


# Bad input


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Keyring({"k1": os.urandom(16)}, current="k1"), "32 bytes"),
        (lambda: Keyring({"k1": "a" * 32}, current="k1"), "32 bytes"),  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
        (lambda: Keyring({"": K1}, current=""), "1 to 255"),
        (lambda: Keyring({"k" * 256: K1}, current="k" * 256), "1 to 255"),
        (lambda: Keyring({"ключ" * 32: K1}, current="ключ" * 32), "1 to 255"),
        (lambda: Keyring({"k1": K1}, current="k2"), "no key 'k2'; there are 'k1'"),
        (lambda: Keyring({}, current="k1"), "there are none"),
        (lambda: Keyring({"k1": K1}, current="k1").retire("k1"), "the one that encrypts"),
        (lambda: Keyring({"k1": K1}, current="k1").retire("k2"), "no key 'k2'"),
        (lambda: Keyring({"k1": K1}, current="k1").use("k2"), "no key 'k2'"),
        (lambda: Keyring({"k1": K1}, current="k1").add("k1", K2), "another key 'k1'"),
    ],
)
def test_m066_keys_that_are_none_are_refused_when_they_are_added(call: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as refused:
        call()
    assert repr(K1)[2:-1] not in str(refused.value)


def test_no_key_is_printed_or_written_down() -> None:
    keys = Keyring({"k1": K1, "k2": K2}, current="k2")
    keys.add("k1", K1)  # the same again is no change
    assert repr(keys) == "<Keyring of k1, k2; k2 encrypts>"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(keys)


def test_without_the_extra_it_says_what_to_install(keys: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(MissingExtraError, match=r'pip install "acemq\[crypto\]"'):
        EncryptedCodec(JsonCodec(), keys)
