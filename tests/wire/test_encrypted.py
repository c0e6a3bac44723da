"""CONTRACT.md section 11: how an encrypted body is laid out, and what is refused about one."""

from __future__ import annotations

from typing import Any

import pytest

from acemq.codec import BytesCodec
from acemq.encryption import EncryptedCodec, Keyring
from acemq.errors import DecryptError
from tests.wire.suite import Suite, Values

ENCRYPTED = Suite("encrypted")

KEY = bytes(range(32))


@ENCRYPTED.parametrize
async def test_encrypted(case: str) -> None:
    await ENCRYPTED.check(case)


def _codec(keys: dict[str, str], current: str) -> EncryptedCodec:
    return EncryptedCodec(BytesCodec(), Keyring({i: bytes.fromhex(k) for i, k in keys.items()}, current=current))


@ENCRYPTED.op("seal")
def seal(given: Values) -> Values:
    codec = _codec({given["key_id"]: given["key_hex"]}, given["key_id"])
    body = codec.seal(bytes.fromhex(given["plaintext_hex"]), bytes.fromhex(given["nonce_hex"]))
    return {"body_hex": body.hex(), "content_type": codec.content_type}


@ENCRYPTED.back("seal")
def opened_again(given: Values, expect: Values) -> None:
    codec = _codec({given["key_id"]: given["key_hex"]}, given["key_id"])
    body = bytes.fromhex(expect["body_hex"])
    assert codec.decode(body, bytes).hex() == given["plaintext_hex"]
    fresh = codec.encode(bytes.fromhex(given["plaintext_hex"]))
    assert fresh != body, "a nonce of its own"
    assert (len(fresh), fresh[: -len(body) + 3]) == (len(body), body[: -len(body) + 3])
    assert codec.decode(fresh, bytes).hex() == given["plaintext_hex"]


@ENCRYPTED.op("open")
def open_(given: Values) -> Values:
    keys: dict[str, str] = given["keyring"]
    body = bytes.fromhex(given["body_hex"])
    try:
        plaintext: Any = _codec(keys, next(iter(keys))).decode(body, bytes)
    except DecryptError as error:
        named = "nobody" if error.key_id == "nobody" and "'nobody'" in str(error) else str(error)
        return {"error": error, "text_contains": named}
    return {"plaintext_hex": plaintext.hex(), "key_id": EncryptedCodec.key_id_of(body)}


@ENCRYPTED.op("key_id_of")
def key_id_of(given: Values) -> Values:
    return {"key_id": EncryptedCodec.key_id_of(bytes.fromhex(given["body_hex"]))}


@ENCRYPTED.op("can_decode")
def can_decode(given: Values) -> Values:
    return {"can": EncryptedCodec(BytesCodec(), Keyring({"k": KEY}, current="k")).can_decode(given["content_type"])}


async def test_every_refusal_has_one_text_but_for_the_key_id() -> None:
    texts = set[str]()
    for name, case in ENCRYPTED.cases.items():
        if name.startswith("refuse-"):
            keys, body = case["given"]["keyring"], bytes.fromhex(case["given"]["body_hex"])
            codec = _codec(keys, next(iter(keys)))
            with pytest.raises(DecryptError) as refused:
                codec.open(body)
            assert refused.value.__cause__ is refused.value.__context__ is None
            texts.add(str(refused.value).replace(repr(refused.value.key_id), "…"))
    assert len(texts) == 1
