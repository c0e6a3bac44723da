"""How a command ends: with a code that a program can act on, and never with a trace."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import TypeVar

import typer

from acemq.cli.showing import Output
from acemq.errors import AcemqError, ConfigurationError, ConnectionFailedError, DriftError, ReplayError
from acemq.health import without_secrets
from acemq.mq import AceMQ, connect

T = TypeVar("T")


class ExitCode(IntEnum):
    """What the exit code of a command says."""

    DONE = 0
    """Done, or there was nothing to do."""
    ATTENTION = 1
    """It looked, and a person should look too: not healthy, not as described, something wrong with the URL."""
    USAGE = 2
    """Wrong usage: an unknown command, option, queue, record or filter. Nothing was done."""
    REFUSED = 3
    """A guard refused: not confirmed, or the broker has an object otherwise. Nothing was done."""
    UNREACHABLE = 4
    """The broker or the database does not answer, or refuses the credentials."""
    PARTLY = 5
    """Partly done: interrupted, stopped by a failure, or held up by its filters. The numbers say how far."""
    INTERRUPTED = 130
    """Interrupted before anything was done."""


class NotConfirmed(Exception):
    """Nobody said yes."""


def connected(url: str, timeout: timedelta, work: Callable[[AceMQ], Awaitable[T]]) -> T:
    """What `work` makes of an open connection. Ctrl-C cancels it, which lets it clean up."""

    async def run() -> T:
        async with connect(url, name="acemq-cli", connect_timeout=timeout) as mq:
            return await work(mq)

    # What the library logs while it recovers belongs into a service's log, and would tear the tables here.
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    return asyncio.run(run())


@contextmanager
def ending(output: Output) -> Generator[None]:
    """An error becomes one sentence, or one JSON object, on standard error, and a code."""
    try:
        yield
    except NotConfirmed as refusal:
        output.error("NotConfirmed", str(refusal))
        raise typer.Exit(ExitCode.REFUSED) from None
    except AcemqError as error:
        output.error(type(error).__name__, without_secrets(str(error)))
        raise typer.Exit(_code_of(error)) from None
    except KeyboardInterrupt:
        output.error("Interrupted", "interrupted; nothing was done")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _code_of(error: AcemqError) -> ExitCode:
    match error:
        case ReplayError():
            return ExitCode.PARTLY
        case DriftError():
            return ExitCode.REFUSED
        case ConfigurationError():
            return ExitCode.USAGE
        case ConnectionFailedError():
            return ExitCode.UNREACHABLE
        case _:
            return ExitCode.ATTENTION


def confirm(question: str, *, yes: bool) -> None:
    """Ask at a terminal; elsewhere `--yes` is the answer, and without it `NotConfirmed`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed(f"{question} Nobody is there to ask: add --yes. Nothing was done")
    try:
        answer = typer.confirm(question, err=True)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if not answer:
        raise NotConfirmed("Not confirmed, nothing was done")
