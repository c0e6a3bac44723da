"""Stores in the memory of one process, for tests and for what may be forgotten with it."""

from __future__ import annotations

import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from acemq.clock import SYSTEM, Clock, check_duration
from acemq.errors import ConfigurationError, IdempotencyConflictError
from acemq.stores import (
    ERROR_LIMIT,
    MAX_ATTEMPTS,
    RELAY_LEASE,
    Claim,
    OutboxBatch,
    OutboxRecord,
    OutboxStatus,
    check_claim_key,
)


class _Row(msgspec.Struct):
    record: OutboxRecord
    seq: int
    token: int = 0
    leased_until: datetime | None = None
    published_at: datetime | None = None


class InMemoryOutboxStore:
    """The shape of an outbox, for tests. It is none: it is in no transaction, and a restart loses all that is in it."""

    name = "memory"

    def __init__(
        self, *, max_attempts: int = MAX_ATTEMPTS, lease: timedelta = RELAY_LEASE, clock: Clock = SYSTEM
    ) -> None:
        self.max_attempts, self._lease = check_ceiling(max_attempts), check_duration("lease", lease)
        self._clock = clock
        self._rows: dict[str, _Row] = {}
        self._numbers = itertools.count()
        self._wakes: list[Callable[[], None]] = []
        warnings.warn(
            "InMemoryOutboxStore is no outbox: it joins no transaction and forgets everything at a restart. "
            "Use it in tests; DbOutboxStore is for production",
            stacklevel=2,
        )

    async def add(self, record: OutboxRecord, within: object = None, /) -> bool:
        """At once, and whatever becomes of a transaction: `within` is taken so that code under test need not differ."""
        return self.add_sync(record, within)

    def add_sync(self, record: OutboxRecord, within: object = None, /) -> bool:
        if record.id in self._rows:
            return False
        self._rows[record.id] = _Row(record, next(self._numbers))
        for wake in self._wakes:
            wake()
        return True

    async def listen(self, wake: Callable[[], None], /) -> None:
        import asyncio

        self._wakes.append(wake)
        try:
            await asyncio.Event().wait()
        finally:
            self._wakes.remove(wake)

    # For the relay

    async def claim(self, most: int, /) -> OutboxBatch:
        now = self._clock.now()
        heads: dict[str, int] = {}
        for row in self._pending():
            if row.record.key is not None:
                heads[row.record.key] = min(heads.get(row.record.key, row.seq), row.seq)
        free = [
            row
            for row in self._pending()
            if not self._is_retired(row)
            and (row.leased_until is None or row.leased_until <= now)
            and (row.record.key is None or heads[row.record.key] == row.seq)
        ]
        free.sort(key=_age)
        taken = free[:most]
        token = max((row.token for row in taken), default=0) + 1
        for row in taken:
            row.token, row.leased_until = token, now + self._lease
        return OutboxBatch([row.record for row in taken], token, self._lease)

    async def published(self, ids: Sequence[str], token: int, /) -> int:
        held = self._held(ids, token)
        for row in held:
            row.published_at, row.leased_until = self._clock.now(), None
        return len(held)

    async def failed(self, id: str, error: str, token: int, /) -> bool:
        for row in self._held([id], token):
            row.leased_until = None
            row.record = replace(row.record, attempts=row.record.attempts + 1, last_error=error[:ERROR_LIMIT])
            return True
        return False

    async def give_back(self, ids: Sequence[str], token: int, /) -> int:
        held = self._held(ids, token)
        for row in held:
            row.leased_until = None
        return len(held)

    async def pending_count(self) -> int:
        return len(self._pending())

    # For an operator

    async def check(self) -> None:
        """Nothing can be wrong with it."""

    async def status(self) -> OutboxStatus:
        pending = self._pending()
        live = [row.record.created_at for row in pending if not self._is_retired(row)]
        oldest = max(self._clock.now() - min(live), timedelta()) if live else None
        return OutboxStatus(len(pending), len(pending) - len(live), oldest)

    async def retired(self, most: int = 100, /) -> list[OutboxRecord]:
        return [row.record for row in sorted(self._pending(), key=_age) if self._is_retired(row)][:most]

    async def release(self, id: str, /) -> bool:
        row = self._rows.get(id)
        if row is None or row.published_at is not None:
            return False
        row.record = replace(row.record, attempts=0)
        for wake in self._wakes:
            wake()
        return True

    async def discard(self, id: str, reason: str, /) -> bool:
        row = self._rows.get(id)
        if row is None or row.published_at is not None or not self._is_retired(row):
            return False
        row.published_at = self._clock.now()
        row.record = replace(row.record, last_error=f"discarded: {reason}"[:ERROR_LIMIT])
        return True

    async def purge(self, *, before: datetime | None = None, batch: int = 1_000) -> int:
        limit = self._clock.now() if before is None else before
        gone = [id for id, row in self._rows.items() if row.published_at is not None and row.published_at < limit]
        for id in gone[:batch]:
            del self._rows[id]
        return len(gone[:batch])

    def _pending(self) -> list[_Row]:
        return [row for row in self._rows.values() if row.published_at is None]

    def _is_retired(self, row: _Row) -> bool:
        return row.record.attempts >= self.max_attempts

    def _held(self, ids: Sequence[str], token: int) -> list[_Row]:
        rows = [self._rows[id] for id in ids if id in self._rows]
        return [row for row in rows if row.token == token and row.published_at is None]


def _age(row: _Row) -> tuple[datetime, str]:
    return row.record.created_at, row.record.id


def check_ceiling(most: int) -> int:
    if most < 1:
        raise ConfigurationError(f"max_attempts={most} must be 1 or more")
    return most


class _Claimed(msgspec.Struct):
    token: int
    expires_at: float
    fingerprint: bytes | None
    is_confirmed: bool = False


class MemoryIdempotencyStore:
    """Claims of one process. A restart forgets them, so it keeps from double handling only what one process sees."""

    def __init__(self, most: int = 100_000, *, clock: Clock = SYSTEM) -> None:
        """`most`: keys remembered; above it the oldest that was confirmed is forgotten first, a live claim never."""
        if most < 1:
            raise ConfigurationError(f"most={most} must be 1 or more")
        self._most, self._clock = most, clock
        self._token = 0
        self._live: dict[str, _Claimed] = {}
        self._confirmed: OrderedDict[str, _Claimed] = OrderedDict()

    async def claim(self, key: str, /, *, lease: timedelta, fingerprint: bytes | None = None) -> Claim:
        key, now = check_claim_key(key), self._clock.monotonic()
        check_duration("lease", lease)
        known = self._live.get(key) or self._confirmed.get(key)
        if known is not None and known.expires_at > now:
            if None not in (fingerprint, known.fingerprint) and known.fingerprint != fingerprint:
                raise IdempotencyConflictError(key)
            return Claim("duplicate" if known.is_confirmed else "in_progress")
        self._confirmed.pop(key, None)
        self._token += 1
        self._live[key] = _Claimed(self._token, now + lease.total_seconds(), fingerprint)
        self._forget(now)
        return Claim("claimed", self._token)

    async def renew(self, key: str, token: int, /, *, lease: timedelta) -> bool:
        held = self._held(key, token)
        if held is None:
            return False
        held.expires_at = self._clock.monotonic() + check_duration("lease", lease).total_seconds()
        return True

    async def confirm(self, key: str, token: int, /, *, retention: timedelta) -> bool:
        check_duration("retention", retention)
        held = self._held(key, token)
        if held is None:
            return False
        del self._live[check_claim_key(key)]
        held.is_confirmed, held.expires_at = True, self._clock.monotonic() + retention.total_seconds()
        self._confirmed[check_claim_key(key)] = held
        return True

    async def release(self, key: str, token: int, /) -> bool:
        if self._held(key, token) is None:
            return False
        del self._live[check_claim_key(key)]
        return True

    def _held(self, key: str, token: int) -> _Claimed | None:
        held = self._live.get(check_claim_key(key))
        return held if held is not None and held.token == token else None

    def _forget(self, now: float) -> None:
        if len(self._live) + len(self._confirmed) <= self._most:
            return
        if self._confirmed:
            self._confirmed.popitem(last=False)
            return
        self._live = {key: held for key, held in self._live.items() if held.expires_at > now}
