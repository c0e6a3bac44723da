"""The broker refuses something for good, or has another queue under a name: only what is concerned is disturbed."""

from __future__ import annotations

import asyncio

import pytest

import acemq
from acemq import AceMQ, ConsumerState, Diagnostic, Message, Receipt, Topology
from acemq.errors import DriftError, PublishFailedError, UnroutableError
from tests.conftest import StartRabbitMQ
from tests.crash.conftest import remove
from tests.proxy import Proxy
from tests.waiting import QUICK, until


async def test_a_precondition_that_closes_the_channel_fails_what_is_unanswered_on_it_and_no_consumer(
    start_rabbitmq: StartRabbitMQ, name: str
) -> None:
    server = await asyncio.to_thread(start_rabbitmq, max_message_size=10_000)
    handled: list[str] = []
    async with acemq.connect(server.url) as mq:
        await mq.declare(Topology().queue(name, type="classic"))
        consumer = await mq.consume(name, str, lambda message: handled.append(message.id))
        good = [asyncio.create_task(mq.send(name, "x", message_id=f"m-{n}")) for n in range(20)]
        with pytest.raises(PublishFailedError) as failed:
            await mq.send(name, "x" * 20_000)
        assert failed.value.code == 406
        for ended in await asyncio.gather(*good, return_exceptions=True):
            assert isinstance(ended, Receipt) or (isinstance(ended, PublishFailedError) and ended.code == 406)
        await mq.send(name, "x", message_id="after")
        await until(lambda: "after" in handled)
        assert mq.state.generation == 1, "the link stays"
        assert consumer.counters.stale == 0
        assert consumer.state is ConsumerState.RUNNING


@pytest.mark.slow
async def test_a_queue_made_again_with_other_arguments_is_consumed_as_it_is_and_named_by_plan(
    rabbit_url: str, mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    described = Topology().exchange(f"{queue}-x").queue(queue, type="classic").bind(queue, f"{queue}-x", "k")
    await mq.declare(described)
    handled: list[str] = []

    def handle(message: Message[str]) -> None:
        handled.append(message.payload)

    async with mq.consume(queue, str, handle) as consumer, acemq.connect(rabbit_url) as other:
        await other.delete(queue)
        await until(lambda: consumer.state is ConsumerState.RECOVERING)
        with pytest.raises(UnroutableError):
            await mq.send(queue, "nowhere")
        await other.declare(Topology().queue(queue, type="quorum"))
        await until(lambda: consumer.state is ConsumerState.RUNNING, within=31)
        await mq.send(queue, "here")
        await until(lambda: handled == ["here"])
        with pytest.raises(UnroutableError):
            await mq.publish(f"{queue}-x", "k", "its binding is gone")
        with pytest.raises(DriftError):
            await mq.declare(described)
        assert (await mq.plan(described)).drifted
    assert [told.queue for told in diagnostics if told.name == "acemq.consumer.lost"][:1] == [queue]
    await mq.delete(f"{queue}-x", "exchange")


async def test_o03_a_queue_made_again_otherwise_is_named_once_and_keeps_nothing_else_from_coming_back(
    mq: AceMQ, name: str, proxy: Proxy, proxied: str, diagnostics: list[Diagnostic], caplog: pytest.LogCaptureFixture
) -> None:
    """What is gone is made again with all that was applied, some of which the broker refuses now."""
    kept, gone = f"{name}-kept", f"{name}-gone"
    described = Topology().queue(kept, type="classic", max_length=10).queue(gone, type="classic")
    otherwise = Topology().queue(kept, type="classic", max_length=100)
    handled: list[str] = []
    slips: list[float] = []

    async def tick() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + 0.05
            await asyncio.sleep(0.05)
            slips.append(loop.time() - due)

    async with acemq.connect(proxied, reconnect=QUICK, on_diagnostic=diagnostics.append) as cut:
        await cut.declare(described)
        of_kept = await cut.consume(kept, str, lambda message: handled.append(message.payload))
        of_gone = await cut.consume(gone, str, lambda message: handled.append(message.payload))
        ticking = asyncio.create_task(tick())
        proxy.refuse()
        proxy.cut()
        await until(lambda: cut.state.phase == "reconnecting")
        for queue in (kept, gone):
            await mq.delete(queue)
        await mq.declare(otherwise)
        proxy.refuse(False)
        await until(lambda: cut.state.phase == "connected")
        await mq.send(kept, "kept")
        await until(lambda: handled == ["kept"])
        await until(lambda: of_gone.state is of_kept.state is ConsumerState.RUNNING)
        await mq.send(gone, "gone")
        await until(lambda: handled == ["kept", "gone"])

        def said() -> list[str]:
            whole = [record.getMessage() for record in caplog.records]
            return [text for text in whole if "not everything could be declared again" in text]

        await until(lambda: bool(said()))
        await asyncio.sleep(1)  # this is how long it does not spin
        assert [all(word in text for word in (kept, "x-max-length", "'10'", "'100'")) for text in said()] == [True]
        ticking.cancel()
        assert max(slips) < 0.5
        assert (await mq.plan(otherwise)).drifted is False, "what was there is as it was"
    await remove(mq, kept, gone)
