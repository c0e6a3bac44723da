"""Who we are to a server, and how we know that it is the right one.

Nothing of this file shows a secret: not in a `repr`, not in an error, not in what an error refers to.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, TypeAlias

from acemq.errors import ConfigurationError, SecurityError

DEVELOPMENT = "acemq development only"
"""The organisation in certificates whose key anybody may have."""
ALLOW_DEVELOPMENT = "ACEMQ_ALLOW_DEVELOPMENT_CERTIFICATES"
"""The environment variable that lets them pass, when it is 1."""


# Credentials


@dataclass(frozen=True, repr=False)
class Credentials:
    """A user and a password. Neither is shown in any text."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "<Credentials>"

    @staticmethod
    def env(user: str, password: str) -> CredentialsSource:
        """Read from the two environment variables of these names, at every dial.

        A variable that is unset or empty is a `SecurityError` naming it.
        """

        def from_environment() -> Credentials:
            return Credentials(_variable(user), _variable(password))

        return from_environment

    @staticmethod
    def file(path: str | os.PathLike[str], *, user: str | None = None) -> CredentialsSource:
        """Read from a file, at every dial: `user:password`, or with `user` the password alone.

        White space at its end does not count. A file that cannot be read is a `SecurityError` naming it.
        """

        def from_file() -> Credentials:
            text = _text_of(path)
            if user is not None:
                found, password = user, text
            else:
                found, colon, password = text.partition(":")
                if not colon:
                    raise SecurityError(
                        f"credentials file {_name(path)} holds no 'user:password'; write both, or give user=",
                        setting="credentials",
                    )
            if not found or not password:
                raise SecurityError(
                    f"credentials file {_name(path)} holds no {'password' if found else 'user'}", setting="credentials"
                )
            return Credentials(found, password)

        return from_file


CredentialsSource: TypeAlias = Credentials | Callable[[], Credentials | Awaitable[Credentials]]


def check_credentials(source: object) -> None:
    """Refuse what is no source, without a word about what it is instead: it may be the password."""
    if not isinstance(source, Credentials) and not callable(source):
        raise ConfigurationError(
            f"credentials= is of type {type(source).__name__}; it must be Credentials(user, password), "
            "or a function that returns them"
        )


def check_answer(answer: object) -> Credentials:
    """The same for what a source has given."""
    if not isinstance(answer, Credentials):
        raise SecurityError(
            f"the source given as credentials= returned {type(answer).__name__}, not Credentials", setting="credentials"
        )
    return answer


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise SecurityError(f"environment variable {name} is not set, or empty", setting="credentials")
    return value


def _text_of(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise SecurityError(
            f"credentials file {_name(path)} cannot be read: {error.strerror or error}", setting="credentials"
        ) from error
    # Compared and not caught: a UnicodeDecodeError carries the bytes, and an error refers to the one before it.
    text = data.decode(errors="replace").rstrip()
    if text.encode(errors="replace") != data.rstrip():
        raise SecurityError(f"credentials file {_name(path)} is not UTF-8", setting="credentials")
    return text


def _name(path: str | os.PathLike[str]) -> str:
    return repr(os.fspath(path))


# TLS


@dataclass(frozen=True, kw_only=True, repr=False)
class Tls:
    """How a server's certificate is checked, and which one we show. Files are read at every dial.

    Without any of it the system's trust store decides, the host name is checked and TLS 1.2 is the least.
    """

    ca_file: str | None = None
    """PEM; replaces the system's trust store."""
    cert_file: str | None = None
    """PEM; ours, for a server that asks for one."""
    key_file: str | None = None
    """PEM; may be in `cert_file`."""
    key_password: str | None = None
    """Of an encrypted key."""
    server_name: str | None = None
    """Checked in place of the host's name."""
    minimum: Literal["1.2", "1.3"] = "1.2"
    _is_verified: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        for setting in ("ca_file", "cert_file", "key_file", "key_password", "server_name"):
            if getattr(self, setting) == "":
                raise SecurityError(f"{setting} is empty; leave it out", setting=setting)
        for setting in ("key_file", "key_password"):
            if getattr(self, setting) is not None and self.cert_file is None:
                raise SecurityError(
                    f"{setting} is given without cert_file, the certificate of the key", setting=setting
                )
        if self.minimum not in _VERSIONS:
            raise SecurityError(f"minimum={self.minimum!r} must be one of {', '.join(_VERSIONS)}", setting="minimum")

    def __repr__(self) -> str:
        if not self._is_verified:
            return "Tls.unverified_for_testing()"
        shown = ((name, getattr(self, name)) for name in ("ca_file", "cert_file", "key_file", "server_name", "minimum"))
        return f"Tls({', '.join(f'{name}={value!r}' for name, value in shown if value is not None)})"

    @staticmethod
    def unverified_for_testing() -> Tls:
        """Encrypted, and open to whoever sits in between: no certificate is checked. There is no other way to that."""
        tls = Tls()
        object.__setattr__(tls, "_is_verified", False)
        return tls

    @property
    def is_verified(self) -> bool:
        return self._is_verified

    def context(self) -> ssl.SSLContext:
        """Reads the files; blocks for as long as that takes. `SecurityError` names the setting at fault."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = _VERSIONS[self.minimum]
        # PROTOCOL_TLS_CLIENT says the same, which is Python's default to change, and not ours to rely on.
        context.check_hostname = self._is_verified
        context.verify_mode = ssl.CERT_REQUIRED if self._is_verified else ssl.CERT_NONE
        if self.ca_file is not None:
            self._trust(context, self.ca_file)
        elif self._is_verified:
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        if self.cert_file is not None:
            self._show(context, self.cert_file)
        return context

    def _trust(self, context: ssl.SSLContext, ca_file: str) -> None:
        _check_configured("ca_file", ca_file)
        try:
            context.load_verify_locations(cafile=ca_file)
        except (OSError, ValueError) as error:
            raise SecurityError(
                f"ca_file={ca_file!r} holds no certificate that can be read", setting="ca_file"
            ) from error

    def _show(self, context: ssl.SSLContext, cert_file: str) -> None:
        _check_configured("cert_file", cert_file)
        holder = "cert_file" if self.key_file is None else "key_file"
        if self.key_file is not None:
            _read("key_file", self.key_file)
        asked: list[None] = []

        def password() -> str:
            # Without an answer OpenSSL would ask at the terminal, and wait.
            asked.append(None)
            return self.key_password or ""

        try:
            context.load_cert_chain(cert_file, self.key_file, password)
        except (OSError, ValueError) as error:
            if asked:
                what = "is missing" if self.key_password is None else "does not open it"
                path = getattr(self, holder)
                text = f"the key in {holder}={path!r} is encrypted, and key_password {what}"
                raise SecurityError(text, setting="key_password") from None
            raise SecurityError(_why_no_chain(cert_file, self.key_file, error), setting=holder) from error


_VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


def check_tls(tls: object) -> None:
    if not isinstance(tls, Tls):
        raise ConfigurationError(f"tls= is of type {type(tls).__name__}; it must be a Tls, for example Tls(ca_file=…)")


_WRONG_NAME = (62, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH."""


def untrusted(endpoint: str, error: ssl.SSLCertVerificationError) -> SecurityError:
    """What a server's certificate was refused for, and which setting may mend it."""
    text = f"the certificate of {endpoint} is refused: {error.verify_message}"
    if error.verify_code in _WRONG_NAME:
        return SecurityError(f"{text}. The name that it has may be given as Tls(server_name=…)", setting="server_name")
    return SecurityError(f"{text}. Its authority may be given as Tls(ca_file=…)", setting="ca_file")


def is_loopback(host: str) -> bool:
    """Whether what is sent there leaves this machine not at all. No look-up: a name other than localhost may."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _why_no_chain(cert_file: str, key_file: str | None, error: OSError | ValueError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"the key in key_file={key_file!r} is not that of cert_file={cert_file!r}"
    if key_file is None:
        return f"cert_file={cert_file!r} does not hold a certificate and its key that can be read; is there a key_file?"
    return f"cert_file={cert_file!r} and key_file={key_file!r} do not hold a certificate and its key that can be read"


def _read(setting: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise SecurityError(f"{setting}={path!r} cannot be read: {error.strerror or error}", setting=setting) from error


# Certificates for development


def _check_configured(setting: str, path: str) -> None:
    if any(map(is_for_development, _certificates(_read(setting, path)))):
        refuse_development(f"{setting}={path!r}", setting)


def check_presented(connection: ssl.SSLObject | ssl.SSLSocket, endpoint: str) -> None:
    """Refuse a server that shows a development certificate anywhere in its chain, verified or not."""
    if any(map(is_for_development, presented(connection))):
        refuse_development(f"the server at {endpoint}", "tls")


def refuse_development(who: str, setting: str) -> None:
    if os.environ.get(ALLOW_DEVELOPMENT) != "1":
        raise SecurityError(
            f"{who} has a certificate of the organisation {DEVELOPMENT!r}, whose key is no secret; get a real one, or "
            f"set {ALLOW_DEVELOPMENT}=1 on a developer's machine",
            setting=setting,
        )


def presented(connection: ssl.SSLObject | ssl.SSLSocket) -> list[bytes]:
    """The chain that the other side has shown, as DER, whether it is trusted or not."""
    public = getattr(connection, "get_unverified_chain", None)  # from Python 3.13
    if public is not None:
        return list(public())
    # Older ones have it one level down only; getpeercert() knows the first of the chain and no more.
    inner = getattr(connection, "_sslobj", None)
    chain = inner.get_unverified_chain() if inner is not None else None
    return [each.public_bytes(_DER) for each in chain or ()]


_DER = 2
"""`_ssl.ENCODING_DER`."""


def is_for_development(certificate: bytes) -> bool:
    """Whether the organisation of this certificate (DER) says so."""
    try:
        return DEVELOPMENT in _organisations(_subject(certificate))
    except (IndexError, ValueError):
        return False  # cannot be taken apart; OpenSSL will not take it either


_PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)-----END", re.DOTALL)


def _certificates(pem: bytes) -> Iterator[bytes]:
    for found in _PEM.finditer(pem):
        try:
            yield base64.b64decode(found[1])
        except binascii.Error:  # OpenSSL says so, naming the file
            continue


_VERSION = 0xA0
_ORGANISATION = bytes.fromhex("060355040a")
"""2.5.4.10, with its tag and length."""


def _subject(certificate: bytes) -> bytes:
    """RFC 5280: Certificate ⊃ TBSCertificate ⊃ [version] serial signature issuer validity **subject** …"""
    fields = list(_elements(_content(_content(certificate))))
    if fields[0][0] == _VERSION:
        fields = fields[1:]
    return fields[4][1]


def _organisations(name: bytes) -> list[str]:
    """The values of 2.5.4.10 in a Name, which is a sequence of sets of (type, value)."""
    found: list[str] = []
    for _, relative in _elements(name):
        for _, pair in _elements(relative):
            if pair.startswith(_ORGANISATION):
                ((tag, value),) = _elements(pair[len(_ORGANISATION) :])
                found.append(value.decode({0x1E: "utf-16-be", 0x1C: "utf-32-be"}.get(tag, "utf-8"), "replace"))
    return found


def _content(data: bytes) -> bytes:
    """Of the first element."""
    for _, content in _elements(data):
        return content
    raise ValueError("empty")


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each; X.509 has none with a tag of several bytes."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + length]
        at += length
