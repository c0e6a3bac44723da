"""Who we are at each dial, and how the socket is secured: what the URL says, or what was given beside it."""

from __future__ import annotations

import asyncio
import inspect
import ssl

from acemq.clock import Clock
from acemq.errors import SecurityError
from acemq.security import Credentials, CredentialsSource, Tls, check_answer, check_presented
from acemq.transport import NotConnected

from .address import Address, Host

_FRESH = 1.0
"""Seconds for which an answer serves the other link too: the two sockets of a connection are one dial."""


class Login:
    """Asks the source of credentials at every dial, and reads the files of TLS at every dial.

    What it raises is a `SecurityError`, which names the setting, or `NotConnected` where the source itself has failed.
    """

    def __init__(self, address: Address, source: CredentialsSource | None, tls: Tls | None, clock: Clock) -> None:
        self.tls = (tls or Tls()) if address.tls else None
        self._source = source if source is not None else Credentials(address.user, address.password)
        self._clock = clock
        self._latest: asyncio.Task[Credentials] | None = None
        self._asked_at = 0.0
        self._served: set[str] = set()
        self._asking: set[asyncio.Task[Credentials]] = set()

    async def credentials(self, link: str) -> Credentials:
        """For the link of this name, now. No link is served twice by one answer."""
        if isinstance(self._source, Credentials):
            return self._source
        latest, now = self._latest, self._clock.monotonic()
        if latest is None or link in self._served or (latest.done() and now - self._asked_at > _FRESH):
            self._latest = latest = asyncio.create_task(self._ask())
            self._asking.add(latest)
            latest.add_done_callback(self._asked)
            self._asked_at, self._served = now, set()
        self._served.add(link)
        # One link that gives up its dial must not take the answer away from the other.
        return await asyncio.shield(latest)

    async def _ask(self) -> Credentials:
        source = self._source
        assert not isinstance(source, Credentials)
        try:
            # In a thread, unless it says that it is asynchronous: it may read a file or call a server.
            answer = source() if inspect.iscoroutinefunction(source) else await asyncio.to_thread(source)
            return check_answer(await answer if inspect.isawaitable(answer) else answer)
        except SecurityError:
            raise
        except Exception as error:
            # Its text is not ours to show: it was written beside a secret.
            failure = f"the source given as credentials= raised {type(error).__name__}"
        raise NotConnected(failure)

    async def context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else await asyncio.to_thread(self.tls.context)

    def name_of(self, host: Host) -> str | None:
        """The name that the certificate must have."""
        return None if self.tls is None else self.tls.server_name or host.name

    def check(self, transport: asyncio.BaseTransport, endpoint: str) -> None:
        """What OpenSSL does not check."""
        connection: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if connection is not None:
            check_presented(connection, endpoint)

    def close(self) -> None:
        for asking in self._asking:
            asking.cancel()
        self._latest = None

    def _asked(self, task: asyncio.Task[Credentials]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # read, should nobody wait for it any more
