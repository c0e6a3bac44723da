"""A server that speaks just enough AMQP to be taken for a broker, until a test makes it say something else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import pamqp.frame
from pamqp import commands


class Speaker:
    """`says` maps what a client asks, by name, to bytes that it is sent instead of the answer."""

    def __init__(self, *, frame_max: int = 131_072) -> None:
        self.says: dict[str, bytes] = {}
        self.properties: dict[str, Any] = {"capabilities": {"publisher_confirms": True}}
        self.accepted = 0
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._answers: dict[str, Any] = {
            "Connection.StartOk": commands.Connection.Tune(2047, frame_max, 60),
            "Connection.Open": commands.Connection.OpenOk(),
            "Connection.Close": commands.Connection.CloseOk(),
            "Channel.Open": commands.Channel.OpenOk(),
            "Channel.Close": commands.Channel.CloseOk(),
            "Confirm.Select": commands.Confirm.SelectOk(),
            "Basic.Qos": commands.Basic.QosOk(),
            "Basic.Consume": commands.Basic.ConsumeOk("consumer"),
        }

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def say(self, what: bytes) -> None:
        """To every client that is there."""
        for writer in self._clients.values():
            writer.write(what)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._server.close()
        tasks = list(self._clients)
        for task, writer in list(self._clients.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.accepted += 1
        self._clients[task] = writer
        with suppress(OSError, EOFError, asyncio.CancelledError):
            await reader.readexactly(8)
            self._answer(writer, 0, "the header", commands.Connection.Start(0, 9, self.properties, "PLAIN", "en_US"))
            while True:
                head = await reader.readexactly(7)
                rest = await reader.readexactly(int.from_bytes(head[3:], "big") + 1)
                _, channel, frame = pamqp.frame.unmarshal(head + rest)
                if (answer := self._answers.get(frame.name)) is not None:
                    self._answer(writer, channel, frame.name, answer)
        writer.transport.abort()
        del self._clients[task]

    def _answer(self, writer: asyncio.StreamWriter, channel: int, asked: str, answer: Any) -> None:
        writer.write(self.says[asked] if asked in self.says else pamqp.frame.marshal(answer, channel))
