"""A user who may not do everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from acemq.topology import Topology
from acemq.transport import AccessDenied, ApplyMode, Published
from tests.rabbitmq.conftest import Declare, Dial
from tests.rabbitmq.kit import Recorder, out, send
from tests.services import RabbitMQ


@pytest.fixture
async def restricted(rabbitmq: RabbitMQ, name: str) -> AsyncIterator[str]:
    """The URL of a user who may write and read what begins with the test's name and `-mine`, and configure nothing."""
    user = name[-16:]

    def prepare() -> None:
        rabbitmq.ctl("add_user", user, "pw")
        rabbitmq.ctl("set_permissions", user, "^$", f"^({name}-mine.*|amq\\.default)$", f"^{name}-mine.*$")

    await asyncio.to_thread(prepare)
    yield f"amqp://{user}:pw@127.0.0.1:{rabbitmq.port}"
    await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)


async def test_a_forbidden_exchange_refuses_its_messages_and_the_others_go_on(
    restricted: str, dial: Dial, declare: Declare, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin, one, queue = await dial(), await dial(restricted), await declare("mine")
    await admin.apply(Topology().exchange(f"{name}-theirs"), ApplyMode.CREATE)
    results = await send(one, out(queue), out("k", exchange=f"{name}-theirs"))
    assert results[0].outcome in (Published.ROUTED, Published.FAILED)
    assert results[1].outcome is Published.REFUSED
    assert isinstance(results[1].error, AccessDenied)
    assert results[1].error.code == 403
    for _ in range(3):
        good, bad = await asyncio.gather(send(one, out(queue)), send(one, out("k", exchange=f"{name}-theirs")))
        assert (good[0].outcome, bad[0].outcome) == (Published.ROUTED, Published.REFUSED)
    closed = [record for record in caplog.records if "the channel for publishing was closed" in record.getMessage()]
    assert len(closed) == 1, "the next tries, within five seconds, cost no channel"
    assert one.state.generation == 1
    await admin.delete(f"{name}-theirs", "exchange")


async def test_a_queue_that_may_not_be_read_is_told(restricted: str, dial: Dial, declare: Declare) -> None:
    one, queue = await dial(restricted), await declare("theirs")
    with pytest.raises(AccessDenied, match="theirs"):
        await one.subscribe(queue, Recorder(), prefetch=1)
    with pytest.raises(AccessDenied, match="theirs"):
        await one.pull(queue, most=1, wait=timedelta())


async def test_what_is_there_needs_no_right_to_declare_it(
    restricted: str, dial: Dial, declare: Declare, name: str
) -> None:
    one, queue = await dial(restricted), await declare("mine")
    (found,) = await one.apply(Topology().queue(queue, type="classic"), ApplyMode.CREATE)
    assert (found.verdict, found.note) == ("present", "not compared: no right to declare it")
    with pytest.raises(AccessDenied, match=f"{name}-mine-new"):
        await one.apply(Topology().queue(f"{name}-mine-new", type="classic"), ApplyMode.CREATE)
