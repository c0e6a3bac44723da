"""Partitions: the same in every process and, for powers of two, in every language."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.errors import ConfigurationError
from acemq.patterns.ordered.keys import fnv1a, partition_of, queue_of, queues_of

KEYS = st.text()
COUNTS = st.integers(1, 10_000)


@given(KEYS, COUNTS)
def test_a_partition_is_one_of_the_queues(key: str, count: int) -> None:
    partition = partition_of(key, count)
    assert 0 <= partition < count


@given(KEYS)
def test_the_hash_has_32_bits_without_a_sign(key: str) -> None:
    assert 0 <= fnv1a(key) < 2**32


@given(KEYS, st.integers(0, 31).map(lambda bits: 2**bits))
def test_every_language_agrees_when_the_count_is_a_power_of_two(key: str, count: int) -> None:
    unsigned = fnv1a(key)
    signed = unsigned - 2**32 if unsigned >= 2**31 else unsigned
    assert partition_of(key, count) == signed % count == (unsigned & 0x7FFFFFFF) % count


def test_another_process_gives_the_same_answer() -> None:
    keys = ["", "order-1", "ünïcode", "日本語"]
    program = f"from acemq.patterns.ordered.keys import partition_of; print([partition_of(k, 8) for k in {keys!r}])"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([partition_of(key, 8) for key in keys])


def test_keys_spread_over_all_partitions() -> None:
    found = Counter(partition_of(f"customer-{number}", 8) for number in range(8_000))
    assert len(found) == 8
    assert min(found.values()) > 800


@pytest.mark.parametrize("count", [0, -1])
def test_fewer_than_one_partition_is_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match=f"partitions={count}"):
        partition_of("k", count)
    with pytest.raises(ConfigurationError, match=f"partitions={count}"):
        queues_of("ledger", count)


@pytest.mark.parametrize("key", [None, 7, b"bytes", "half \ud83d"])
def test_a_key_that_is_no_text_is_refused(key: Any) -> None:
    with pytest.raises(ConfigurationError):
        partition_of(key, 8)


def test_queues_are_numbered_from_0() -> None:
    assert queues_of("ledger", 3) == ("ledger.0", "ledger.1", "ledger.2")
    assert queue_of("ledger", 7) == "ledger.7"
