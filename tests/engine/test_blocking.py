"""The synchronous face: the same engine for scripts, other threads and handlers that are plain functions."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

import acemq
from acemq import (
    Ack,
    BlockingMQ,
    ClosedError,
    ConfigurationError,
    ConnectionFailedError,
    ConsumerState,
    Draft,
    LoopError,
    Message,
    ReplayError,
    StopReason,
    Topology,
    TopologyError,
)
from tests.waiting import until

ROOT = Path(__file__).parents[2]
SECOND = timedelta(seconds=1)


@pytest.fixture
def ops(url: str) -> Iterator[BlockingMQ]:
    with acemq.blocking.connect(url) as ops:
        yield ops


@pytest.fixture
def orders(ops: BlockingMQ, name: str) -> Iterator[str]:
    """A queue of the test's own, with its dead letters."""
    ops.declare(Topology().queue(name, type="classic", dead_letter=True))
    yield name
    for each in (name, f"{name}.dlq", f"{name}.parked"):
        ops.delete(each)


def waits_until(condition: Callable[[], bool], within: float = 30) -> None:
    asyncio.run(until(condition, within=within))


# What it does


def test_it_publishes_pulls_and_settles(ops: BlockingMQ, orders: str) -> None:
    receipt = ops.send(orders, {"order": 1}, headers={"x-tenant": "acme"})
    pulled = ops.pull(orders, dict[str, int], wait=SECOND)
    assert pulled is not None
    assert (pulled.payload, pulled.id, pulled.headers["x-tenant"]) == ({"order": 1}, receipt.message_id, "acme")
    assert pulled.reject("bad")
    assert (ops.depth(orders).ready, ops.depth(f"{orders}.dlq").ready) == (0, 1)
    (letter,) = ops.pull_many(f"{orders}.dlq", bytes, wait=SECOND)
    assert letter.failure is not None
    assert letter.release()
    with pytest.raises(ClosedError, match="settled already"):
        letter.accept()
    assert ops.pull(orders, str) is None


def test_every_way_to_publish_waits_for_the_confirm(ops: BlockingMQ, orders: str) -> None:
    events = Topology().exchange(f"{orders}.x", "topic").queue(orders, type="classic", dead_letter=True)
    ops.declare(events.bind(orders, f"{orders}.x", "order.*"))
    ops.publish(f"{orders}.x", "order.placed", 1)
    assert len(ops.publish_many(f"{orders}.x", "order.paid", [2, 3])) == 2
    assert len(ops.send_many(orders, (n for n in (4, 5)))) == 2
    assert len(ops.publish_batch([Draft("", orders, 6)])) == 1
    assert [each.payload for each in ops.pull_many(orders, int, most=10, wait=SECOND)] == [1, 2, 3, 4, 5, 6]
    ops.delete(f"{orders}.x", "exchange")


def test_it_consumes_in_threads_that_may_call_it(ops: BlockingMQ, orders: str) -> None:
    seen: list[int] = []

    def ship(message: Message[int]) -> Ack | None:
        if message.payload < 3:
            ops.send(orders, message.payload + 1)  # correlated with the message in hand
        seen.append(message.payload)
        assert message.correlation_id == "first"
        return None

    with ops.consume(orders, int, ship) as consumer:
        ops.send(orders, 0, message_id="first")
        waits_until(lambda: consumer.counters.acked == 4)
        consumer.pause()
        assert consumer.state is ConsumerState.PAUSED
        consumer.resume()
    assert sorted(seen) == [0, 1, 2, 3]


def test_it_replays(ops: BlockingMQ, orders: str) -> None:
    ops.send_many(f"{orders}.dlq", range(5))
    replay = ops.replay(f"{orders}.dlq").where(lambda message: message.body != b"2")
    assert replay.pending() == 5
    assert replay.dry_run().replayed == 4
    told: list[StopReason] = []
    result = (
        replay.at_rate(1_000)
        .until(SECOND * 30)
        .in_batches(2)
        .reporting(lambda r: told.append(r.stopped))
        .run(limit=100)
    )
    assert (result.replayed, result.put_back, told) == (4, 1, [StopReason.DRAINED])
    assert ops.replay(f"{orders}.dlq").into(orders).keeping_attempts().run().replayed == 1
    ops.send(f"{orders}.dlq", 9)
    ops.delete(orders)
    with pytest.raises(ReplayError):
        ops.replay(f"{orders}.dlq").run()


def test_it_looks_and_declares(ops: BlockingMQ, orders: str) -> None:
    assert ops.exists(orders)
    assert not ops.plan(Topology().queue(orders, type="classic", dead_letter=True)).missing
    assert ops.declared().queues[0].name == orders
    assert ops.stats(orders).depth is not None
    assert ops.health().status == "up"
    ops.send(orders, 1)
    assert ops.purge(orders) == 1
    assert (ops.state.phase, ops.capabilities.delivery) == ("connected", "at_least_once")
    with pytest.raises(TopologyError):
        ops.depth(f"{orders}.no")


def test_it_asks_and_waits_for_the_answer(ops: BlockingMQ, orders: str, name: str) -> None:
    async def respond(mq: acemq.AceMQ) -> acemq.Responder:
        return await mq.respond(orders, int, half, concurrency=8)

    def half(message: Message[int]) -> int:
        if message.payload % 2:
            raise ValueError(f"{message.payload} is odd")
        return message.payload // 2

    responder = ops.run(respond)
    with ThreadPoolExecutor(8) as threads:
        halves = threads.map(lambda n: ops.request("", orders, n, int, timeout=10 * SECOND), range(0, 100, 2))
        assert list(halves) == list(range(50))
    with pytest.raises(acemq.ResponderError, match="3 is odd"):
        ops.request("", orders, 3, int)
    with pytest.raises(acemq.UnroutableError):
        ops.request("", f"{name}.no", 1, int)
    ops.run(lambda _: responder.close())
    with pytest.raises(acemq.RequestTimeoutError):
        ops.request("", orders, 4, int, timeout=SECOND / 10, headers={"x-tenant": "acme"})


def test_a_handler_in_a_thread_may_ask_another_queue(ops: BlockingMQ, orders: str, name: str) -> None:
    answers: list[int] = []

    async def respond(mq: acemq.AceMQ) -> acemq.Responder:
        await mq.declare(Topology().queue(f"{name}.prices", type="classic"))
        return await mq.respond(f"{name}.prices", int, lambda message: message.payload * 2)

    def ship(message: Message[int]) -> None:
        answers.append(ops.request("", f"{name}.prices", message.payload, int))

    responder = ops.run(respond)
    with ops.consume(orders, int, ship):
        ops.send(orders, 21)
        waits_until(lambda: answers == [42])
    ops.run(lambda _: responder.close())
    for each in ("", ".dlq", ".parked"):
        ops.delete(f"{name}.prices{each}")


def test_everything_else_is_awaited_on_its_loop(ops: BlockingMQ, orders: str) -> None:
    async def send_twice(mq: acemq.AceMQ) -> int:
        return len(await asyncio.gather(mq.send(orders, 1), mq.send(orders, 2)))

    assert ops.run(send_twice) == 2


def test_publishing_can_be_paused(ops: BlockingMQ, orders: str) -> None:
    ops.pause_publishing()
    with pytest.raises(acemq.PublishingPausedError):
        ops.send(orders, 1)
    ops.resume_publishing()
    ops.send(orders, 1)


# Threads


@pytest.mark.timeout(120)
def test_eight_threads_lose_nothing_and_no_two_share_an_id(ops: BlockingMQ, orders: str) -> None:
    ids: list[str] = []

    def send() -> None:
        ids.extend([ops.send(orders, n).message_id for n in range(1_000)])

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(ids), len(set(ids)), ops.depth(orders).ready) == (8_000, 8_000, 8_000)


def test_two_of_one_process_do_not_meet(url: str, ops: BlockingMQ, orders: str) -> None:
    with acemq.blocking.connect("memory://") as other:
        assert not other.exists(orders)
        other.declare(Topology().queue(orders))
    with pytest.raises(ClosedError):
        other.exists(orders)
    assert ops.exists(orders)


def test_importing_it_starts_no_thread_and_closing_leaves_none() -> None:
    code = (
        "import threading, acemq, acemq.blocking as b; assert threading.active_count() == 1\n"
        "mq = b.connect('memory://'); assert threading.active_count() == 1\n"
        "with mq: assert threading.active_count() == 2\n"
        "assert threading.active_count() == 1\n"
        "mq.close()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT, timeout=30)


async def test_it_works_while_a_loop_runs_in_another_thread_and_is_refused_in_that_one(name: str) -> None:
    def script() -> int:
        with acemq.blocking.connect(f"memory://{name}") as ops:
            ops.declare(Topology().queue("orders"))
            ops.send("orders", 1)
            return ops.depth("orders").ready

    assert await asyncio.to_thread(script) == 1
    with pytest.raises(LoopError, match="inside a running event loop"):
        acemq.blocking.connect("memory://").open()


async def test_t012_a_blocking_and_an_asynchronous_side_lose_and_double_nothing(name: str) -> None:
    """`memory://shared`, both ways at once."""
    count = 20_000
    here: list[int] = []

    def blocking_side() -> list[int]:
        there: list[int] = []
        with acemq.blocking.connect(f"memory://{name}") as ops:
            with ops.consume("to-blocking", int, lambda message: there.append(message.payload)):
                for n in range(count):
                    ops.send("to-async", n)
                waits_until(lambda: len(there) >= count, within=40)
            began = time.monotonic()
        assert time.monotonic() - began < 1
        return there

    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("to-async").queue("to-blocking"))

        async def take(message: Message[int]) -> None:
            here.append(message.payload)

        async with mq.consume("to-async", int, take):
            other = asyncio.ensure_future(asyncio.to_thread(blocking_side))
            await mq.send_many("to-blocking", range(count))
            there = await other
            await until(lambda: len(here) >= count)
    assert (sorted(here), sorted(there)) == (list(range(count)), list(range(count)))


# The same connection, from a thread


async def test_an_asynchronous_connection_has_a_blocking_face_for_its_threads(name: str) -> None:
    async with acemq.connect(f"memory://{name}") as mq:
        await mq.declare(Topology().queue("orders").queue("mail"))
        sent: list[acemq.Receipt] = []

        def ship(message: Message[int]) -> None:
            sent.append(mq.blocking.send("mail", message.payload))

        async with mq.consume("orders", int, ship) as consumer:
            order = await mq.send("orders", 1)
            await until(lambda: consumer.counters.acked == 1)
        mail = await mq.pull("mail", int)
        assert mail is not None
        assert mail.correlation_id == order.message_id

        face = mq.blocking
        with pytest.raises(LoopError, match="running event loop"):
            face.send("mail", 1)
        with pytest.raises(LoopError, match="belongs to the event loop that opened it"):
            await asyncio.to_thread(face.close)
        with pytest.raises(LoopError, match="`blocking`"):
            await asyncio.to_thread(lambda: asyncio.run(_send(mq)))
    with pytest.raises(ClosedError):
        await asyncio.to_thread(lambda: face.send("mail", 1))
    with pytest.raises(ClosedError, match="not open yet"):
        _ = acemq.AceMQ("memory://").blocking


async def _send(mq: acemq.AceMQ) -> None:
    await mq.send("mail", 1)


def test_a_call_that_waits_while_its_loop_ends_is_told_so() -> None:
    told: list[BaseException] = []

    def wait(mq: acemq.AceMQ) -> None:
        try:
            mq.blocking.pull("orders", int, wait=SECOND * 60)
        except ClosedError as closed:
            told.append(closed)

    async def main() -> threading.Thread:
        mq = await acemq.connect("memory://")
        await mq.declare(Topology().queue("orders"))
        thread = threading.Thread(target=wait, args=(mq,))
        thread.start()
        await asyncio.to_thread(lambda: mq.blocking.exists("orders"))  # behind the pull
        return thread

    asyncio.run(main()).join(10)
    assert len(told) == 1


# Opening, closing, interrupting


def test_what_is_wrong_is_refused_before_anything_is_opened() -> None:
    with pytest.raises(ConfigurationError, match="unknown scheme"):
        acemq.blocking.connect("kafka://h")
    ops = acemq.blocking.connect("memory://")
    with pytest.raises(ClosedError, match="not open yet"):
        ops.send("orders", 1)
    assert ops.close().finished
    with acemq.blocking.connect("memory://") as ops, pytest.raises(ClosedError, match="opened already"):
        ops.open()


def test_a_broker_that_is_not_there_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with pytest.raises(ConnectionFailedError):
        acemq.blocking.connect("amqp://127.0.0.1:1", connect_timeout=SECOND / 5).open()
    assert threading.active_count() == before


def test_closing_is_bounded_though_a_handler_never_ends(url: str, name: str) -> None:
    started, end = threading.Event(), threading.Event()

    def stuck(message: Message[int]) -> None:
        started.set()
        end.wait()

    ops = acemq.blocking.connect(url).open()
    try:
        ops.declare(Topology().queue(name, type="classic", dead_letter=True))
        ops.consume(name, int, stuck)
        ops.send(name, 1)
        started.wait()
        began = time.monotonic()
        drained = ops.close(timeout=SECOND / 2)
        assert time.monotonic() - began < 1.5  # a second, and what a busy machine takes
        assert (drained.finished, drained.abandoned) == (False, 1)
        assert ops.close() is drained
    finally:
        end.set()
        with acemq.blocking.connect(url) as again:
            for each in (name, f"{name}.dlq", f"{name}.parked"):
                again.delete(each)


def test_a_keyboard_interrupt_ends_the_call_and_leaves_the_connection_usable(ops: BlockingMQ, orders: str) -> None:
    waiting = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        ops.pull(orders, str, wait=SECOND * 30)
    waiting.join()
    ops.send(orders, "after")
    pulled = ops.pull(orders, str, wait=SECOND)
    assert pulled is not None
    assert pulled.payload == "after"


INTERRUPTED = """
import os, signal, sys, threading, acemq
from acemq import Topology
signal.signal(signal.SIGINT, signal.default_int_handler)
with acemq.blocking.connect(sys.argv[1]) as mq:
    mq.declare(Topology().queue(sys.argv[2], type="classic"))
    def send():
        for n in range(500):
            mq.send(sys.argv[2], n)
    threads = [threading.Thread(target=send) for _ in range(7)]
    for each in threads:
        each.start()
    try:
        for n in range(500):
            if n == 50:
                signal.raise_signal(signal.SIGINT)
            mq.send(sys.argv[2], n)
    except KeyboardInterrupt:
        print("interrupted at", n)
    for each in threads:
        each.join()
print("closed")
"""


def test_m114_an_interrupt_of_the_main_thread_leaves_the_others_alone(url: str, ops: BlockingMQ, orders: str) -> None:
    if url.startswith("memory:"):
        pytest.skip("the script is another process")
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED, url, f"{orders}.114"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=50, check=False)
    assert done.stdout.splitlines() == ["interrupted at 50", "closed"], done.stderr
    assert ops.depth(f"{orders}.114").ready == 3_500 + 50
    ops.delete(f"{orders}.114")


FORKED = """
import os, acemq
with acemq.blocking.connect("memory://") as mq:
    child = os.fork()
    if not child:
        try:
            mq.exists("orders")
        except acemq.LoopError as refused:
            os._exit("forked" in str(refused))
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert not mq.exists("orders")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_is_told_to_connect_again() -> None:
    # Python 3.12 warns of the fork itself: threads run.
    subprocess.run([sys.executable, "-c", FORKED], check=True, cwd=ROOT, timeout=30)
