"""One live connection to a broker: aiormq for all that is asked and answered, the lane for all that flows.

Only public names of aiormq are used; tests/unit/transports/rabbitmq/test_aiormq.py holds what is relied on.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar, cast
from urllib.parse import quote

import aiormq

from acemq.errors import SecurityError
from acemq.security import Credentials, untrusted
from acemq.transport import AccessDenied, LostBy, NotConnected, TransportError

from . import frames
from .address import Address, Host
from .lane import CLOSED_HERE, End, Lane, Taker
from .login import Login

T = TypeVar("T")

log = logging.getLogger("acemq.rabbitmq")

DIAL_LIMIT = 10.0
"""Seconds for one dial, from the first packet to the opened virtual host."""
ANSWER_LIMIT = 10.0
"""Seconds for what the broker is asked on a link that works."""
_NO_LIMIT = 128 * 1024
"""Bytes of a frame where the broker names no limit."""


class Connection(aiormq.Connection):
    """aiormq's, shown without a user."""

    endpoint = ""
    lane: Lane

    def __str__(self) -> str:
        return self.endpoint

    def set_close_reason(self, *reason: Any, **more: Any) -> None:
        """Called by aiormq when its reader has failed, be it for the end of the socket, which the lane knew before."""
        super().set_close_reason(*reason, **more)
        self.lane.abort("the broker sent a frame that aiormq cannot read")


class _Given(aiormq.TransportFactory):
    """aiormq asks for a socket and is given the one that we have dialled."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    async def create(self, url: object, **_: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self._lane.streams()


class Session:
    """From a successful dial to the end of its socket."""

    def __init__(self, connection: Connection, lane: Lane, endpoint: str, heartbeat: int) -> None:
        self.lane, self.endpoint = lane, endpoint
        self.began = asyncio.get_running_loop().time()
        self.blocked: str | None = None
        """The broker's reason, while it takes no publishes on this connection."""
        self._connection = connection
        self._heartbeat = heartbeat
        self._last_number = 0
        self._watchdog = self._watch_again()
        lane.longest_frame = connection.connection_tune.frame_max or frames.LARGEST_BODY

    @property
    def is_alive(self) -> bool:
        return self.lane.end is None

    async def ended(self) -> None:
        """Return when nothing more can be sent or received, be it before the socket is closed."""
        await self.lane.finished.wait()

    @property
    def frame_max(self) -> int:
        return self._connection.connection_tune.frame_max or _NO_LIMIT

    async def channel(self, taker: Taker | None = None, *, confirms: bool = False) -> aiormq.Channel:
        """A new channel, claimed for `taker`. Cancelled, it leaves no channel behind."""
        number = self._free_number()
        opening = self._connection.channel(channel_number=number, publisher_confirms=confirms)
        channel = cast("aiormq.Channel", await ask(opening))
        if taker is not None:
            self.lane.claim(channel.number, taker)
        return channel

    def _free_number(self) -> int:
        """The next in turn. aiormq would take the one above the highest in use: used again at once, it may come before
        the answer to the broker's close of it, and with channels that overlap it climbs above what was agreed.
        """
        highest = self._connection.connection_tune.channel_max or 65535
        for _ in range(highest):
            self._last_number = self._last_number % highest + 1
            if self._last_number not in self._connection.channels:
                return self._last_number
        raise TransportError(f"all {highest} channels of {self.endpoint} are in use")

    @asynccontextmanager
    async def scratch(self) -> AsyncGenerator[aiormq.Channel]:
        """A channel for a few questions; a refusal closes it and nothing else."""
        channel = await self.channel()
        try:
            yield channel
        finally:
            await close_channel(channel)

    async def close(self, within: float) -> None:
        """Say goodbye if the broker listens, and hang up in any case, within that many seconds or little more."""
        goodbye = asyncio.ensure_future(ask(self._connection.close()))
        try:
            await asyncio.wait({goodbye}, timeout=within)
        finally:
            self._watchdog.cancel()
            await self.lane.hang_up("closed by us")
            await asyncio.wait({goodbye}, timeout=0.2)
            if not goodbye.done():
                goodbye.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await goodbye

    def _watch_again(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._heartbeat / 2, self._watch)

    def _watch(self) -> None:
        silent = asyncio.get_running_loop().time() - self.lane.heard_at
        if silent >= 2 * self._heartbeat:
            self.lane.abort(f"nothing heard from the broker for {silent:.0f} s, which is two heartbeats")
        elif self.is_alive:
            self._watchdog = self._watch_again()


async def dial(address: Address, host: Host, name: str, login: Login, on_blocked: Callable[[Session], None]) -> Session:
    """Raises `AccessDenied`, `SecurityError`, or `NotConnected` whose `retryable` says whether waiting helps.

    Then nothing is left.
    """
    session: Session | None = None

    def control(method: int, arguments: bytes) -> None:
        if method == frames.CONNECTION_CLOSE:
            code, text = frames.reason(arguments)
            lane.finish(End(LostBy.CONNECTION, text, code))
        elif session is not None and method in (frames.CONNECTION_BLOCKED, frames.CONNECTION_UNBLOCKED):
            session.blocked = frames.short_at(arguments, 0) if method == frames.CONNECTION_BLOCKED else None
            on_blocked(session)
            lane.writable.ring()

    lane = Lane(address.heartbeat, control)
    endpoint = address.endpoint(host)
    try:
        async with asyncio.timeout(DIAL_LIMIT):
            credentials, context = await login.credentials(name), await login.context()
            transport, _ = await asyncio.get_running_loop().create_connection(
                lambda: lane, host.name, host.port, ssl=context, server_hostname=login.name_of(host)
            )
            login.check(transport, endpoint)
            connection = _connection(address, host, name, credentials, lane)
            await _connect(connection, lane)
            _check_confirms(connection)
    except BaseException as error:
        end = lane.end
        await lane.hang_up("the dial failed")
        if isinstance(error, Exception):
            raise _why(endpoint, end, error) from None
        raise
    session = Session(connection, lane, endpoint, address.heartbeat)
    return session


async def _connect(connection: Connection, lane: Lane) -> None:
    connect = cast("Any", connection).connect  # typed as who knows what
    connecting = asyncio.ensure_future(ask(connect()))
    try:
        await asyncio.wait({connecting})
        connecting.result()
    except BaseException as error:
        # Hung up before aiormq learns of it: it would wait for the end of a TLS connection, 30 s with a dead peer.
        await lane.hang_up(_text(error))
        connecting.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await connecting
        raise


def _check_confirms(connection: Connection) -> None:
    offered = cast("dict[str, Any]", connection.server_properties).get("capabilities")
    if not isinstance(offered, dict) or not cast("dict[str, Any]", offered).get("publisher_confirms"):
        refusal = NotConnected("the server offers no publisher confirms, so nobody could say what it has accepted")
        refusal.retryable = False
        raise refusal


def _connection(address: Address, host: Host, name: str, credentials: Credentials, lane: Lane) -> Connection:
    _silence_aiormq()
    who = f"{quote(credentials.user, safe='')}:{quote(credentials.password, safe='')}"
    connection = Connection(
        f"amqp://{who}@{host}/?heartbeat={address.heartbeat}",
        transport_factory=_Given(lane),
        client_properties={"connection_name": name, "product": "acemq"},
    )
    connection.vhost = address.vhost  # unescaped, as it is: aiormq would unescape the URL's in its own way
    connection.endpoint = address.endpoint(host)
    connection.lane = lane
    return connection


def _why(endpoint: str, end: End | None, error: Exception) -> TransportError | SecurityError:
    if isinstance(error, SecurityError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(endpoint, error)
    said = _text(error) if end is None or end.text == CLOSED_HERE else end.text
    if _REFUSES_OURS.search(said):
        return SecurityError(f"{endpoint} does not accept our certificate, cert_file: {said}", setting="cert_file")
    if end is not None and end.code is not None:
        if end.code == 403 or (end.code == 530 and "refused for user" in end.text and "limit (" not in end.text):
            return AccessDenied(f"{endpoint}: {end.text}", code=end.code)
        refusal = NotConnected(f"{endpoint}: {end.text}", code=end.code)
        refusal.retryable = "not found" not in end.text  # a virtual host does not appear by waiting
        return refusal
    if isinstance(error, TimeoutError) and not str(error):
        return NotConnected(f"{endpoint}: no answer within {DIAL_LIMIT:g} s")
    lost = NotConnected(f"{endpoint}: {said}")
    lost.retryable = not isinstance(error, TransportError) or error.retryable
    return lost


_REFUSES_OURS = re.compile(r"ALERT_(\w*CERTIFICATE\w*|UNKNOWN_CA)")
"""What a server answers to a client's certificate, or to none."""


# Asking aiormq


_CODES: dict[type[Exception], int] = {
    aiormq.ChannelAccessRefused: 403,
    aiormq.ChannelNotFoundEntity: 404,
    aiormq.ChannelLockedResource: 405,
    aiormq.ChannelPreconditionFailed: 406,
}


async def ask(answer: Awaitable[T]) -> T:
    """Await an answer of aiormq; its errors become ours, with the broker's code, and its log lines are left out."""
    token = _ours.set(True)
    try:
        return await answer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # aiormq ends calls with CancelledError, too, when it closes their connection.
        raise NotConnected("the link was lost before the broker answered") from None
    except aiormq.AMQPChannelError as error:
        arguments = cast("tuple[object, ...]", error.args)
        code = _CODES.get(type(error), arguments[0] if len(arguments) > 1 and isinstance(arguments[0], int) else None)
        raise TransportError(str(arguments[-1] if arguments else error), code=code) from None
    except (aiormq.AMQPConnectionError, aiormq.ChannelInvalidStateError, aiormq.AMQPError, RuntimeError) as error:
        raise NotConnected(f"the link was lost before the broker answered: {_text(error)}") from None
    finally:
        _ours.reset(token)


async def close_channel(channel: aiormq.Channel, within: float = 2.0) -> None:
    """Close it, if it is still open. What goes wrong here is the link's trouble and shows there."""
    if not channel.is_closed:
        # Never cancelled: aiormq would send a second close, for which the broker closes the link.
        closing = asyncio.ensure_future(ask(channel.close()))
        closing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        await asyncio.wait({closing}, timeout=within)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


# aiormq's log


_ours: ContextVar[bool] = ContextVar("acemq_rabbitmq_ours", default=False)
"""True in every task that aiormq makes for us, as tasks inherit it."""


class _NotOurs(logging.Filter):
    """Leaves out what aiormq says of our connections: we say it ourselves, once. Other users of aiormq keep theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or not _ours.get()


_filter = _NotOurs()


def _silence_aiormq() -> None:
    for name in ("aiormq.connection", "aiormq.channel"):
        logging.getLogger(name).addFilter(_filter)  # adding it again changes nothing
