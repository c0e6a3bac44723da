"""What this transport relies on of the installed aiormq: public names, and how they behave. A new version must pass."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from typing import Any

import aiormq
import aiormq.abc
import pamqp.frame
import pytest
from pamqp import commands
from pamqp.heartbeat import Heartbeat

import acemq.transports.rabbitmq
from acemq.topology import Declaration
from acemq.transport import NotConnected, TransportError
from acemq.transports.rabbitmq import questions
from acemq.transports.rabbitmq.session import ask

FOLDER = Path(inspect.getfile(acemq.transports.rabbitmq)).parent


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_a_connection_takes_a_transport_factory_and_client_properties() -> None:
    assert {"url", "transport_factory", "client_properties"} <= parameters(aiormq.Connection.__init__)
    assert parameters(aiormq.TransportFactory.create) >= {"url"}


def test_the_calls_that_are_made_take_what_they_are_given() -> None:
    wanted: dict[Any, set[str]] = {
        aiormq.Connection.channel: {"publisher_confirms"},
        aiormq.Channel.basic_qos: {"prefetch_count"},
        aiormq.Channel.rpc: {"frame"},
        commands.Basic.Consume.__init__: {"queue", "consumer_tag", "arguments"},
        commands.Exchange.Declare.__init__: {
            "exchange",
            "exchange_type",
            "passive",
            "durable",
            "auto_delete",
            "arguments",
        },
        commands.Queue.Declare.__init__: {"queue", "passive", "durable", "exclusive", "auto_delete", "arguments"},
        commands.Queue.Bind.__init__: {"queue", "exchange", "routing_key"},
        commands.Queue.Delete.__init__: {"queue", "if_empty"},
        commands.Exchange.Delete.__init__: {"exchange"},
        commands.Queue.Purge.__init__: {"queue"},
    }
    for function, names in wanted.items():
        assert names <= parameters(function), function


@pytest.mark.parametrize("name", ["приказы", "a*b", "50% off", "<>"])
def test_a_question_about_any_name_can_be_written(name: str) -> None:
    class Channel:
        async def rpc(self, frame: Any) -> bytes:
            written: bytes = frame.marshal()
            return written

    channel: Any = Channel()
    queue = Declaration("queue", name, type="classic")
    for asked in (
        questions.look(channel, "queue", name),
        questions.look(channel, "exchange", name),
        questions.declare(channel, queue),
        questions.declare(channel, Declaration("exchange", name, type="topic")),
        questions.declare(channel, Declaration("binding", name, exchange=name, routing_key="#")),
        questions.delete(channel, "queue", name),
        questions.delete(channel, "exchange", name),
        questions.purge(channel, name),
        questions.consume(channel, name, "tag", {}),
    ):
        assert name.encode() in asyncio.run(asked)  # type: ignore[arg-type]  # pyright: ignore


def test_errors_have_the_classes_that_codes_are_read_from() -> None:
    from aiormq.channel import EXCEPTION_MAPPING

    assert dict(EXCEPTION_MAPPING) == {
        403: aiormq.ChannelAccessRefused,
        404: aiormq.ChannelNotFoundEntity,
        405: aiormq.ChannelLockedResource,
        406: aiormq.ChannelPreconditionFailed,
    }


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (aiormq.ChannelNotFoundEntity("NOT_FOUND - no queue"), 404, "NOT_FOUND - no queue"),
        (aiormq.ChannelClosed(541, "INTERNAL_ERROR"), 541, "INTERNAL_ERROR"),
    ],
)
async def test_a_refusal_keeps_the_brokers_code_and_words(error: Exception, code: int, text: str) -> None:
    async def fail() -> None:
        raise error

    with pytest.raises(TransportError) as refused:
        await ask(fail())
    assert (refused.value.code, str(refused.value)) == (code, text)


async def test_a_cancelled_error_that_is_not_ours_is_a_lost_link() -> None:
    async def fail() -> None:
        raise asyncio.CancelledError

    with pytest.raises(NotConnected):
        await ask(fail())


async def test_our_own_cancellation_goes_through() -> None:
    task = asyncio.create_task(ask(asyncio.sleep(60)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_heartbeat_that_it_is_fed_is_one_to_its_parser() -> None:
    from acemq.transports.rabbitmq.frames import HEARTBEAT

    size, channel, frame = pamqp.frame.unmarshal(HEARTBEAT)
    assert (size, channel, type(frame)) == (8, 0, Heartbeat)


def test_a_channel_keeps_its_consumers_in_a_public_dict() -> None:
    # A paused consumer is cancelled by a frame of ours; its tag is taken out here, or it could not be registered again.
    assert "self.consumers: dict[str, ConsumerCallback] = {}" in inspect.getsource(aiormq.Channel.__init__)


def test_the_virtual_host_is_a_public_attribute_that_opening_reads() -> None:
    assert "spec.Connection.Open(virtual_host=self.vhost)" in inspect.getsource(aiormq.connection)
    assert commands.Connection.Open.name == "Connection.Open"


def test_there_is_no_second_way_to_publish() -> None:
    for file in FOLDER.parents[1].rglob("*.py"):
        text = file.read_text()
        assert "basic_publish" not in text, file
        assert "Basic.Publish" not in text, file
        assert ("append_to(" in text) == (file in (FOLDER / "frames.py", FOLDER / "publish.py")), file


def test_a_reader_that_fails_says_so_through_a_public_method() -> None:
    source = inspect.getsource(aiormq.connection)
    assert source.count("self.set_close_reason(") == 1
    assert "reader unexpected closed" in source


def test_no_private_name_of_aiormq_or_pamqp_is_used() -> None:
    ours = {"_Consumer", "_Pulled", "_Running"}
    for file in FOLDER.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("aiormq", "pamqp"):
                assert not any(alias.name.startswith("_") for alias in node.names), file
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                root = node.value
                assert (isinstance(root, ast.Name) and root.id == "self") or node.attr in ours, (
                    f"{file}: {ast.unparse(node)}"
                )
