"""Large payloads that lie in a store: what travels, what is read, and what becomes of a message when they cannot be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    BatchPublishError,
    ClaimCheckCodec,
    ClaimStoreError,
    Codecs,
    ConfigurationError,
    DecodeError,
    EncryptedCodec,
    FileClaimStore,
    JsonCodec,
    Keyring,
    MemoryClaimStore,
    Message,
    RetryPolicy,
    Topology,
)
from acemq.claim_check import INLINE, STORED
from tests.waiting import until, until_async

AGAIN = RetryPolicy.fixed(3, timedelta())
BIG = "x" * 1_048_576


class Store(MemoryClaimStore):
    """One that is down, or hangs, for so many calls."""

    def __init__(self, *, down: int = 0) -> None:
        super().__init__()
        self.down, self.hangs = down, False
        self.kept: dict[str, bytes] = self._payloads

    async def _answers(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            self.down -= 1
            raise ConnectionError("the store is down")

    async def put(self, payload: bytes) -> str:
        await self._answers()
        return await super().put(payload)

    async def get(self, key: str) -> bytes:
        await self._answers()
        return await super().get(key)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
async def mq(url: str, store: Store) -> AsyncIterator[AceMQ]:
    async with acemq.connect(url, codec=ClaimCheckCodec(JsonCodec(), store, threshold=100)) as mq:
        yield mq


async def bodies(mq: AceMQ, queue: str) -> list[bytes]:
    """What lies there, as it travels; it stays."""
    pulled = await mq.pull_many(queue, bytes, wait=timedelta(seconds=2), codec=acemq.BytesCodec())
    found = [each.body for each in pulled]
    for each in pulled:
        await each.release()
    return found


async def test_m069_one_byte_below_the_threshold_travels_and_the_next_is_stored(
    mq: AceMQ, queue: str, store: Store
) -> None:
    for size in (97, 98):  # and two quotation marks
        await mq.send(queue, "x" * size)
    inline, stored = await bodies(mq, queue)
    assert inline == INLINE + b'"' + b"x" * 97 + b'"'
    (key,) = store.kept
    assert stored == STORED + key.encode()
    assert len(stored) == 39
    pulled = await mq.pull_many(queue, str, wait=timedelta(seconds=2))
    assert sorted(len(each.payload) for each in pulled) == [97, 98]
    for each in pulled:
        await each.accept()
    assert len(store) == 1, "reading deletes nothing"


async def test_m069_a_store_that_is_down_for_two_attempts_is_asked_a_third_time(
    mq: AceMQ, queue: str, store: Store
) -> None:
    handled = asyncio.Queue[Message[str]]()
    await mq.send(queue, BIG)
    store.down = 2
    async with mq.consume(queue, str, handled.put, retry=AGAIN) as consumer:
        message = await asyncio.wait_for(handled.get(), 5)
    assert (message.payload, message.attempt) == (BIG, 3)
    assert consumer.counters.retried == 2


async def test_a_store_that_stays_down_is_a_dead_letter_that_says_so(mq: AceMQ, queue: str, store: Store) -> None:
    await mq.send(queue, BIG)
    store.down = 3
    async with mq.consume(queue, str, lambda message: None, retry=AGAIN) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 1)
    pulled = await mq.pull(f"{queue}.dlq", str, wait=timedelta(seconds=2))
    assert pulled is not None
    assert pulled.failure is not None
    assert "the store is down" in pulled.failure.text
    assert pulled.payload == BIG, "it can be read again now, and replayed"
    await pulled.accept()


async def test_m069_a_payload_that_is_gone_is_parked_naming_its_key(mq: AceMQ, queue: str, store: Store) -> None:
    await mq.send(queue, BIG)
    (key,) = store.kept
    await store.delete(key)
    async with mq.consume(queue, str, lambda message: None, retry=AGAIN) as consumer:
        await until(lambda: consumer.counters.parked == 1)
    pulled = await mq.pull(f"{queue}.parked", bytes, wait=timedelta(seconds=2), codec=acemq.BytesCodec())
    assert pulled is not None
    assert pulled.failure is not None
    assert key in pulled.failure.text
    assert pulled.body == STORED + key.encode()
    await pulled.accept()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_a_megabyte_goes_through_retry_dead_letter_and_replay_as_39_bytes(
    url: str, mq: AceMQ, queue: str, encrypted: bool
) -> None:
    store, keys = Store(), Keyring({"k-1": os.urandom(32)}, current="k-1")
    codec = ClaimCheckCodec(EncryptedCodec(JsonCodec(), keys) if encrypted else JsonCodec(), store)
    seen: list[tuple[int, int, int]] = []
    repaired = False

    async def handle(message: Message[str]) -> Ack | None:
        seen.append((message.attempt, len(message.body), len(message.payload)))
        return None if repaired else Ack.retry("not yet")

    async with acemq.connect(url, codec=codec) as writing:
        await writing.send(queue, BIG)
        async with writing.consume(queue, str, handle, retry=AGAIN) as consumer:
            await until(lambda: consumer.counters.dead_lettered == 1)
            (dead,) = await bodies(mq, f"{queue}.dlq")
            assert len(dead) == 39
            repaired = True
            assert (await writing.replay(f"{queue}.dlq").run()).replayed == 1
            await until(lambda: consumer.counters.acked == 1)
    assert seen == [(1, 39, len(BIG)), (2, 39, len(BIG)), (3, 39, len(BIG)), (1, 39, len(BIG))]
    ((key, kept),) = store.kept.items()
    assert dead == STORED + key.encode()
    assert (b"xxxx" in kept) is not encrypted
    if encrypted:
        assert EncryptedCodec.key_id_of(kept) == "k-1"


async def test_a_publish_is_refused_when_the_store_is_down_and_nothing_is_sent(
    mq: AceMQ, queue: str, store: Store
) -> None:
    store.down = 1
    with pytest.raises(ClaimStoreError, match="could not be put into the claim store: ConnectionError: the store is"):
        await mq.send(queue, BIG)
    assert (await mq.depth(queue)).ready == 0
    await mq.send(queue, BIG)
    store.down = 1
    with pytest.raises(BatchPublishError) as some:
        await mq.send_many(queue, [BIG, BIG])
    assert (some.value.confirmed, some.value.failed, some.value.safe_to_resend) == (1, 1, True)
    assert [type(result) for result in some.value.results] == [ClaimStoreError, acemq.Receipt]
    await until_async(lambda: holds(mq, queue, 2))


async def holds(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


async def test_a_store_that_hangs_is_given_up_after_its_time(mq: AceMQ, queue: str, store: Store) -> None:
    store.hangs = True
    codec = ClaimCheckCodec(JsonCodec(), store, threshold=0, timeout=timedelta(milliseconds=20))
    with pytest.raises(ClaimStoreError, match="no answer within"):
        await mq.send(queue, 1, codec=codec)
    assert (await mq.depth(queue)).ready == 0


async def test_what_is_wrong_with_a_publish_is_found_before_the_store_is_asked(
    mq: AceMQ, queue: str, store: Store
) -> None:
    given: list[dict[str, Any]] = [{"version": 0}, {"headers": {"x-acemq-id": "x"}}, {"timeout": timedelta()}]
    for options in given:
        with pytest.raises(ConfigurationError):
            await mq.send(queue, BIG, **options)
    with pytest.raises(ConfigurationError, match="version"):
        await mq.send_many(queue, [BIG], version=0)
    with pytest.raises(ConfigurationError, match="queue name"):
        await mq.send("", BIG)
    with pytest.raises(acemq.EncodeError):
        await mq.send(queue, object())
    assert len(store) == 0


async def test_bytes_are_stored_as_they_are_and_read_as_they_were(mq: AceMQ, queue: str, store: Store) -> None:
    await mq.send(queue, b"\x00" * 200, content_type="image/png")
    assert list(store.kept.values()) == [b"\x00" * 200]
    (body,) = await bodies(mq, queue)
    assert body.startswith(STORED)
    handled = asyncio.Queue[Message[bytes]]()
    async with mq.consume(queue, bytes, handled.put):
        message = await handled.get()
    assert (message.payload, message.content_type, message.body) == (b"\x00" * 200, "image/png", body)


async def test_what_another_has_sent_unframed_is_read(mq: AceMQ, queue: str) -> None:
    await mq.send(queue, {"n": 1}, codec=JsonCodec())
    await mq.send(queue, b"\xac\x01 not a frame", codec=JsonCodec())
    pulled = await mq.pull(queue, dict[str, int], wait=timedelta(seconds=2))
    assert pulled is not None
    assert pulled.payload == {"n": 1}
    await pulled.accept()
    raw = await mq.pull(queue, bytes, wait=timedelta(seconds=2))
    assert raw is not None
    assert raw.payload == b"\xac\x01 not a frame"
    await raw.accept()


# Every way in and out


async def test_batches_pulls_and_receiving_have_their_payloads(mq: AceMQ, queue: str, store: Store) -> None:
    sizes = [10, 200, 300]
    await mq.send_many(queue, ["x" * size for size in sizes])
    got = asyncio.Queue[list[int]]()

    async def batch(batch: acemq.Batch[str]) -> None:
        await got.put([len(message.payload) for message in batch])

    async with mq.consume_batches(queue, str, batch, most=3):
        assert sorted(await asyncio.wait_for(got.get(), 5)) == sizes
    await mq.send(queue, "x" * 200)
    async with mq.receive(queue, str) as receiving:
        pulled = await anext(receiving)
        assert len(pulled.payload) == 200
        await pulled.accept()


async def test_one_of_a_batch_that_is_gone_is_parked_and_one_that_cannot_be_got_is_retried(
    mq: AceMQ, queue: str, store: Store
) -> None:
    await mq.send_many(queue, [f"{number}" + "x" * 200 for number in range(3)])
    gone = next(key for key, payload in store.kept.items() if payload.startswith(b'"1'))
    await store.delete(gone)
    store.down = 1
    got = list[str]()

    async def batch(batch: acemq.Batch[str]) -> None:
        got.extend(message.payload[0] for message in batch)

    async with mq.consume_batches(queue, str, batch, most=3, retry=AGAIN) as consumer:
        await until(lambda: sorted(got) == ["0", "2"] and consumer.counters.acked == 2)
        await until(lambda: consumer.counters.parked == 1)
    assert consumer.counters.retried == 1


async def test_a_pulled_message_that_cannot_be_read_says_so_at_its_payload_and_is_still_held(
    mq: AceMQ, queue: str, store: Store
) -> None:
    await mq.send(queue, BIG)
    store.down = 1
    pulled = await mq.pull(queue, str, wait=timedelta(seconds=2))
    assert pulled is not None
    with pytest.raises(ClaimStoreError):
        _ = pulled.payload
    await pulled.release()
    again = await mq.pull(queue, int, wait=timedelta(seconds=2))
    assert again is not None
    with pytest.raises(DecodeError):
        _ = again.payload
    assert await again.accept()


async def test_a_pull_that_is_cancelled_while_it_waits_for_the_store_gives_its_messages_back(
    mq: AceMQ, queue: str, store: Store
) -> None:
    await mq.send_many(queue, [BIG, BIG])
    store.hangs = True
    pulling = asyncio.ensure_future(mq.pull_many(queue, str, wait=timedelta(seconds=2)))
    await until_async(lambda: holds(mq, queue, 0))
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    await until_async(lambda: holds(mq, queue, 2))
    assert await mq.purge(queue) in (2, None)


async def test_a_receiver_that_is_cancelled_while_it_waits_for_the_store_loses_no_message(
    mq: AceMQ, queue: str, store: Store
) -> None:
    await mq.send(queue, BIG)
    store.hangs = True
    async with mq.receive(queue, str) as receiving:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(receiving), 0.2)
        store.hangs = False
        pulled = await asyncio.wait_for(anext(receiving), 5)
        assert pulled.payload == BIG
        await pulled.accept()


async def test_patterns_carry_what_is_stored(mq: AceMQ, queue: str, store: Store, name: str) -> None:
    async def double(text: str) -> str:
        return text * 2

    ended = asyncio.Queue[int]()

    async def end(text: str) -> None:
        await ended.put(len(text))

    async with mq.pipeline(name, str).step("double", double).step("end", end).start() as running:
        await running.send("x" * 90)
        assert await asyncio.wait_for(ended.get(), 5) == 180
    async with mq.respond(queue, str, lambda message: message.payload * 2):
        assert await mq.request("", queue, "y" * 200, str) == "y" * 400
    async with mq.scheduler() as later:
        await later.after(timedelta(milliseconds=10), "", queue, "z" * 200)
        pulled = await mq.pull(queue, str, wait=timedelta(seconds=2))
        assert pulled is not None
        assert pulled.payload == "z" * 200
        await pulled.accept()
    for step in ("double", "end"):
        for suffix in ("", ".dlq", ".parked"):
            await mq.delete(f"{name}.{step}{suffix}")
    await mq.delete(name, "exchange")


async def test_hooks_see_the_payload_before_it_is_stored(mq: AceMQ, queue: str, store: Store) -> None:
    class Stamp(acemq.PublishInterceptor):
        def before_publish(self, draft: acemq.Draft, /) -> None:
            draft.payload = "hooked" * 50

    mq.intercept(Stamp())
    await mq.send(queue, "x")
    pulled = await mq.pull(queue, str, wait=timedelta(seconds=2))
    assert pulled is not None
    assert pulled.payload == "hooked" * 50
    await pulled.accept()


# The store of files


async def test_m070_a_key_that_leads_elsewhere_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    folder = tmp_path / "store"
    folder.mkdir()
    store = FileClaimStore(folder)
    (folder / "half.partial").write_bytes(b"half")
    for key in ("../x", "a/b", "a\n", "", ".", "..", "half.partial"):
        with pytest.raises(KeyError):
            await store.get(key)
        with pytest.raises(KeyError):
            await store.delete(key)
    assert (tmp_path / "x").read_bytes() == b"secret"


async def test_m070_two_writers_of_one_folder_leave_whole_files_only(tmp_path: Path) -> None:
    one, two = FileClaimStore(tmp_path), FileClaimStore(tmp_path)
    payloads = [bytes([n]) * 100_000 for n in range(40)]
    keys = await asyncio.gather(*((one if n % 2 else two).put(payload) for n, payload in enumerate(payloads)))
    assert len(set(keys)) == 40
    assert sorted(os.listdir(tmp_path)) == sorted(keys)
    for key, payload in zip(keys, payloads, strict=True):
        assert await two.get(key) == payload
    await one.delete(keys[0])
    await one.delete(keys[0])
    with pytest.raises(KeyError):
        await two.get(keys[0])


async def test_a_folder_that_is_not_there_is_a_store_that_is_down(tmp_path: Path, mq: AceMQ, queue: str) -> None:
    codec = ClaimCheckCodec(JsonCodec(), FileClaimStore(tmp_path / "not mounted"), threshold=0)
    with pytest.raises(ClaimStoreError, match="FileNotFoundError"):
        await mq.send(queue, 1, codec=codec)
    with pytest.raises(ClaimStoreError):
        await codec.decode(STORED + b"some-key", int)


async def test_a_write_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        await FileClaimStore(tmp_path).put(b"x")
    assert os.listdir(tmp_path) == []


# Bad input


async def test_bad_input_is_refused_when_it_is_made(store: Store) -> None:
    with pytest.raises(ConfigurationError, match="threshold=-1"):
        ClaimCheckCodec(JsonCodec(), store, threshold=-1)
    with pytest.raises(ConfigurationError, match="timeout"):
        ClaimCheckCodec(JsonCodec(), store, timeout=timedelta())
    with pytest.raises(ConfigurationError, match="has to be awaited"):
        Codecs.of(ClaimCheckCodec(JsonCodec(), store)).write(1)


async def test_a_store_that_gives_no_key_is_refused(mq: AceMQ, queue: str) -> None:
    class Keyless(MemoryClaimStore):
        async def put(self, payload: bytes) -> Any:
            return ""

    with pytest.raises(ClaimStoreError, match="empty key"):
        await mq.send(queue, 1, codec=ClaimCheckCodec(JsonCodec(), Keyless(), threshold=0))


async def test_two_services_one_of_which_has_no_store_park_what_they_cannot_read(
    url: str, mq: AceMQ, queue: str, store: Store, name: str
) -> None:
    await mq.declare(Topology().queue(queue, type="classic"))
    await mq.send(queue, BIG)
    async with acemq.connect(url) as plain, plain.consume(queue, str, lambda message: None) as consumer:
        await until(lambda: consumer.counters.parked == 1)


async def test_an_ordered_queue_has_its_payloads_and_waits_for_a_store_that_is_down(
    mq: AceMQ, store: Store, name: str
) -> None:
    got = list[str]()

    async def book(message: Message[str]) -> None:
        got.append(message.payload[:1])

    ledger = await mq.ordered(name, str).partitions(1).keyed_by(lambda text: "one").declare()
    for number in range(3):
        await ledger.send(f"{number}" + "x" * 200)
    store.down = 1
    async with ledger.consume(book):
        await until(lambda: got == ["0", "1", "2"], within=15)
    for suffix in (".0", ".0.dlq", ".0.parked"):
        await mq.delete(f"{name}{suffix}")
