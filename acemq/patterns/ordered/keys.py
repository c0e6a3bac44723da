"""Which partition a key belongs to. The same in every language that shares the queues (CONTRACT.md section 5)."""

from __future__ import annotations

from acemq.errors import ConfigurationError

_OFFSET, _PRIME, _MASK = 2166136261, 16777619, 0xFFFFFFFF


def fnv1a(key: str) -> int:
    """FNV-1a with 32 bits over the UTF-8 bytes: Python's own hash() differs in every process."""
    value = _OFFSET
    for byte in key.encode():
        value = (value ^ byte) * _PRIME & _MASK
    return value


def partition_of(key: str, count: int) -> int:
    """0 … count − 1. Libraries of all languages agree when `count` is a power of two, and only then."""
    if not isinstance(key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"key {key!r} must be text; a message without a key has no partition")
    try:
        return fnv1a(key) % check_count(count)
    except UnicodeEncodeError:
        raise ConfigurationError(f"key {key!r} holds half of a surrogate pair, which no UTF-8 can carry") from None


def check_count(count: int) -> int:
    if count < 1:
        raise ConfigurationError(f"partitions={count} must be 1 or more")
    return count


def queue_of(name: str, partition: int) -> str:
    return f"{name}.{partition}"


def queues_of(name: str, count: int) -> tuple[str, ...]:
    return tuple(queue_of(name, partition) for partition in range(check_count(count)))
