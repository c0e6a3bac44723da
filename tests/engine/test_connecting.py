"""Connecting, and staying connected: credentials that change, hosts that are gone, a broker that takes no publishes."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    AuthenticationError,
    Backoff,
    BatchPublishError,
    BlockedError,
    ClosedError,
    ConfigurationError,
    ConnectionFailedError,
    Credentials,
    Message,
    PublishingPausedError,
    PublishRefusedError,
    RetryPolicy,
    RoutingSlip,
    SecurityError,
    WhenBlocked,
)
from acemq.transports.memory import MemoryBroker
from acemq.transports.rabbitmq import link
from tests.proxy import Proxy
from tests.secret import PASSWORD, assert_unprinted
from tests.services import RabbitMQ, free_ports
from tests.waiting import QUICK, refused_at_once, until

# One event loop


TWO_LOOPS = """
import asyncio, sys, acemq

url, queue = sys.argv[1:]
opening, kept = acemq.connect(url), []

async def first():
    mq = await opening
    kept.append(mq)
    await mq.declare(acemq.Topology().queue(queue, type="classic"))
    for n in range(3):
        await mq.send(queue, n)
    print(len(await mq.pull_many(queue, int)))
    await mq.delete(queue)

async def second():
    for use in (lambda: kept[0].send(queue, 4), lambda: opening):
        try:
            await asyncio.wait_for(use(), 1)
        except acemq.AcemqError as error:
            print(type(error).__name__)

asyncio.run(first())
asyncio.run(second())
"""


async def test_m010_o49_made_without_a_loop_it_is_the_first_loop_s_and_refuses_the_next(url: str, name: str) -> None:
    """In a process of its own: what the first loop leaves open when it ends is nobody's any more."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TWO_LOOPS, url, name), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, complaints = await asyncio.wait_for(program.communicate(), 20)
    assert said.decode().split() == ["3", "LoopError", "ClosedError"], complaints.decode()
    assert_unprinted(f"{said!r} {complaints!r}", "the program")


async def test_m010_a_broker_in_memory_is_shared_by_its_name_alone(name: str) -> None:
    url = f"memory://{name}"
    async with (
        acemq.connect("memory://") as one,
        acemq.connect("memory://") as two,
        acemq.connect(url) as three,
        acemq.connect(url) as four,
    ):
        for mq in (one, two, three):
            await mq.declare(acemq.Topology().queue("q"))
        await one.send("q", 1)
        assert await two.pull("q", int) is None
        await three.send("q", 3)
        shared = await four.pull("q", int)
        assert shared is not None
        assert shared.payload == 3


# Credentials


@pytest.fixture
async def user(rabbitmq: RabbitMQ, name: str) -> AsyncIterator[str]:
    """A user of the test's own, whose password is `pa55-one`."""
    user = f"u-{name[-8:]}"
    await asyncio.to_thread(rabbitmq.ctl, "add_user", user, "pa55-one")
    await asyncio.to_thread(rabbitmq.ctl, "set_permissions", user, ".*", ".*", ".*")
    yield user
    await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_m005_a_source_is_asked_at_every_dial_and_a_changed_password_needs_no_restart(
    rabbitmq: RabbitMQ, user: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answers = iter(["pa55-one", "pa55-two", "pa55-three"])

    def plain() -> Credentials:
        return Credentials(user, next(answers))

    async def asynchronous() -> Credentials:
        await asyncio.sleep(0)
        return plain()

    source = plain if kind == "plain" else asynchronous
    url = f"amqp://somebody:wr0ng@127.0.0.1:{rabbitmq.port}"
    async with acemq.connect(url, credentials=source, reconnect=QUICK) as mq:
        await asyncio.to_thread(rabbitmq.ctl, "change_password", user, "pa55-two")
        await asyncio.to_thread(rabbitmq.close_all_connections)
        await until(lambda: mq.state.generation == 2)
        assert next(answers) == "pa55-three"  # asked twice, and once for both sockets each time
        assert not await mq.exists("no such queue")
        shown = f"{mq!r} {mq.state!r} {mq.transport!r} {vars(mq)!r}"
    for secret in ("pa55", "wr0ng"):
        assert secret not in caplog.text
        assert secret not in shown


async def test_refused_credentials_end_the_opening_at_once_and_are_shown_nowhere(
    rabbitmq: RabbitMQ, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    began = time.monotonic()
    with pytest.raises(AuthenticationError) as refused:
        await acemq.connect(rabbitmq.url, credentials=Credentials("guest", "s3cret"))
    assert time.monotonic() - began < 5
    assert refused.value.hosts == (f"127.0.0.1:{rabbitmq.port}/",)
    assert "s3cret" not in f"{caplog.text} {refused.value!r} {vars(refused.value)!r} {refused.value.__cause__!r}"


async def test_credentials_refused_at_a_reconnect_are_tried_again_and_the_state_says_that_waiting_does_not_help(
    rabbitmq: RabbitMQ, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert link.HOPELESS == (5.0, 30.0)
    monkeypatch.setattr(link, "HOPELESS", (0.05, 0.1))
    password = "pa55-one"
    url = f"amqp://127.0.0.1:{rabbitmq.port}"
    async with acemq.connect(url, credentials=lambda: Credentials(user, password), reconnect=QUICK) as mq:
        await asyncio.to_thread(rabbitmq.ctl, "change_password", user, "pa55-two")
        await asyncio.to_thread(rabbitmq.close_all_connections)
        await until(lambda: mq.state.terminal and mq.state.dials > 1)
        assert mq.state.phase == "reconnecting"
        password = "pa55-two"
        await until(lambda: mq.state.phase == "connected")
        assert not mq.state.terminal
        assert mq.state.generation == 2


async def test_m004_a_variable_that_is_not_set_ends_the_opening_at_once(
    rabbit_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Q_USER", "svc")
    monkeypatch.delenv("Q_PASS", raising=False)
    with pytest.raises(SecurityError, match="Q_PASS"):
        await acemq.connect(rabbit_url, credentials=Credentials.env("Q_USER", "Q_PASS"))


async def test_a_source_that_fails_is_asked_again_until_the_limit_and_its_text_is_kept(rabbit_url: str) -> None:
    asked = 0

    def down() -> Credentials:
        nonlocal asked
        asked += 1
        raise OSError("the vault said s3cret")

    opening = acemq.connect(rabbit_url, credentials=down, connect_timeout=timedelta(milliseconds=600), reconnect=QUICK)
    with pytest.raises(ConnectionFailedError, match="raised OSError") as failed:
        await opening
    assert asked > 1
    assert "s3cret" not in f"{failed.value!r} {failed.value.__cause__!r}"


async def test_a_source_that_gives_something_else_is_refused_without_showing_it(rabbit_url: str) -> None:
    opening = acemq.connect(rabbit_url, credentials=lambda: "guest:s3cret")  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    with pytest.raises(SecurityError, match="returned str") as refused:
        await opening
    assert "s3cret" not in repr(refused.value)


async def test_closing_does_not_wait_for_a_source_that_never_answers(rabbitmq: RabbitMQ) -> None:
    asked = 0

    async def hesitant() -> Credentials:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.Event().wait()
        return Credentials("guest", PASSWORD)

    mq = await acemq.connect(f"amqp://127.0.0.1:{rabbitmq.port}", credentials=hesitant, reconnect=QUICK)
    await asyncio.to_thread(rabbitmq.close_all_connections)
    await until(lambda: asked == 2)
    began = time.monotonic()
    await mq.close(timedelta(milliseconds=500))
    assert time.monotonic() - began < 2
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "_ask" in repr(task.get_coro())]


# Hosts


async def test_m002_of_three_hosts_the_one_that_answers_is_found_within_one_round(rabbitmq: RabbitMQ) -> None:
    url = rabbitmq.url_through(*free_ports(2), rabbitmq.port)
    never = Backoff(first=timedelta(minutes=10), ceiling=timedelta(minutes=10))  # there is no second round
    for _ in range(10):
        opening = acemq.connect(url, reconnect=never, connect_timeout=timedelta(seconds=5))
        async with opening as mq:
            assert mq.state.endpoint == f"127.0.0.1:{rabbitmq.port}/"


async def test_m002_the_first_host_is_not_always_the_same(rabbitmq: RabbitMQ) -> None:
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(Proxy("127.0.0.1", rabbitmq.port)) for _ in range(3)]
        url = rabbitmq.url_through(*(door.port for door in doors))
        endpoints = {(await stack.enter_async_context(acemq.connect(url))).state.endpoint for _ in range(10)}
    assert len(endpoints) > 1


# Blocked


Block = Callable[[str | None], Awaitable[None]]


@pytest.fixture
async def block(url: str, name: str, request: pytest.FixtureRequest) -> AsyncIterator[Block]:
    """Let the broker of `url` take no publishes, or take them again."""
    if url.startswith("memory"):
        broker = MemoryBroker.named(name)

        async def block(reason: str | None) -> None:
            broker.unblock() if reason is None else broker.block(reason)

    else:
        node: RabbitMQ = request.getfixturevalue("rabbitmq")

        async def block(reason: str | None) -> None:
            await asyncio.to_thread(node.set_memory_alarm, reason is not None)

    yield block
    await block(None)


async def meets_the_alarm(mq: AceMQ, queue: str) -> asyncio.Task[object]:
    """A broker tells that it is blocked only after a first publish, which may wait there until it is over."""

    async def first() -> None:
        try:
            await mq.send(queue, "first", timeout=timedelta(seconds=30))
        except BlockedError:  # where the broker tells at once
            assert mq.capabilities.transport == "memory"

    task: asyncio.Task[object] = asyncio.create_task(first())
    await until(lambda: mq.state.blocked is not None)
    return task


async def test_m017_refuse_raises_at_once_with_the_reason_and_wait_after_its_time_while_a_consumer_goes_on(
    url: str, mq: AceMQ, queue: str, block: Block
) -> None:
    handled: list[int] = []
    turn = asyncio.Semaphore(1)

    async def handle(message: Message[int]) -> None:
        await turn.acquire()
        handled.append(message.payload)

    await mq.send_many(queue, range(4))
    await mq.declare(acemq.Topology().queue(f"{queue}.parked", type="classic"))
    async with acemq.connect(url, when_blocked=WhenBlocked.WAIT) as patient:
        async with patient.consume(queue, int, handle, concurrency=1):
            await until(lambda: len(handled) == 1)
            await block("low on memory")
            firsts = [await meets_the_alarm(each, f"{queue}.parked") for each in (mq, patient)]

            outstanding, in_use = mq.state.outstanding, mq.outbound.permits.in_use
            refused = await refused_at_once(lambda: mq.send(queue, 99), BlockedError)
            assert refused.reason == mq.state.blocked == "low on memory"
            assert (mq.state.outstanding, mq.outbound.permits.in_use) == (outstanding, in_use)

            began = time.perf_counter()
            with pytest.raises(BlockedError) as blocked:
                await patient.send(queue, 99, timeout=timedelta(seconds=2))
            assert 1.9 < time.perf_counter() - began < 3
            assert blocked.value.reason == "low on memory"

            for _ in range(3):
                turn.release()
            await until(lambda: len(handled) == 4)

            # A busy machine takes its time to lift an alarm.
            waiting = asyncio.create_task(patient.send(f"{queue}.parked", "third", timeout=timedelta(seconds=60)))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await block(None)
            assert (await waiting).routed
            await until(lambda: mq.state.blocked is None)  # each connection is told by itself
            assert (await mq.send(f"{queue}.parked", "fourth")).routed
            await asyncio.gather(*firsts)
        assert patient.outbound.permits.in_use == mq.outbound.permits.in_use == 0
    assert sorted(handled) == [0, 1, 2, 3]


async def test_a_refused_publish_takes_no_permit_even_where_none_is_left(url: str, queue: str, block: Block) -> None:
    async with acemq.connect(url, max_outstanding=1) as small:
        await small.send(queue, 0)
        await block("disk full")
        first = await meets_the_alarm(small, queue)
        began = time.perf_counter()
        with pytest.raises(BlockedError):
            await small.send(queue, 1, timeout=timedelta(seconds=10))
        assert time.perf_counter() - began < 1
        with pytest.raises(BatchPublishError) as batch:
            await small.send_many(queue, range(5))
        assert batch.value.safe_to_resend
        assert {type(error) for error in batch.value.results} == {BlockedError}
        await block(None)
        await first


async def test_a_batch_waits_for_the_end_of_an_alarm_and_keeps_its_order(url: str, queue: str, block: Block) -> None:
    async with acemq.connect(url, when_blocked=WhenBlocked.WAIT, publish_timeout=timedelta(seconds=20)) as patient:
        await block("disk full")
        first = None
        if patient.capabilities.transport == "rabbitmq":
            first = await meets_the_alarm(patient, queue)
        sending = asyncio.create_task(patient.send_many(queue, range(20)))
        await asyncio.sleep(0.05)
        assert not sending.done()
        await block(None)
        assert len(await sending) == 20
        if first is not None:
            await first
        pulled = await patient.pull_many(queue, object, most=30)
        assert [each.payload for each in pulled if each.payload != "first"] == list(range(20))


async def test_close_ends_what_waits_for_the_end_of_an_alarm(url: str, queue: str, block: Block) -> None:
    patient = await acemq.connect(url, when_blocked=WhenBlocked.WAIT)
    await block("disk full")
    first = None
    if patient.capabilities.transport == "rabbitmq":
        first = await meets_the_alarm(patient, queue)
    waiting = asyncio.create_task(patient.send(queue, 1, timeout=timedelta(seconds=30)))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await patient.close(timedelta(milliseconds=500))
    assert time.monotonic() - began < 1.8
    with pytest.raises((ClosedError, PublishRefusedError)):
        await asyncio.wait_for(waiting, 2)
    if first is not None:
        await asyncio.gather(first, return_exceptions=True)


def test_when_blocked_is_one_of_two() -> None:
    with pytest.raises(ConfigurationError, match="when_blocked"):
        acemq.connect("memory://", when_blocked="later")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# Pausing


async def test_after_a_pause_the_applications_publishes_raise_and_a_resume_ends_that(mq: AceMQ, queue: str) -> None:
    publisher = mq.publisher("", queue, int)
    assert not mq.publishing_paused
    mq.pause_publishing()
    mq.pause_publishing()
    assert mq.publishing_paused
    with pytest.raises(PublishingPausedError, match="resume_publishing") as paused:
        await mq.send(queue, 1, message_id="m-1")
    assert (paused.value.outcome, paused.value.message_id, paused.value.routing_key) == ("refused", "m-1", queue)
    for refused in (publisher.publish(1), mq.send_many(queue, [1]), publisher.publish_many([1])):
        with pytest.raises(PublishingPausedError):
            await refused
    assert mq.outbound.permits.in_use == 0
    mq.resume_publishing()
    assert not mq.publishing_paused
    await mq.send(queue, 2)
    assert [each.payload for each in await mq.pull_many(queue, int)] == [2]


async def test_a_pause_lets_what_is_under_way_end(mq: AceMQ, queue: str) -> None:
    sending = [asyncio.ensure_future(mq.send(queue, number)) for number in range(5)]
    await asyncio.sleep(0)
    mq.pause_publishing()
    assert all([(await each).routed for each in sending])


async def test_a_batch_that_is_paused_half_way_says_which_were_not_sent(mq: AceMQ, queue: str) -> None:
    def numbers() -> object:
        for number in range(1_200):
            if number == 600:
                mq.pause_publishing()
            yield number

    with pytest.raises(BatchPublishError) as half:
        await mq.send_many(queue, numbers())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert half.value.confirmed == 1_000  # its second window was full already
    assert half.value.safe_to_resend
    assert isinstance(half.value.__cause__, PublishingPausedError)


async def test_while_paused_the_librarys_own_copies_go_on_and_a_handlers_publish_does_not(
    mq: AceMQ, queue: str
) -> None:
    refused: list[str] = []

    async def handle(message: Message[str]) -> Ack | None:
        if message.payload == "publishes":
            try:
                await mq.send(queue, "another")
            except PublishingPausedError:
                refused.append(message.payload)
            return None
        if message.payload == "forwards":
            await mq.forward(RoutingSlip.start_of(f"{queue}.parked"), "hop", message.envelope)
            return None
        if message.payload == "fails":
            raise ValueError("boom")
        return Ack.reject("bad")

    for payload in ("publishes", "forwards", "fails", "rejects"):
        await mq.send(queue, payload)
    async with mq.consume(queue, str, handle, retry=RetryPolicy.fixed(2, timedelta())) as consumer:
        mq.pause_publishing()
        await until(lambda: consumer.counters.dead_lettered == 1 and consumer.counters.rejected == 1)
        await until(lambda: consumer.counters.acked == 2)
    assert refused == ["publishes"]
    assert (await mq.depth(f"{queue}.dlq")).ready == 2
    assert (await mq.depth(f"{queue}.parked")).ready == 1
    result = await mq.replay(f"{queue}.dlq").into(queue).run()
    assert result.replayed == 2


async def test_while_paused_a_pipeline_finishes_its_runs_and_starts_none(mq: AceMQ, name: str) -> None:
    done: list[int] = []

    async def double(number: int) -> int:
        mq.pause_publishing()
        return number * 2

    async def note(number: int) -> None:
        done.append(number)

    pipeline = await mq.pipeline(name, int).step("double", double).step("note", note).start()
    try:
        await pipeline.send(21)
        await until(lambda: done == [42])
        with pytest.raises(PublishingPausedError):
            await pipeline.send(1)
    finally:
        await pipeline.close()
        mq.resume_publishing()
        for step in ("double", "note"):
            for suffix in ("", ".dlq", ".parked"):
                await mq.delete(f"{name}.{step}{suffix}")


# Closing


async def test_what_is_lost_again_within_thirty_seconds_is_dialled_after_longer_pauses(
    proxy: Proxy, proxied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Noting(Backoff, frozen=True, kw_only=True):
        def pause(self, tries: int) -> float:
            asked.append(tries)
            return 0.05

    async def cut(mq: AceMQ) -> None:
        generation = mq.state.generation
        proxy.cut()
        await until(lambda: mq.state.phase == "connected" and mq.state.generation == generation + 1)

    assert link.STEADY == 30
    async with acemq.connect(proxied, reconnect=Noting()) as mq:
        for _ in range(3):
            await cut(mq)
        assert sorted(asked) == [0, 0, 1, 1], "by each of the two links; the first loss is dialled at once"
        monkeypatch.setattr(link, "STEADY", 0.0)
        await cut(mq)
        assert len(asked) == 4, "one that has lasted begins anew"


async def test_close_while_reconnecting_is_bounded(proxy: Proxy, proxied: str, queue: str, mq: AceMQ) -> None:
    """In memory as on RabbitMQ; a publish that waits for the link is refused, and nothing is dialled any more."""
    handling = asyncio.Event()

    async def handle(message: Message[int]) -> None:
        handling.set()
        await asyncio.sleep(30)

    memory = mq.capabilities.transport == "memory"
    url = mq.state.endpoint if memory else proxied
    busy = await acemq.connect(url, reconnect=QUICK)
    consumer = await busy.consume(queue, int, handle)
    await mq.send(queue, 1)
    await handling.wait()
    broker = MemoryBroker.named(url.removeprefix("memory://")) if memory else None
    if broker is not None:
        broker.refuse_dials()
        broker.disconnect("cut by a test")
    else:
        proxy.refuse()
        proxy.cut()
    await until(lambda: busy.state.phase == "reconnecting" and busy.state.dials >= 2)
    waiting = asyncio.create_task(busy.send(queue, 2, timeout=timedelta(seconds=30)))
    await asyncio.sleep(0)
    began = time.monotonic()
    drained = await busy.close(timedelta(milliseconds=800))
    assert time.monotonic() - began < 2.3
    assert not drained.finished
    assert busy.state.phase == "closed"
    with pytest.raises((PublishRefusedError, ClosedError)):
        await asyncio.wait_for(waiting, 2)
    assert await busy.close() is drained
    if broker is not None:
        broker.refuse_dials(False)
    else:
        proxy.refuse(False)
    dialled = proxy.accepted
    await asyncio.sleep(0.3)  # this is how long nothing happens
    assert proxy.accepted == dialled
    assert consumer.in_flight == 0
