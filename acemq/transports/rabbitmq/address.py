"""Where the broker is and who we are there, read from a URL.

    amqp[s]://user:password@host[:port][,host[:port]…]/vhost[?heartbeat=15]

An error of this file never quotes what may hold a part of the password.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

import msgspec

from acemq.errors import ConfigurationError

HEARTBEAT = 15
"""Seconds. The link is given up after two of them without a byte."""

_PORTS = {"amqp": 5672, "amqps": 5671}
_SHAPE = re.compile(
    r"(?P<scheme>[^:/?#]*)://(?P<authority>[^/?#]*)(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?(?P<rest>#.*)?"
)
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%]+)\]|(?P<name>[^\[\]:@]*))(?::(?P<port>.*))?")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_FORM = "amqp://user:password@host:5672/vhost"


class Host(msgspec.Struct, frozen=True):
    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    hosts: tuple[Host, ...]
    vhost: str
    user: str
    password: str
    tls: bool
    heartbeat: int

    def __repr__(self) -> str:
        return f"<Address {', '.join(map(self.endpoint, self.hosts))}>"

    def endpoint(self, host: Host) -> str:
        """To show: no user, no secret."""
        return f"{host}/{'' if self.vhost == '/' else self.vhost}"


def parse(url: object) -> Address:
    """Refuse what is wrong with it, before any I/O."""
    if not isinstance(url, str):
        raise ConfigurationError(f"a broker's URL must be text such as {_FORM!r}, not {type(url).__name__}")
    if any(char.isspace() or char == "\0" for char in url):
        raise ConfigurationError("a broker's URL must not hold white space; write %20 in a password")
    shape = _SHAPE.fullmatch(url)
    if shape is None or shape["scheme"] not in _PORTS:
        raise ConfigurationError(f"a RabbitMQ URL begins with amqp:// or amqps://, for example {_FORM!r}")
    if any("@" in (shape[part] or "") for part in ("path", "query", "rest")):
        # Most likely a password with '/', '?' or '#' in it: nothing of this URL can be quoted.
        raise ConfigurationError(
            "a broker's URL has '@' behind its hosts: write '/', '?', '#', '@' as %2F, %3F, %23, %40"
        )
    if shape["rest"] is not None:
        raise ConfigurationError("a broker's URL has no '#' part; write %23 in a password")
    userinfo, _, hosts = shape["authority"].rpartition("@")
    user, colon, password = userinfo.partition(":")
    scheme = shape["scheme"]
    return Address(
        hosts=tuple(_host(text, _PORTS[scheme]) for text in hosts.split(",")),
        vhost=_decoded("virtual host", (shape["path"] or "/")[1:]) or "/",
        user=_decoded("user", user) if userinfo else "guest",
        password=_decoded("password", password) if colon else "guest",
        tls=scheme == "amqps",
        heartbeat=_query(shape["query"] or ""),
    )


def _host(text: str, default: int) -> Host:
    found = _HOST.fullmatch(text)
    if found is None:
        raise ConfigurationError("a host in the URL must read name, name:port or [IPv6 address]:port")
    name, port = found["v6"] or found["name"], found["port"]
    if not name:
        raise ConfigurationError(f"a host is empty in the URL; it reads {_FORM!r}, with commas between several hosts")
    if port is None:
        return Host(name, default)
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigurationError(f"the port of host {name!r} must be a number from 1 to 65535")
    return Host(name, int(port))


def _query(text: str) -> int:
    heartbeat, seen = HEARTBEAT, False
    for pair in text.split("&") if text else ():
        name, _, value = pair.partition("=")
        if name != "heartbeat":
            raise ConfigurationError(
                f"query key {name!r} of a RabbitMQ URL is not known; there is 'heartbeat' (seconds)"
            )
        if seen or not (value.isascii() and value.isdigit() and 2 <= int(value) <= 65534):
            raise ConfigurationError(f"heartbeat={value!r} must be given once, in whole seconds from 2 to 65534")
        heartbeat, seen = int(value), True
    return heartbeat


def _decoded(what: str, text: str) -> str:
    try:
        if _NO_ESCAPE.search(text):
            raise ConfigurationError(f"the {what} in the URL has a '%' that begins no escape; write %25")
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise ConfigurationError(f"the {what} in the URL holds escapes that are not UTF-8") from None
