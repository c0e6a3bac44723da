"""Large payloads in a store, and in the message only the key to them (CONTRACT.md section 10)."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

from acemq.clock import check_duration
from acemq.codec import AnyCodec, Wrapping, as_bytes
from acemq.errors import ClaimStoreError, ConfigurationError, DecodeError
from acemq.ids import new_id

T = TypeVar("T")

THRESHOLD = 65_536
INLINE, STORED = b"\xac\x01\x00", b"\xac\x01\x01"

_PARTIAL = ".partial"
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class ClaimStore(Protocol):
    """Where payloads lie. Whatever else a method raises means that the store cannot be reached now."""

    async def put(self, payload: bytes) -> str:
        """Return the key once the payload is kept."""
        ...

    async def get(self, key: str) -> bytes:
        """`KeyError`: it is not there, and will not be."""
        ...

    async def delete(self, key: str) -> None:
        """It is gone, or was not there. The library itself never deletes: when to, only the application knows."""
        ...


class MemoryClaimStore:
    """Keeps payloads in this process; for tests, and for programs of one process."""

    def __init__(self) -> None:
        self._payloads: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    async def put(self, payload: bytes) -> str:
        key = new_id()
        self._payloads[key] = payload
        return key

    async def get(self, key: str) -> bytes:
        return self._payloads[key]

    async def delete(self, key: str) -> None:
        self._payloads.pop(key, None)


class FileClaimStore:
    """Keeps each payload as a file of one folder, which several processes and machines may share.

    A file has its final name only when all of it is on the disk. Nothing outside of the folder is touched, whatever key
    a message names.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    async def put(self, payload: bytes) -> str:
        key = new_id()
        await asyncio.to_thread(self._write, key, payload)
        return key

    async def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError:
            if not await asyncio.to_thread(self._folder.is_dir):
                raise  # not the payload is missing, but the store
            raise KeyError(key) from None

    async def delete(self, key: str) -> None:
        path = self._path(key)
        await asyncio.to_thread(path.unlink, missing_ok=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key) or key.endswith(_PARTIAL):
            raise KeyError(key)
        return self._folder / key

    def _write(self, key: str, payload: bytes) -> None:
        path = self._path(key)
        partial = path.with_name(key + _PARTIAL)
        try:
            with partial.open("xb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)


def _sync_folder(folder: Path) -> None:
    """The new name, too, survives a power cut, where a folder can be told so."""
    if os.name != "posix":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class ClaimCheckCodec:
    """Writes with `inner`, and puts what is then `threshold` bytes long or longer into the store.

    Reads both kinds, and what was never framed. `ClaimStoreError` when the store cannot be reached within `timeout`: a
    publish is refused then, a delivery retried. A key that is not in the store is a `DecodeError`.
    """

    def __init__(
        self,
        inner: AnyCodec,
        store: ClaimStore,
        *,
        threshold: int = THRESHOLD,
        timeout: timedelta = timedelta(seconds=30),
    ) -> None:
        if threshold < 0:
            raise ConfigurationError(f"threshold={threshold} must be 0 or more bytes; 0 stores everything")
        self._inner, self._store, self._threshold = inner, store, threshold
        self._timeout = check_duration("timeout", timeout).total_seconds()
        self._wrapping = inner if isinstance(inner, Wrapping) else None
        self.content_type = inner.content_type

    def can_decode(self, content_type: str | None) -> bool:
        return self._inner.can_decode(content_type)

    def unwraps(self, content_type: str | None) -> bool:
        return self._wrapping is None or self._wrapping.unwraps(content_type)

    def label(self, content_type: str) -> str:
        return content_type if self._wrapping is None else self._wrapping.label(content_type)

    async def encode(self, payload: object) -> bytes:
        raw = as_bytes(payload) if self._wrapping is None else None
        body: bytes = raw if raw is not None else await _awaited(self._inner.encode(payload))
        if len(body) < self._threshold:
            return INLINE + body
        key = await self._reached(lambda: self._store.put(body), "a payload could not be put into")
        if not key:
            raise ClaimStoreError("the claim store gave an empty key for a payload")
        return STORED + key.encode()

    async def decode(self, body: bytes, into: Any) -> Any:
        if body.startswith(INLINE):
            body = body[len(INLINE) :]
        elif (key := self.key_of(body)) is not None:
            body = await self._fetched(key)
        if into is bytes and self._wrapping is None:
            return body
        return await _awaited(self._inner.decode(body, into))

    @staticmethod
    def key_of(body: bytes) -> str | None:
        """The key that a body names; `None` when it has its payload with it."""
        return body[len(STORED) :].decode(errors="replace") if body.startswith(STORED) else None

    async def _fetched(self, key: str) -> bytes:
        try:
            return await self._reached(lambda: self._store.get(key), f"payload {key!r} could not be got from")
        except KeyError:
            missing = f"payload {key!r} is not in the claim store; it was deleted, or this is another store"
        raise DecodeError(missing, content_type=self.content_type)

    async def _reached(self, ask: Callable[[], Awaitable[T]], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await ask()
        except KeyError:
            raise
        except Exception as error:
            why = f"no answer within {self._timeout:g} s" if isinstance(error, TimeoutError) else str(error)
            raise ClaimStoreError(f"{what} the claim store: {type(error).__name__}: {why}") from error


async def _awaited(made: Any) -> Any:
    return await made if asyncio.iscoroutine(made) else made
