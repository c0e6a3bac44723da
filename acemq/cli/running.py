"""How a command ends: with a code that a program can act on, and never with a trace."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import TypeVar

import typer

from acemq.cli.showing import Output, clean
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
    """Partly done: interrupted, stopped by a failure, or held up by its filters. What is shown says how far."""
    INTERRUPTED = 130
    """Interrupted before anything was done."""
    CLOSED = 141
    """Whoever read the output, such as `head`, has closed it. What was to be done was done before."""


class NotConfirmed(Exception):
    """Nobody said yes."""


class PartlyDone(Exception):
    """Some of it is done; the text says why it stopped and what is done, `facts` say it to programs."""

    def __init__(self, kind: str, text: str, **facts: object) -> None:
        self.kind, self.facts = kind, facts
        super().__init__(text)


def connected(url: str, timeout: timedelta, work: Callable[[AceMQ], Awaitable[T]]) -> T:
    """What `work` makes of an open connection. Ctrl-C cancels it, which lets it clean up."""

    async def run() -> T:
        async with connect(url, name="acemq-cli", connect_timeout=timeout) as mq:
            return await work(mq)

    return asyncio.run(run())


class _Cleaned(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def log_errors_only() -> None:
    """What the library logs while it recovers belongs into a service's log, and would tear the tables here."""
    to_error = logging.StreamHandler()
    to_error.setFormatter(_Cleaned("%(message)s"))
    logging.basicConfig(level=logging.ERROR, handlers=[to_error])


@contextmanager
def ending(output: Output) -> Generator[None]:
    """An error becomes one sentence, or one JSON object, on standard error, and a code."""
    log_errors_only()
    try:
        with _told(output):
            yield
    except BrokenPipeError:
        _let_go()
        raise typer.Exit(ExitCode.CLOSED) from None


def _let_go() -> None:
    """What a closed stream has not taken is forgotten: Python would try once more at its end, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def _told(output: Output) -> Generator[None]:
    try:
        yield
    except NotConfirmed as refusal:
        output.error("NotConfirmed", str(refusal))
        raise typer.Exit(ExitCode.REFUSED) from None
    except PartlyDone as partly:
        output.error(partly.kind, str(partly), **partly.facts)
        raise typer.Exit(ExitCode.PARTLY) from None
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
