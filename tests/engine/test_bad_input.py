"""Bad input is a clear error at the call, before any I/O, that says what was wrong and what to do."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    ClosedError,
    ConfigurationError,
    ConnectionFailedError,
    Envelope,
    MissingExtraError,
    MovableClock,
    RetryPolicy,
    Topology,
    TopologyError,
)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("kafka://x", "unknown scheme 'kafka'; known: .*amqp.*memory"),
        ("localhost", "no URL"),
        ("", "no URL"),
        (5, "no URL"),
        ("memory://shop?x=1", "x"),
        ("memory://shop/path", "path"),
        ("memory://user:secret@shop", "user"),
        ("amqp://h?hartbeat=5", "hartbeat"),
        ("amqp://h?heartbeat=1", "heartbeat"),
        ("amqp://h?heartbeat=x", "heartbeat"),
        ("amqp://h:0", "port"),
        ("amqp://h:65536", "port"),
        ("amqp://h:x", "port"),
        ("amqp://", "host"),
        ("amqp://a,,b", "host"),
        ("amqp://a b", "space"),
        ("amqp://a, b", "space"),
        ("redis://a,b", "redis"),
    ],
)
def test_a_url_that_cannot_work_is_refused_before_a_socket_is_opened(url: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as refused:
        acemq.connect(url)
    assert "secret" not in str(refused.value)


def test_a_url_without_a_scheme_does_not_print_its_password() -> None:
    with pytest.raises(ConfigurationError) as refused:
        acemq.connect("guest:secret@localhost")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["amqp://guest:secret@localhost/shop", "amqp://u:secret@h1,h2:5673/%2Fx"])
def test_a_password_is_in_no_text(url: str) -> None:
    opening = acemq.connect(url)
    assert "secret" not in repr(opening)
    mq = AceMQ(url)
    assert "secret" not in f"{mq!r} {mq.state} {mq.transport!r} {mq.capabilities}"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": ""}, "name"),
        ({"name": "a@b"}, "name"),
        ({"prefetch": 0}, "prefetch"),
        ({"max_outstanding": 0}, "max_outstanding"),
        ({"threads": 0}, "threads"),
        ({"publish_timeout": timedelta()}, "publish_timeout"),
        ({"connect_timeout": timedelta(seconds=-1)}, "connect_timeout"),
        ({"close_timeout": 5}, "close_timeout"),
    ],
)
def test_a_bad_option_of_connect_is_named(options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        acemq.connect("memory://", **options)


def test_an_unknown_option_of_connect_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="prefech"):
        acemq.connect("memory://", prefech=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def test_a_missing_driver_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith(("aiormq", "acemq.transports.rabbitmq"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr("acemq.transports.rabbitmq", raising=False)
    monkeypatch.setitem(sys.modules, "aiormq", None)
    with pytest.raises(MissingExtraError, match=r'pip install "acemq\[rabbitmq\]"') as missing:
        acemq.connect("amqp://localhost")
    assert missing.value.extra == "rabbitmq"


async def test_a_host_that_is_not_there_is_named_without_its_credentials() -> None:
    with pytest.raises(ConnectionFailedError) as failed:
        await acemq.connect("amqp://guest:secret@127.0.0.1:1", connect_timeout=timedelta(milliseconds=300))
    assert "127.0.0.1:1" in str(failed.value)
    assert "secret" not in str(failed.value)


async def test_a_connection_that_is_not_open_says_so() -> None:
    mq = AceMQ("memory://")
    with pytest.raises(ClosedError, match="not open yet"):
        await mq.send("q", 1)
    with pytest.raises(ClosedError, match="not open yet"):
        await mq.depth("q")
    with pytest.raises(ClosedError, match="not open yet"):
        await mq.consume("q", int, lambda m: None)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: RetryPolicy.fixed(0, timedelta(seconds=1)), "attempts=0"),
        (lambda: RetryPolicy.fixed(2, timedelta(seconds=-1)), "zero or more"),
        (lambda: RetryPolicy.fixed(2, 5), "timedelta"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: RetryPolicy.exponential(2, first=timedelta(seconds=1), factor=0.5), "factor"),
        (lambda: RetryPolicy.exponential(2, first=timedelta(seconds=1), jitter=1.5), "jitter"),
        (lambda: RetryPolicy.none().give_up_after(timedelta()), "age"),
        (lambda: RetryPolicy.none().with_rungs(timedelta(seconds=45.5)), "rung"),
        (lambda: RetryPolicy.none().with_rungs(timedelta(seconds=5)), "rung"),
        (lambda: Ack.retry(delay=timedelta(seconds=-1)), "delay"),
        (lambda: Ack.in_progress(timedelta(minutes=16)), "0:15:00 or less"),
        (lambda: Envelope.of("t", first_seen=datetime(2026, 1, 1)), "naive"),
        (lambda: Envelope.of("t", headers={"x-acemq-id": "1"}), "reserved"),
        (lambda: Envelope.of("t", version=0), "version=0"),
        (lambda: MovableClock(datetime(2026, 1, 1)), "naive"),
        (lambda: Topology().exchange("e", "headers"), "kind='headers'"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        (lambda: Topology().queue(""), "1 to 255 bytes"),
        (lambda: Topology().queue("q" * 256), "256 bytes"),
        (lambda: Topology().queue("amq.q"), "belong to the broker"),
        (lambda: Topology().queue("q", ttl=timedelta()), "ttl"),
        (lambda: Topology().queue("q", max_length=0), "max_length"),
        (lambda: Topology().queue("q", priorities=300), "priorities"),
        (lambda: Topology().bind("q", "e", "k" * 256), "routing key"),
        (lambda: acemq.RoutingSlip.start_of(), "at least one step"),
        (lambda: acemq.RoutingSlip.start_of("a").advance_to(-1), "position"),
    ],
)
def test_a_value_that_cannot_work_is_refused_when_it_is_made(build: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        build()


@pytest.mark.parametrize(
    ("topology", "problems"),
    [
        (Topology().bind("q1", "ex", "k"), ["queue 'q1'", "exchange 'ex'"]),
        (Topology().queue("q", type="quorum", exclusive=True), ["quorum queue is durable and shared"]),
        (Topology().queue("q") | Topology().queue("q", type="classic"), ["described twice"]),
        (Topology().queue("acemq.mine"), ["belong to the library"]),
        (Topology().queue("q", native={"kafka": {}}), ["no transport 'kafka'"]),
        (
            Topology().queue("q", dead_letter=True, native={"rabbitmq": {"x-dead-letter-exchange": "e"}}),
            ["set by an option"],
        ),
    ],
)
async def test_m052_a_topology_tells_every_problem_at_once_and_makes_nothing(
    topology: Topology, problems: list[str]
) -> None:
    async with acemq.connect("memory://") as mq:
        with pytest.raises(TopologyError) as refused:
            await mq.declare(topology)
        assert len(refused.value.problems) == len(problems)
        for problem, wanted in zip(refused.value.problems, problems, strict=True):
            assert wanted in problem
        assert not await mq.exists("q1")


async def test_depth_and_purge_of_a_missing_queue_name_it(mq: AceMQ, name: str) -> None:
    with pytest.raises(TopologyError, match=name):
        await mq.depth(name)
    with pytest.raises(TopologyError, match=name):
        await mq.purge(name)
    assert not await mq.exists(name)
    assert not await mq.delete(name)
