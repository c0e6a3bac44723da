"""The ladder as another client finds it, and as another client uses it: CONTRACT.md section 6."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, Diagnostic, DriftError, Topology
from tests.foreign.client import Foreign, Refused
from tests.services import RabbitMQ
from tests.waiting import until

SECOND = timedelta(seconds=1)
RUNGS = {"1h": 3_600_000, "10m": 600_000, "1m": 60_000, "10s": 10_000, "1s": 1_000}
DUE = "acemq.schedule.due"


@pytest.fixture(scope="module")
def host(rabbitmq: RabbitMQ) -> str:
    """A virtual host of these tests alone: there is one ladder on each."""
    rabbitmq.ctl(
        "eval",
        'rabbit_vhost:add(<<"ladder">>, <<"tests">>), rabbit_auth_backend_internal:set_permissions('
        '<<"guest">>, <<"ladder">>, <<".*">>, <<".*">>, <<".*">>, <<"tests">>), ok.',
    )
    return f"{rabbitmq.url}/ladder"


@pytest.fixture
def foreign(host: str) -> Iterator[Foreign]:
    with Foreign(host) as foreign:
        yield foreign


@pytest.fixture
async def mq(host: str, diagnostics: list[Diagnostic]) -> AsyncIterator[AceMQ]:
    async with acemq.connect(host, name="shop", on_diagnostic=diagnostics.append) as mq:
        yield mq


@pytest.fixture
def diagnostics() -> list[Diagnostic]:
    return []


@pytest.fixture
async def queue(mq: AceMQ, foreign: Foreign, name: str) -> AsyncIterator[str]:
    await mq.declare(Topology().queue(name, type="classic"))
    yield name
    foreign.delete(name)


def rung(millis: int) -> dict[str, Any]:
    return {
        "x-message-ttl": millis,
        "x-dead-letter-exchange": "acemq.schedule",
        "x-dead-letter-routing-key": DUE,
    }


async def test_the_ladder_has_the_arguments_of_the_contract_and_no_others(mq: AceMQ, foreign: Foreign) -> None:
    async with mq.scheduler():
        pass
    foreign.declare_exchange("acemq.schedule", "direct")
    for name, millis in RUNGS.items():
        foreign.declare(f"acemq.schedule.{name}", **rung(millis))
        with pytest.raises(Refused, match="PRECONDITION_FAILED"):
            foreign.declare(f"acemq.schedule.{name}", **rung(millis), **{"x-queue-type": "quorum"})
    foreign.declare(DUE)
    for absent in (f"{DUE}.dlq", f"{DUE}.parked"):
        with pytest.raises(Refused, match="NOT_FOUND"):
            foreign.depth(absent)


async def test_what_another_has_declared_is_used_as_it_is(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    names = [f"acemq.schedule.{name}" for name in RUNGS]
    foreign.delete(*names, DUE)
    foreign.declare_exchange("acemq.schedule", "direct")
    for name, millis in RUNGS.items():
        foreign.declare(f"acemq.schedule.{name}", **rung(millis))
        foreign.bind(f"acemq.schedule.{name}", "acemq.schedule", f"acemq.schedule.{name}")
    foreign.declare(DUE)
    foreign.bind(DUE, "acemq.schedule", DUE)
    async with mq.scheduler() as later:
        await later.after(SECOND, "", queue, 1)
        await until(lambda: later.counters.delivered == 1)


async def test_a_rung_that_another_has_declared_otherwise_is_refused_by_name(mq: AceMQ, foreign: Foreign) -> None:
    foreign.delete("acemq.schedule.1m")
    foreign.declare("acemq.schedule.1m", **rung(61_000))
    with pytest.raises(DriftError, match=r"acemq\.schedule\.1m.*61000"):
        await mq.scheduler()
    foreign.delete("acemq.schedule.1m")


async def test_another_client_reads_what_waits_and_where_it_is_to_go(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    async with mq.scheduler() as later:
        before = time.time() * 1000
        await later.after(timedelta(hours=4), "billing", "invoice.due", {"n": 1})
        await later.after(timedelta(seconds=90), "", queue, "two")
    far = foreign.take_one("acemq.schedule.1h")
    assert far.body == b'{"n":1}'
    assert far.properties == {
        "content_type": "application/octet-stream",
        "delivery_mode": 2,
        "message_id": far.id,
    }
    assert (far.exchange, far.routing_key) == ("acemq.schedule", "acemq.schedule.1h")
    due = far.headers.pop("x-schedule-due-at")
    assert abs(due - before - 4 * 3_600_000) < 2_000
    assert far.headers.pop("x-acemq-first-seen") >= int(before)
    assert far.headers == {
        "x-schedule-exchange": "billing",
        "x-schedule-routing-key": "invoice.due",
        "x-schedule-content-type": "application/json",
        "x-acemq-id": far.id,
        "x-acemq-type": "ScheduledMessage",
        "x-acemq-version": 1,
        "x-acemq-correlation": far.id,
        "x-acemq-attempt": 1,
        "x-acemq-origin": mq.origin,
    }
    near = foreign.take_one("acemq.schedule.1m")
    assert (near.headers["x-schedule-exchange"], near.headers["x-schedule-routing-key"]) == ("", queue)


async def test_another_client_moves_on_what_we_have_scheduled(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    async with mq.scheduler() as later:
        pass
    await mq.send(queue, "scheduled here", delay=SECOND)
    assert later.counters.scheduled == 0
    await until(lambda: foreign.depth(DUE) == 1)
    due = foreign.take_one(DUE)
    assert due.body == b'"scheduled here"'
    foreign.put(
        due.headers["x-schedule-routing-key"],
        due.body,
        {},
        exchange=due.headers["x-schedule-exchange"],
        content_type=due.headers["x-schedule-content-type"],
    )
    pulled = await mq.pull(queue, str)
    assert pulled is not None
    assert pulled.payload == "scheduled here"
    await pulled.accept()


@pytest.mark.parametrize("due_in", [-5_000, 999, 1_500], ids=["past", "within a second", "a hop away"])
async def test_we_move_on_what_another_client_has_scheduled(
    mq: AceMQ, foreign: Foreign, queue: str, due_in: int
) -> None:
    async with mq.scheduler() as later:
        headers = {
            "x-schedule-exchange": "",
            "x-schedule-routing-key": queue,
            "x-schedule-due-at": int(time.time() * 1000) + due_in,
            "x-schedule-content-type": "application/x-theirs",
            "x-acemq-id": "theirs",
            "tenant": "not carried",
        }
        foreign.put(DUE, b"\x00 theirs", headers, exchange="acemq.schedule", content_type="application/octet-stream")
        await until(lambda: later.counters.delivered == 1)
    assert later.counters.hops == (1 if due_in > 1_000 else 0)
    letter = foreign.take_one(queue)
    assert (letter.body, letter.properties["content_type"]) == (b"\x00 theirs", "application/x-theirs")
    assert letter.properties.keys() == {"content_type", "delivery_mode", "message_id"}
    assert letter.id != "theirs"
    assert letter.headers.pop("x-acemq-first-seen") > 0
    assert letter.headers == {
        "x-acemq-id": letter.id,
        "x-acemq-type": "ScheduledMessage",
        "x-acemq-version": 1,
        "x-acemq-correlation": letter.id,
        "x-acemq-attempt": 1,
        "x-acemq-origin": mq.origin,
    }


async def test_a_message_that_keeps_no_contract_is_dropped_reported_once_and_not_delivered_again(
    mq: AceMQ, foreign: Foreign, diagnostics: list[Diagnostic]
) -> None:
    async with mq.scheduler() as later:
        foreign.put(DUE, b"?", {"x-schedule-exchange": "billing", "x-acemq-expires-at": 1}, content_type="a/b")
        await until(lambda: later.counters.foreign == 1)
        foreign.put(DUE, b"?")
        await until(lambda: later.counters.foreign == 2)
    assert foreign.depth(DUE) == 0
    assert [(each.name, each.level) for each in diagnostics] == [("acemq.schedule.foreign.message", "error")] * 2
