"""Case O-046: integers in headers keep value and type on every transport, whatever becomes of the message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

import acemq
from acemq import AceMQ, Ack, ConfigurationError, Message, RetryPolicy, Topology

SECOND = timedelta(seconds=1)

EDGES = (0, 1, 127, 128, 200, 255, 256, 32767, 32768, 65535, 65536, 2**31 - 1, 2**31, 2**53, 2**53 + 1, 2**63 - 1)
SENT: dict[str, int] = {
    **{f"p{n}": n for n in EDGES},
    **{f"n{n}": -n for n in EDGES},
    "lowest": -(2**63),
    "true": True,
    "false": False,
}


@pytest.fixture(params=["memory", "rabbitmq", "sqlite", "postgresql", "mariadb"])
def url(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return f"memory://{name}"
        case "rabbitmq":
            address: str = request.getfixturevalue("rabbit_url")
            return address
        case "sqlite":
            return f"sqlite:///{tmp_path / 'messages.db'}"
        case "postgresql":
            return f"{request.getfixturevalue('postgres_url')}?create_schema=true"
        case _:
            return f"{request.getfixturevalue('mariadb_url')}?create_schema=true"


@pytest.fixture
async def queue(url: str, name: str) -> AsyncIterator[tuple[AceMQ, str]]:
    async with acemq.connect(url) as mq:
        await mq.declare(Topology().queue(name, dead_letter=True))
        yield mq, name
        for each in (name, f"{name}.dlq", f"{name}.parked"):
            await mq.delete(each)


def read(message: Message[int]) -> dict[str, tuple[type, object]]:
    """By name, as `1 == True` hides what became of a type."""
    return {name: (type(value), value) for name, value in message.headers.items() if name in SENT}


async def test_o046_integers_come_back_equal_and_of_their_type_after_a_retry_and_as_dead_letters(
    queue: tuple[AceMQ, str],
) -> None:
    mq, name = queue
    expected = {key: (type(value), value) for key, value in SENT.items()}
    seen: list[dict[str, tuple[type, object]]] = []

    async def fail(message: Message[int]) -> Ack:
        seen.append(read(message))
        return Ack.retry("again")

    async with mq.consume(name, int, fail, retry=RetryPolicy.fixed(2, timedelta(milliseconds=50))):
        await mq.send(name, 1, headers=SENT)
        letter = await mq.pull(f"{name}.dlq", int, wait=10 * SECOND)
    assert letter is not None
    assert [*seen, read(letter)] == [expected] * 3
    await letter.accept()


@pytest.mark.parametrize("beyond", [2**63, -(2**63) - 1, 2**64])
async def test_o046_what_no_transport_carries_is_refused_at_the_call(queue: tuple[AceMQ, str], beyond: int) -> None:
    mq, name = queue
    with pytest.raises(ConfigurationError, match=r"'n'.*64-bit"):
        await mq.send(name, 1, headers={"n": beyond})
    assert (await mq.depth(name)).ready == 0
