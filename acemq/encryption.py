"""Bodies that only a holder of the key can read: AES-256-GCM, with keys that rotate (CONTRACT.md section 11)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from acemq.codec import Codec, Wrapping, as_bytes, is_async, media_type
from acemq.errors import ConfigurationError, DecodeError, DecryptError, MissingExtraError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CONTENT_TYPE = "application/vnd.acemq.encrypted"

_MAGIC = b"\xae\x01"
_NONCE, _TAG = 12, 16
_KEY_SIZE = 32
_ID_LIMIT = 255


class Keyring:
    """Keys by id, one of which encrypts. Shared freely; a codec sees at once what is added, used and retired.

    To rotate: `add` the new key everywhere, then `use` it, then `retire` the old one when no message of its is left,
    dead letters included.
    """

    def __init__(self, keys: Mapping[str, bytes], *, current: str) -> None:
        self._keys: dict[str, bytes] = {}
        for key_id, key in keys.items():
            self.add(key_id, key)
        self._current = self._known(current)

    @property
    def current(self) -> str:
        return self._current

    def add(self, key_id: str, key: bytes) -> None:
        """From now on what was encrypted with it is read. 32 bytes, as from `os.urandom(32)`."""
        if not isinstance(key_id, str) or not 1 <= len(key_id.encode(errors="replace")) <= _ID_LIMIT:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"key id {str(key_id)[:40]!r} must have 1 to {_ID_LIMIT} bytes of UTF-8")
        if not isinstance(key, bytes) or len(key) != _KEY_SIZE:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"the key {key_id!r} must have {_KEY_SIZE} bytes, as os.urandom({_KEY_SIZE}) gives"
            )
        if self._keys.setdefault(key_id, key) != key:
            raise ConfigurationError(f"another key {key_id!r} is there already; give a new key an id of its own")

    def use(self, key_id: str) -> None:
        """From now on this one encrypts."""
        self._current = self._known(key_id)

    def retire(self, key_id: str) -> None:
        """From now on what was encrypted with it is not read any more."""
        if self._known(key_id) == self._current:
            raise ConfigurationError(f"key {key_id!r} is the one that encrypts; use() another before it is retired")
        del self._keys[key_id]

    def get(self, key_id: str) -> bytes | None:
        return self._keys.get(key_id)

    def _known(self, key_id: str) -> str:
        if key_id not in self._keys:
            raise ConfigurationError(f"no key {key_id!r}; there are {', '.join(map(repr, self._keys)) or 'none'}")
        return key_id

    def __repr__(self) -> str:
        return f"<Keyring of {', '.join(self._keys)}; {self._current} encrypts>"

    def __reduce__(self) -> Any:
        raise TypeError("a keyring is not pickled: its keys would be written down")


class EncryptedCodec:
    """Encrypts what `inner` writes, `bytes` payloads too, and decrypts what `inner` then reads. Headers stay readable.

    Needs the extra `crypto`. Whatever keeps a body from being opened is one `DecryptError`, which names the key id and
    nothing else: whoever tampers learns nothing from it.
    """

    content_type = CONTENT_TYPE

    def __init__(self, inner: Codec, keyring: Keyring) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ModuleNotFoundError:
            raise MissingExtraError("EncryptedCodec", "crypto") from None
        if is_async(inner):
            raise ConfigurationError(
                "a codec that has to be awaited cannot be encrypted as it is; put it outside, for example "
                "ClaimCheckCodec(EncryptedCodec(…), store)"
            )
        self._inner, self._keyring = inner, keyring
        self._wraps = isinstance(inner, Wrapping)
        self._aesgcm, self._invalid = AESGCM, InvalidTag
        self._ciphers: dict[bytes, AESGCM] = {}

    def can_decode(self, content_type: str | None) -> bool:
        return media_type(content_type) == CONTENT_TYPE

    def unwraps(self, content_type: str | None) -> bool:
        return self.can_decode(content_type)

    def label(self, content_type: str) -> str:
        return CONTENT_TYPE

    def encode(self, payload: object) -> bytes:
        raw = None if self._wraps else as_bytes(payload)
        return self.seal(raw if raw is not None else self._inner.encode(payload), os.urandom(_NONCE))

    def seal(self, plaintext: bytes, nonce: bytes) -> bytes:
        """The body. A nonce may never be used twice with one key; `encode` takes a random one for each message."""
        key_id = self._keyring.current
        key = self._keyring.get(key_id)
        assert key is not None
        named = key_id.encode()
        head = _MAGIC + bytes((len(named),)) + named
        return head + nonce + self._cipher(key).encrypt(nonce, plaintext, head)

    def decode(self, body: bytes, into: Any) -> Any:
        plaintext = self.open(body)
        if into is bytes and not self._wraps:
            return plaintext
        try:
            return self._inner.decode(plaintext, into)
        except Exception:
            name = getattr(into, "__name__", None) or str(into)
        # Outside of the handler, so that nothing hangs on to the error: its text may quote the plaintext.
        raise DecodeError(
            f"the decrypted body of key {self.key_id_of(body)!r} is no {name}", content_type=self.content_type
        )

    def open(self, body: bytes) -> bytes:
        """The plaintext, or `DecryptError`."""
        key_id = self.key_id_of(body)
        key = self._keyring.get(key_id) if key_id is not None else None
        if key_id is not None and key is not None:
            head = len(_MAGIC) + 1 + body[2]
            nonce, sealed = body[head : head + _NONCE], body[head + _NONCE :]
            if len(sealed) >= _TAG:
                try:
                    return self._cipher(key).decrypt(nonce, sealed, body[:head])
                except self._invalid:
                    pass
        raise DecryptError(
            f"the body cannot be decrypted with the keys that are here; it names key {key_id!r}",
            key_id=key_id,
            content_type=self.content_type,
        )

    @staticmethod
    def key_id_of(body: bytes) -> str | None:
        """The id of the key that a body was encrypted with; readable without any key. `None`: it is not encrypted."""
        if not body.startswith(_MAGIC) or len(body) < len(_MAGIC) + 1 or len(body) < len(_MAGIC) + 1 + body[2]:
            return None
        try:
            return body[3 : 3 + body[2]].decode()
        except UnicodeDecodeError:
            return None

    def _cipher(self, key: bytes) -> AESGCM:
        cipher = self._ciphers.get(key)
        if cipher is None:
            if len(self._ciphers) >= 100:  # a keyring that rotates for ever must not fill the memory
                self._ciphers.clear()
            cipher = self._ciphers[key] = self._aesgcm(key)
        return cipher
