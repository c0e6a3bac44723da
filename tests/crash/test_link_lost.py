"""The link goes away, or a channel of it, while work is under way: every wait ends, and nothing is taken for done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import AceMQ, Ack, Consumer, ConsumerState, Diagnostic, Message, Receipt, Receiving, Topology
from acemq.errors import PublishError, PublishFailedError, PublishRefusedError
from tests.crash import census
from tests.crash.conftest import remove
from tests.foreign.client import Foreign
from tests.proxy import Proxy, Way
from tests.services import RabbitMQ
from tests.waiting import QUICK, until, until_async


async def close_by_server(rabbitmq: RabbitMQ) -> None:
    """320 on every connection."""
    await asyncio.to_thread(rabbitmq.close_all_connections)


async def recovered(mq: AceMQ, generation: int) -> None:
    await until(lambda: mq.state.phase == "connected" and mq.state.generation > generation)


# Publishes


@pytest.mark.parametrize("then", ["the confirms come late", "the line is cut", "nothing comes any more"])
async def test_o01_a_hundred_publishes_outstanding_when_the_server_closes_all_end(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str, proxy: Proxy, proxied: str, then: str
) -> None:
    async with acemq.connect(proxied, publish_timeout=timedelta(seconds=5)) as publisher:
        await publisher.send(queue, "before")
        proxy.swallow("to_client")
        publishes = {f"m-{n}": asyncio.create_task(publisher.send(queue, n, message_id=f"m-{n}")) for n in range(100)}
        await until_async(lambda: holds(mq, queue, 101))
        assert publisher.state.outstanding == 100
        await close_by_server(rabbitmq)
        match then:
            case "the confirms come late":
                proxy.release()
            case "the line is cut":
                proxy.cut()
        _, pending = await asyncio.wait(publishes.values(), timeout=10)
        assert not pending
        ended = {id: task.exception() for id, task in publishes.items()}
        assert all(error is None or isinstance(error, PublishFailedError) for error in ended.values())
        confirmed = {id for id, error in ended.items() if error is None}
        if then != "the confirms come late":
            assert not confirmed
        proxy.release()

        async def is_confirmed() -> bool:
            try:
                return (await publisher.send(queue, "after", message_id="after")).routed is True
            except PublishFailedError:  # the end of the old line was still on its way to us
                return False

        await until_async(is_confirmed)
        assert publisher.state.outstanding == 0
    with Foreign(rabbitmq.url) as foreign:
        assert confirmed <= {letter.id for letter in foreign.take(queue)}


async def holds(mq: AceMQ, queue: str, count: int) -> bool:
    return (await mq.depth(queue)).ready == count


@pytest.mark.parametrize(("way", "there"), [("to_client", 1), ("to_server", 0)])
async def test_m016_a_cut_between_write_and_confirm_says_that_it_may_or_may_not_be_there(
    mq: AceMQ, queue: str, proxy: Proxy, proxied: str, way: Way, there: int
) -> None:
    async with acemq.connect(proxied) as publisher:
        proxy.swallow(way)
        taken = proxy.taken["to_server"]
        publish = asyncio.create_task(publisher.send(queue, "x" * 1_000, message_id="m-1"))
        await until(lambda: proxy.taken["to_server"] > taken + 1_000)
        await until_async(lambda: holds(mq, queue, there))
        proxy.cut()
        proxy.release()
        with pytest.raises(
            PublishFailedError, match="may or may not be there; send it again with the same message_id"
        ) as lost:
            await publish
        error = lost.value
        assert (error.message_id, error.routing_key, error.outcome, error.nacked) == ("m-1", queue, "failed", False)
        assert "refused" not in str(error)
        assert (await publisher.send(queue, "again", message_id="m-1")).routed
    assert (await mq.depth(queue)).ready == there + 1


async def test_a_publish_refused_while_the_broker_is_away_is_never_sent_later(
    mq: AceMQ, queue: str, proxy: Proxy, proxied: str
) -> None:
    async with acemq.connect(proxied, reconnect=QUICK) as publisher:
        proxy.refuse()
        proxy.cut()
        await until(lambda: publisher.state.phase == "reconnecting")
        began = time.monotonic()
        publishes = [publisher.send(queue, n, timeout=timedelta(seconds=1)) for n in range(50)]
        results = await asyncio.gather(*publishes, return_exceptions=True)
        took = time.monotonic() - began
        assert all(isinstance(result, PublishRefusedError) for result in results)
        assert 0.5 < took < 2.5
        proxy.refuse(False)
        assert (await publisher.send(queue, "after")).routed
        assert (await mq.depth(queue)).ready == 1


async def test_o07_an_exchange_that_goes_away_fails_its_own_message_by_name_and_leaves_no_other_waiting(
    mq: AceMQ, queue: str
) -> None:
    gone = f"{queue}-gone"
    await mq.declare(Topology().exchange(gone).queue(queue, type="classic").bind(queue, gone, "k"))
    assert (await mq.publish(gone, "k", 0)).routed  # known from here on, so that nobody looks before writing
    await mq.delete(gone, "exchange")
    began = time.monotonic()
    good = [asyncio.create_task(mq.send(queue, n)) for n in range(25)]
    bad = asyncio.create_task(mq.publish(gone, "k", "bad", message_id="bad"))
    good += [asyncio.create_task(mq.send(queue, n)) for n in range(25, 50)]
    with pytest.raises(PublishError) as refused:
        await bad
    assert refused.value.code == 404
    assert (refused.value.exchange, refused.value.message_id) == (gone, "bad")
    assert gone in str(refused.value)
    results = await asyncio.gather(*good, return_exceptions=True)
    assert time.monotonic() - began < 10
    assert all(isinstance(result, Receipt | PublishFailedError) for result in results)
    confirmed = sum(isinstance(result, Receipt) for result in results)
    assert (await mq.send(queue, "next")).routed
    assert (await mq.depth(queue)).ready >= confirmed + 2
    assert mq.state.generation == 1, "without connecting again"
    with pytest.raises(PublishRefusedError, match=gone) as missing:
        await mq.publish(gone, "k", "bad")
    assert missing.value.code == 404


@pytest.mark.timeout(150)
async def test_t033_an_exchange_deleted_under_load_costs_its_own_messages_and_comes_back_without_help(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    here, gone = f"{queue}-x", f"{queue}-y"
    described = Topology().queue(queue, type="classic")
    for exchange in (here, gone):
        described = described.exchange(exchange).bind(queue, exchange, "k")
    await mq.declare(described)
    ended: dict[str, list[Receipt | BaseException]] = {here: [], gone: []}
    publishes: set[asyncio.Task[None]] = set()

    async def publish(exchange: str) -> None:
        try:
            ended[exchange].append(await mq.publish(exchange, "k", 1))
        except PublishError as error:
            ended[exchange].append(error)

    async def load() -> None:
        while True:
            for exchange in (here, gone):
                publishes.add(asyncio.create_task(publish(exchange)))
            await asyncio.sleep(0.01)

    def is_refused() -> bool:
        return any(isinstance(end, PublishRefusedError) and end.code == 404 for end in ended[gone])

    async with mq.consume(queue, int, lambda message: None) as consumer:
        before = (await census.on_broker(rabbitmq))["consumers"]
        loading = asyncio.create_task(load())
        await until(lambda: len(ended[gone]) > 100, within=30)
        async with acemq.connect(rabbitmq.url) as other:
            await other.delete(gone, "exchange")
        await until(is_refused, within=30)
        refused_from = len(ended[gone])
        settled = len(ended[here])
        await until(lambda: len(ended[here]) > settled + 100, within=30)
        assert all(isinstance(end, PublishError) for end in ended[gone][refused_from:])
        again = len(ended[gone])
        async with acemq.connect(rabbitmq.url) as other:
            await other.declare(described)
        await until(lambda: any(isinstance(end, Receipt) for end in ended[gone][again:]), within=30)
        loading.cancel()
        _, pending = await asyncio.wait(publishes, timeout=10)
        assert not pending
        lost = [end for end in ended[here] if not isinstance(end, Receipt)]
        assert all(isinstance(end, PublishFailedError) for end in lost)
        assert mq.state.generation == 1
        assert (await census.on_broker(rabbitmq))["consumers"] == before
        await until(lambda: consumer.held == consumer.in_flight == 0)
    for exchange in (here, gone):
        await mq.delete(exchange, "exchange")


async def test_o07_a_forbidden_exchange_refuses_its_own_message_by_name_and_leaves_no_other_waiting(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    forbidden = f"{queue}-forbidden"
    await mq.declare(Topology().exchange(forbidden).queue(queue, type="classic").bind(queue, forbidden, "k"))
    user = queue[-8:]
    await asyncio.to_thread(rabbitmq.ctl, "add_user", user, "secret")
    await asyncio.to_thread(rabbitmq.ctl, "set_permissions", user, ".*", "^amq.default$", ".*")
    try:
        async with acemq.connect(rabbitmq.url_as(user, "secret")) as limited:
            began = time.monotonic()
            good = [asyncio.create_task(limited.send(queue, n)) for n in range(25)]
            bad = asyncio.create_task(limited.publish(forbidden, "k", "bad", message_id="bad"))
            good += [asyncio.create_task(limited.send(queue, n)) for n in range(25, 50)]
            with pytest.raises(PublishRefusedError) as refused:
                await bad
            assert refused.value.code == 403
            assert (refused.value.exchange, refused.value.message_id) == (forbidden, "bad")
            results = await asyncio.gather(*good, return_exceptions=True)
            assert time.monotonic() - began < 10
            assert all(isinstance(result, Receipt | PublishFailedError) for result in results)
            assert (await limited.send(queue, "next")).routed
            assert limited.state.generation == 1
    finally:
        await asyncio.to_thread(rabbitmq.ctl, "delete_user", user)
    await mq.delete(forbidden, "exchange")


# Consumers


async def waiting_on_a_gate(
    mq: AceMQ, queue: str, gate: asyncio.Event, answer: Ack | None
) -> tuple[Consumer, Counter[int]]:
    """Ten handlers that wait, and how often each message was begun."""
    runs: Counter[int] = Counter()

    async def handle(message: Message[int]) -> Ack | None:
        runs[message.payload] += 1
        assert message.redelivered == (runs[message.payload] == 2)
        await gate.wait()
        return answer

    consumer = await mq.consume(queue, int, handle, concurrency=10, prefetch=10)
    await mq.send_many(queue, range(10))
    await until(lambda: consumer.in_flight == 10)
    return consumer, runs


async def test_m031_o05_what_is_settled_on_a_lost_link_is_dropped_and_work_goes_on(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    gate = asyncio.Event()
    consumer, runs = await waiting_on_a_gate(mq, queue, gate, None)
    await close_by_server(rabbitmq)
    await recovered(mq, 1)
    await until(lambda: consumer.state is ConsumerState.RUNNING and consumer.held == 10)
    gate.set()
    began = time.monotonic()
    await mq.send_many(queue, range(10, 30))
    await until(lambda: len(runs) == 30 and consumer.in_flight == 0)
    assert time.monotonic() - began < 10
    assert max(runs.values()) <= 2
    assert consumer.counters.stale == 10
    stale = [diagnostic for diagnostic in diagnostics if diagnostic.name == "acemq.settle.stale"]
    assert len(stale) == len({diagnostic.message_id for diagnostic in stale}) == 10
    assert not [diagnostic for diagnostic in diagnostics if diagnostic.level == "error"]
    await consumer.close()
    assert (await mq.depth(queue)).ready == 0, "and none is unsettled"


@pytest.mark.parametrize(
    ("answer", "suffix"), [(Ack.reject("bad"), ".dlq"), (Ack.park("why"), ".parked")], ids=["reject", "park"]
)
async def test_m031_a_decision_about_a_delivery_that_is_gone_makes_no_copy(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str, answer: Ack, suffix: str
) -> None:
    gate = asyncio.Event()
    consumer, runs = await waiting_on_a_gate(mq, queue, gate, answer)
    await close_by_server(rabbitmq)
    await recovered(mq, 1)
    await until(lambda: consumer.state is ConsumerState.RUNNING and consumer.held == 10)
    gate.set()
    await until(lambda: runs.total() == 20 and consumer.in_flight == consumer.held == 0)
    await consumer.close()
    assert (await mq.depth(queue)).ready == 0
    assert (await mq.depth(f"{queue}{suffix}")).ready == 10
    assert consumer.counters.stale == 10


async def test_m037_a_pulled_message_settled_after_the_link_was_lost_says_so_and_is_there_again(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str
) -> None:
    await mq.send(queue, 1, message_id="m-1")
    pulled = await mq.pull(queue, int)
    assert pulled is not None
    await close_by_server(rabbitmq)
    await recovered(mq, 1)
    assert not await pulled.accept()
    again = await mq.pull(queue, int, wait=timedelta(seconds=5))
    assert again is not None
    assert (again.id, again.redelivered, again.attempt) == ("m-1", True, 1)
    assert await again.accept()


async def test_o10_a_plain_handler_outlasting_three_heartbeats_keeps_its_connection(
    rabbitmq: RabbitMQ, rabbit_url: str, queue: str
) -> None:
    runs = 0

    def block(message: Message[int]) -> None:
        nonlocal runs
        runs += 1
        time.sleep(7)  # the work itself

    async def connections() -> set[str]:
        rows = await asyncio.to_thread(rabbitmq.ctl, "list_connections", "pid", "timeout")
        return {row.split()[0] for row in rows.splitlines() if row.split()[1:] == ["2"]}

    async with acemq.connect(f"{rabbit_url}/?heartbeat=2") as mq:
        async with mq.consume(queue, int, block) as consumer:
            before = await connections()
            assert len(before) == 2
            await mq.send(queue, 1)
            await until(lambda: consumer.counters.acked == 1)
            assert await connections() == before
        assert mq.state.generation == 1
        assert (await mq.depth(queue)).ready == 0
    assert runs == 1


async def force(
    mq: AceMQ, number: int, *, by: Callable[[], Awaitable[None]], queues: list[str], seen: Counter[str]
) -> None:
    """Have the links taken away, and return once they are back and each queue's consumer has handled a message."""
    generation = mq.state.generation
    await by()
    await recovered(mq, generation)
    for queue in queues:
        await mq.send(queue, f"{queue} {number}")
    await until(lambda: all(f"{queue} {number}" in seen for queue in queues))


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_m009_forty_forced_reconnects_leave_everything_as_it_was_after_the_first(
    rabbitmq: RabbitMQ, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for logger in census.PACKAGES:
        caplog.set_level(logging.CRITICAL, logger)  # a captured record keeps alive what it speaks of
    queues = [f"{name}-{letter}" for letter in "abc"]
    async with acemq.connect(rabbitmq.url, name="forced", reconnect=QUICK) as forced:
        for queue in queues:
            await forced.declare(Topology().queue(queue, type="classic"))
        seen: Counter[str] = Counter()
        consumers = [
            await forced.consume(queue, str, lambda message: seen.update([message.payload])) for queue in queues
        ]
        await forced.pull(f"{queues[0]}.parked", str)  # a channel of its own, too

        async def close(number: int) -> None:
            await force(forced, number, by=lambda: close_by_server(rabbitmq), queues=queues, seen=seen)
            await forced.pull(f"{queues[0]}.parked", str)

        await close(1)
        tasks, objects, broker = census.tasks(), census.objects(), await census.on_broker(rabbitmq)
        for number in range(2, 41):
            await close(number)
        assert forced.state.generation == 41
        assert census.tasks() == tasks
        grown = census.objects() - objects
        assert grown.total() <= 5, grown

        async def is_as_before() -> bool:
            return await census.on_broker(rabbitmq) == broker

        await until_async(is_as_before, within=20)
        assert broker["connections"].count(f"forced@{forced.origin.partition('@')[2]} publish") == 1
        assert [queue for queue, _ in broker["consumers"]] == queues
        assert max(seen.values()) == 1
        assert {consumer.state for consumer in consumers} == {ConsumerState.RUNNING}
        assert forced.outbound.permits.in_use == 0
        for consumer in consumers:
            await consumer.close()
        await remove(forced, *queues)


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_fifty_forced_reconnects_leave_broker_and_process_as_after_the_first_whatever_consumes(
    rabbitmq: RabbitMQ, mq: AceMQ, name: str, proxy: Proxy, proxied: str
) -> None:
    handled, grouped, received = (f"{name}-{what}" for what in ("handled", "grouped", "received"))
    queues = [handled, grouped, received]
    for queue in queues:
        await mq.declare(Topology().queue(queue, type="classic"))
    async with acemq.connect(proxied, name="fifty", reconnect=QUICK) as forced:
        seen: Counter[str] = Counter()

        def note(message: Message[str]) -> None:
            seen[message.payload] += 1

        async def take(receiving: Receiving[str]) -> None:
            async for message in receiving:
                seen[message.payload] += 1
                await message.accept()

        await forced.consume(handled, str, note)
        await forced.consume_group(grouped, str, note, size=2)
        async with forced.receive(received, str) as receiving:
            taking = asyncio.create_task(take(receiving))

            async def cut() -> None:
                proxy.cut()

            async def settled() -> dict[str, Any]:
                """What the broker has once it has noticed the end of every connection but the last."""
                found: dict[str, Any] = {}

                async def is_settled() -> bool:
                    nonlocal found
                    found = await census.on_broker(rabbitmq)
                    ours = [each for each in found["connections"] if each.startswith("fifty@")]
                    consuming = [queue for queue, _ in found["consumers"] if queue in queues]
                    return len(ours) == 2 and sorted(consuming) == sorted([*queues, grouped])

                await until_async(is_settled, within=20)
                return found

            await force(forced, 1, by=cut, queues=queues, seen=seen)
            tasks, broker = census.tasks(), await settled()
            for number in range(2, 51):
                await force(forced, number, by=cut, queues=queues, seen=seen)
            assert forced.state.generation == 51
            assert census.tasks() == tasks

            async def is_as_before() -> bool:
                return await census.on_broker(rabbitmq) == broker

            await until_async(is_as_before, within=20)
            assert forced.outbound.permits.in_use == 0
        await taking
    await remove(mq, *queues)


async def test_o11_two_thousand_publishers_leave_nothing_behind(
    rabbitmq: RabbitMQ, mq: AceMQ, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    for logger in census.PACKAGES:
        caplog.set_level(logging.CRITICAL, logger)
    channels = (await census.on_broker(rabbitmq))["channels"]
    early = tasks = None
    for number in range(2_000):
        await mq.publisher("", queue, int).publish(number)
        if number == 50:
            early, tasks = census.objects(), census.tasks()
    assert early is not None
    await close_by_server(rabbitmq)
    await recovered(mq, 1)
    assert (await mq.send(queue, -1)).routed
    grown = census.objects() - early
    assert grown.total() <= 5, grown
    assert census.tasks() == tasks

    async def is_as_before() -> bool:
        return bool((await census.on_broker(rabbitmq))["channels"] == channels)

    await until_async(is_as_before)
    assert (await mq.depth(queue)).ready == 2_001
